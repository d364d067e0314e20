package weights

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer"
)

const (
	// snapshotPiece is the size of the pieces of files that are leased, copied and written: a multiple of saveAlign.
	snapshotPiece = 32 << 20
	// snapshotCopies is the number of pieces of a device that are copied at once: while one waits for its end, the
	// link has another.
	snapshotCopies = 3
	// snapshotWriters is the number of goroutines that write to a disk, and memoryWriters at most to memory.
	snapshotWriters = 4
	memoryWriters   = 16
	// throughPiece and throughBytes are the size of pieces, and the memory for all of them, without a pool of the
	// caller's.
	throughPiece = 8 << 20
	throughBytes = 128 << 20
)

// A snapshot copies the pieces of files to leased memory, and writes them from there: when the copies are complete,
// or the pool has no more memory. Copies to pinned memory have the host's memory to themselves before.
type snapshot struct {
	*Saving
	pool    *pool.Pool
	own     bool // the pool is of this save alone
	piece   int64
	streams map[*cudart.Device][]*cudart.Stream // snapshotCopies
	filled  chan filledPiece
	start   chan struct{} // closed: the writers may begin
	once    sync.Once     // of start
	writing sync.WaitGroup
}

// A filledPiece is a part of a file in leased memory.
type filledPiece struct {
	*savedFile
	off   int64
	lease pool.Lease
}

func newSnapshot(s *Saving) (*snapshot, error) {
	n := &snapshot{
		Saving: s, pool: s.o.Snapshot, piece: snapshotPiece,
		start: make(chan struct{}), streams: map[*cudart.Device][]*cudart.Stream{},
	}
	if n.pool == nil {
		if err := n.newPool(); err != nil {
			return n, err
		}
	}
	for dev := range s.copiers {
		streams, err := newStreams(s.ctx, dev)
		if err != nil {
			return n, err
		}
		n.streams[dev] = streams
	}
	pieces, writers := 0, snapshotWriters
	for _, f := range s.files {
		pieces += int(f.size/n.piece) + 1
		switch {
		case f.mapped != nil:
			writers = max(snapshotWriters, min(runtime.GOMAXPROCS(0), memoryWriters))
		case s.o.DirectIO:
			f.direct = openDirect(f.temp.Name())
		}
	}
	n.filled = make(chan filledPiece, pieces)
	for range writers {
		n.writing.Go(n.write)
	}
	return n, nil
}

// newPool makes a pool for a save whose caller waits for the writes.
func (n *snapshot) newPool() (err error) {
	for dev := range n.copiers {
		n.own, n.piece = true, throughPiece
		n.pool, err = pool.New(dev, pool.Options{MaxBytes: throughBytes, Buffer: hostmem.Options{Label: "weights save"}})
		n.begin()
		break
	}
	return err
}

// snapshots bound, for each device, the threads in calls of CUDA for snapshots.
var snapshots bounded.Each[cudart.Device, bounded.Group]

// onDevice makes calls of CUDA.
func onDevice[T any](ctx context.Context, dev *cudart.Device, run func() (T, error)) (none T, _ error) {
	group := snapshots.Of(dev)
	if err := group.Begin(ctx); err != nil {
		return none, err
	}
	result, err := bounded.Do(ctx, bounded.Call[T]{Run: func() (T, error) {
		defer group.End()
		return run()
	}})
	if errors.Is(err, bounded.ErrStuck) {
		err = fmt.Errorf("%w: %w", transfer.ErrUnderWay, err)
	}
	return result, err
}

// deviceStreams are the streams of a snapshot on a device.
type deviceStreams []*cudart.Stream

