//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"errors"
	"fmt"
	"runtime"
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

// A dynamicLibrary is a library that the dynamic loader has loaded. It is never
// unloaded, because CUDA's threads and exit handlers would still run its code.
type dynamicLibrary struct {
	handle uintptr
	path   string
}

// loadLibrary opens a path, or a bare name that the dynamic loader finds. Its symbols
// are local, so that two versions can be loaded side by side.
func loadLibrary(path string) (Source, error) {
	// dlerror belongs to the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("dlopen: %w", err)
	}
	if handle == 0 {
		return nil, errors.New("dlopen: no handle and no error")
	}
	return &dynamicLibrary{handle: handle, path: path}, nil
}

// Symbol returns the address of a symbol, or 0 if there is none.
func (l *dynamicLibrary) Symbol(name string) uintptr {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	address, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0
	}
	return address
}

// String returns the path.
func (l *dynamicLibrary) String() string { return l.path }

// newHostFuncEntry makes the C function for cudaLaunchHostFunc. It calls run.
func newHostFuncEntry(run func(id uintptr)) uintptr {
	return purego.NewCallback(func(id uintptr) uintptr {
		run(id)
		return 0
	})
}
