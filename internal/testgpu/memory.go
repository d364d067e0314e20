package testgpu

import (
	"context"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// Malloc allocates n bytes of device memory until the end of the test.
func Malloc(tb testing.TB, dev *cudart.Device, n int) cudart.DevPtr {
	tb.Helper()
	p, err := dev.Malloc(n)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, dev.Free(p)) })
	return p
}

// ToDevice copies a slice to new device memory.
func ToDevice[T any](tb testing.TB, dev *cudart.Device, v []T) cudart.DevPtr {
	tb.Helper()
	p := Malloc(tb, dev, len(v)*int(unsafe.Sizeof(v[0])))
	CopyToDevice(tb, dev, p, v)
	return p
}

// CopyToDevice copies a slice to device memory. cudaMemcpy from memory that is not pinned may return
// before the device has it, and kernels on other streams do not wait.
func CopyToDevice[T any](tb testing.TB, dev *cudart.Device, p cudart.DevPtr, v []T) {
	tb.Helper()
	require.NoError(tb, dev.CopyToDevice(p, unsafe.Pointer(&v[0]), len(v)*int(unsafe.Sizeof(v[0]))))
	require.NoError(tb, dev.Synchronize(context.Background()))
}

// CopyToHost copies n elements from device memory, when the stream is done.
func CopyToHost[T any](tb testing.TB, s *cudart.Stream, p cudart.DevPtr, n int) []T {
	tb.Helper()
	require.NoError(tb, s.Synchronize(context.Background()))
	v := make([]T, n)
	require.NoError(tb, s.Device().CopyToHost(unsafe.Pointer(&v[0]), p, n*int(unsafe.Sizeof(v[0]))))
	return v
}
