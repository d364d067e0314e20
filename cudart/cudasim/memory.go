package cudasim

import (
	"fmt"
	"runtime/debug"
	"strings"
	"unsafe"
)

// pointer turns an address that came from C into a pointer.
func pointer[T any](addr uintptr) *T { return *(**T)(unsafe.Pointer(&addr)) }

// address returns the address of memory that does not move, so not of a variable
// on a stack.
func address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// bytesAt returns n bytes of the process's memory.
func bytesAt(addr uintptr, n int) []byte { return unsafe.Slice(pointer[byte](addr), n) }

// guarded runs f, which accesses memory of the caller. It is false if some of that
// memory was not mapped.
func guarded(f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover(); {
		case r == nil:
		case strings.Contains(fmt.Sprint(r), "invalid memory address"):
			ok = false
		default:
			panic(r)
		}
	}()
	f()
	return true
}

// array returns n values that C passed.
func array[T any](addr uintptr, n int) []T { return unsafe.Slice(pointer[T](addr), n) }
