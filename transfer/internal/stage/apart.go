package stage

import (
	"context"
	"errors"
	"time"
)

// ErrUnderWay is the error of copies that are given up because a call into the
// CUDA library does not return.
var ErrUnderWay = errors.New("copies may be under way: a call into the CUDA library has not returned")

// asking is the context of questions to the library: whoever may wait no longer
// than a context has another goroutine ask, see Apart.
var asking = context.Background()

// landTimeout bounds the wait for copies that are under way after one failed.
const landTimeout = 2 * time.Second

// Apart calls f, which calls the library: on another goroutine if ctx can end, as
// such a call may block. When ctx ends, stop is called with its cause; f should
// then end soon. If it does not, Apart returns true as soon as mayLeave does, and
// what f uses must stay.
func Apart(ctx context.Context, f func(), stop func(cause error), mayLeave func() bool) (left bool) {
	if ctx.Done() == nil {
		f()
		return false
	}
	over := make(chan struct{})
	go func() {
		f()
		close(over)
	}()
	select {
	case <-over:
		return false
	case <-ctx.Done():
		stop(context.Cause(ctx))
	}
	for wait := 2 * landTimeout; ; wait = time.Millisecond {
		select {
		case <-over:
			return false
		case <-time.After(wait):
		}
		if mayLeave() {
			return true
		}
	}
}
