package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/plain"
)

// An Uploader is a [Copier] or [View], or a [Fanout] or [FanoutView], whose destination is an
// address for each device.
type Uploader[D cudart.DevPtr | []cudart.DevPtr] interface {
	Upload(ctx context.Context, dst D, src []byte) error
}

// A Downloader is a [Copier] or [View].
type Downloader interface {
	Download(ctx context.Context, dst []byte, src cudart.DevPtr) error
}

var errNilCopier = errors.New("the Copier, Fanout or View is nil")

// UploadSlice copies src, which may be any memory, to the device as [View.Upload] does, or to
// all devices as [FanoutView.Upload] does. The bytes stay as they are: numbers in the formats
// of the CPU, which GPUs share, int and uint of 8 bytes, and structs as Go lays them out, with
// padding as C has it. src may be empty.
//
// T is a number, bool, or an array or struct of these: the errors are those of Upload, one
// that names the field if T holds a pointer, and one if dst is not a multiple of T's
// alignment, where no kernel could read it. A nil c is an error.
func UploadSlice[T any, D cudart.DevPtr | []cudart.DevPtr](ctx context.Context, c Uploader[D], dst D, src []T) error {
	err := checkSlice(c, src)
	switch dst := any(dst).(type) {
	case cudart.DevPtr:
		err = cmp.Or(err, checkAddress(dst, src))
	case []cudart.DevPtr:
		for _, dst := range dst {
			err = cmp.Or(err, checkAddress(dst, src))
		}
	}
	if err != nil {
		return fmt.Errorf("transfer: upload a %T of %d elements: %w", src, len(src), err)
	}
	return c.Upload(ctx, dst, asBytes(src))
}

// DownloadSlice copies from the device into dst, which may be any memory, as
// [View.Download] does. The requirements and the errors of [UploadSlice] apply. Where T has a
// bool, the device must have 0 or 1: Go defines no other.
func DownloadSlice[T any](ctx context.Context, c Downloader, dst []T, src cudart.DevPtr) error {
	if err := cmp.Or(checkSlice(c, dst), checkAddress(src, dst)); err != nil {
		return fmt.Errorf("transfer: download a %T of %d elements: %w", dst, len(dst), err)
	}
	return c.Download(ctx, asBytes(dst), src)
}

// checkSlice checks what Upload and Download do not.
func checkSlice[T any](c any, _ []T) error {
	switch c := c.(type) {
	case nil:
		return errNilCopier
	case *Copier:
		if c == nil {
			return errNilCopier
		}
	case *Fanout:
		if c == nil {
			return errNilCopier
		}
	}
	return plain.Check[T]()
}

// checkAddress checks that a slice can be on the device at an address.
func checkAddress[T any](at cudart.DevPtr, s []T) error {
	var zero T
	align, n := unsafe.Alignof(zero), unsafe.Sizeof(zero)*uintptr(len(s))
	switch {
	case uintptr(at)%align != 0:
		return fmt.Errorf("device address %#x is not a multiple of %d, the alignment of %T", uintptr(at), align, zero)
	case uintptr(at) > ^uintptr(0)-n:
		return fmt.Errorf("%d bytes at device address %#x end past the last address", n, uintptr(at))
	}
	return nil
}

// asBytes returns the memory of a slice.
func asBytes[T any](s []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(zero)))
}
