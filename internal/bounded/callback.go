package bounded

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"
)

// ErrExited is the error of a callback that ended its goroutine.
var ErrExited = errors.New("a callback ended its goroutine (runtime.Goexit, as testing.T.FailNow does)")

// Guard calls f and returns a panic as an error: see [Recovered]. A memory fault is such a
// panic, too: a mapped file that was truncated has no bytes past its end, and one on a full
// file system gets no more.
func Guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer Recovered(&err)
	return f()
}

// Recovered sets err to a panic as an error, with the stack, or, if it is a memory fault, with
// the address. It is to be deferred.
func Recovered(err *error) {
	switch p := recover().(type) {
	case nil:
	case interface {
		runtime.Error
		Addr() uintptr
	}:
		*err = fmt.Errorf("no memory at %#x (unmapped, or its file was truncated, or the file system is full): %w", p.Addr(), p)
	default:
		*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
}

// Foreign is Guard for code that may end its goroutine. Then Foreign does not return, and
// calls exited with [ErrExited].
func Foreign(f func() error, exited func(error)) error {
	returned := false
	defer func() {
		if !returned {
			exited(ErrExited)
		}
	}()
	err := Guard(f)
	returned = true
	return err
}

// Callback makes one call of a user's code, on a goroutine of its own. The code may end
// that ([ErrExited]), or panic: see [Guard]. It may block: when ctx ends, Callback waits
// for CallbackGrace and returns the error of [Ended], and the call may go on.
func Callback[T any](ctx context.Context, call func() (T, error)) (T, error) {
	var o struct {
		value T
		err   error
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		o.err = Foreign(func() (err error) {
			o.value, err = call()
			return err
		}, func(exited error) { o.err = exited })
	}()
	if !await(done, ctx.Done()) {
		var none T
		return none, Ended(ctx)
	}
	return o.value, o.err
}

// await waits until c is closed, and reports whether it is: once stopped is closed, it waits
// for CallbackGrace at most.
func await(c, stopped <-chan struct{}) bool {
	select {
	case <-c:
		return true
	case <-stopped:
	}
	grace := time.NewTimer(CallbackGrace)
	defer grace.Stop()
	select {
	case <-c:
		return true
	case <-grace.C:
		return false
	}
}
