package stage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// ErrUnderWay is in the errors of copies that are abandoned while the GPU may still
// use memory.
var ErrUnderWay = errors.New("copies may be under way")

// errStuck is the reason that is known before CUDA reports anything.
var errStuck = fmt.Errorf("%w: %w", ErrUnderWay, bounded.ErrStuck)

// UnderWay returns the error of copies whose end is not known, as CUDA has returned err for
// p.
func UnderWay(p cudart.Point, err error) error {
	return fmt.Errorf("%w on %v: %w", ErrUnderWay, p.Line(), err)
}

// asking is the context of questions to the library. A call that may wait no longer
// than its context has another goroutine ask: see [bounded.Do].
var asking = context.Background()

const (
	// landTimeout bounds the wait for copies that are under way after one failed.
	landTimeout = bounded.Grace
	// Grace is how long the caller of a copy waits for it once its context has ended: the
	// copy itself waits for the GPU.
	Grace = 2 * bounded.Grace
)

// Linger waits until c is closed, or, once ctx has ended, for [bounded.CallbackGrace].
func Linger(ctx context.Context, c <-chan struct{}) {
	select {
	case <-c:
		return
	case <-ctx.Done():
	}
	select {
	case <-c:
	case <-time.After(bounded.CallbackGrace):
	}
}

// Abandoned returns the error of a copy that [bounded.Do] has returned: one that it has left
// may be under way.
func Abandoned(err error) error {
	if errors.Is(err, bounded.ErrStuck) {
		return fmt.Errorf("%w: %w", ErrUnderWay, err)
	}
	return err
}
