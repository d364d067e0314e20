package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// ErrUnderWay is in the errors of copies that are abandoned while the GPU may still
// use memory.
var ErrUnderWay = errors.New("copies may be under way")

// ErrHeld is the error of closing what an abandoned copy uses: see Stage.Run.
var ErrHeld = errors.New("in use by a copy that waits for a call into the CUDA library")

// errStuck is the reason that is known before CUDA reports anything.
var errStuck = fmt.Errorf("%w: %w", ErrUnderWay, bounded.ErrStuck)

// errUnknown returns the error of copies whose end is not known, as CUDA has returned err
// for p.
func errUnknown(p cudart.Point, err error) error {
	return fmt.Errorf("%w on %v: %w", ErrUnderWay, p.Line(), err)
}

// Abandoned returns the error of a copy that [bounded.Do] has returned: one that it has left
// may be under way.
func Abandoned(err error) error {
	if errors.Is(err, bounded.ErrStuck) {
		return fmt.Errorf("%w: %w", ErrUnderWay, err)
	}
	return err
}

// background is used for queries that must run to their end. What has a deadline runs them
// on another goroutine: see [bounded.Do].
var background = context.Background()

// grace is how long the caller of a copy waits for it once its context has ended: the
// copy itself waits bounded.Grace for the GPU.
const grace = 2 * bounded.Grace
