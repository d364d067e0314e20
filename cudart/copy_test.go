package cudart_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// pinned returns n bytes of pinned memory, until the end of the test.
func pinned(tb testing.TB, dev *cudart.Device, n int) []byte {
	tb.Helper()
	p, err := dev.HostAlloc(n, 0)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, dev.FreeHost(p)) })
	return unsafe.Slice((*byte)(p), n)
}

// device returns n bytes of device memory, until the end of the test.
func device(tb testing.TB, dev *cudart.Device, n int) cudart.DevPtr {
	tb.Helper()
	p, err := dev.Malloc(n)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, dev.Free(p)) })
	return p
}

func stream(tb testing.TB, dev *cudart.Device) *cudart.Stream {
	tb.Helper()
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, s.Close()) })
	return s
}

func event(tb testing.TB, dev *cudart.Device) *cudart.Event {
	tb.Helper()
	e, err := dev.NewEvent()
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, e.Close()) })
	return e
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>8) ^ seed
	}
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// forEachLibrary runs a test with every simulated version, or with the machine's library
// if a real GPU is requested.
func forEachLibrary(t *testing.T, test func(t *testing.T, dev *cudart.Device)) {
	if testgpu.Real() {
		test(t, testgpu.Device(t))
		return
	}
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			_, rt := testgpu.Sim(t, cudasim.Config{Version: v})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			test(t, dev)
		})
	}
}

func TestCopies(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const n = 70001
		ctx := context.Background()
		s := stream(t, dev)
		a, b := device(t, dev, n), device(t, dev, n)
		src, dst := pinned(t, dev, n), pinned(t, dev, n)

		fill(src, 1)
		require.NoError(t, s.CopyToDevice(a, pointer(src), n))
		require.NoError(t, s.CopyOnDevice(b, a, n))
		require.NoError(t, s.CopyToHost(pointer(dst), b, n))
		require.NoError(t, s.Synchronize(ctx))
		require.Equal(t, src, dst, "queued copies")

		heap, back := make([]byte, n), make([]byte, n)
		fill(heap, 2)
		require.NoError(t, dev.CopyToDevice(a, pointer(heap), n))
		require.NoError(t, dev.CopyToHost(pointer(back), a, n))
		require.Equal(t, heap, back, "synchronous copies of Go memory")

		require.NoError(t, s.Memset(a, 0xa5, n-1))
		require.NoError(t, s.CopyToHost(pointer(dst), a, n))
		require.NoError(t, s.Synchronize(ctx))
		for i, v := range dst[:n-1] {
			require.Equal(t, byte(0xa5), v, "byte %d", i)
		}
		require.Equal(t, heap[n-1], dst[n-1], "the byte after the memset")
		require.NoError(t, dev.Memset(a, 0x5a, n))
		require.NoError(t, dev.CopyToHost(pointer(back), a, n))
		require.Equal(t, byte(0x5a), back[n/2])

		for _, err := range []error{
			s.CopyToDevice(a, pointer(src), 0), dev.CopyToHost(pointer(back), a, 0), s.Memset(a, 1, 0),
		} {
			require.NoError(t, err, "nothing is nothing to do")
		}
		for _, err := range []error{
			s.CopyToDevice(a, pointer(src), -1), dev.CopyToHost(pointer(back), a, -1), s.Memset(a, 1, -1),
		} {
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			require.ErrorContains(t, err, "must not be negative")
		}
	})
}

func TestReadBeforeSynchronisingIsStale(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	require.NoError(t, dev.Memset(mem, 7, 64))
	require.NoError(t, dev.Synchronize(context.Background()))
	host[63] = 1
	sim.Hold()
	require.NoError(t, s.CopyToHost(pointer(host), mem, 64))
	assert.Equal(t, byte(1), host[63], "before the copy ran")
	done, err := s.Query()
	require.NoError(t, err)
	assert.False(t, done)
	sim.Release()
	require.NoError(t, s.Synchronize(context.Background()))
	assert.Equal(t, byte(7), host[63], "after the copy ran")
}

