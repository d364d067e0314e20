package bench

import (
	"errors"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/gopinned/pinned/internal/dynlib"
)

// memoryByC returns n bytes of the C library (posix_memalign), aligned to a page, as extensions of PyTorch
// register them. They are resident where the C library has used them before.
func memoryByC(n int) (b []byte, free func() error, err error) {
	libc, err := dynlib.Open("libc.so.6")
	if err != nil {
		return nil, nil, err
	}
	allocate, release := libc.Symbol("posix_memalign"), libc.Symbol("free")
	if allocate == 0 || release == 0 {
		return nil, nil, errors.ErrUnsupported
	}
	at := new(unsafe.Pointer)
	var pinner runtime.Pinner
	pinner.Pin(at) // C writes it
	defer pinner.Unpin()
	if errno := int32(dynlib.Call(allocate, uintptr(unsafe.Pointer(at)), uintptr(os.Getpagesize()), uintptr(n))); errno != 0 {
		return nil, nil, os.NewSyscallError("posix_memalign", syscall.Errno(errno))
	}
	memory := *at
	return unsafe.Slice((*byte)(memory), n), func() error {
		dynlib.Call(release, uintptr(memory))
		return nil
	}, nil
}
