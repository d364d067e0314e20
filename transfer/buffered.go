package transfer

import (
	"slices"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// buffers are ordinary memory between a job, whose workers must not block, and a reader or
// writer, which may. Goroutines of their own call the reader or writer.
//
//	piece of an upload  | piece of a download | in
//	is read             | is filled           | call; pieces
//	waits               | waits               | pieces
//	is copied           | is written          | Parts; call
type buffers struct {
	*bounded.Callers
	job *stage.Job

	mu      sync.Mutex
	free    int      // pieces that may still be made
	pieces  []*piece // waiting or being filled, in order
	stopped bool
}

// A piece is memory between a reader or writer and the ring.
type piece struct {
	mem     *scratch
	off     int
	bytes   []byte // of mem
	pending int    // bytes that are not copied from or to the ring
}

// Stop begins no further calls.
func (b *buffers) Stop() {
	b.mu.Lock()
	b.stopped = true
	for _, p := range b.pieces {
		p.mem.release()
	}
	b.pieces = nil
	b.mu.Unlock()
	b.Callers.Stop()
}

// reuse makes the memory of a piece available.
func (b *buffers) reuse(p *piece) {
	p.mem.release()
	b.mu.Lock()
	b.free++
	b.mu.Unlock()
}

// A readAhead is a [stage.Host] of bytes from a reader.
type readAhead struct {
	buffers
	lanes   []lane // guarded by mu
	section int    // the most bytes that a lane claims at once
	helps   bool   // readers read rangeBytes at a time, and copy them into the ring
	// claim returns the next bytes to read, maxBytes at most; n is 0 if there are none for
	// now. They are the first that are left: if they are past the end of the copy, all are.
	// It needs mu.
	claim func(maxBytes int) (off, n int)
}

// A lane is a sequence of reads, one at a time, at offsets that ascend as far as those of the claims do.
type lane struct {
	read    readFunc
	claimed span // not read yet; off is where the last read ended
	reading bool
}

// A readFunc reads n bytes at off. It returns the index in to at which they begin (skip),
// and their number (got); got < n only with an error.
type readFunc func(to []byte, off, n int) (skip, got int, err error)

// A reader has one piece that is read and one that is copied; a writer has one that is
// written and two that are filled.
const piecesPerReader, piecesPerWriter = 2, 3

func newReadAhead(lanes []lane, section int, claim func(maxBytes int) (off, n int)) *readAhead {
	r := &readAhead{buffers: buffers{free: piecesPerReader * len(lanes)}, lanes: lanes, section: section, claim: claim}
	r.Callers = bounded.NewCallers(len(lanes), r.next)
	return r
}

// lanesOf returns lanes that share a reader.
func lanesOf(readers int, read readFunc) []lane {
	return slices.Repeat([]lane{{read: read}}, readers)
}

// sectionOf returns the size of one of several parts of n bytes: reading and copying overlap even if
// there are few bytes.
func sectionOf(n, parts int) int {
	return min(max((n/parts+block-1)/block*block, block), scratchBytes)
}

// inOrder claims n bytes from the first one to the last one.
func inOrder(n int) func(maxBytes int) (off, n int) {
	next := 0
	return func(maxBytes int) (int, int) {
		off := next
		next += min(maxBytes, n-next)
		return off, next - off
	}
}

func (r *readAhead) Start(j *stage.Job) {
	r.job = j
	r.Callers.Start(len(r.lanes))
}

// next returns the next call of the reader.
func (r *readAhead) next() (call func() error, done func(error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped || r.free == 0 {
		return nil, nil
	}
	l := r.nextLane()
	if l == nil {
		return nil, nil
	}
	size := scratchBytes
	if r.helps {
		size = rangeBytes
	}
	off, n := l.claimed.off, min(l.claimed.n, size)
	l.claimed, l.reading = span{off + n, l.claimed.n - n}, true
	r.free--
	p := &piece{off: off}
	skip, got := 0, 0
	return func() (err error) {
			p.mem = newScratch(size)
			skip, got, err = l.read(*p.mem, off, n)
			return err
		}, func(err error) {
			p.bytes, p.pending = (*p.mem)[skip:skip+got], got
			r.put(p, l)
			if err != nil {
				r.job.Cut(off+got, err)
			}
		}
}

// nextLane returns the lane that reads next: of those that have claimed bytes the one with the lowest
// offset, else one that claims some now. It returns nil if there is nothing to read. It needs mu.
func (r *readAhead) nextLane() (next *lane) {
	for i := range r.lanes {
		l := &r.lanes[i]
		if !l.reading && r.job.PastEnd(l.claimed.off) {
			l.claimed.n = 0
		}
		if !l.reading && l.claimed.n > 0 && (next == nil || l.claimed.off < next.claimed.off) {
			next = l
		}
	}
	if next != nil {
		return next
	}
	off, n := r.claim(r.section)
	if n == 0 || r.job.PastEnd(off) {
		return nil
	}
	next = r.laneFor(off)
	next.claimed = span{off, n}
	return next
}

// laneFor returns a lane without claimed bytes: the one that is closest before off, if there is one. There
// is a lane for each goroutine, so one is free. It needs mu.
func (r *readAhead) laneFor(off int) (best *lane) {
	for i := range r.lanes {
		l := &r.lanes[i]
		if l.reading || l.claimed.n > 0 {
			continue
		}
		if best == nil || best.claimed.off > off || l.claimed.off <= off && l.claimed.off > best.claimed.off {
			best = l
		}
	}
	return best
}

func (r *readAhead) put(p *piece, l *lane) {
	r.mu.Lock()
	l.reading = false
	wanted := !r.stopped && p.pending > 0
	if wanted {
		r.pieces = append(r.pieces, p)
	}
	r.mu.Unlock()
	if !wanted {
		r.reuse(p)
	}
	if r.helps {
		r.job.Help()
	} else {
		r.job.Wake()
	}
}

func (r *readAhead) Ready() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pieces) == 0 {
		return 0
	}
	return len(r.pieces[0].bytes)
}

