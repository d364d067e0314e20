package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// Memory is memory of a device: Bytes bytes at Ptr, allocated by the caller, for
// instance with [cudart.Device.Malloc].
type Memory struct {
	Device *cudart.Device
	Ptr    cudart.DevPtr
	Bytes  int
}

// check returns an error for what is no memory, and for less than n bytes of it.
func (m Memory) check(n int) error {
	switch {
	case m.Device == nil:
		return errors.New("nil device")
	case m.Bytes < 0:
		return fmt.Errorf("memory of %d bytes on %v", m.Bytes, m.Device)
	case n > m.Bytes:
		return fmt.Errorf("memory of %d bytes on %v, want %d", m.Bytes, m.Device, n)
	case n > 0 && m.Ptr == 0:
		return fmt.Errorf("memory at address 0 on %v", m.Device)
	case uint64(m.Ptr) > uint64(math.MaxInt-m.Bytes):
		return fmt.Errorf("memory of %d bytes at %#x on %v: no memory has such addresses", m.Bytes, uintptr(m.Ptr), m.Device)
	}
	return nil
}

// A Placement is a part and the memory that it is to be copied to, which may be
// larger.
type Placement struct {
	Part
	To Memory
}

// LoadOptions shape a load. The zero value suits files that are read more than once.
type LoadOptions struct {
	// Progress is called now and then with the bytes that are read of all that are to
	// be: one call at a time, on a goroutine of its own. Bytes that go to several
	// devices count once.
	Progress func(done, total int)
	// DirectIO reads past the page cache: see [transfer.Call]. Without it, what is
	// in the page cache is copied from there, and what is not is read into it.
	DirectIO bool
	// DropCache removes what was read from the page cache (posix_fadvise with
	// POSIX_FADV_DONTNEED), each read when it has ended. Only files in the file
	// system of a disk or network have pages that can be removed, only on Linux, and
	// only pages that no process has mapped. That it could not be done is no error.
	DropCache bool
}

// A LoadError reports which tensor could not be brought to its place, and why.
type LoadError struct {
	Tensor  *Tensor
	Devices []*cudart.Device // that it was to be copied to
	// Offset is of the first byte in the tensor's file that is not on all of them.
	Offset int64
	// Complete are the tensors all of whose parts are on their devices, in the
	// order of the files. The others' memory has bytes of any kind.
	Complete []*Tensor
	// Err is the reason: an error of the file or of CUDA, or the context's.
	Err error
}

// Error names the tensor, the file, the offset in it, the devices and the reason.
func (e *LoadError) Error() string {
	return fmt.Sprintf("weights: load tensor %s of %s: at offset %d, onto %v: %v", quote(e.Tensor.Name), e.Tensor.File.name, e.Offset, e.Devices, e.Err)
}

// Unwrap returns Err.
func (e *LoadError) Unwrap() error { return e.Err }

// Load copies the plan's tensors from their files to the memory of devices: memory
// has one for each index of Plan.Devices, with at least DevicePlan.Bytes bytes. All
// devices are copied to at once, each over its own link, and what several of them
// get is read once: see [transfer.Fanout]. When Load returns nil everything is there.
//
// The memory may be used by no other work meanwhile, which includes work queued on
// streams. Load uses the rings of pinned memory that Copiers of the devices share, and
// makes those that are missing: a [transfer.Copier] of each device, or for tensors that
// several get a [transfer.Fanout] of them, that stays open saves that time.
//
// Errors are reported before anything is copied for devices that are nil, or of
// different CUDA libraries, or the same under two indexes; for memory that is missing
// or too small; and for files that are closed, or shorter than they were when opened.
// An error that comes later ends all copies, and is a *LoadError. When ctx ends, its
// Err is ctx's. Memory and files are not used any more then, unless the error wraps
// [transfer.ErrUnderWay].
func (p *Plan) Load(ctx context.Context, memory map[int]Memory, o LoadOptions) error {
	l := loading{o: o, reads: p.Reads, memory: memory}
	if err := l.checkPlan(p); err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return l.load(ctx)
}

