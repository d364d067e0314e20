package stage

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A Direct describes a copy of N bytes of pinned memory, which needs no ring.
type Direct struct {
	N, Piece int // bytes
	Pieces   int // that are queued at once
	Down     bool
	// Queue queues a piece, and returns the ends of what it has queued, also after an
	// error.
	Queue    func(off, n int) ([]cudart.Point, error)
	Progress func(done, total int)
}

// Run copies, and returns how many bytes, from the first on, were copied, when the GPU is
// done with the memory, also after an error.
func (c Direct) Run(ctx context.Context) (int, error) {
	d := &directCopy{Direct: c}
	d.init(c.N, c.Down)
	d.reporter = bounded.NewReporter(c.N, c.Progress, d.fail, d.stopped)
	d.runBounded(ctx, d)
	return d.result()
}

// A directCopy is a Direct that runs.
type directCopy struct {
	Direct
	outcome
	reporter *bounded.Reporter
}

// A queuedPiece is n bytes at off on their way.
type queuedPiece struct {
	off, n int
	ends   []cudart.Point
}

func (d *directCopy) abort(at int, err error) { d.fail(at, err) }

// released is true: the GPU may use the memory longer than the call, see [ErrUnderWay].
func (d *directCopy) released() bool { return true }

func (d *directCopy) run() {
	var queued []queuedPiece
	for next := 0; ; {
		for len(queued) < d.Pieces && next < d.N && !d.failed.Load() {
			p := queuedPiece{off: next, n: min(d.Piece, d.N-next)}
			var err error
			if p.ends, err = d.Queue(p.off, p.n); err != nil {
				d.fail(p.off, err)
			}
			queued = append(queued, p)
			next += p.n
		}
		if len(queued) == 0 {
			break
		}
		d.await(queued[0])
		queued = queued[1:]
	}
	d.reporter.Finish()
}

// await waits for a piece.
func (d *directCopy) await(p queuedPiece) {
	for _, end := range p.ends {
		if err := end.Wait(background); err != nil {
			d.abandon(errUnknown(end, err))
		} else if err := end.Err(); err != nil {
			d.fail(p.off, fmt.Errorf("%v: %w", end.Line(), err))
		}
	}
	if d.failed.Load() {
		return
	}
	d.mu.Lock()
	d.pass(p.off, p.n)
	d.mu.Unlock()
	d.reporter.Set(p.off + p.n)
}
