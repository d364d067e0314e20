package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/elements"
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
// T is a number, or an array or struct of numbers. The errors are those of Upload, one that
// names the field if T holds a pointer or a bool, and one if dst is not a multiple of T's
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
// [View.Download] does. The requirements and the errors of [UploadSlice] apply.
func DownloadSlice[T any](ctx context.Context, c Downloader, dst []T, src cudart.DevPtr) error {
	if err := cmp.Or(checkSlice(c, dst), checkAddress(src, dst)); err != nil {
		return fmt.Errorf("transfer: download a %T of %d elements: %w", dst, len(dst), err)
	}
	return c.Download(ctx, asBytes(dst), src)
}

// A DeviceCopier is a [Copier] or [View].
type DeviceCopier interface {
	Uploader[cudart.DevPtr]
	Downloader
	Device() *cudart.Device
}

// UploadElements copies src, which may be any memory, to the first elements of dst, as
// [View.Upload] does. Apart from the errors of Upload it returns one if src is longer than
// dst, if dst is of another device than c, or was closed, and if c is nil. The memory of dst
// must not be closed during the copy.
func UploadElements[T any](ctx context.Context, c DeviceCopier, dst cudart.DeviceSlice[T], src []T) error {
	if err := checkElements(c, dst, src); err != nil {
		return fmt.Errorf("transfer: upload a %T of %d elements: %w", src, len(src), err)
	}
	return c.Upload(ctx, dst.Ptr(), asBytes(src))
}

// DownloadElements copies the first elements of src into dst, which may be any memory, as
// [View.Download] does. The requirements and the errors of [UploadElements] apply.
func DownloadElements[T any](ctx context.Context, c DeviceCopier, dst []T, src cudart.DeviceSlice[T]) error {
	if err := checkElements(c, src, dst); err != nil {
		return fmt.Errorf("transfer: download a %T of %d elements: %w", dst, len(dst), err)
	}
	return c.Download(ctx, asBytes(dst), src.Ptr())
}

// checkElements checks that there are elements on the device for all of a slice.
func checkElements[T any](c DeviceCopier, on cudart.DeviceSlice[T], s []T) error {
	if err := checkSlice(c, s); err != nil {
		return err
	}
	m := on.Memory()
	if _, err := m.Range(0, 0); err != nil {
		return err
	}
	switch {
	case m.Device() != c.Device() && c.Device() != nil: // Upload and Download refuse a zero View
		return fmt.Errorf("%v is not of %v", m, c.Device())
	case len(s) > on.Len():
		return fmt.Errorf("%d elements on the device for %d: %w", on.Len(), len(s), cudart.ErrInvalidValue)
	}
	return nil
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
	return elements.Check[T]()
}

// checkAddress checks that a slice can be on the device at an address.
func checkAddress[T any](at cudart.DevPtr, s []T) error {
	var zero T
	align, n := unsafe.Alignof(zero), unsafe.Sizeof(zero)*uintptr(len(s))
	switch {
	case uintptr(at)%align != 0:
		return fmt.Errorf("device address %v is not a multiple of %d, the alignment of %T", at, align, zero)
	case uintptr(at) > ^uintptr(0)-n:
		return fmt.Errorf("%d bytes at device address %v end past the last address", n, at)
	}
	return nil
}

// asBytes returns the memory of a slice.
func asBytes[T any](s []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(zero)))
}
