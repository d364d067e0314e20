package transfer

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Upload copies src, which may be any memory, to the device.
func (c *Copier) Upload(ctx context.Context, dst cudart.DevPtr, src []byte) error {
	_, err := c.get().do(ctx, len(src), func() (int, error) {
		if queued, err := c.queue(ctx, dst, src); queued {
			return c.counted(len(src), err)
		}
		return c.copyMemory(ctx, dst, src, false)
	})
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes: %w", len(src), err)
	}
	return nil
}

// Download copies from the device into dst, which may be any memory.
func (c *Copier) Download(ctx context.Context, dst []byte, src cudart.DevPtr) error {
	_, err := c.get().do(ctx, len(dst), func() (int, error) { return c.copyMemory(ctx, src, dst, true) })
	if err != nil {
		return fmt.Errorf("transfer: download %d bytes: %w", len(dst), err)
	}
	return nil
}

// copyMemory copies between mem and one address range of the device, in the order of Call.Stream.
func (v view) copyMemory(ctx context.Context, at cudart.DevPtr, mem []byte, down bool) (int, error) {
	if err := v.call.waitForStream(ctx); err != nil {
		return 0, err
	}
	if len(mem) > directPiece && v.call.Inspect == nil {
		if p := raw.BeginPartly(mem); p != nil {
			defer p.End()
			return v.copyParts(ctx, at, mem, down, p)
		}
	}
	return v.copyPart(ctx, at, mem, down)
}

// copyParts copies memory that is registered in the background: what is registered directly, and the rest by the file that
// it maps, or through the ring.
func (v view) copyParts(ctx context.Context, at cudart.DevPtr, mem []byte, down bool, p raw.Partly) (int, error) {
	if down && p.ReadOnly() {
		return 0, hostmem.ErrReadOnly
	}
	part, progress := v, v.call.Progress
	for done := 0; ; {
		if before := done; progress != nil {
			part.call.Progress = func(done, _ int) { progress(before+done, len(mem)) }
		}
		n, registered := p.Prefix(done, len(mem)-done)
		to := part.at(n, at+cudart.DevPtr(done))
		file, off := p.File(done)
		var err error
		switch {
		case registered || file == nil:
			n, err = part.copyPart(ctx, at+cudart.DevPtr(done), mem[done:done+n], down)
		case down:
			n, err = to.downloadAt(ctx, file, off, n)
		default:
			n, err = to.uploadAt(ctx, file, off, n)
		}
		if done += n; err != nil || done == len(mem) {
			return done, err
		}
	}
}

// copyPart copies memory that is all pinned, or all not.
func (v view) copyPart(ctx context.Context, at cudart.DevPtr, mem []byte, down bool) (int, error) {
	send, registered, err := v.pinned(ctx, mem, down)
	switch {
	case err != nil:
		return 0, err
	case send != nil:
		done, err := v.at(len(mem), at).copyPinned(ctx, len(mem), send, down)
		if registered || !atSeam(err) {
			return done, err
		}
	case v.call.Progress == nil && v.call.Inspect == nil: // the caller's goroutine copies small memory itself
		if ok, err := v.stages[0].CopySmall(ctx, at, mem, down); ok {
			return v.counted(len(mem), err)
		}
	}
	if !down {
		return v.at(len(mem), at).stage(ctx, stage.Upload(mem))
	}
	fill := func(from []byte, off int) error {
		copyIn(mem[off:off+len(from)], from)
		return nil
	}
	c := stage.Copy{N: len(mem), Down: true, Host: stage.Memory(fill)}
	if len(mem) >= minFresh && fresh(mem) {
		c = intoFresh(len(mem), fill)
	}
	return v.at(len(mem), at).stage(ctx, c)
}

// counted counts a small copy of n bytes.
func (v view) counted(n int, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	v.stats.stagedBytes.Add(int64(n))
	return n, nil
}

