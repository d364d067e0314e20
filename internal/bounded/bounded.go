// Package bounded makes calls that may never return: calls into CUDA, whose drivers have
// locks and defects, and callbacks of the module's users.
//
// A call that does not return occupies a goroutine and, inside C, a thread. Nothing can end it.
// What can be bounded is who waits for it: [Do] returns to the caller when its context ends,
// [Group] bounds the number of threads that such calls occupy, and [Relay] continues work on
// another goroutine while a call blocks. cudart.Runtime.Stuck reports the calls into CUDA. [ForEach]
// shares work out to goroutines, and waits for all of it.
package bounded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
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
	// Group, unless it is nil, has a slot for Run until that returns. If ctx ends while Do waits
	// for the slot, Do returns the error of Begin and calls nothing.
	Group *Group
	// Stop is called when the context has ended, with its cause, so that Run returns
	// soon. It may be nil.
	Stop func(cause error)
	// Abandon reports whether the caller may abandon the call, which it then does: Run must
	// not use the caller's memory any more. It is called again every millisecond while it
	// returns false. Nil stands for a function that returns true.
	Abandon func() bool
	// Late takes the outcome of a Run that its caller has abandoned. It may be nil.
	Late func(T, error)
	// Short is set for a Run that mostly takes some microseconds: see Go.
	Short bool
	// Grace is the time between Stop and Abandon: 0 stands for the constant Grace, a
	// negative one for none.
	Grace time.Duration
}

// Do calls Run and returns its outcome. If ctx can end, Run runs on another goroutine,
// and Do returns some time after the end of ctx, at the latest, with an error that wraps
// ctx's, its cause and [ErrStuck]: see Call. Run is called although ctx has ended before,
// unless it needs a slot of a Group and no slot is free.
// If Run panics or ends its goroutine, Do does so too; a panic in an abandoned Run ends
// the process.
func Do[T any](ctx context.Context, c Call[T]) (T, error) {
	if c.Group != nil {
		if err := c.Group.Begin(ctx); err != nil {
			var none T
			return none, err
		}
	}
	if ctx.Done() == nil {
		return c.run()
	}
	r := &running[T]{Call: c}
	if !c.Short {
		go r.make()
	} else if Go(r.make) && short.Until(r.returned) {
		return r.get()
	}
	done := make(chan struct{}, 1)
	if r.done = done; !r.state.CompareAndSwap(callRuns, callAwaited) {
		return r.get()
	}
	select {
	case <-done:
		return r.get()
	case <-ctx.Done():
	}
	if c.Stop != nil {
		c.Stop(context.Cause(ctx))
	}
	if !r.abandon(done) {
		return r.get()
	}
	var none T
	return none, fmt.Errorf("%w: %w", ErrStuck, Ended(ctx))
}

// abandon waits for the grace period, and until the caller may abandon the call. It returns false if Run returns before.
func (r *running[T]) abandon(done <-chan struct{}) bool {
	timer := time.NewTimer(max(cmp.Or(r.Grace, Grace), 0))
	defer timer.Stop()
	for {
		select {
		case <-done:
			return false
		case <-timer.C:
		}
		if r.Abandon == nil || r.Abandon() {
			return r.state.CompareAndSwap(callAwaited, callAbandoned) // on a busy host it may return at the same time
		}
		timer.Reset(time.Millisecond)
	}
}

// run calls Run, and returns the slot of the Group.
func (c *Call[T]) run() (T, error) {
	if c.Group != nil {
		defer c.Group.End()
	}
	return c.Run()
}

// A running call is one that Do makes on another goroutine.
//
//	state          entered by     | at the end of Run the goroutine
//	callRuns       Do             | leaves the outcome to the caller, which polls or is about to wait
//	callAwaited    Do             | leaves the outcome, and sends to done
//	callAbandoned  Do             | passes the outcome to Late
//	callReturned   make           | –
type running[T any] struct {
	Call[T]
	state atomic.Int32
	done  chan<- struct{} // set before callAwaited

	// The outcome, set before callReturned.
	value    T
	err      error
	ended    bool // Run has not returned
	panicked any  // nil if Run has ended its goroutine
}

const (
	callRuns int32 = iota
	callAwaited
	callAbandoned
	callReturned
)

func (r *running[T]) returned() bool { return r.state.Load() == callReturned }

// get is how Do ends, as Run did.
func (r *running[T]) get() (T, error) {
	switch {
	case r.panicked != nil:
		panic(r.panicked)
	case r.ended:
		runtime.Goexit()
	}
	return r.value, r.err
}

// make calls Run, and passes its outcome to the caller, or to Late if the caller has abandoned it.
func (r *running[T]) make() {
	r.ended = true
	defer func() {
		if r.ended {
			r.panicked = recover()
		}
		switch r.state.Swap(callReturned) {
		case callAwaited:
			r.done <- struct{}{}
		case callAbandoned:
			switch {
			case r.panicked != nil:
				panic(r.panicked)
			case !r.ended && r.Late != nil:
				r.Late(r.value, r.err)
			}
		}
	}()
	r.value, r.err = r.run()
	r.ended = false
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
