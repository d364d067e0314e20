package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
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
	// Progress is called from time to time with the number of bytes that were read, and
	// the number of all. There is one call at a time, on a goroutine of its own. Bytes for
	// several devices count once. A call that blocks delays no copy, but the return of a
	// load that succeeds. After an error no call begins, and a call in progress may
	// outlast the load. A panic, and the end of the goroutine (runtime.Goexit), are
	// errors of the load.
	Progress func(done, total int)
	// DirectIO reads without the page cache (O_DIRECT): see [transfer.Call]. Without it,
	// cached pages are copied from the page cache, and others are read into it.
	DirectIO bool
	// DropCache removes the pages of each read from the page cache when the read has
	// ended (posix_fadvise with POSIX_FADV_DONTNEED). Linux removes pages of file systems
	// on disks and networks that no process has mapped; other systems remove none. A page
	// that stays is no error.
	DropCache bool
}

// Load copies the plan's tensors from their files to the memory of devices. memory has an
// element for each index of Plan.Devices, with at least DevicePlan.Bytes bytes. Load copies to
// all devices at once, each over its own link, and reads bytes for several devices once: see
// [transfer.Fanout]. When Load returns nil, all bytes are in device memory.
//
// No other work may use the memory during Load, including work queued on streams. Load uses the
// rings of pinned memory that Copiers of the devices share, and allocates missing ones. An open
// [transfer.Copier] of each device saves that time; for tensors that several devices get, an
// open [transfer.Fanout] of these devices does.
//
// Before anything is copied, Load returns an error for devices that are nil, of different CUDA
// libraries, or the same under two indexes; for memory that is missing or too small; for a plan
// that is nil, or does not match its tensors or the memory; and for files that are closed, or
// shorter than when they were opened. A later error ends all copies, and is a *LoadError. When
// ctx ends, its Err wraps ctx's error and cause. Memory and files are unused then, unless the
// error wraps [transfer.ErrUnderWay].
func (p *Plan) Load(ctx context.Context, memory map[int]Memory, o LoadOptions) error {
	placements, err := p.placements(memory)
	if err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return place(ctx, p.files, placements, o)
}

// Place copies parts of tensors from their files to addresses, as if by one Plan: in the order
// of the files, with one read for each byte, and with one copy for neighbours in a file that
// are neighbours on their device. The requirements and the errors are those of [Plan.Load].
// Before anything is copied, it also returns an error for a Part that is not within a File's
// tensor, and for parts that overlap on a device.
func Place(ctx context.Context, placements []Placement, o LoadOptions) error {
	return place(ctx, nil, placements, o)
}