// waitForStream waits until the work on the caller's stream is done. Otherwise a copy would
// hold memory of the ring, which all copies share, while it waits for the caller's work.
func (c Call) waitForStream(ctx context.Context) error {
	if c.Stream == nil {
		return nil
	}
	err := fence.TimelineOf(c.Stream).End().Wait(ctx) // which calls CUDA elsewhere if ctx can end
	if err != nil && ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	return err
}

const (
	// Uploads of up to maxQueued bytes are queued on the caller's stream, from leased
	// memory.
	maxQueued = mib
	// queuedBytes is the memory that such uploads have together.
	queuedBytes = 16 * mib
)

// queue queues a small upload on the caller's stream, and does not wait for it.
// queued is false if there is no stream, or no memory for it just now.
func (v view) queue(ctx context.Context, dst cudart.DevPtr, src []byte) (queued bool, err error) {
	if v.call.Stream == nil || len(src) > maxQueued || v.call.Progress != nil || v.call.Inspect != nil {
		return false, nil
	}
	lease, err := v.queued.TryGet(ctx, len(src))
	if err != nil {
		return false, nil
	}
	if err := bounded.Guard(func() error { stage.Put(lease.Bytes(), src); return nil }); err != nil {
		return true, errors.Join(err, lease.Release())
	}
	// A stream with a full queue blocks the call.
	group := queue.Calls.Of(v.call.Stream)
	if err := group.Begin(ctx); err != nil {
		return true, errors.Join(err, lease.Release())
	}
	_, err = bounded.Do(ctx, bounded.Call[struct{}]{
		Run: func() (none struct{}, err error) {
			defer group.End()
			return none, errors.Join(lease.CopyToDevice(v.call.Stream, dst, 0, len(src)), lease.Release())
		},
		Grace: bounded.CallbackGrace,
	})
	return true, stage.AddUnderWay(err)
}

// minFresh is the size of the smallest downloads for which it is asked whether the memory is fresh.
const minFresh = 16 * mib

// intoFresh describes a copy into memory whose pages the kernel still has to clear, which takes most of
// the time: all cores do it. The worker that touches a huge page first has it cleared, in its caches,
// and should be the one that writes it. Parts of a page table, 2 MiB, would wait for one another.
func intoFresh(n int, fill func(from []byte, off int) error) stage.Copy {
	return stage.Copy{
		N: n, Down: true, Host: stage.Memory(fill),
		Piece: hostos.HugePage, MaxChunk: 2 * hostos.HugePage, Workers: runtime.GOMAXPROCS(0),
	}
}

// fresh reports whether most of mem is not resident, as memory that was just allocated is. It looks
// at some pages, and does not tell such memory from memory that was swapped out.
func fresh(mem []byte) bool {
	const samples = 16
	missing := 0
	for i := range samples {
		if !resident(mem[len(mem)/samples*i:][:2*maxPage]) {
			missing++
		}
	}
	return missing > samples/2
}

// maxPage is the size of the largest base page.
const maxPage = 64 * kib

// minPopulated is the size of the smallest pieces of memory that are populated before they are written. To
// ask whether smaller ones are resident takes longer than to copy them.
const minPopulated = 64 * kib

// copyIn copies into the caller's memory, which may be resident or not. It writes resident
// memory with non-temporal stores, so that the ring stays in the caches.
func copyIn(to, from []byte) {
	if len(to) < minPopulated || resident(to) {
		ntcopy.Copy(to, from)
	} else {
		copyFresh(to, from)
	}
}

// copyFresh copies into memory that is not resident. It populates a piece before it writes
// it: one call for many pages is faster than a fault for each, and the pages are still in
// the caches when they are written.
func copyFresh(to, from []byte) {
	const piece = 256 * kib
	for n := 0; n < len(from); n += piece {
		part := to[n:min(n+piece, len(from))]
		hostos.Populate(part)
		copy(part, from[n:])
	}
}
