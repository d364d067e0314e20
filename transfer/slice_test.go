package transfer_test

import (
	"context"
	"math"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
)

type celsius float32

// roundTrip copies a slice to a device and back, and compares every bit.
func roundTrip[T comparable](t *testing.T, c *transfer.Copier, size int, value func(i int) T) {
	t.Helper()
	for _, n := range []int{0, 1, 3, 1000, 100_003} {
		src, dst := make([]T, n), make([]T, n+1)
		for i := range src {
			src[i] = value(i)
		}
		before := dst[n]
		mem, err := c.Device().Malloc(max(1, n*size))
		require.NoError(t, err)
		require.NoError(t, transfer.UploadSlice(t.Context(), c, mem, src))
		require.NoError(t, transfer.DownloadSlice(t.Context(), c, dst[:n], mem))
		require.NoError(t, c.Device().Free(mem))
		for i := range src {
			if src[i] != dst[i] {
				t.Fatalf("element %d of %d: %v, want %v", i, n, dst[i], src[i])
			}
		}
		assert.Equal(t, before, dst[n], "nothing is written after the slice")
	}
}

func newCopier(t *testing.T) *transfer.Copier {
	t.Helper()
	c, err := transfer.NewCopier(t.Context(), testgpu.Device(t), transfer.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.CloseContext(context.Background())) })
	return c
}

func TestSlicesOfEveryPlainType(t *testing.T) {
	t.Parallel()
	c := newCopier(t)
	roundTrip(t, c, 1, func(i int) int8 { return int8(i * 7) })
	roundTrip(t, c, 2, func(i int) int16 { return int16(i * 77) })
	roundTrip(t, c, 4, func(i int) int32 { return -int32(i * 777) })
	roundTrip(t, c, 8, func(i int) int64 { return math.MinInt64 + int64(i) })
	roundTrip(t, c, 8, func(i int) int { return -i << 33 })
	roundTrip(t, c, 1, func(i int) byte { return byte(i) })
	roundTrip(t, c, 2, func(i int) uint16 { return uint16(i) })
	roundTrip(t, c, 4, func(i int) uint32 { return math.MaxUint32 - uint32(i) })
	roundTrip(t, c, 8, func(i int) uint64 { return math.MaxUint64 - uint64(i) })
	roundTrip(t, c, 8, func(i int) uint { return uint(i) << 40 })
	roundTrip(t, c, 4, func(i int) float32 { return float32(i) / 3 })
	roundTrip(t, c, 8, func(i int) float64 { return math.Sqrt(float64(i)) })
	roundTrip(t, c, 8, func(i int) complex64 { return complex(float32(i), -float32(i)/7) })
	roundTrip(t, c, 16, func(i int) complex128 { return complex(float64(i), 1/float64(i+1)) })
	roundTrip(t, c, 4, func(i int) celsius { return celsius(i) - 273.15 })
}

type vertex struct {
	Position [3]float32
	Color    [4]uint8
	Visible  uint8
	Weight   float64 // behind padding
}

func TestSlicesOfStructsAndArrays(t *testing.T) {
	t.Parallel()
	c := newCopier(t)
	roundTrip(t, c, 12, func(i int) [3]float32 { return [3]float32{float32(i), -1, float32(i) / 3} })
	roundTrip(t, c, 32, func(i int) vertex {
		return vertex{Position: [3]float32{float32(i)}, Color: [4]uint8{byte(i), 2, 3, 255}, Visible: byte(i % 2), Weight: 1 / float64(i+1)}
	})
}

// A slice goes to every device of a Fanout, and back from each by a Copier.
func TestASliceOntoSeveralDevices(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	f, err := transfer.NewFanout(t.Context(), rt.Devices(), transfer.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	src := []vertex{{Color: [4]uint8{1, 2, 3, 4}}, {Weight: 5}}
	var dsts []cudart.DevPtr
	for _, dev := range rt.Devices() {
		mem, err := dev.Malloc(64)
		require.NoError(t, err)
		defer func() { assert.NoError(t, dev.Free(mem)) }()
		dsts = append(dsts, mem)
	}
	require.NoError(t, transfer.UploadSlice(t.Context(), f, dsts, src))
	require.NoError(t, transfer.UploadSlice(t.Context(), f.With(transfer.Call{}), dsts, src))
	for i, dev := range rt.Devices() {
		c, err := transfer.NewCopier(t.Context(), dev, transfer.Options{})
		require.NoError(t, err)
		dst := make([]vertex, len(src))
		require.NoError(t, transfer.DownloadSlice(t.Context(), c, dst, dsts[i]))
		assert.Equal(t, src, dst)
		require.NoError(t, c.Close())
	}
	assert.ErrorContains(t, transfer.UploadSlice(t.Context(), f, []cudart.DevPtr{dsts[0], dsts[1] + 1}, src), "is not a multiple of 8")
}

// Elements go to typed views of device memory, as far as the view reaches.
func TestElementsOfDeviceMemory(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	c, err := transfer.NewCopier(t.Context(), rt.Devices()[0], transfer.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, c.Close()) }()
	m, err := c.Device().Alloc(320)
	require.NoError(t, err)
	all, err := cudart.ViewOf[vertex](m)
	require.NoError(t, err)
	end, err := all.Slice(8, 10)
	require.NoError(t, err)
	ctx := t.Context()
	src := []vertex{{Color: [4]uint8{1, 2, 3, 4}}, {Weight: 5}}
	require.NoError(t, transfer.UploadElements(ctx, c, end, src))
	dst := make([]vertex, 10)
	require.NoError(t, transfer.DownloadElements(ctx, c.With(transfer.Call{}), dst, all))
	assert.Equal(t, src, dst[8:])
	require.NoError(t, transfer.DownloadElements(ctx, c, dst[:1], end), "the first one")
	assert.Equal(t, src[0], dst[0])

	err = transfer.UploadElements(ctx, c, end, dst[:3])
	assert.ErrorIs(t, err, cudart.ErrInvalidValue)
	assert.EqualError(t, transfer.DownloadElements(ctx, c, dst[:3], end),
		"transfer: download a []transfer_test.vertex of 3 elements: 2 elements on the device for 3: "+cudart.ErrInvalidValue.Error())
	other, err := transfer.NewCopier(ctx, rt.Devices()[1], transfer.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, other.Close()) }()
	assert.ErrorContains(t, transfer.UploadElements(ctx, other, end, src), "is not of "+rt.Devices()[1].String())
	assert.ErrorIs(t, transfer.UploadElements(ctx, c, cudart.DeviceSlice[vertex]{}, src), cudart.ErrInvalidValue)
	require.NoError(t, m.Close())
	assert.ErrorIs(t, transfer.UploadElements(ctx, c, end, src), os.ErrClosed)
}

