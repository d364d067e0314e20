package stage

import (
	"errors"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A chunk is a part of a job that passes through one extent.
//
//	upload     download   | entered by             | who has it
//	published  –          | openNext               | who claims its pieces
//	submitted  submitted  | the last piece;        | the goroutine that queues it: see link
//	                      | openNext               |
//	–          arriving   | queued                 | the driver, in Job.driver
//	–          published  | the driver             | who claims its pieces
//	over       over       | queued; the last piece | its ring, which waits for the fence
//
// After an error the goroutine that has a chunk drops it.
type chunk struct {
	Part
	job   *Job
	x     *extent
	round int // of the groups: each has its next stage in each round

	piece   int          // bytes
	pieces  int32        // in all
	next    atomic.Int32 // to claim
	pending atomic.Int32 // pieces that are not done
	refused atomic.Bool  // Copy has returned ErrNotReady
	sends   atomic.Int32 // copies that are not queued yet
	arrives atomic.Bool  // its copy from the device is queued; set under job.mu
	orphan  bool         // the job has ended: whoever queues it drops it; guarded by job.mu
}

const (
	minPiece = 64 * kib
	maxPiece = 512 * kib
)

// pieceSize returns the size of the pieces of a chunk of n bytes.
func pieceSize(n int) int {
	piece := (n/8 + minPiece - 1) / minPiece * minPiece
	return min(max(piece, minPiece), maxPiece)
}

// A workQueue holds the pieces of a job that any goroutine may claim.
type workQueue struct {
	workers atomic.Int32          // of the pools that work on the job
	pieces  atomic.Int32          // that can be claimed
	first   atomic.Pointer[chunk] // with pieces to claim; set under job.mu
	more    []*chunk              // behind first; guarded by job.mu
}

// publish makes a chunk's pieces available to all goroutines.
func (j *Job) publish(c *chunk) {
	if c.piece = j.Piece; c.piece == 0 {
		c.piece = pieceSize(c.N)
	}
	c.pieces = int32((c.N + c.piece - 1) / c.piece)
	c.pending.Store(c.pieces)
	j.mu.Lock()
	j.chunks.published++
	only := j.work.first.Load() == nil
	if only {
		j.work.first.Store(c)
	} else {
		j.work.more = append(j.work.more, c)
	}
	j.mu.Unlock()
	j.work.pieces.Add(c.pieces)
	if c.pieces > 1 || !only {
		for _, p := range j.pools {
			p.publish(j)
		}
	}
}

// copyPiece claims a piece and fills or drains it. It reports whether there was one.
func (j *Job) copyPiece() bool {
	c, i := j.claim()
	if c == nil {
		return false
	}
	c.copyPiece(int(i))
	return true
}

func (j *Job) claim() (*chunk, int32) {
	for j.work.pieces.Load() > 0 && !j.failed.Load() {
		c := j.work.first.Load()
		if c == nil {
			return nil, 0
		}
		if i := c.next.Add(1) - 1; i < c.pieces {
			j.work.pieces.Add(-1)
			return c, i
		}
		j.mu.Lock()
		if j.work.first.Load() == c {
			j.work.shift()
		}
		j.mu.Unlock()
	}
	return nil, 0
}

// shift makes the next chunk the first. It needs job.mu.
func (w *workQueue) shift() {
	if len(w.more) == 0 {
		w.first.Store(nil)
		return
	}
	w.first.Store(w.more[0])
	w.more[0] = nil
	w.more = w.more[1:]
}

// dropPieces drops all pieces that are not claimed, after an error.
func (j *Job) dropPieces() {
	var dropped []*chunk
	j.mu.Lock()
	for c := j.work.first.Load(); c != nil; c = j.work.first.Load() {
		unclaimed := c.pieces - min(c.next.Swap(c.pieces), c.pieces)
		j.work.pieces.Add(-unclaimed)
		if unclaimed > 0 && c.pending.Add(-unclaimed) == 0 {
			dropped = append(dropped, c)
		}
		j.work.shift()
	}
	j.mu.Unlock()
	for _, c := range dropped {
		c.drop()
		j.finished(0)
	}
}

// finished counts a published chunk as finished; n of its bytes come again. The chunk's
// memory was released before, because the ring may be closed when the job has ended.
func (j *Job) finished(n int) {
	j.mu.Lock()
	j.chunks.published--
	j.chunks.opened -= n
	j.mu.Unlock()
}

// copyPiece fills or drains a piece, and passes the chunk on if it is the last one.
func (c *chunk) copyPiece(i int) {
	from := i * c.piece
	mem := c.x.mem[from:min(from+c.piece, c.N)]
	if !c.refused.Load() {
		if err := bounded.Guard(func() error { return c.fillOrDrain(mem, c.Off+from) }); errors.Is(err, ErrNotReady) {
			c.refused.Store(true)
		} else if err != nil {
			c.job.Cut(c.Off+from, err)
		}
	}
	if c.pending.Add(-1) == 0 {
		c.copied()
	}
}

// fillOrDrain copies the bytes from off on between the Host and memory of the ring, where they are
// inspected.
func (c *chunk) fillOrDrain(mem []byte, off int) error {
	inspect := c.job.Inspect
	if inspect != nil && c.job.dir == toHost {
		inspect(off, mem)
	}
	err := c.Copy(mem, off)
	if inspect != nil && c.job.dir == toDevice && err == nil {
		inspect(off, mem)
	}
	return err
}

// copied passes on a chunk after its last piece.
func (c *chunk) copied() {
	j := c.job
	if j.failed.Load() || c.refused.Load() {
		c.drop()
		j.finished(c.N)
		j.Wake()
		return
	}
	if c.End != nil {
		c.End(true)
	}
	j.mu.Lock()
	if c.N = min(c.N, j.outcome.end-c.Off); c.N > 0 {
		if j.dir == toDevice {
			j.chunks.submitted++
		} else if !c.Later {
			j.pass(c.Off, c.N)
		}
	}
	over := j.dir == toHost || c.N <= 0 // or an error was met before the chunk
	if !over {
		j.chunks.published--
	}
	j.mu.Unlock()
	if over {
		c.x.release()
		j.finished(0)
		j.tryDrive()
		j.Wake()
		return
	}
	c.sends.Store(int32(len(j.Groups)))
	for g := range j.Groups {
		c.submit(g)
	}
}

// submit submits the chunk's copy to the link of one stage of a group.
func (c *chunk) submit(group int) {
	j := c.job
	g := j.Groups[group]
	device := g[c.round%len(g)]
	j.Stages[device].link(j.dir, j.small).submit(c, device)
}

// drop ends a chunk that is not copied.
func (c *chunk) drop() {
	if c.End != nil {
		c.End(false)
	}
	c.x.release()
}

// queued is called after a copy of the chunk was queued, up to a Point, or after queueing
// has failed.
func (c *chunk) queued(device int, p cudart.Point, err error) {
	j := c.job
	// Also after an error: some of it may be queued.
	c.x.fence.AddPoint(p)
	if err != nil {
		j.abort(c.Off, err)
	}
	if j.dir == toHost {
		j.mu.Lock()
		if c.orphan {
			j.mu.Unlock()
			c.drop() // first: see finished
			j.mu.Lock()
		}
		c.arrives.Store(true)
		j.chunks.submitted--
		j.mu.Unlock()
		j.Wake()
		return
	}
	j.ends.AddPoint(p)
	if j.Forward != nil && err == nil {
		ends, err := j.Forward(device, c.Off, c.N, p)
		if err != nil {
			j.abort(c.Off, err)
		}
		// The chunk keeps its memory meanwhile, which bounds the copies between devices, too.
		for _, p := range ends {
			c.x.fence.AddPoint(p)
			j.ends.AddPoint(p)
		}
	}
	if c.sends.Add(-1) > 0 {
		return
	}
	c.x.release()
	j.mu.Lock()
	j.chunks.submitted--
	if !j.failed.Load() {
		j.pass(c.Off, c.N)
	}
	j.mu.Unlock()
	j.Wake()
}
