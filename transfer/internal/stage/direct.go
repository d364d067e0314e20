package stage

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
)

// A Direct copies N bytes of pinned memory, without the ring.
type Direct struct {
	N, Piece int // bytes
	Pieces   int // maximum that is queued at once
	Down     bool
	// Queue queues a piece, and returns the ends of what it has queued, also after an
	// error.
	Queue    func(off, n int) ([]cudart.Point, error)
	Progress func(done, total int)

	outcome
	reporter *bounded.Reporter
}

// Run copies. It returns the number of bytes, from the first on, that were copied, when the
// GPU is done with the memory, also after an error. It is called once.
func (d *Direct) Run(ctx context.Context) (int, error) {
	d.init(d.N, d.Down)
	d.reporter = bounded.NewReporter(d.N, d.Progress, d.fail, d.stopped)
	d.runBounded(ctx, d)
	return d.result()
}

func (d *Direct) abort(at int, err error) { d.fail(at, err) }

// released returns true: an abandoned copy may go on using pinned memory, see [ErrUnderWay].
func (d *Direct) released() bool { return true }

func (d *Direct) run() {
	defer d.reporter.Finish()
	var queued [][]cudart.Point // the ends of pieces
	for done, next := 0, 0; ; done += d.Piece {
		for ; len(queued) < d.Pieces && next < d.N && !d.failed.Load(); next += d.Piece {
			ends, err := d.Queue(next, min(d.Piece, d.N-next))
			if err != nil {
				d.fail(next, err)
			}
			queued = append(queued, ends)
		}
		if len(queued) == 0 {
			return
		}
		d.await(done, queued[0])
		queued = queued[1:]
	}
}

// await waits for the ends of the piece at off.
func (d *Direct) await(off int, ends []cudart.Point) {
	for _, end := range ends {
		if err := end.Wait(background); err != nil {
			d.abandon(errUnknown(end, err))
		} else if err := end.Err(); err != nil {
			d.fail(off, fmt.Errorf("%v: %w", fence.TimelineAt(end), err))
		}
	}
	if d.failed.Load() {
		return
	}
	n := min(d.Piece, d.N-off)
	d.mu.Lock()
	d.pass(off, n)
	d.mu.Unlock()
	d.reporter.Set(off + n)
}
