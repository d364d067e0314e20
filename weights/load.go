package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer"
)

// Memory is memory of a device: Bytes bytes at Ptr, allocated by the caller, for
// instance with [cudart.Device.Malloc].
type Memory struct {
	Device *cudart.Device
	Ptr    cudart.DevPtr
	Bytes  int // size
}

// A Placement is a part and the memory for it, which may be larger.
type Placement struct {
	Part
	To Memory
}

// LoadOptions shape a load. The zero value suits files that are read more than once.
type LoadOptions struct {
	// Progress is called from time to time with the number of bytes that were read, and the number
	// of all. There is one call at a time, on a goroutine of its own. Bytes for several devices
	// count once. A call that blocks does not delay copies, only the return of a successful load.
	// After an error no call begins, and a call in progress may outlast the load. A panic, or the
	// end of the goroutine (runtime.Goexit), is an error of the load.
	Progress func(done, total int)
	// DirectIO reads without the page cache (O_DIRECT): see [transfer.Call]. Without it,
	// cached pages are copied from the page cache, and others are read into it.
	DirectIO bool
	// DropCache removes the pages that were read from the page cache, when their bytes are in
	// device memory (posix_fadvise with POSIX_FADV_DONTNEED); for columns also the pages between
	// the first and the last of them. Linux removes pages of file systems
	// on disks and networks that no process has mapped; other systems remove none. A page
	// that stays is no error.
	DropCache bool
	// Checksums compares the bytes with the checksums that [Save] has written: on the devices after the
	// copies, or in pinned memory if a device runs no kernels. The blocks of columns, and those that a device
	// gets in part, are read again, whole. The Err of a LoadError is a *[ChecksumError] for each wrong block
	// then; the bytes are in device memory nevertheless. A file without checksums is refused with
	// [ErrNoChecksums].
	Checksums bool
	// NoPeers makes no copies from device to device: see [transfer.Options]. Without it, direct
	// paths are proved once, and those that lose bytes are left out: [transfer.Fanout.Notes] of a
	// Fanout of the devices names them.
	NoPeers bool
}

// Load copies the plan's tensors from their files to the memory of devices. memory has an
// element for each index of Plan.Devices, with at least DevicePlan.Bytes bytes. Load copies to
// all devices at once, each over its own link, and reads bytes for several devices once: see
// [transfer.Fanout]. When Load returns nil, all bytes are in device memory.
//
// No other work may use the memory during Load, including work queued on streams. Bytes between
// tensors, which their alignment leaves, may become zero. Load uses the
// rings of pinned memory that Copiers of the devices share, and allocates missing ones. An open
// [transfer.Copier] of each device saves that time; for tensors that several devices get, an
// open [transfer.Fanout] of these devices does.
//
// Before anything is copied, Load returns an error for devices that are nil, of different CUDA
// libraries, or the same under two indexes; for memory that is missing or too small; for a plan
// that is nil, or does not match its tensors or the memory; and for files that are closed, or
// shorter than when they were opened. A later error ends all copies, and is a *LoadError. When
// ctx ends, its Err wraps ctx's error and cause. Memory is unused then, unless the error wraps
// [transfer.ErrUnderWay]. No further read of a file begins, and one that runs may outlast the load.
func (p *Plan) Load(ctx context.Context, memory map[int]Memory, o LoadOptions) error {
	placements, err := p.placements(memory)
	if err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return place(ctx, p.files, placements, true, o)
}

// Place copies parts of tensors from their files to addresses, as if by one Plan: in the order
// of the files, with one read for each byte, and with one copy for neighbours in a file that
// are neighbours on their device. The requirements and the errors are those of [Plan.Load].
// Before anything is copied, it also returns an error for a Part that is not within a File's
// tensor, and for parts that overlap on a device.
func Place(ctx context.Context, placements []Placement, o LoadOptions) error {
	return place(ctx, nil, placements, false, o)
}

func place(ctx context.Context, files []*File, placements []Placement, owned bool, o LoadOptions) error {
	l := loading{o: o, owned: owned, caller: ctx}
	err := l.plan(files, placements)
	switch {
	case err != nil:
	case ctx == nil:
		err = errors.New("the context is nil")
	default:
		if err = l.checkFiles(); err == nil {
			err = bounded.Ended(ctx)
		}
		if err == nil && o.Checksums {
			if err = l.readChecksums(); err == nil {
				err = l.openSummers()
			}
		}
	}
	if err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	err = l.load()
	l.closeSummers(err != nil)
	return err
}

