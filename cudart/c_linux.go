//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

const platformSupported = true

// callC calls a C function of up to nine integer arguments. The slice must be
// heap memory: spread from there it costs no allocation.
func callC(entry uintptr, args []uintptr) uintptr {
	r, _, _ := purego.SyscallN(entry, args...)
	return r
}

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