// Place copies parts of tensors from their files to given places, as if by one Plan:
// in the order of the files, each byte read once, and neighbours in a file that are
// neighbours on their device as one copy. The requirements and the errors are those
// of [Plan.Load]. It also returns an error, before anything is copied, for a Part of
// what is no File's tensor or beyond it, and for parts that overlap on a device.
func Place(ctx context.Context, placements []Placement, o LoadOptions) error {
	l := loading{o: o, memory: map[int]Memory{}}
	if err := l.plan(placements); err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return l.load(ctx)
}

// A loading is one call of Load or Place.
type loading struct {
	o      LoadOptions
	parts  []Part
	reads  []Read
	memory map[int]Memory // by the index of a device

	ctx    context.Context
	cancel context.CancelCauseFunc

	mu         sync.Mutex
	total      int // bytes
	done       int
	failed     []failedRead
	unreleased []error
}

// A failedRead is one of which only the first bytes are done.
type failedRead struct {
	*Read
	done int
	err  error
}

// checkPlan checks the arguments of Load.
func (l *loading) checkPlan(p *Plan) error {
	var devices []*cudart.Device
	for _, d := range p.Devices {
		m, ok := l.memory[d.Device]
		if !ok {
			return fmt.Errorf("no memory for device %d of the plan, which gets %d bytes", d.Device, d.Bytes)
		}
		if err := m.check(d.Bytes); err != nil {
			return fmt.Errorf("device %d of the plan: %w", d.Device, err)
		}
		if i := slices.Index(devices, m.Device); i >= 0 {
			return fmt.Errorf("devices %d and %d of the plan are both %v", p.Devices[i].Device, d.Device, m.Device)
		}
		devices = append(devices, m.Device)
		for _, t := range d.Tensors {
			l.parts = append(l.parts, t.Part)
		}
	}
	return checkDevices(devices)
}

// checkDevices returns an error for devices that cannot work together.
func checkDevices(devices []*cudart.Device) error {
	for _, d := range devices {
		if d.Runtime() != devices[0].Runtime() {
			return fmt.Errorf("%v and %v are of different CUDA libraries: open them with one cudart.Open", devices[0], d)
		}
	}
	return nil
}

// plan makes reads for placements. Addresses are counted from 0 on each device.
func (l *loading) plan(placements []Placement) error {
	files := fileOrder{}
	var devices []*cudart.Device
	targets := make([]target, 0, len(placements))
	for i, p := range placements {
		if err := p.check(); err != nil {
			return fmt.Errorf("placement %d: %w", i, err)
		}
		if err := p.To.check(p.Size); err != nil {
			return fmt.Errorf("tensor %s of %s: %w", quote(p.Tensor.Name), p.Tensor.File.name, err)
		}
		device := slices.Index(devices, p.To.Device)
		if device < 0 {
			device = len(devices)
			devices = append(devices, p.To.Device)
			l.memory[device] = Memory{Device: p.To.Device}
		}
		files.add(p.Tensor.File)
		targets = append(targets, target{p.Part, device, int(p.To.Ptr)})
	}
	if err := checkDevices(devices); err != nil {
		return err
	}
	if err := checkApart(targets, devices); err != nil {
		return err
	}
	slices.SortFunc(targets, func(t, u target) int {
		return cmp.Or(files.compare(t.Part, u.Part), cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to))
	})
	for _, t := range targets {
		l.parts = append(l.parts, t.Part)
	}
	l.reads = planReads(targets, 0)
	return nil
}

