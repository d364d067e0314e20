// Package bounded makes calls that may never return: calls into CUDA, whose drivers have
// locks and defects, and callbacks of the module's users.
//
// A call that does not return occupies a goroutine and, inside C, a thread. Nothing can end it.
// What can be bounded is who waits for it: [Do] returns to the caller when its context ends,
// [Group] bounds the number of threads that such calls occupy, and [Relay] continues work on
// another goroutine while a call blocks. cudart.Runtime.Stuck reports the calls into CUDA.
package bounded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
)

const (
	// Grace is the time that a caller waits, once its context has ended, for a call that
	// heeds the context: its own error says more than the context's.
	Grace = time.Second
	// CallbackGrace is the same for a callback of a user, which need not heed it.
	CallbackGrace = 10 * time.Millisecond
	// NoGrace is for callers that have nothing to gain by the outcome.
	NoGrace = -1
	// QueryTimeout is the time that a caller waits for the result of one query of the GPU.
	QueryTimeout = 200 * time.Millisecond
	// SearchTimeout is the time that a caller waits for queries and releases of memory, as many
	// as it needs, before it goes on without.
	SearchTimeout = 500 * time.Millisecond
)

// ErrStuck is in the errors of callers that have abandoned a call.
var ErrStuck = errors.New("a call into the CUDA library has not returned")

// A Call is work that may never return.
type Call[T any] struct {
	// Run does the work.
	Run func() (T, error)
	// Stop is called when the context has ended, with its cause, so that Run returns
	// soon. It may be nil.
	Stop func(cause error)
	// Abandon reports whether the caller may abandon the call, which it then does: Run must
	// not use the caller's memory any more. It is called again every millisecond while it
	// returns false. Nil stands for a function that returns true.
	Abandon func() bool
	// Late takes the outcome of a Run that its caller has abandoned. It may be nil.
	Late func(T, error)
	// Grace is the time between Stop and Abandon: 0 stands for the constant Grace, a
	// negative one for none.
	Grace time.Duration
}

// Do calls Run and returns its outcome. If ctx can end, Run runs on another goroutine,
// and Do returns some time after the end of ctx, at the latest, with an error that wraps
// ctx's, its cause and [ErrStuck]: see Call. Run is called although ctx has ended before.
// If Run panics or ends its goroutine, Do does so too; a panic in an abandoned Run ends
// the process.
func Do[T any](ctx context.Context, c Call[T]) (T, error) {
	if ctx.Done() == nil {
		return c.Run()
	}
	done, abandoned := make(chan outcome[T]), make(chan struct{})
	go c.run(done, abandoned)
	select {
	case o := <-done:
		return o.get()
	case <-ctx.Done():
	}
	if c.Stop != nil {
		c.Stop(context.Cause(ctx))
	}
	timer := time.NewTimer(max(cmp.Or(c.Grace, Grace), 0))
	defer timer.Stop()
	for {
		select {
		case o := <-done:
			return o.get()
		case <-timer.C:
		}
		if c.Abandon == nil || c.Abandon() {
			break
		}
		timer.Reset(time.Millisecond)
	}
	select {
	case o := <-done: // on a busy host both may be true
		return o.get()
	default:
	}
	close(abandoned)
	var none T
	return none, fmt.Errorf("%w: %w", ErrStuck, Ended(ctx))
}

// An outcome is how a Run ended.
type outcome[T any] struct {
	value    T
	err      error
	returned bool
	panicked any // nil if Run has ended its goroutine
}

// get is how Do ends, as Run did.
func (o outcome[T]) get() (T, error) {
	switch {
	case o.panicked != nil:
		panic(o.panicked)
	case !o.returned:
		runtime.Goexit()
	}
	return o.value, o.err
}

// run calls Run, and sends its outcome to the caller, or to Late if the caller has abandoned it.
func (c Call[T]) run(done chan<- outcome[T], abandoned <-chan struct{}) {
	var o outcome[T]
	defer func() {
		if !o.returned {
			o.panicked = recover()
		}
		select {
		case done <- o:
		case <-abandoned:
			switch {
			case o.panicked != nil:
				panic(o.panicked)
			case o.returned && c.Late != nil:
				c.Late(o.value, o.err)
			}
		}
	}()
	o.value, o.err = c.Run()
	o.returned = true
}

// Extend returns a context that ends with ctx's cause, but grace later: for a call that
// returns at once when its context ends, although it may be about to return by itself.
// stop releases its timer.
func Extend(ctx context.Context, grace time.Duration) (extended context.Context, stop context.CancelFunc) {
	extended, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	ended := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel(context.Cause(ctx))
		case <-extended.Done():
		}
	})
	return extended, func() {
		ended()
		cancel(nil)
	}
}

// Ended returns the error of a context that has ended: it wraps ctx.Err and the cause. It is
// nil while ctx has not ended.
func Ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
