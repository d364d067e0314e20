package stage

import (
	"errors"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A chunk is a part of a job that passes through one extent.
type chunk struct {
	job    *Job
	x      *extent
	turn   int // of the groups
	off, n int
	work   func(mem []byte, off int) error
	end    func(worked bool) // nil for nothing
	later  bool              // the sink passes it

	piece   int          // bytes
	pieces  int32        // in all
	next    atomic.Int32 // to claim
	left    atomic.Int32 // not done
	refused atomic.Bool  // by Fill, which is not ready
	sends   atomic.Int32 // copies that are not queued
	sent    atomic.Bool  // from the device; set under job.mu
	orphan  bool         // to be dropped when it is sent; guarded by job.mu
}

const (
	leastPiece = 64 * kib
	mostPiece  = 512 * kib
)

// pieceOf is the size of a chunk's pieces.
func pieceOf(n int) int {
	piece := (n/8 + leastPiece - 1) / leastPiece * leastPiece
	return min(max(piece, leastPiece), mostPiece)
}

// offer opens a chunk's pieces to all.
func (j *Job) offer(c *chunk) {
	if c.piece = j.Piece; c.piece == 0 {
		c.piece = pieceOf(c.n)
	}
	c.pieces = int32((c.n + c.piece - 1) / c.piece)
	c.left.Store(c.pieces)
	j.mu.Lock()
	j.out++
	alone := j.first.Load() == nil
	if alone {
		j.first.Store(c)
	} else {
		j.more = append(j.more, c)
	}
	j.mu.Unlock()
	j.pieces.Add(c.pieces)
	if c.pieces > 1 || !alone {
		for _, c := range j.crews {
			c.post(j)
		}
	}
}

// help does so many pieces, or fewer if there are none left.
func (j *Job) help(most int) (worked bool) {
	for range most {
		c, i := j.claim()
		if c == nil {
			return worked
		}
		c.do(int(i))
		worked = true
	}
	return worked
}

// claim takes a piece.
func (j *Job) claim() (*chunk, int32) {
	for j.pieces.Load() > 0 && !j.failed.Load() {
		c := j.first.Load()
		if c == nil {
			return nil, 0
		}
		if i := c.next.Add(1) - 1; i < c.pieces {
			j.pieces.Add(-1)
			return c, i
		}
		j.mu.Lock()
		if j.first.Load() == c {
			j.shift()
		}
		j.mu.Unlock()
	}
	return nil, 0
}

// shift makes the next open chunk the first. It needs j.mu.
func (j *Job) shift() {
	if len(j.more) == 0 {
		j.first.Store(nil)
		return
	}
	j.first.Store(j.more[0])
	j.more[0] = nil
	j.more = j.more[1:]
}

// dropPieces drops all pieces that are not claimed, after an error.
func (j *Job) dropPieces() {
	var dropped []*chunk
	j.mu.Lock()
	for c := j.first.Load(); c != nil; c = j.first.Load() {
		left := c.pieces - min(c.next.Swap(c.pieces), c.pieces)
		j.pieces.Add(-left)
		if left > 0 && c.left.Add(-left) == 0 {
			dropped = append(dropped, c)
		}
		j.shift()
	}
	j.mu.Unlock()
	for _, c := range dropped {
		c.drop()
		j.mu.Lock()
		j.out--
		j.mu.Unlock()
	}
}

// do works on a piece, and passes the chunk on if it is the last one.
func (c *chunk) do(i int) {
	from := i * c.piece
	mem := c.x.mem[from:min(from+c.piece, c.n)]
	if !c.refused.Load() {
		if err := bounded.Guard(func() error { return c.work(mem, c.off+from) }); errors.Is(err, ErrNotReady) {
			c.refused.Store(true)
		} else if err != nil {
			c.job.Cut(c.off+from, err)
		}
	}
	if c.left.Add(-1) == 0 {
		c.worked()
	}
}

// worked passes on a chunk all of whose pieces are done.
func (c *chunk) worked() {
	j := c.job
	if j.failed.Load() || c.refused.Load() {
		c.drop()
		j.mu.Lock()
		j.out--
		j.opened -= c.n
		j.mu.Unlock()
		j.Poke()
		return
	}
	if c.end != nil {
		c.end(true)
	}
	j.mu.Lock()
	if c.n = min(c.n, j.end-c.off); c.n > 0 {
		if !j.Down {
			j.queue++
		} else if !c.later {
			j.pass(c.off, c.n)
		}
	}
	over := j.Down || c.n <= 0 // or an error was met before the chunk
	if !over {
		j.out--
	}
	j.mu.Unlock()
	if over {
		c.x.release() // first: the ring may be closed when the job has ended
		j.mu.Lock()
		j.out--
		j.mu.Unlock()
		j.standIn()
		j.Poke()
		return
	}
	c.sends.Store(int32(len(j.Groups)))
	for g := range j.Groups {
		to := c.via(g)
		j.Over[to].up(j.brief).submit(c, to)
	}
}

// via is the stage of a group, in Job.Over, over whose link the chunk goes.
func (c *chunk) via(group int) int {
	g := c.job.Groups[group]
	return g[c.turn%len(g)]
}

// drop ends a chunk that is not copied.
func (c *chunk) drop() {
	if c.end != nil {
		c.end(false)
	}
	c.x.release()
}

// queued is called when a copy of the chunk was queued, up to a Point, or that
// has failed.
func (c *chunk) queued(to int, p cudart.Point, err error) {
	j := c.job
	// Also after an error: some of it may be queued.
	c.x.fence.AddPoint(p)
	if err != nil {
		j.Abort(c.off, err)
	}
	if j.Down {
		j.mu.Lock()
		if c.orphan {
			j.mu.Unlock()
			c.drop() // first, as in worked
			j.mu.Lock()
		}
		c.sent.Store(true)
		j.queue--
		j.mu.Unlock()
		j.Poke()
		return
	}
	j.ends.AddPoint(p)
	if j.Forward != nil && err == nil {
		ends, err := j.Forward(to, c.off, c.n, p)
		if err != nil {
			j.Abort(c.off, err)
		}
		// The ring's memory bounds what is queued between devices, too.
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
	j.queue--
	if !j.failed.Load() {
		j.pass(c.off, c.n)
	}
	j.mu.Unlock()
	j.Poke()
}