// checkApart returns an error if two parts overlap on a device.
func checkApart(targets []target, devices []*cudart.Device) error {
	sorted := slices.DeleteFunc(slices.Clone(targets), func(t target) bool { return t.Size == 0 })
	slices.SortFunc(sorted, func(t, u target) int { return cmp.Or(cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to)) })
	for i := 1; i < len(sorted); i++ {
		t, u := sorted[i-1], sorted[i]
		if t.device == u.device && t.to+t.Size > u.to {
			return fmt.Errorf("tensors %s of %s, %d bytes at %#x, and %s of %s, %d bytes at %#x, overlap on %v",
				quote(t.Tensor.Name), t.Tensor.File.name, t.Size, t.to,
				quote(u.Tensor.Name), u.Tensor.File.name, u.Size, u.to, devices[t.device])
		}
	}
	return nil
}

// checkFiles returns an error for a file that is closed or has shrunk.
func (l *loading) checkFiles() error {
	var last *File
	for _, r := range l.reads {
		opened, ok := r.File.r.(*os.File)
		if !ok || r.File == last {
			continue
		}
		last = r.File
		info, err := opened.Stat()
		if err != nil {
			return err
		}
		if info.Size() < r.File.size {
			return fmt.Errorf("%s has %d bytes, it had %d when it was opened: %w", r.File.name, info.Size(), r.File.size, io.ErrUnexpectedEOF)
		}
	}
	return nil
}

// A queue is the reads for one set of devices.
type queue struct {
	devices []*cudart.Device
	bases   []cudart.DevPtr
	fanout  *transfer.Fanout

	mu    sync.Mutex
	reads []*Read
}

// lanes is how many reads of a queue are copied at once: when one ends, the links
// have the next one's bytes.
const lanes = 2

// load runs the reads.
func (l *loading) load(ctx context.Context) error {
	if ctx == nil {
		return errors.New("weights: load: the context is nil")
	}
	if err := l.checkFiles(); err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	defer l.cancel(nil)
	var running sync.WaitGroup
	queues := l.queues()
	if len(queues) > 0 {
		running.Go(func() { releaseOthers(queues[0].devices[0].Runtime()) })
	}
	for _, q := range queues {
		running.Go(func() { l.run(q) })
	}
	running.Wait()
	return l.err()
}

// queues returns the reads by their sets of devices.
func (l *loading) queues() (list []*queue) {
	for i := range l.reads {
		r := &l.reads[i]
		l.total += r.Size
		at := slices.IndexFunc(list, func(q *queue) bool { return slices.Equal(q.reads[0].Devices, r.Devices) })
		if at < 0 {
			q := &queue{}
			for _, d := range r.Devices {
				q.devices, q.bases = append(q.devices, l.memory[d].Device), append(q.bases, l.memory[d].Ptr)
			}
			at = len(list)
			list = append(list, q)
		}
		list[at].reads = append(list[at].reads, r)
	}
	return list
}

func (q *queue) next() *Read {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.reads) == 0 {
		return nil
	}
	r := q.reads[0]
	q.reads = q.reads[1:]
	return r
}

// run copies the reads of a queue.
func (l *loading) run(q *queue) {
	var err error
	if q.fanout, err = transfer.NewFanout(l.ctx, q.devices, transfer.Options{}); err != nil {
		l.fail(q.next(), 0, cause(err))
		l.lane(q) // which fails them all
		return
	}
	var running sync.WaitGroup
	for range min(lanes, len(q.reads)) {
		running.Go(func() { l.lane(q) })
	}
	running.Wait()
	if err := release(q.fanout); err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.unreleased = append(l.unreleased, fmt.Errorf("after the load: %w", cause(err)))
	}
}

// cause is an error without the operation of package transfer, in whose place this
// package names its own.
func cause(err error) error { return cmp.Or(errors.Unwrap(err), err) }

// lane copies reads of a queue, one after the other. When one has failed, of whichever
// queue, the others do.
func (l *loading) lane(q *queue) {
	for r := q.next(); r != nil; r = q.next() {
		done, err := 0, context.Cause(l.ctx)
		if err == nil {
			done, err = l.read(q, r)
		}
		if err != nil {
			l.fail(r, done, err)
		}
	}
}

