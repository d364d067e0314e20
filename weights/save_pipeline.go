package weights

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/transfer"
)

const (
	// snapshotPiece is the size of the pieces of files that are leased, copied and written: a multiple of saveAlign.
	snapshotPiece = 32 << 20
	// copiesAtOnce is the number of pieces of a device that are copied at once: while one waits for its end, the
	// link has others.
	copiesAtOnce = 4
	// throughPiece and throughBytes are the size of pieces, and the memory for all of them, without a pool of the
	// caller's. Pieces of 8 MiB are 3 % slower, and those of 2 MiB 5 % (H200, 2026-11-29).
	throughPiece = 4 << 20
	throughBytes = 128 << 20
	// directWriters is the number of goroutines that write without the page cache, cacheWriters to a file in it, to
	// which the kernel lets one at a time write, and memoryWriters at most to a file in memory.
	directWriters = 4
	cacheWriters  = 2
	memoryWriters = 16
	// putBytes is how much memory is written at a time: it is in a core's cache then, after its checksum was computed.
	putBytes = 1 << 20
)

// A pipeline copies pieces of files to leased memory, and writes them from there. With a pool of the caller's, writers
// begin when the copies are complete, or the pool has no more memory: copies to pinned memory have the host's memory to
// themselves before. Without one, host memory is written from where it is.
type pipeline struct {
	*Saving
	pool    *pool.Pool // nil if nothing is to be copied
	through bool       // the caller waits for the writers
	size    int64      // of the pieces
	streams map[*cudart.Device]deviceStreams
	gather  map[*cudart.Device]*gpukernels.Parts // of devices with many small tensors: nil if it cannot be loaded
	filled  chan filledPiece
	start   chan struct{} // closed: the writers may begin
	once    sync.Once     // of start
	writing sync.WaitGroup
}

// A filledPiece is a part of a file in leased memory, or in the caller's.
type filledPiece struct {
	*savedFile
	off   int64
	mem   []byte
	lease *pool.Lease // nil for the caller's
}

// A usedLease is a lease with the calls of CUDA that use it. After an error the pool takes it back when its owner has left and
// all calls have returned, also those that were abandoned: they may still queue a kernel.
type usedLease struct {
	pool.Lease
	calls   atomic.Int32     // -1 when the last user has left
	streams []*cudart.Stream // set before the owner leaves: those whose work uses it
}

// onDevice makes a call that uses the lease.
func (l *usedLease) onDevice(ctx context.Context, dev *cudart.Device, run func() error) error {
	l.calls.Add(1)
	_, err := onDevice(ctx, dev, func() (none struct{}, err error) { return none, run() }, func(struct{}, error) { _ = l.leave() })
	if !errors.Is(err, transfer.ErrUnderWay) {
		_ = l.leave() // not as the last: the owner is there
	}
	return err
}

func (l *usedLease) leave() error {
	if l.calls.Add(-1) >= 0 {
		return nil
	}
	return l.Release(l.streams...)
}

func newPipeline(s *Saving) (*pipeline, error) {
	n := &pipeline{
		Saving: s, pool: s.o.Snapshot, through: s.o.Snapshot == nil, size: snapshotPiece,
		start: make(chan struct{}), streams: map[*cudart.Device]deviceStreams{}, gather: map[*cudart.Device]*gpukernels.Parts{},
	}
	if n.through {
		n.size = throughPiece
		n.begin()
		if len(n.devices) > 0 {
			var err error
			if n.pool, err = idlePools.take(n.devices[0], func() (*pool.Pool, error) { return newThroughPool(n.devices[0]) }); err != nil {
				return n, err
			}
		}
	}
	for _, dev := range s.devices {
		streams, err := newStreams(s.ctx, dev, copiesAtOnce)
		if err != nil {
			return n, err
		}
		n.streams[dev] = streams
	}
	pieces, writers := 0, 0
	for _, f := range s.files {
		f.pieces = f.cut(n.size, n.through)
		pieces += len(f.pieces)
		for _, piece := range f.pieces {
			n.openGather(piece)
		}
		if s.o.DirectIO && f.mapped == nil {
			f.direct = openDirect(f.temp.Name())
		}
		writers = max(writers, f.writers())
	}
	n.filled = make(chan filledPiece, pieces)
	for range min(writers, pieces) {
		n.writing.Go(n.write)
	}
	return n, nil
}

// idlePools has the pools of saves whose callers waited, so that the next one pins nothing. A pool unmaps its memory when it
// has been idle for some time.
var idlePools idle[*pool.Pool]

func newThroughPool(dev *cudart.Device) (*pool.Pool, error) {
	return pool.New(dev, pool.Options{MaxBytes: throughBytes, Buffer: hostmem.Options{Label: "weights save"}})
}

// writers returns the number of goroutines that write to the file.
func (f *savedFile) writers() int {
	switch {
	case f.mapped != nil:
		return max(directWriters, min(runtime.GOMAXPROCS(0), memoryWriters))
	case f.direct != nil:
		return directWriters
	}
	return cacheWriters
}