func newStreams(ctx context.Context, dev *cudart.Device) (deviceStreams, error) {
	return onDevice(ctx, dev, func() (streams deviceStreams, err error) {
		for range snapshotCopies {
			s, err := dev.NewStream(cudart.StreamOptions{})
			if err != nil {
				return streams, errors.Join(err, streams.close())
			}
			streams = append(streams, s)
		}
		return streams, nil
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
	_, err := onDevice(ctx, s[0].Device(), func() (struct{}, error) { return struct{}{}, s.close() })
	return err
}

// begin lets the writers begin.
func (n *snapshot) begin() { n.once.Do(func() { close(n.start) }) }

// complete ends the writers when they have begun, and have written all pieces.
func (n *snapshot) complete() { close(n.filled) }

// release closes the streams, and a pool of its own when the writers have ended.
func (n *snapshot) release() (err error) {
	if n.own && n.pool != nil {
		n.writing.Wait()
		for dev := range n.copiers {
			err = release(n.caller, dev.Runtime(), n.pool)
			break
		}
	}
	for dev, streams := range n.streams {
		err = errors.Join(err, release(n.caller, dev.Runtime(), deviceStreams(streams)))
	}
	return err
}

// write writes pieces. After an error it only returns their memory.
func (n *snapshot) write() {
	<-n.start
	for p := range n.filled {
		if p.mapped != nil {
			p.mapped.MakePages(int(p.off), p.lease.Len())
		}
		if done, err := n.put(p.savedFile, p.off, p.lease.Bytes()); err != nil {
			n.fail(p.savedFile, p.off+int64(done), err)
		}
		if err := p.lease.Release(); err != nil {
			n.cancel(err)
		}
	}
}

// copyFile copies the pieces of a file, those of each device at once with those of the others.
func (n *snapshot) copyFile(f *savedFile) error {
	of := map[*cudart.Device][][]savedRun{} // pieces by the device of their first byte
	for _, piece := range piecesOf(f.runs, n.piece) {
		of[piece[0].device] = append(of[piece[0].device], piece)
	}
	var running sync.WaitGroup
	for _, pieces := range of {
		var next atomic.Int64
		for worker := range snapshotCopies {
			running.Go(func() {
				for i := next.Add(1) - 1; i < int64(len(pieces)) && n.ctx.Err() == nil; i = next.Add(1) - 1 {
					off := pieces[i][0].off
					if err := n.copyPiece(f, off, pieces[i], worker); err != nil {
						n.fail(f, off, err)
					}
				}
			})
		}
	}
	running.Wait()
	return n.failure()
}

// copyPiece copies the piece of a file from off on to leased memory, and uses up runs. The pool takes the memory back
// when its copies are done, also those that were abandoned.
func (n *snapshot) copyPiece(f *savedFile, off int64, runs []savedRun, worker int) error {
	size := int(runs[len(runs)-1].end() - off)
	lease, err := n.pool.TryGet(n.ctx, size)
	if errors.Is(err, hostmem.ErrLimit) {
		n.begin()
		lease, err = n.pool.Get(n.ctx, size)
	}
	if err != nil {
		return err
	}
	large := map[*cudart.Device][]savedRun{}
	small := slices.DeleteFunc(runs, func(r savedRun) bool {
		if r.device == nil || r.n <= groupedBytes {
			return false
		}
		large[r.device] = append(large[r.device], r)
		return true
	})
	for dev, runs := range large {
		err = errors.Join(err, queueRuns(n.ctx, lease, off, runs, n.streams[dev][worker]))
	}
	if err == nil {
		err = n.gather(lease.Bytes(), off, small)
	}
	for dev := range large {
		err = errors.Join(err, n.await(n.streams[dev][worker]))
	}
	if err != nil {
		return errors.Join(err, lease.Release())
	}
	n.filled <- filledPiece{f, off, lease}
	return nil
}

// queueRuns queues the copies of runs of a stream's device to leased memory for a file from off on.
func queueRuns(ctx context.Context, lease pool.Lease, off int64, runs []savedRun, on *cudart.Stream) error {
	_, err := onDevice(ctx, on.Device(), func() (none struct{}, err error) {
		for _, r := range runs {
			if err := lease.CopyFromDevice(on, r.ptr, int(r.off-off), r.n); err != nil {
				return none, err
			}
		}
		return none, nil
	})
	return err
}

// await waits for the copies on a stream, which the end of the save leaves a second.
func (n *snapshot) await(s *cudart.Stream) error {
	ctx, stop := bounded.Extend(n.ctx, bounded.Grace)
	defer stop()
	err := s.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", transfer.ErrUnderWay, err)
	}
	return err
}

// piecesOf cuts runs at multiples of a size in the file.
func piecesOf(runs []savedRun, size int64) (pieces [][]savedRun) {
	at := int64(-1)
	for _, r := range runs {
		for r.n > 0 {
			part, of := r, r.off/size
			part.n = int(min(int64(r.n), (of+1)*size-r.off))
			if r.device == nil {
				part.host, r.host = r.host[:part.n], r.host[part.n:]
			}
			if of != at {
				at, pieces = of, append(pieces, nil)
			}
			last := len(pieces) - 1
			pieces[last] = append(pieces[last], part)
			r.off, r.ptr, r.n = part.end(), r.ptr+cudart.DevPtr(part.n), r.n-part.n
		}
	}
	return pieces
}
