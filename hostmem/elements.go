package hostmem

import (
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/elements"
)

// Bytes returns the memory of s, for copies of any numbers. It does not copy.
func Bytes[T cudart.Number](s []T) []byte { return bytesOf(s) }

// BytesOf returns the memory of arrays or structs of numbers, with Go's layout, which C shares. It does
// not copy. The error names a field that holds a pointer or a bool, or a T of no bytes.
func BytesOf[T any](s []T) ([]byte, error) {
	if err := elements.Check[T](); err != nil {
		return nil, fmt.Errorf("hostmem: %w", err)
	}
	return bytesOf(s), nil
}

// Slice returns b as elements of T, as many as fit whole: nil if none does. It does not copy. b must be
// aligned for T, as the memory of buffers and leases is.
func Slice[T cudart.Number](b []byte) []T { return sliceOf[T](b) }

// SliceOf returns b as arrays or structs of numbers, as [Slice] does. Its errors are those of [BytesOf].
func SliceOf[T any](b []byte) ([]T, error) {
	if err := elements.Check[T](); err != nil {
		return nil, fmt.Errorf("hostmem: %w", err)
	}
	return sliceOf[T](b), nil
}

func bytesOf[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*(*T)(nil))))
}

func sliceOf[T any](b []byte) []T {
	size := int(unsafe.Sizeof(*(*T)(nil)))
	if len(b) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/size)
}
