package stage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// ErrUnderWay is in the errors of copies that are given up while the GPU may still
// use memory.
var ErrUnderWay = errors.New("copies may be under way")

// errStuck is the reason that is known before CUDA says anything.
var errStuck = fmt.Errorf("%w: a call into the CUDA library has not returned", ErrUnderWay)

// UnderWay is the error of copies of which it is not known when they end, as asking
// the library for p has failed.
func UnderWay(p cudart.Point, err error) error {
	return fmt.Errorf("%w on %v: %w", ErrUnderWay, p.Line(), err)
}

// asking is the context of questions to the library. A call that may wait no longer
// than its context has another goroutine ask: see Apart.
var asking = context.Background()

const (
	// landTimeout bounds the wait for copies that are under way after one failed.
	landTimeout = time.Second
	// Patience is how long a call may wait, once its context has ended, for one that
	// waits so.
	Patience = 2 * landTimeout
)

// Apart calls f, which calls the library: on another goroutine if ctx can end, as
// such a call may block. When ctx ends, stop is called with its cause; f should
// then end soon. If it has not after the patience, Apart returns as soon as mayLeave
// is true: an error that wraps the cause and [ErrUnderWay]. What f uses must stay
// then.
func Apart(ctx context.Context, patience time.Duration, f func(), stop func(cause error), mayLeave func() bool) (left error) {
	if ctx.Done() == nil {
		f()
		return nil
	}
	over := make(chan struct{})
	go func() {
		f()
		close(over)
	}()
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		stop(context.Cause(ctx))
	}
	for wait := max(patience, Grace); ; wait = time.Millisecond {
		select {
		case <-over:
			return nil
		case <-time.After(wait):
		}
		if mayLeave() {
			return fmt.Errorf("%w; %w", context.Cause(ctx), errStuck)
		}
	}
}