func place(ctx context.Context, files []*File, placements []Placement, o LoadOptions) error {
	l := loading{o: o, caller: ctx}
	err := l.plan(files, placements)
	switch {
	case err != nil:
	case ctx == nil:
		err = errors.New("the context is nil")
	default:
		if err = l.checkFiles(); err == nil {
			err = bounded.Ended(ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return l.load()
}

// A loading is one call of Load or Place. Its workers share it, without a lock:
//
//	field        set by                       | read by
//	failures[i]  the worker that took read i  | err, when the workers have ended
//	queue.err    the goroutine of the queue   | err, when the goroutine has ended
//	done         Progress of the copies       | Progress of the copies, which adds to it
//	ctx          ended by the first failure,  | workers, copies, the reporter
//	             which is its cause, or by    |
//	             the caller's context         |
type loading struct {
	o       LoadOptions
	tensors []*Tensor        // in the order of the files
	reads   []Read           // to addresses
	devices []*cudart.Device // by the indices of the reads

	caller context.Context // of Load or Place
	ctx    context.Context
	cancel context.CancelCauseFunc

	failures []*failure // by read, nil without a failure
	reporter *bounded.Reporter
	done     atomic.Int64 // bytes
}

// A queue has the reads for one set of devices.
type queue struct {
	set     []int // indices of the devices
	devices []*cudart.Device
	reads   chan int // indices of reads that no worker has taken
	err     error    // of the release
}

// queueWorkers is the number of reads of a queue that are copied at once. With two, the links
// stay busy when a read ends.
const queueWorkers = 2

// load runs the reads.
func (l *loading) load() error {
	l.ctx, l.cancel = context.WithCancelCause(l.caller)
	defer l.cancel(nil)
	l.failures = make([]*failure, len(l.reads))
	queues := l.queues()
	l.report()
	var running sync.WaitGroup
	if len(queues) > 0 {
		running.Go(func() { retryUnreleased(l.caller, queues[0].devices[0].Runtime()) })
	}
	for _, q := range queues {
		running.Go(func() { l.run(q) })
	}
	running.Wait()
	reported := l.reporter == nil || l.reporter.Finish()
	return l.err(queues, reported)
}

// queues returns the reads by their sets of devices.
func (l *loading) queues() (list []*queue) {
	for i, r := range l.reads {
		at := slices.IndexFunc(list, func(q *queue) bool { return slices.Equal(q.set, r.Devices) })
		if at < 0 {
			q := &queue{set: r.Devices, reads: make(chan int, len(l.reads))}
			for _, d := range r.Devices {
				q.devices = append(q.devices, l.devices[d])
			}
			at, list = len(list), append(list, q)
		}
		list[at].reads <- i
	}
	for _, q := range list {
		close(q.reads)
	}
	return list
}

// report starts the reports to LoadOptions.Progress.
func (l *loading) report() {
	if l.o.Progress == nil {
		return
	}
	total := 0
	for i := range l.reads {
		total += l.reads[i].Size
	}
	failed := func(_ int, err error) { l.cancel(&failure{err: err}) }
	l.reporter = bounded.NewReporter(total, l.o.Progress, failed, l.ctx.Done())
}

// run copies the reads of a queue.
func (l *loading) run(q *queue) {
	fanout, err := transfer.NewFanout(l.ctx, q.devices, transfer.Options{})
	if err != nil {
		l.fail(<-q.reads, 0, cause(err))
		l.copyReads(q, nil) // fails the other reads
		return
	}
	var running sync.WaitGroup
	for range min(queueWorkers, len(q.reads)) {
		running.Go(func() { l.copyReads(q, fanout) })
	}
	running.Wait()
	if err := release(l.caller, fanout); err != nil {
		q.err = fmt.Errorf("after the load: %w", cause(err))
	}
}

// cause returns an error without the operation of package transfer: this package's operation
// takes its place.
func cause(err error) error { return cmp.Or(errors.Unwrap(err), err) }

// copyReads copies reads of a queue, one after the other. After the failure of any read, of this
// queue or another, the following reads fail too.
func (l *loading) copyReads(q *queue, fanout *transfer.Fanout) {
	for i := range q.reads {
		done, err := 0, error(nil)
		if l.ctx.Err() != nil {
			err = bounded.Ended(l.ctx)
		} else {
			done, err = l.read(fanout, &l.reads[i])
		}
		if err != nil {
			l.fail(i, done, err)
		}
	}
}

// read copies one read, and returns the number of bytes, from the first on, that were copied.
func (l *loading) read(fanout *transfer.Fanout, r *Read) (int, error) {
	pieces := make([]transfer.Piece, len(r.Pieces))
	for i, p := range r.Pieces {
		pieces[i] = transfer.Piece{Off: p.From, N: p.Size, Dsts: make([]cudart.DevPtr, len(p.To))}
		for d, to := range p.To {
			pieces[i].Dsts[d] = cudart.DevPtr(to)
		}
	}
	call := transfer.Call{DirectIO: l.o.DirectIO}
	if l.reporter != nil {
		before := 0
		call.Progress = func(done, _ int) {
			l.reporter.Set(int(l.done.Add(int64(done - before))))
			before = done
		}
	}
	done, err := fanout.With(call).UploadPieces(l.ctx, r.File.r, r.Offset, r.Size, pieces)
	if file, ok := r.File.r.(*os.File); ok && l.o.DropCache {
		dropCache(file, r.Offset, r.Size)
	}
	if err != nil {
		return done, cause(err)
	}
	return done, nil
}

// fail records the error of a read, and ends the other reads.
func (l *loading) fail(read, done int, err error) {
	f := &failure{&l.reads[read], done, err}
	l.failures[read] = f
	l.cancel(f)
}
