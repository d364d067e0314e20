package transfer

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// Plain are the element types of [UploadSlice] and [DownloadSlice]: numbers, and types
// that are defined as one. They hold no pointers, and any bytes are a valid number.
//
// For bool only 0 and 1 are valid, and a constraint cannot require that a struct holds no
// pointers: use [View.Upload] and [View.Download] with bytes for these.
type Plain interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int |
		~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint |
		~float32 | ~float64 | ~complex64 | ~complex128
}

var errNilView = errors.New("the View is nil")

// UploadSlice copies src, which may be any memory, to the device as [View.Upload] does, in
// the formats of the CPU, which GPUs share; int and uint have 8 bytes. src may be empty. A
// [Copier] c is passed as &c.View.
//
// The errors are those of Upload. A nil v is an error as well, and so is a dst that is not
// a multiple of T's alignment, where no kernel could read the numbers.
func UploadSlice[T Plain](ctx context.Context, v *View, dst cudart.DevPtr, src []T) error {
	if err := checkSlice(v, dst, src); err != nil {
		return fmt.Errorf("transfer: upload a %T of %d elements: %w", src, len(src), err)
	}
	return v.Upload(ctx, dst, asBytes(src))
}

// DownloadSlice copies from the device into dst, which may be any memory, as
// [View.Download] does. The requirements and the errors of [UploadSlice] apply.
func DownloadSlice[T Plain](ctx context.Context, v *View, dst []T, src cudart.DevPtr) error {
	if err := checkSlice(v, src, dst); err != nil {
		return fmt.Errorf("transfer: download a %T of %d elements: %w", dst, len(dst), err)
	}
	return v.Download(ctx, asBytes(dst), src)
}

// checkSlice checks what Upload and Download do not: the alignment on the device.
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
