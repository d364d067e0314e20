package stage

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrExited is the error of a callback that did not return.
var ErrExited = errors.New("a callback ended its goroutine (runtime.Goexit, as testing.T.FailNow does)")

// Guard runs f and returns a panic as an error, with the stack, and a memory
// fault too: a file that shrinks has no bytes past its end, and one on a full file
// system gets no more.
func Guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = fmt.Errorf("no memory at %#x (unmapped, or its file was truncated, or the file system is full): %w", p.Addr(), p)
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}

// Foreign is Guard for code that may end its goroutine. It does not return then,
// and calls exited with [ErrExited].
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