// calls bound, for each device, the threads in calls of CUDA that may not return.
var calls bounded.Each[cudart.Device, bounded.Group]

// onDevice makes calls of CUDA. late, unless it is nil, takes the outcome of calls that were abandoned.
func onDevice[T any](ctx context.Context, dev *cudart.Device, run func() (T, error), late func(T, error)) (none T, _ error) {
	group := calls.Of(dev)
	if err := group.Begin(ctx); err != nil {
		return none, err
	}
	result, err := bounded.Do(ctx, bounded.Call[T]{Run: func() (T, error) {
		defer group.End()
		return run()
	}, Late: late})
	if errors.Is(err, bounded.ErrStuck) {
		err = fmt.Errorf("%w: %w", transfer.ErrUnderWay, err)
	}
	return result, err
}

// deviceStreams are streams of a device.
type deviceStreams []*cudart.Stream

func newStreams(ctx context.Context, dev *cudart.Device, n int) (deviceStreams, error) {
	return onDevice(ctx, dev, func() (streams deviceStreams, err error) {
		for range n {
			s, err := dev.NewStream(cudart.StreamOptions{})
			if err != nil {
				return streams, errors.Join(err, streams.close())
			}
			streams = append(streams, s)
		}
		return streams, nil
	}, func(streams deviceStreams, err error) {
		if err == nil {
			_ = streams.close()
		}
	})
}

