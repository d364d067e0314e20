package weights

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/transfer"
)

const (
	// snapshotPiece is the size of the pieces of files that are leased, copied and written: a multiple of saveAlign.
	snapshotPiece = 32 << 20
	// snapshotCopies is the number of pieces of a device that are copied at once: while one waits for its end, the
	// link has another.
	snapshotCopies = 3
	// snapshotWriters is the number of goroutines that write.
	snapshotWriters = 4
)

// A snapshot copies the pieces of files to leased memory, and writes them from there: when the copies are complete,
// or the pool has no more memory. Copies to pinned memory have the host's memory to themselves before.
type snapshot struct {
	*Saving
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

func newSnapshot(s *Saving) *snapshot {
	pieces := 0
	for _, f := range s.files {
		pieces += int(f.size/snapshotPiece) + 1
		if s.o.DirectIO {
			f.direct = openDirect(f.temp.Name())
		}
	}
	n := &snapshot{Saving: s, filled: make(chan filledPiece, pieces), start: make(chan struct{})}
	for range snapshotWriters {
		n.writing.Go(n.write)
	}
	return n
}

// begin lets the writers begin.
func (n *snapshot) begin() { n.once.Do(func() { close(n.start) }) }

// complete ends the writers when they have written all pieces.
func (n *snapshot) complete() {
	close(n.filled)
	n.begin()
}

// write writes pieces. After an error it only returns their memory.
func (n *snapshot) write() {
	<-n.start
	for p := range n.filled {
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
	for _, piece := range piecesOf(f.runs) {
		of[piece[0].device] = append(of[piece[0].device], piece)
	}
	var running sync.WaitGroup
	for _, pieces := range of {
		var next atomic.Int64
		for range snapshotCopies {
			running.Go(func() {
				for i := next.Add(1) - 1; i < int64(len(pieces)) && n.ctx.Err() == nil; i = next.Add(1) - 1 {
					if err := n.copyPiece(f, pieces[i]); err != nil {
						n.fail(f, pieces[i][0].off, err)
					}
				}
			})
		}
	}
	running.Wait()
	return n.failure()
}

// copyPiece copies a piece of a file to leased memory.
func (n *snapshot) copyPiece(f *savedFile, runs []savedRun) error {
	off, size := runs[0].off, int(runs[len(runs)-1].end()-runs[0].off)
	lease, err := n.o.Snapshot.TryGet(n.ctx, size)
	if errors.Is(err, hostmem.ErrLimit) {
		n.begin()
		lease, err = n.o.Snapshot.Get(n.ctx, size)
	}
	if err != nil {
		return err
	}
	err = n.gather(lease.Bytes(), off, runs)
	switch {
	case errors.Is(err, transfer.ErrUnderWay):
		device := slices.IndexFunc(runs, func(r savedRun) bool { return r.device != nil })
		return errors.Join(err, release(n.caller, runs[device].device.Runtime(), underWay{lease, runs}))
	case err != nil:
		return errors.Join(err, lease.Release())
	}
	n.filled <- filledPiece{f, off, lease}
	return nil
}

// An underWay is leased memory to which devices may still write.
type underWay struct {
	lease pool.Lease
	runs  []savedRun
}

// CloseContext waits for the devices, and returns the memory to its pool.
func (u underWay) CloseContext(ctx context.Context) error {
	var waited *cudart.Device
	for _, r := range u.runs {
		if r.device == nil || r.device == waited {
			continue
		}
		if waited = r.device; waited.Synchronize(ctx) != nil {
			return transfer.ErrUnderWay
		}
	}
	return u.lease.Release()
}

// piecesOf cuts runs at multiples of snapshotPiece in the file.
func piecesOf(runs []savedRun) (pieces [][]savedRun) {
	at := int64(-1)
	for _, r := range runs {
		for r.n > 0 {
			part, of := r, r.off/snapshotPiece
			part.n = int(min(int64(r.n), (of+1)*snapshotPiece-r.off))
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