// read copies one read, and returns how many of its bytes, from the first on, are
// done with.
func (l *loading) read(q *queue, r *Read) (int, error) {
	pieces := make([]transfer.Piece, len(r.Pieces))
	for i, p := range r.Pieces {
		pieces[i] = transfer.Piece{Off: p.From, N: p.Size, Dsts: make([]cudart.DevPtr, len(p.To))}
		for d, to := range p.To {
			pieces[i].Dsts[d] = q.bases[d] + cudart.DevPtr(to)
		}
	}
	call := transfer.Call{DirectIO: l.o.DirectIO}
	if l.o.Progress != nil {
		call.Progress = l.progress()
	}
	done, err := q.fanout.With(call).UploadPieces(l.ctx, r.File.r, r.Offset, r.Size, pieces)
	if file, ok := r.File.r.(*os.File); ok && l.o.DropCache {
		dropCache(file, r.Offset, r.Size)
	}
	if err != nil {
		return done, cause(err)
	}
	return done, nil
}

// progress returns the Progress of one read, which adds to that of all.
func (l *loading) progress() func(done, total int) {
	before := 0
	return func(done, _ int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.done += done - before
		before = done
		l.o.Progress(l.done, l.total)
	}
}

// fail keeps an error, and ends the other reads.
func (l *loading) fail(r *Read, done int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, failedRead{r, done, err})
	l.cancel(err)
}

// err is the error of the load: of the first read that failed, with those of others
// that are not its consequences.
func (l *loading) err() error {
	if len(l.failed) == 0 {
		if len(l.unreleased) > 0 {
			return fmt.Errorf("weights: load: %w", errors.Join(l.unreleased...))
		}
		return nil
	}
	first := l.failed[0]
	e := &LoadError{Err: first.err}
	e.Offset = first.Offset + int64(min(first.done, first.Size-1))
	for _, d := range first.Devices {
		e.Devices = append(e.Devices, l.memory[d].Device)
	}
	reason := context.Cause(l.ctx)
	for _, f := range l.failed[1:] {
		if !errors.Is(f.err, reason) || errors.Is(f.err, transfer.ErrUnderWay) {
			e.Err = errors.Join(e.Err, f.err)
		}
	}
	if len(l.unreleased) > 0 {
		e.Err = errors.Join(append([]error{e.Err}, l.unreleased...)...)
	}
	incomplete := map[*Tensor]bool{}
	for i, f := range l.failed {
		for t := range f.left() {
			incomplete[t] = true
			if i == 0 && e.Tensor == nil {
				e.Tensor = t
				e.Offset = max(e.Offset, t.Offset)
			}
		}
	}
	e.Complete = slices.DeleteFunc(l.tensors(), func(t *Tensor) bool { return incomplete[t] })
	return e
}

// tensors returns all tensors of which there are parts, in the order of the files.
func (l *loading) tensors() (list []*Tensor) {
	files := fileOrder{}
	for _, r := range l.reads {
		files.add(r.File)
	}
	for _, p := range l.parts { // of no bytes
		files.add(p.Tensor.File)
	}
	slices.SortFunc(l.parts, files.compare)
	for _, p := range l.parts {
		if len(list) == 0 || list[len(list)-1] != p.Tensor {
			list = append(list, p.Tensor)
		}
	}
	return list
}

// left iterates over the tensors of which bytes were not done, in order.
func (r failedRead) left() func(yield func(*Tensor) bool) {
	done := min(r.done, r.Size-1) // all bytes may be there although the read failed
	return func(yield func(*Tensor) bool) {
		for _, p := range r.Pieces {
			from, to := r.Offset+int64(max(p.From, done)), r.Offset+int64(p.From+p.Size)
			if from >= to {
				continue
			}
			tensors := r.File.tensors
			at, _ := slices.BinarySearchFunc(tensors, from, func(t *Tensor, from int64) int {
				return cmp.Compare(t.Offset+int64(t.Size), from+1)
			})
			for ; at < len(tensors) && tensors[at].Offset < to; at++ {
				if tensors[at].Size > 0 && !yield(tensors[at]) {
					return
				}
			}
		}
	}
}
