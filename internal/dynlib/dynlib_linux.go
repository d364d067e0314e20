//go:build linux && !android && (amd64 || arm64)

package dynlib

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

// A Library is a library that the dynamic loader has loaded. It is never unloaded, because
// CUDA's threads and exit handlers would still run its code.
type Library struct {
	handle uintptr
	path   string
}

// Open loads a library by its path, or by a bare name that the dynamic loader finds
// (dlopen). Its symbols are local, so that two versions can be loaded side by side. The
// error is the dynamic loader's.
func Open(path string) (*Library, error) {
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
	return &Library{handle: handle, path: path}, nil
}

// Symbol returns the address of a symbol (dlsym), or 0 if there is none.
func (l *Library) Symbol(name string) uintptr {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	address, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0
	}
	return address
}

// Call calls a C function whose arguments are integers or pointers, up to 15, and returns
// its result. It allocates nothing if arguments are spread from a slice. It is for calls
// that are rare or long: package cudart has a faster one for its own.
func Call(entry uintptr, arguments ...uintptr) uintptr {
	result, _, _ := purego.SyscallN(entry, arguments...)
	return result
}