// A NaN keeps its bits.
func TestSliceKeepsTheBitsOfNaN(t *testing.T) {
	t.Parallel()
	c := newCopier(t)
	mem, err := c.Device().Malloc(8)
	require.NoError(t, err)
	defer c.Device().Free(mem)
	const bits = 0x7ff4_0000_dead_beef // a signaling one
	src, dst := []float64{math.Float64frombits(bits)}, []float64{0}
	require.NoError(t, transfer.UploadSlice(t.Context(), c, mem, src))
	require.NoError(t, transfer.DownloadSlice(t.Context(), c, dst, mem))
	assert.Equal(t, uint64(bits), math.Float64bits(dst[0]))
}

func TestSlicesThatAreRefused(t *testing.T) {
	t.Parallel()
	c := newCopier(t)
	mem, err := c.Device().Malloc(64)
	require.NoError(t, err)
	defer c.Device().Free(mem)
	ctx := t.Context()
	two := make([]float32, 2)
	both := func(v *transfer.View, at cudart.DevPtr, want string) {
		t.Helper()
		assert.EqualError(t, transfer.UploadSlice(ctx, v, at, two), "transfer: upload a []float32 of 2 elements: "+want)
		assert.EqualError(t, transfer.DownloadSlice(ctx, v, two, at), "transfer: download a []float32 of 2 elements: "+want)
	}
	both(&c.View, 0x1002, "device address 0x1002 is not a multiple of 4, the alignment of float32")
	both(&c.View, ^cudart.DevPtr(3), "8 bytes at device address 0xfffffffffffffffc end past the last address")

	assert.EqualError(t, transfer.UploadSlice(ctx, c, mem, []string{"host"}),
		"transfer: upload a []string of 1 elements: elements of type string: a string holds pointers")
	assert.ErrorContains(t, transfer.DownloadSlice(ctx, c, []struct{ Next *int }{{}}, mem), "field Next: a *int holds pointers")

	assert.NoError(t, transfer.UploadSlice(ctx, c, mem+4, make([]complex64, 1)), "aligned to its parts")
	assert.NoError(t, transfer.UploadSlice(ctx, c, mem+1, make([]int8, 3)))
	ended, cancel := context.WithCancel(ctx)
	cancel()
	assert.ErrorIs(t, transfer.UploadSlice(ended, c, mem, two), context.Canceled)
	closed, err := transfer.NewCopier(ctx, c.Device(), transfer.Options{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	assert.ErrorIs(t, transfer.UploadSlice(ctx, closed, mem, two), os.ErrClosed)
	assert.ErrorIs(t, transfer.DownloadSlice(ctx, closed, two, mem), os.ErrClosed)
	var none context.Context
	assert.ErrorContains(t, transfer.DownloadSlice(none, c, two, mem), "the context is nil")
}

// A View's stream orders slices too, also one that another library owns. It is not parallel:
// on a real GPU calls of other tests wait for the stream that it holds up, with locks of the
// driver that its own calls need.
func TestSlicesInTheOrderOfAForeignStream(t *testing.T) {
	c := newCopier(t)
	dev := c.Device()
	owner, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	s, err := dev.StreamFromHandle(owner.Handle())
	require.NoError(t, err)
	const n = 10_000
	mem, err := dev.Malloc(n * 4)
	require.NoError(t, err)
	got := make([]uint32, n)
	blocked := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(blocked) })
	t.Cleanup(goOn) // before the copier is closed, which waits
	require.NoError(t, owner.LaunchHostFunc(func() { <-blocked }))
	require.NoError(t, owner.Memset(mem, 0x42, n*4)) // the owner's kernel
	copied := make(chan error, 1)
	go func() {
		copied <- transfer.DownloadSlice(t.Context(), c.With(transfer.Call{Stream: s}), got, mem)
	}()
	select {
	case <-copied:
		t.Error("copied before the owner's work was done")
	case <-time.After(10 * time.Millisecond): // long enough for a copy that does not wait
	}
	goOn()
	require.NoError(t, <-copied)
	for i, x := range got {
		require.Equal(t, uint32(0x42424242), x, i)
	}
	require.NoError(t, s.Close())
	require.NoError(t, owner.Close())
	require.NoError(t, dev.Free(mem))
}