func (r *readAhead) Take(_, n int) stage.Part {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pieces[0]
	bytes, off := p.bytes[:n], p.off
	if p.bytes, p.off = p.bytes[n:], p.off+n; len(p.bytes) == 0 {
		r.pieces = append(r.pieces[:0], r.pieces[1:]...)
	}
	return stage.Part{
		Off: off,
		N:   n,
		Copy: func(to []byte, at int) error {
			copy(to, bytes[at-off:])
			return nil
		},
		End: func(bool) { r.copied(p, n) },
	}
}

// copied counts bytes of a piece as copied into the ring.
func (r *readAhead) copied(p *piece, n int) {
	r.mu.Lock()
	p.pending -= n
	over := p.pending == 0
	r.mu.Unlock()
	if over {
		r.reuse(p)
		r.Callers.Start(1)
	}
}

// A writeBehind is a [stage.Host] of bytes for a writer.
type writeBehind struct {
	buffers
	inOrder bool
	write   writeFunc
}

// A writeFunc writes bytes at off. It returns the number of bytes that were written: fewer
// than all only with an error.
type writeFunc func(from []byte, off int) (took int, err error)

// newWriteBehind returns a writeBehind with that number of concurrent writes; one writer
// writes in order.
func newWriteBehind(writers int, write writeFunc) *writeBehind {
	w := &writeBehind{buffers: buffers{free: piecesPerWriter * writers}, inOrder: writers == 1, write: write}
	w.Callers = bounded.NewCallers(writers, w.next)
	return w
}

func (w *writeBehind) Start(j *stage.Job) { w.job = j }

func (w *writeBehind) Ready() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.free == 0 {
		return 0
	}
	return scratchBytes
}

func (w *writeBehind) Take(off, n int) stage.Part {
	p := &piece{mem: newScratch(scratchBytes), off: off, pending: n}
	p.bytes = (*p.mem)[:n]
	w.mu.Lock()
	w.free--
	w.pieces = append(w.pieces, p)
	w.mu.Unlock()
	return stage.Part{
		Off: off,
		N:   n,
		Copy: func(from []byte, at int) error {
			copy(p.bytes[at-off:], from)
			return nil
		},
		End:   func(drained bool) { w.drained(p, drained) },
		Later: true,
	}
}

// drained makes a piece available to the writers, unless the copy ends before it.
func (w *writeBehind) drained(p *piece, ok bool) {
	if !ok {
		return
	}
	w.mu.Lock()
	p.pending = 0
	w.mu.Unlock()
	w.Callers.Start(1)
}

// next returns the next call of the writer.
func (w *writeBehind) next() (call func() error, done func(error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, p := range w.pieces {
		switch {
		case w.stopped || w.job.PastEnd(p.off) || p.pending > 0 && w.inOrder:
			return nil, nil
		case p.pending > 0:
			continue
		}
		w.pieces = append(w.pieces[:i], w.pieces[i+1:]...)
		took := 0
		return func() (err error) {
				took, err = w.write(p.bytes, p.off)
				return err
			}, func(err error) {
				w.reuse(p)
				w.job.Pass(p.off, took)
				if err != nil {
					w.job.Cut(p.off+took, err)
				}
			}
	}
	return nil, nil
}

const (
	// block is the size that offsets, lengths and addresses of O_DIRECT must be multiples
	// of. Devices require 512 or 4096.
	block = 4 * kib
	// scratchBytes is the size of a reader's or writer's memory. One block more at each
	// end is for reading whole blocks.
	scratchBytes = mib
	// rangeBytes is the size of the memory of a reader of ranges. Each piece costs calls of CUDA and of the scheduler.
	rangeBytes = 2 * mib
)

// A scratch is ordinary memory for calls that may block, which must not hold memory of the
// ring.
type scratch []byte // from a block's start, with two blocks more than the pool's size

// scratches are the pools by size.
var scratches = map[int]*sync.Pool{scratchBytes: newScratches(scratchBytes), rangeBytes: newScratches(rangeBytes)}

func newScratches(n int) *sync.Pool {
	return &sync.Pool{New: func() any {
		mem := make([]byte, n+3*block)
		skip := -int(uintptr(unsafe.Pointer(&mem[0]))) & (block - 1)
		s := scratch(mem[skip : skip+n+2*block])
		return &s
	}}
}

func newScratch(n int) *scratch { return scratches[n].Get().(*scratch) }

func (s *scratch) release() { scratches[len(*s)-2*block].Put(s) }
