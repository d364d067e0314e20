package transfer

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A writeBehind is a [stage.Sink] of what may block: workers copy from the ring
// into memory of its own, from which goroutines of its own write.
type writeBehind struct {
	job     *stage.Job
	write   writing
	writers int // at most; one writes in order

	mu      sync.Mutex
	running int      // writers
	free    int      // pieces that may be made
	pieces  []*piece // taken and not written, in order
	stopped bool
	idle    chan struct{} // closed when stopped, and no writer runs
}

// A writing takes the bytes from off on, and returns how many it took. Fewer come
// with an error.
type writing func(from []byte, off int) (took int, err error)

func newWriteBehind(writers int, write writing) *writeBehind {
	return &writeBehind{write: write, writers: writers, free: piecesPerWriter * writers, idle: make(chan struct{})}
}

// piecesPerWriter is one that is written, and two that are filled.
const piecesPerWriter = 3

func (w *writeBehind) Start(j *stage.Job) { w.job = j }

// Stop makes it so that no further writing begins.
func (w *writeBehind) Stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	for _, p := range w.pieces {
		p.mem.release()
	}
	w.pieces = nil
	if w.running == 0 {
		close(w.idle)
	}
}

// wait waits for writers that run still, when ctx has ended a little only.
func (w *writeBehind) wait(ctx context.Context) { stage.Linger(ctx, w.idle) }

func (w *writeBehind) Room() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.free == 0 {
		return 0
	}
	return scratchBytes
}

func (w *writeBehind) Take(off, n int) stage.Space {
	p := &piece{mem: newScratch(), off: off, left: n}
	p.bytes = (*p.mem)[:n]
	w.mu.Lock()
	w.free--
	w.pieces = append(w.pieces, p)
	w.mu.Unlock()
	return stage.Space{
		Drain: func(from []byte, at int) error {
			copy(p.bytes[at-off:], from)
			return nil
		},
		End:   func(drained bool) { w.drained(p, drained) },
		Later: true,
	}
}

// drained makes a piece available to writers.
func (w *writeBehind) drained(p *piece, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !ok {
		return // the copy has failed, or ends before
	}
	p.left = 0
	if w.running < w.writers && !w.stopped {
		w.running++
		go w.run()
	}
}

// run is a writer. It ends when there is nothing to write.
func (w *writeBehind) run() {
	ended := false
	defer func() {
		if !ended { // by the writing, which did not return
			w.exit()
		}
	}()
	for {
		p := w.next()
		if p == nil {
			ended = true
			return
		}
		took := 0
		err := bounded.Foreign(func() (err error) {
			took, err = w.write(p.bytes, p.off)
			return err
		}, func(err error) { w.job.Cut(p.off, err) })
		w.put(p)
		if took > 0 {
			w.job.Pass(p.off, took)
		}
		if err != nil {
			w.job.Cut(p.off+took, err)
		}
	}
}

// next takes the next piece that can be written. If there is none the writer
// ends.
func (w *writeBehind) next() *piece {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, p := range w.pieces {
		switch {
		case w.stopped || w.job.Past(p.off):
		case p.left == 0:
			w.pieces = append(w.pieces[:i], w.pieces[i+1:]...)
			return p
		case w.writers > 1:
			continue
		}
		break
	}
	w.left()
	return nil
}

func (w *writeBehind) put(p *piece) {
	p.mem.release()
	w.mu.Lock()
	w.free++
	w.mu.Unlock()
	w.job.Poke()
}

func (w *writeBehind) exit() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left()
}

// left counts a writer that has ended. It needs w.mu.
func (w *writeBehind) left() {
	if w.running--; w.stopped && w.running == 0 {
		close(w.idle)
	}
}