func (s deviceStreams) close() error {
	var errs []error
	for _, s := range s {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// CloseContext closes the streams.
func (s deviceStreams) CloseContext(ctx context.Context) error {
	_, err := onDevice(ctx, s[0].Device(), func() (struct{}, error) { return struct{}{}, s.close() }, nil)
	return err
}

// begin lets the writers begin.
func (n *pipeline) begin() { n.once.Do(func() { close(n.start) }) }

// release closes the streams. When the writers have ended it keeps the pool of a save whose caller waits and the kernels,
// or closes them after an error: all at once, because each may wait for work that does not end.
func (n *pipeline) release() error {
	if n.through {
		n.writing.Wait()
	}
	failed := n.ctx.Err() != nil
	var rings, streams []func() error
	if n.through && n.pool != nil {
		rings = append(rings, func() error { return idlePools.keep(n.caller, failed, n.devices[0], n.pool) })
	}
	for dev, kernel := range n.gather {
		if kernel != nil {
			rings = append(rings, func() error { return idleGather.keep(n.caller, failed, dev, kernel) })
		}
	}
	for dev, s := range n.streams {
		streams = append(streams, func() error { return release(n.caller, failed, dev.Runtime(), s) })
	}
	return errors.Join(atOnce(rings), atOnce(streams))
}

// write writes pieces. After an error it only returns their memory.
func (n *pipeline) write() {
	<-n.start
	var aligned []byte
	for p := range n.filled {
		n.awaitPages(p.savedFile, p.off+int64(len(p.mem)))
		if p.direct != nil && aligned == nil {
			aligned = alignedMemory(putBytes)
		}
		if done, err := n.put(p, aligned); err != nil {
			n.fail(p.savedFile, p.off+int64(done), err)
		}
		if p.lease == nil {
			continue
		}
		if err := p.lease.Release(); err != nil {
			n.cancel(err)
		}
	}
}

// put computes the checksums of a piece and writes it, and returns how many bytes from the first on were written. With
// aligned memory it copies bytes there first that are not aligned.
func (n *pipeline) put(p filledPiece, aligned []byte) (done int, err error) {
	for done < len(p.mem) && err == nil {
		if err := n.failure(); err != nil {
			return done, err
		}
		off := p.off + int64(done)
		part := p.mem[done:min(done+putBytes-int(off&(putBytes-1)), len(p.mem))]
		if p.sums != nil {
			p.sums.add(off, part)
		}
		if aligned != nil && !isAligned(part) {
			part = aligned[:copy(aligned, part)]
		}
		var wrote int
		wrote, err = p.writeAt(part, off)
		done += wrote
		n.report(wrote)
		if err == nil {
			err = n.changed(change{call: "write", path: p.temp.Name()})
		}
	}
	return done, err
}

// awaitPages waits until the pages of a file in memory are made for the bytes before an offset. The first call begins to
// make them.
func (n *pipeline) awaitPages(f *savedFile, end int64) {
	if f.mapped != nil {
		f.mapped.Start(func(int) bool { return n.ctx.Err() == nil }, func() {})
		f.mapped.Wait(int(end))
	}
}

// copyFile copies the pieces of a file until the save fails, those of each device at once with those of the others.
func (n *pipeline) copyFile(f *savedFile) {
	of := map[*cudart.Device][][]savedRun{} // pieces by the device of their first byte
	for _, piece := range f.pieces {
		if first := piece[0]; n.through && first.device == nil {
			n.filled <- filledPiece{savedFile: f, off: first.off, mem: first.host}
			continue
		}
		of[piece[0].device] = append(of[piece[0].device], piece)
	}
	var running sync.WaitGroup
	for _, pieces := range of {
		var next atomic.Int64
		for stream := range min(copiesAtOnce, len(pieces)) {
			running.Go(func() {
				for i := next.Add(1) - 1; i < int64(len(pieces)) && n.ctx.Err() == nil; i = next.Add(1) - 1 {
					off := pieces[i][0].off
					if err := n.copyPiece(f, off, pieces[i], stream); err != nil {
						n.fail(f, off, err)
					}
				}
			})
		}
	}
	running.Wait()
}

// copyPiece copies the piece of a file from off on to leased memory by one of each device's streams. The pool takes the
// memory back when its copies are done, also those that were abandoned.
func (n *pipeline) copyPiece(f *savedFile, off int64, runs []savedRun, stream int) error {
	end := runs[len(runs)-1].end()
	size := int(end - off)
	if n.through {
		n.awaitPages(f, end)
	}
	of := byDevice(runs)
	lists := make(map[*cudart.Device]int) // offsets in the lease
	all := size
	for dev, runs := range of {
		if n.gather[dev] != nil && gathered(runs) {
			lists[dev] = (all + gpukernels.PartBytes - 1) / gpukernels.PartBytes * gpukernels.PartBytes
			all = lists[dev] + countParts(runs)*gpukernels.PartBytes
		}
	}
	if len(lists) > 0 || n.through && len(n.gather) > 0 { // leases of one size, so that the pool need not pin others
		room := int(n.size / 16)
		all = size + max(1, (all-size+room-1)/room)*room
	}
	lease, err := n.lease(all)
	if err != nil && all > size && n.ctx.Err() == nil { // there may be no room for the lists
		clear(lists)
		lease, err = n.lease(size)
	}
	if err != nil {
		return err
	}
	for _, r := range runs {
		if r.device == nil {
			copy(lease.Bytes()[r.off-off:], r.host)
		}
	}
	used := &usedLease{Lease: lease}
	for dev, runs := range of {
		on := n.streams[dev][stream]
		used.streams = append(used.streams, on)
		err = errors.Join(err, used.onDevice(n.ctx, dev, func() error {
			if list := lists[dev]; list > 0 {
				return gatherRuns(n.gather[dev], lease, off, list, runs, on)
			}
			return queueRuns(lease, off, runs, on)
		}))
	}
	if err = errors.Join(err, await(n.ctx, used.streams...)); err != nil {
		return errors.Join(err, used.leave())
	}
	n.filled <- filledPiece{savedFile: f, off: off, mem: lease.Bytes()[:size], lease: &lease}
	return nil
}

// lease leases memory. If there is no more, the writers return some.
func (n *pipeline) lease(bytes int) (pool.Lease, error) {
	lease, err := n.pool.TryGet(n.ctx, bytes)
	if errors.Is(err, hostmem.ErrLimit) {
		n.begin()
		lease, err = n.pool.Get(n.ctx, bytes)
	}
	return lease, err
}

// byDevice returns the runs of each device.
func byDevice(runs []savedRun) map[*cudart.Device][]savedRun {
	of := map[*cudart.Device][]savedRun{}
	for _, r := range runs {
		if r.device != nil {
			of[r.device] = append(of[r.device], r)
		}
	}
	return of
}

// queueRuns queues the copies of runs of a stream's device to leased memory for a file from off on.
func queueRuns(lease pool.Lease, off int64, runs []savedRun, on *cudart.Stream) error {
	for _, r := range runs {
		if err := lease.CopyFromDevice(on, r.ptr, int(r.off-off), r.n); err != nil {
			return err
		}
	}
	return nil
}

// await waits for the work of streams, which the end of ctx leaves a second.
func await(ctx context.Context, streams ...*cudart.Stream) (err error) {
	ctx, stop := bounded.Extend(ctx, bounded.Grace)
	defer stop()
	for _, s := range streams {
		e := s.Synchronize(ctx)
		if e != nil && ctx.Err() != nil {
			e = fmt.Errorf("%w: %w", transfer.ErrUnderWay, e)
		}
		err = errors.Join(err, e)
	}
	return err
}

// cut cuts the runs of the file into pieces, at multiples of a size in the file. If apart is set, each run of host memory
// is a piece of its own.
func (f *savedFile) cut(size int64, apart bool) (pieces [][]savedRun) {
	at, host, first := int64(-1), false, 0
	parts := make([]savedRun, 0, len(f.runs)+int(f.size/size)+1)
	for _, r := range f.runs {
		for r.n > 0 {
			part, of := r, r.off/size
			part.n = int(min(int64(r.n), (of+1)*size-r.off))
			if r.device == nil {
				part.host, r.host = r.host[:part.n], r.host[part.n:]
			}
			if (of != at || apart && (host || r.device == nil)) && len(parts) > first {
				pieces, first = append(pieces, parts[first:]), len(parts)
			}
			at, host = of, r.device == nil
			parts = append(parts, part)
			r.off, r.ptr, r.n = part.end(), r.ptr+cudart.DevPtr(part.n), r.n-part.n
		}
	}
	if len(parts) > first {
		pieces = append(pieces, parts[first:])
	}
	return pieces
}
