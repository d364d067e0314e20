package hostmem

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Calls into CUDA may never return: drivers have locks and bugs. A function whose
// context can end makes its calls on another goroutine. When ctx ends while such a
// call has not returned, the function does, and the goroutine undoes its work
// whenever the call returns. Each such goroutine occupies a thread, so there can be
// few of them.
const (
	patience  = time.Second // for work to end by itself, once ctx has ended
	mostStuck = 16
)

var (
	stuck    atomic.Int32 // goroutines that no caller waits for any more
	errStuck = errors.New("a call into CUDA has not returned; what it does is undone when it returns")
)

// bounded does work on another goroutine, if ctx can end, and waits for it. When the
// work of a caller that is gone succeeds, undo undoes it.
func bounded[T any](ctx context.Context, work func() (T, error), undo func(T)) (T, error) {
	var none T
	switch {
	case ctx.Done() == nil:
		return work()
	case ctx.Err() != nil:
		return none, ended(ctx)
	case stuck.Load() >= mostStuck:
		return none, fmt.Errorf("%d calls into CUDA have not returned", stuck.Load())
	}
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome)
	left := make(chan struct{})
	go func() {
		value, err := work()
		select {
		case done <- outcome{value, err}:
		case <-left:
			if err == nil {
				undo(value)
			}
			stuck.Add(-1)
		}
	}()
	select {
	case o := <-done:
		return o.value, o.err
	case <-ctx.Done():
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case o := <-done:
		return o.value, o.err
	case <-timer.C:
		stuck.Add(1)
		close(left)
		return none, fmt.Errorf("%w: %w", errStuck, ended(ctx))
	}
}

// ended returns the error and the cause of a context that has ended.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
