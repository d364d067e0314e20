package transfer

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// guarded makes errors of panics, whose stacks no caller of ours is on, and of
// faults in mapped memory: a file that was cut short has no bytes behind its
// end, and one on a full file system gets no more.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = fmt.Errorf("no memory at %#x: it was unmapped, or the file behind it cut short, or its file system is full: %w", p.Addr(), p)
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}
