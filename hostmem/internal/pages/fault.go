package pages

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// ErrFault is the error of a page that the kernel could not supply: the node that the memory
// is bound to has no hugetlb page left, memory is broken, or a file has lost it.
var ErrFault = errors.New("the kernel has no page for it (SIGBUS)")

// Access calls f, which reads or writes mapped memory. A page that the kernel cannot supply is an error.
func Access(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = fmt.Errorf("%w at %#x", ErrFault, r.Addr())
		default: // without the fault's address
			err = fmt.Errorf("%w: %v", ErrFault, r)
		}
	}()
	f()
	return nil
}
