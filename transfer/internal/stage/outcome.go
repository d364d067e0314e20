package stage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
)

// An outcome has how far a copy of n bytes has come, and the error that ends it earlier.
//
//	state    entered by      | is copied still         | bytes that result counts
//	running                  | all bytes               | n
//	cut      Cut, at a byte  | bytes before that byte  | bytes before that byte
//	failed   fail, abandon   | nothing                 | up to the error, as far as they
//	                         |                         | are copied without a gap
//
// Of several errors it reports the one with the lowest offset; of several at one offset the
// first.
type outcome struct {
	n       int // bytes
	dir     direction
	failed  atomic.Bool   // set under mu
	stopped chan struct{} // closed when failed is set

	mu     sync.Mutex
	end    int    // the copy ends there
	copied int    // bytes
	done   ranges // that are copied
	err    error
	at     int   // the offset of err
	open   error // of copies that may be under way
}

func (o *outcome) init(n int, down bool) {
	o.n, o.end, o.at, o.dir, o.stopped = n, n, math.MaxInt, directionOf(down), make(chan struct{})
}

// A running copy is a Job or a Direct.
type running interface {
	run()
	abort(at int, err error) // ends it
	released() bool          // the caller's memory is not used any more
}

// runBounded runs a copy until it is done or abandoned: see [bounded.Call].
func (o *outcome) runBounded(ctx context.Context, c running) {
	ended, _ := bounded.Do(ctx, bounded.Call[bool]{
		Run: func() (bool, error) {
			c.run()
			return true, nil
		},
		Stop:    func(error) { c.abort(math.MaxInt-1, bounded.Ended(ctx)) },
		Abandon: c.released,
		Grace:   grace,
	})
	if !ended {
		o.abandon(errStuck)
	}
}

// pass counts n bytes at off as copied. It needs mu.
func (o *outcome) pass(off, n int) {
	o.copied += n
	o.done.add(off, n)
}

// cut ends the copy at a byte, because of an error: the bytes before are copied.
func (o *outcome) cut(at int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keep(at, err)
	o.end = min(o.end, at)
}

// fail ends the copy because of an error at a byte: nothing more is begun.
func (o *outcome) fail(at int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keep(at, err)
	o.stop()
}

// abandon ends the copy although the GPU may still copy. why is reported beside any other
// error. It is not known which bytes of an upload have arrived. Bytes of a download that were
// passed on have.
func (o *outcome) abandon(why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open = errors.Join(o.open, why)
	if o.dir == toDevice {
		o.at = 0
	}
	o.stop()
}

// keep keeps the error with the lowest offset, and of several the first.
func (o *outcome) keep(at int, err error) {
	if at < o.at {
		o.at, o.err = at, err
	}
}

// stop ends the copy. It needs mu.
func (o *outcome) stop() {
	if !o.failed.Swap(true) {
		close(o.stopped)
	}
}

// PastEnd reports whether the copy has ended before the byte at off.
func (o *outcome) PastEnd(off int) bool {
	if o.failed.Load() {
		return true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return off >= o.end
}

// result returns the number of bytes, from the first on, that were copied.
func (o *outcome) result() (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	err := o.err
	switch {
	case err == nil && o.open == nil:
		return o.n, nil
	case err == nil:
		err = o.open
	case o.open != nil:
		err = fmt.Errorf("%w; %w", err, o.open)
	}
	done := min(o.at, o.done.prefix)
	return done, fmt.Errorf("at byte %d of %d: %w", done, o.n, err)
}

// ranges are the parts of a copy that are done. The parts at the start are joined.
type ranges struct {
	prefix int         // bytes from the start that are done
	after  map[int]int // bytes of the other parts, by offset
}

func (r *ranges) add(off, n int) {
	if off != r.prefix {
		if r.after == nil {
			r.after = make(map[int]int)
		}
		r.after[off] = n
		return
	}
	for ; n > 0; n = r.after[r.prefix] {
		delete(r.after, r.prefix)
		r.prefix += n
	}
}

// ErrUnderWay is in the errors of copies that were abandoned while the GPU may still use
// memory.
var ErrUnderWay = errors.New("copies may be under way")

// ErrHeld is the error of closing memory that an abandoned copy uses: see Stage.Run.
var ErrHeld = errors.New("in use by a copy that waits for a call into the CUDA library")

// errStuck is the error of a copy that waits for a call into CUDA.
var errStuck = fmt.Errorf("%w: %w", ErrUnderWay, bounded.ErrStuck)

// errUnknown returns the error of copies up to p. It is not known whether they have ended,
// because CUDA has returned err.
func errUnknown(p cudart.Point, err error) error {
	return fmt.Errorf("%w on %v: %w", ErrUnderWay, fence.TimelineAt(p), err)
}

// AddUnderWay adds ErrUnderWay to an error of [bounded.Do] if that has abandoned the copy.
func AddUnderWay(err error) error {
	if errors.Is(err, bounded.ErrStuck) {
		return fmt.Errorf("%w: %w", ErrUnderWay, err)
	}
	return err
}

// background is used for queries that must run to their end. What has a deadline runs them
// on another goroutine: see [bounded.Do].
var background = context.Background()

// grace is the time for which the caller of a copy waits for it after its context has ended:
// the copy itself waits bounded.Grace for the GPU.
const grace = 2 * bounded.Grace
