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

// callEntryABI0 is the address of callEntry, in call_*.s.
var callEntryABI0 uintptr

// cgocall leaves Go's scheduler for a C function, as purego does it. What
// purego has set up (its own C runtime, where there is no cgo) serves here too.
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(entry uintptr, c unsafe.Pointer) int32

// callC makes a call. It is what purego.SyscallN does, less the copying of 32
// arguments and 8 floats back and forth, which costs as much as all the rest
// (RATIONALE.md). c must be heap memory: C writes to it from another stack.
func callC(c *cCall) { cgocall(callEntryABI0, unsafe.Pointer(c)) }

// A dynamicLibrary is a library that the system's loader loaded. It is never
// unloaded: CUDA leaves threads and exit handlers behind.
type dynamicLibrary struct {
	handle uintptr
	path   string
}

// loadLibrary opens a path, or a bare name which the loader looks for. Names
// stay local, so that two versions can be loaded side by side.
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

// Symbol returns the address of a name, or 0.
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

// newHostFuncEntry makes the C function pointer that cudaLaunchHostFunc calls.
func newHostFuncEntry(run func(id uintptr)) uintptr {
	return purego.NewCallback(func(id uintptr) uintptr {
		run(id)
		return 0
	})
}