func TestStreamOrderedMemory(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		s := stream(t, dev)
		host := pinned(t, dev, 4096)
		p, err := s.Malloc(4096)
		require.NoError(t, err)
		require.NoError(t, s.Memset(p, 9, 4096))
		require.NoError(t, s.CopyToHost(pointer(host), p, 4096))
		require.NoError(t, s.Free(p))
		require.NoError(t, s.Synchronize(context.Background()))
		require.Equal(t, byte(9), host[4095])
		require.NoError(t, s.Free(0))
		_, err = s.Malloc(0)
		require.ErrorIs(t, err, cudart.ErrInvalidValue)
	})
}

func TestHostMemory(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		host := pinned(t, dev, 8192)
		a, err := dev.PointerAttributes(uintptr(pointer(host)) + 100)
		require.NoError(t, err)
		assert.Equal(t, cudart.MemoryHost, a.Type)
		assert.Equal(t, uintptr(pointer(host))+100, a.HostPtr)
		view, err := dev.HostDevicePointer(pointer(host))
		require.NoError(t, err)
		assert.NotZero(t, view)

		heap := make([]byte, 64)
		a, err = dev.PointerAttributes(uintptr(pointer(heap)))
		require.NoError(t, err)
		assert.Equal(t, cudart.MemoryUnregistered, a.Type)

		mem := device(t, dev, 64)
		a, err = dev.PointerAttributes(uintptr(mem) + 63)
		require.NoError(t, err)
		assert.Equal(t, cudart.MemoryDevice, a.Type)
		assert.Equal(t, 0, a.Device)

		err = dev.HostUnregister(pointer(heap))
		require.ErrorIs(t, err, cudart.ErrHostMemoryNotRegistered)
		require.ErrorContains(t, err, fmt.Sprintf("%p", pointer(heap)), "on what")
		require.ErrorIs(t, dev.HostRegister(nil, 4096, 0), cudart.ErrInvalidValue)
		for _, n := range []int{0, -1} {
			err := dev.HostRegister(pointer(heap), n, 0)
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			require.ErrorContains(t, err, fmt.Sprintf("size %d: must be positive", n))
		}
		_, err = dev.HostAlloc(0, 0)
		require.ErrorIs(t, err, cudart.ErrInvalidValue)
		require.NoError(t, dev.FreeHost(nil))
	})
}

func TestManagedMemory(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const n = 1 << 20
		s := stream(t, dev)
		p, err := dev.MallocManaged(n)
		require.NoError(t, err)
		mem := cudart.DevPtr(uintptr(p))
		b := unsafe.Slice((*byte)(p), n)
		fill(b, 5)
		a, err := dev.PointerAttributes(uintptr(p))
		require.NoError(t, err)
		assert.Equal(t, cudart.MemoryManaged, a.Type)
		require.NoError(t, dev.MemAdvise(mem, n, cudart.AdvisePreferredLocation, dev.Location()))
		require.NoError(t, s.Prefetch(mem, n, dev.Location()))
		require.NoError(t, s.Prefetch(mem, n, cudart.Location{Kind: cudart.LocationHost}))
		require.NoError(t, s.Synchronize(context.Background()))
		want := make([]byte, n)
		fill(want, 5)
		require.Equal(t, want, b)
		numa := s.Prefetch(mem, n, cudart.Location{Kind: cudart.LocationHostNUMA, ID: 0})
		if v := dev.Runtime().Library().Runtime; v < 12020 {
			require.ErrorIs(t, numa, errors.ErrUnsupported, "the old ABI has no NUMA nodes")
		} else {
			require.NoError(t, numa)
		}
		require.NoError(t, s.Synchronize(context.Background()))
		for _, n := range []int{0, -1} {
			require.ErrorContains(t, s.Prefetch(mem, n, dev.Location()), fmt.Sprintf("size %d: must be positive", n))
			require.ErrorContains(t, dev.MemAdvise(mem, n, cudart.AdviseReadMostly, dev.Location()), fmt.Sprintf("size %d: must be positive", n))
		}
		require.NoError(t, dev.Free(mem))
	})
}
