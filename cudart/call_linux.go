//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"unsafe"

	"github.com/ebitengine/purego"
)

const platformSupported = true

// callEntryABI0 is the address of callEntry, in call_amd64.s and call_arm64.s.
var callEntryABI0 uintptr

// cgocall runs a C function outside Go's scheduler, as purego does. It needs what
// purego sets up: without cgo, a C runtime of its own.
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(entry uintptr, c unsafe.Pointer) int32

// callC makes a call. purego.SyscallN does the same, and copies 32 arguments and 8
// floats back and forth, which costs as much as all the rest (RATIONALE.md). c must be
// in the heap: C writes to it from another stack.
func callC(c *cCall) { cgocall(callEntryABI0, unsafe.Pointer(c)) }

// newHostFuncEntry makes the C function for cudaLaunchHostFunc. It calls run.
func newHostFuncEntry(run func(id uintptr)) uintptr {
	return purego.NewCallback(func(id uintptr) uintptr {
		run(id)
		return 0
	})
}
