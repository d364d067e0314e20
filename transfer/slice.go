package transfer

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// Plain are the element types of [UploadSlice] and [DownloadSlice]: numbers, and types
// made of them. They hold no pointers, and any bytes are a value of theirs.
//
// That is not so for bool, of which bytes other than 0 and 1 break a Go program, and
// cannot be required of a struct: use [View.Upload] and [View.Download] with bytes.
type Plain interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int |
		~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint |
		~float32 | ~float64 | ~complex64 | ~complex128
}

var errNilView = errors.New("the View is nil")

// UploadSlice is [View.Upload] of numbers: it copies src, which may be any memory, to the
// device, byte by byte as the CPU has them. GPUs have the same formats; int and uint have
// 8 bytes. A [Copier] c is given as &c.View.
//
// It is an error if v is nil, or if dst is not a multiple of T's alignment, because no
// kernel could read the numbers there.
func UploadSlice[T Plain](ctx context.Context, v *View, dst cudart.DevPtr, src []T) error {
	if err := checkSlice(v, dst, src); err != nil {
		return fmt.Errorf("transfer: upload a %T of %d elements: %w", src, len(src), err)
	}
	return v.Upload(ctx, dst, asBytes(src))
}

// DownloadSlice is [View.Download] of numbers: it copies from the device into dst, which
// may be any memory. The requirements of [UploadSlice] apply.
func DownloadSlice[T Plain](ctx context.Context, v *View, dst []T, src cudart.DevPtr) error {
	if err := checkSlice(v, src, dst); err != nil {
		return fmt.Errorf("transfer: download a %T of %d elements: %w", dst, len(dst), err)
	}
	return v.Download(ctx, asBytes(dst), src)
}

// checkSlice checks what bytes would not have: the alignment at the device.
func checkSlice[T Plain](v *View, at cudart.DevPtr, s []T) error {
	var zero T
	align, n := unsafe.Alignof(zero), unsafe.Sizeof(zero)*uintptr(len(s))
	switch {
	case v == nil:
		return errNilView
	case uintptr(at)%align != 0:
		return fmt.Errorf("device address %#x is not a multiple of %d, the alignment of %T", uintptr(at), align, zero)
	case uintptr(at) > ^uintptr(0)-n:
		return fmt.Errorf("%d bytes at device address %#x end past the last address", n, uintptr(at))
	}
	return nil
}

// asBytes returns the memory of a slice.
func asBytes[T Plain](s []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(zero)))
}
