package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// A Shard is a part of a source, and its place on one of several devices.
type Shard struct {
	Device *cudart.Device // of the Fanout
	Dst    cudart.DevPtr
	Off    int64 // in the source, bytes
	N      int   // bytes
}

// UploadShards copies parts of r, each to its own device, all devices at once: each
// part through its device's own ring and over its own link, by workers that the
// devices share. Parts that follow on each other both in r and on the device are
// read as one. Bytes of r that are in several shards are read once for each. r is
// read as [View.UploadFrom] does. No two shards may overlap on a device. After an
// error no other shard begins, and some may have been copied; the error names the
// device and the part of r.
func (f *FanoutView) UploadShards(ctx context.Context, r io.ReaderAt, shards []Shard) error {
	n := 0
	check := func() error { return f.checkShards(r, shards) }
	for _, s := range shards { // no more than MaxInt: see checkShards
		n += max(s.N, 0)
	}
	_, err := f.run(ctx, max(n, 0), check, func() (int, error) { return n, f.uploadShards(ctx, r, shards, n) })
	if err != nil {
		return fmt.Errorf("transfer: upload %d shards of %s: %w", len(shards), nameOf(r), err)
	}
	return nil
}

func (f *FanoutView) checkShards(r io.ReaderAt, shards []Shard) error {
	if err := checkRange(r, 0, 0); err != nil {
		return err
	}
	total := 0
	for i, s := range shards {
		err := checkRange(r, s.Off, s.N)
		switch {
		case s.Device == nil:
			err = errNilDevice
		case !slices.Contains(f.devs, s.Device):
			err = fmt.Errorf("%v is none of the Fanout's", s.Device)
		case s.N < 0:
			err = fmt.Errorf("%d bytes: must not be negative", s.N)
		case s.N > math.MaxInt-total:
			err = fmt.Errorf("all shards are more than %d bytes", math.MaxInt)
		}
		if err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
		total += s.N
	}
	return checkApart(shards)
}

// checkApart returns an error if two shards overlap on their device.
func checkApart(shards []Shard) error {
	placed := slices.DeleteFunc(slices.Clone(shards), func(s Shard) bool { return s.N == 0 })
	slices.SortFunc(placed, func(a, b Shard) int {
		return cmp.Or(cmp.Compare(a.Device.Ordinal(), b.Device.Ordinal()), cmp.Compare(a.Dst, b.Dst))
	})
	for i := 1; i < len(placed); i++ {
		a, b := placed[i-1], placed[i]
		if a.Device == b.Device && overlap(a.Dst, a.N, b.Dst, b.N) {
			return fmt.Errorf("the parts at offsets %d and %d overlap on %v, at %#x", a.Off, b.Off, a.Device, uintptr(b.Dst))
		}
	}
	return nil
}

// lanes is how many shards of a device are copied at once: when one ends, the link
// has the next one's chunks.
const lanes = 2

func (f *FanoutView) uploadShards(ctx context.Context, r io.ReaderAt, shards []Shard, n int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	u := &shardsUpload{r: r, call: Call{DirectIO: f.call.DirectIO}, cancel: cancel}
	if f.call.Progress != nil {
		u.progress = &jointProgress{total: n, f: f.call.Progress}
	}
	for i, e := range f.members {
		l := &shardList{todo: shardsOf(f.devs[i], shards)}
		for range min(lanes, len(l.todo)) {
			u.running.Go(func() { u.run(ctx, e, l) })
		}
	}
	u.running.Wait()
	for _, e := range f.members {
		f.stats.stagedBytes.Add(e.stats.stagedBytes.Swap(0))
		f.stats.directBytes.Add(e.stats.directBytes.Swap(0))
	}
	return u.err
}

// shardsOf returns the shards of a device in the order of the source, those that
// follow on each other as one.
func shardsOf(dev *cudart.Device, shards []Shard) (list []Shard) {
	for _, s := range shards {
		if s.Device == dev && s.N > 0 {
			list = append(list, s)
		}
	}
	slices.SortStableFunc(list, func(a, b Shard) int { return cmp.Compare(a.Off, b.Off) })
	joined := list[:0]
	for _, s := range list {
		if last := len(joined) - 1; last >= 0 && joined[last].meets(s) {
			joined[last].N += s.N
		} else {
			joined = append(joined, s)
		}
	}
	return joined
}

// meets reports whether another shard follows on s, in the source and on the device.
func (s Shard) meets(next Shard) bool {
	return s.Off+int64(s.N) == next.Off && s.Dst+cudart.DevPtr(s.N) == next.Dst
}

// A shardList is shards of one device that are to be copied.
type shardList struct {
	mu   sync.Mutex
	todo []Shard
}

func (l *shardList) next() (s Shard, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.todo) == 0 {
		return s, false
	}
	s, l.todo = l.todo[0], l.todo[1:]
	return s, true
}

// A shardsUpload is one call of UploadShards.
type shardsUpload struct {
	r        io.ReaderAt
	call     Call
	progress *jointProgress
	cancel   context.CancelCauseFunc
	running  sync.WaitGroup

	mu  sync.Mutex
	err error
}

// run copies shards of one device.
func (u *shardsUpload) run(ctx context.Context, e *engine, l *shardList) {
	for ctx.Err() == nil {
		s, ok := l.next()
		if !ok {
			return
		}
		call := u.call
		if u.progress != nil {
			call.Progress = u.progress.part()
		}
		v := &View{engine: e, call: call}
		if _, err := uploadAt(ctx, onDevice{v, s.Dst}, u.r, s.Off, s.N); err != nil {
			u.fail(ctx, fmt.Errorf("%d bytes from offset %d onto %v: %w", s.N, s.Off, s.Device, err))
		}
	}
	u.fail(ctx, context.Cause(ctx))
}

// fail keeps an error, and ends the copies of the other shards, which return it as
// their context's.
func (u *shardsUpload) fail(ctx context.Context, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	cause := context.Cause(ctx)
	switch {
	case u.err == nil:
		u.err = err
	case cause == nil || !errors.Is(err, cause):
		u.err = errors.Join(u.err, err)
	}
	u.cancel(err)
}

// A jointProgress adds up the progress of copies that run at once.
type jointProgress struct {
	total int
	f     func(done, total int)

	mu   sync.Mutex
	done int
}

// part returns the Progress of one of the copies.
func (p *jointProgress) part() func(done, total int) {
	before := 0
	return func(done, _ int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.done += done - before
		before = done
		p.f(p.done, p.total)
	}
}
