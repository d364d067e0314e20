package bounded

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrExited is the error of a callback that ended its goroutine.
var ErrExited = errors.New("a callback ended its goroutine (runtime.Goexit, as testing.T.FailNow does)")

// Guard calls f and returns a panic as an error, with the stack. A memory fault is such a
// panic, too: a mapped file that was truncated has no bytes past its end, and one on a full
// file system gets no more.
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