// A loading is one call of Load or Place. Its queues share it, without a lock:
//
//	field        set by                       | read by
//	queue.failed the goroutine of the queue   | err, when the goroutine has ended
//	queue.err    the same                     | the same
//	done         Progress of the copies       | Progress of the copies, which adds to it
//	ctx          ended by the first failure,  | queues, copies, the reporter
//	             which is its cause, or by    |
//	             the caller's context         |
type loading struct {
	o       LoadOptions
	owned   bool             // the bytes between tensors may be written
	tensors []*Tensor        // in the order of the files
	files   []*File          // with bytes of the load, in their order
	placed  []target         // parts with bytes, in the order of devices and addresses
	devices []*cudart.Device // by the indices of the queues

	queues []*queue // in the order of their first segments
	made   int      // segments

	caller context.Context // of Load or Place
	ctx    context.Context
	cancel context.CancelCauseFunc

	passed   map[*File]*passed
	summers  []*summer // by device, nil if the CPU computes the checksums
	reporter *bounded.Reporter
	done     atomic.Int64 // bytes
}

// load runs the queues.
func (l *loading) load() error {
	l.ctx, l.cancel = context.WithCancelCause(l.caller)
	defer l.cancel(nil)
	l.report()
	var running sync.WaitGroup
	if len(l.queues) > 0 {
		running.Go(func() { retryUnreleased(l.caller, l.devices[0].Runtime()) })
	}
	for _, q := range l.queues {
		running.Go(func() { l.run(q) })
	}
	running.Wait()
	if l.o.DropCache {
		for _, q := range l.queues {
			q.dropShared()
		}
	}
	reported := l.reporter == nil || l.reporter.Finish()
	if err := l.err(reported); err != nil {
		return err
	}
	return l.compareChecksums()
}

// report starts the reports to LoadOptions.Progress.
func (l *loading) report() {
	if l.o.Progress == nil {
		return
	}
	total := 0
	for _, q := range l.queues {
		total += q.read(q.n)
	}
	failed := func(_ int, err error) { l.cancel(&failure{err: err}) }
	l.reporter = bounded.NewReporter(total, l.o.Progress, failed, l.ctx.Done())
}

// run copies the segments of a queue, unless another queue has failed.
func (l *loading) run(q *queue) {
	if l.ctx.Err() != nil {
		l.fail(q, 0, bounded.Ended(l.ctx))
		return
	}
	fanout, err := transfer.NewFanout(l.ctx, q.devices, transfer.Options{NoPeers: l.o.NoPeers})
	if err != nil {
		l.fail(q, 0, cause(err))
		return
	}
	if done, err := l.copy(q, fanout); err != nil {
		l.fail(q, done, cause(err))
	}
	if err := release(l.caller, l.ctx.Err() != nil, q.devices[0].Runtime(), fanout); err != nil {
		q.err = fmt.Errorf("after the load: %w", cause(err))
	}
}

// copy copies the segments of a queue, and returns the number of bytes of its upload, from the first on,
// that were copied.
func (l *loading) copy(q *queue, fanout *transfer.Fanout) (int, error) {
	ranges, err := q.source()
	if err != nil {
		return 0, err
	}
	call := transfer.Call{DirectIO: l.o.DirectIO}
	if l.reporter != nil || l.o.DropCache {
		before := 0
		call.Progress = func(done, _ int) {
			read := q.read(done)
			if l.reporter != nil {
				l.reporter.Set(int(l.done.Add(int64(read - before))))
				before = read
			}
			if l.o.DropCache {
				q.drop(done)
			}
		}
	}
	if l.passed != nil && l.summers == nil {
		call.Inspect = func(off int, mem []byte) { q.inspect(l, off, mem) }
	}
	return fanout.With(call).UploadPieces(l.ctx, ranges, 0, q.n, q.pieces)
}

// cause returns an error without the operation of package transfer: this package's operation
// takes its place.
func cause(err error) error { return cmp.Or(errors.Unwrap(err), err) }

// fail records the error of a queue of whose upload the first bytes were copied, and ends the other
// queues.
func (l *loading) fail(q *queue, done int, err error) {
	q.failed = &failure{queue: q, err: err}
	q.failed.first, q.failed.done = q.find(done)
	l.cancel(q.failed)
}
