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
	Bytes  int
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
	// devices count once. A call that blocks delays no copy, but the return of a load
	// that succeeds. After an error no call begins, and one that runs may outlast the
	// load. A panic, and the end of the goroutine (runtime.Goexit), are errors of the
	// load.
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
// or too small; for a plan that is nil or was changed so that it does not fit its tensors
// or the memory; and for files that are closed, or shorter than they were when opened.
// An error that comes later ends all copies, and is a *LoadError. When ctx ends, its
// Err wraps ctx's error and cause. Memory and files are not used any more then, unless
// the error wraps [transfer.ErrUnderWay].
func (p *Plan) Load(ctx context.Context, memory map[int]Memory, o LoadOptions) error {
	placements, err := p.placements(memory)
	if err != nil {
		return fmt.Errorf("weights: load: %w", err)
	}
	return place(ctx, p.files, placements, o)
}

// Place copies parts of tensors from their files to given places, as if by one Plan:
// in the order of the files, each byte read once, and neighbours in a file that are
// neighbours on their device as one copy. The requirements and the errors are those
// of [Plan.Load]. It also returns an error, before anything is copied, for a Part of
// what is no File's tensor or beyond it, and for parts that overlap on a device.
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

// A loading is one call of Load or Place. Its lanes share it:
//
//	field        set by                      | read by
//	failures[i]  the lane that took read i   | err, when the lanes have ended
//	queue.err    the goroutine of the queue  | err, likewise
//	done         Progress of the copies      | likewise, to add to it
//	ctx          ended by the first failure, | lanes, copies, the reporter
//	             which is its cause, or by   |
//	             the caller's context        |
type loading struct {
	o       LoadOptions
	tensors []*Tensor        // in the order of the files
	reads   []Read           // to addresses
	devices []*cudart.Device // by the indices of the reads

	caller context.Context // of Load or Place
	ctx    context.Context
	cancel context.CancelCauseFunc

	failures []*failure // of reads, nil for those that have not failed
	reporter *bounded.Reporter
	done     atomic.Int64 // bytes
}

// A queue is the reads for one set of devices.
type queue struct {
	set     []int // indices of the devices
	devices []*cudart.Device
	reads   chan int // indices of those that no lane has taken
	err     error    // of the release
}

// lanes is how many reads of a queue are copied at once: when one ends, the links
// have the next one's bytes.
const lanes = 2

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
		l.lane(q, nil) // which fails the others
		return
	}
	var running sync.WaitGroup
	for range min(lanes, len(q.reads)) {
		running.Go(func() { l.lane(q, fanout) })
	}
	running.Wait()
	if err := release(l.caller, fanout); err != nil {
		q.err = fmt.Errorf("after the load: %w", cause(err))
	}
}

// cause is an error without the operation of package transfer, in whose place this
// package names its own.
func cause(err error) error { return cmp.Or(errors.Unwrap(err), err) }

// lane copies reads of a queue, one after the other. When one has failed, of whichever
// queue, the others do.
func (l *loading) lane(q *queue, fanout *transfer.Fanout) {
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

// read copies one read, and returns how many of its bytes, from the first on, are
// done with.
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

// fail keeps the error of a read, and ends the other ones.
func (l *loading) fail(read, done int, err error) {
	f := &failure{&l.reads[read], done, err}
	l.failures[read] = f
	l.cancel(f)
}
