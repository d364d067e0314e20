package transfer

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A readAhead is a [stage.Feed] of what may block: goroutines of its own read into
// memory of its own, from which workers copy into the ring.
type readAhead struct {
	job  *stage.Job
	read reading
	// claim returns what to read next, of at most so many bytes; none if there is
	// nothing for now.
	claim   func(most int) (off, n int)
	readers int // at most

	mu      sync.Mutex
	running int      // readers
	free    int      // blocks that may be made
	ready   []*piece // read and not taken, in order
	stopped bool
	idle    chan struct{} // closed when stopped, and no reader runs
}

// A reading puts the bytes from off on into to: n of them, after the first skip
// bytes. Fewer come with an error.
type reading func(to []byte, off, n int) (skip, got int, err error)

// A piece is what one reading brought.
type piece struct {
	mem   *scratch
	off   int
	bytes []byte // not taken
	left  int    // not copied
}

// piecesPerReader is one that is read, and one that is copied.
const piecesPerReader = 2

func newReadAhead(readers int, read reading, claim func(most int) (off, n int)) *readAhead {
	return &readAhead{read: read, claim: claim, readers: readers, free: piecesPerReader * readers, idle: make(chan struct{})}
}

// inOrder claims n bytes from the first one to the last one.
func inOrder(n, parts int) func(most int) (off, n int) {
	next := 0
	// Some pieces overlap reading and copying also if there is little to read.
	size := max((n/parts+block-1)/block*block, block)
	return func(most int) (int, int) {
		off := next
		next += min(size, most, n-next)
		return off, next - off
	}
}

func (r *readAhead) Start(j *stage.Job) {
	r.job = j
	r.more()
}

// more starts readers where there may be something to read.
func (r *readAhead) more() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for !r.stopped && r.running < r.readers && r.free > r.running {
		r.running++
		go r.run()
	}
}

// Stop makes it so that no further reading begins.
func (r *readAhead) Stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
	for _, p := range r.ready {
		p.mem.release()
	}
	r.ready = nil
	if r.running == 0 {
		close(r.idle)
	}
}

// wait waits for readers that run still, when ctx has ended a little only.
func (r *readAhead) wait(ctx context.Context) { stage.Linger(ctx, r.idle) }

func (r *readAhead) Ready() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ready) == 0 {
		return 0
	}
	return len(r.ready[0].bytes)
}

func (r *readAhead) Take(most int) stage.Segment {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.ready[0]
	bytes, off := p.bytes[:most], p.off
	if p.bytes, p.off = p.bytes[most:], p.off+most; len(p.bytes) == 0 {
		r.ready = append(r.ready[:0], r.ready[1:]...)
	}
	return stage.Segment{
		Off: off,
		N:   most,
		Fill: func(to []byte, at int) error {
			copy(to, bytes[at-off:])
			return nil
		},
		End: func(bool) { r.copied(p, most) },
	}
}

// copied counts bytes of a piece that are in the ring.
func (r *readAhead) copied(p *piece, n int) {
	r.mu.Lock()
	p.left -= n
	over := p.left == 0
	if over {
		r.free++
	}
	r.mu.Unlock()
	if over {
		p.mem.release()
		r.more()
	}
}

// run is a reader. It ends when there is nothing to read, or no memory for it.
func (r *readAhead) run() {
	ended := false
	defer func() {
		if !ended { // by the reading, which did not return
			r.exit()
		}
	}()
	for {
		off, n := r.next()
		if n == 0 {
			ended = true
			return
		}
		p := &piece{mem: newScratch(), off: off}
		var skip, got int
		err := bounded.Foreign(func() (err error) {
			skip, got, err = r.read(*p.mem, off, n)
			return err
		}, func(err error) { r.job.Cut(off, err) })
		p.bytes, p.left = (*p.mem)[skip:skip+got], got
		r.put(p)
		if err != nil {
			r.job.Cut(off+got, err)
		}
	}
}

// next claims something to read, and memory for it. If there is none the reader
// ends.
func (r *readAhead) next() (off, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.stopped && r.free > 0 {
		if off, n = r.claim(scratchBytes); n > 0 && !r.job.Past(off) {
			r.free--
			return off, n
		}
	}
	r.left()
	return 0, 0
}

func (r *readAhead) put(p *piece) {
	r.mu.Lock()
	if r.stopped || p.left == 0 {
		r.free++
		p.mem.release()
	} else {
		r.ready = append(r.ready, p)
	}
	r.mu.Unlock()
	r.job.Poke()
}

func (r *readAhead) exit() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left()
}

// left counts a reader that has ended. It needs r.mu.
func (r *readAhead) left() {
	if r.running--; r.stopped && r.running == 0 {
		close(r.idle)
	}
}
