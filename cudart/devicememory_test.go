package cudart_test

import (
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func alloc(tb testing.TB, dev *cudart.Device, n int) *cudart.DeviceMemory {
	tb.Helper()
	m, err := dev.Alloc(n)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, m.Close()) })
	return m
}

func TestDeviceMemoryHoldsBytes(t *testing.T) {
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		m := alloc(t, dev, 1000)
		assert.Equal(t, 1000, m.Len())
		assert.Same(t, dev, m.Device())
		assert.NotZero(t, m.Ptr())
		assert.Equal(t, fmt.Sprintf("1000 bytes at %v of %v", m.Ptr(), dev), m.String())
		in, out := pinned(t, dev, 300), pinned(t, dev, 300)
		fill(in, 1)
		part, err := m.Range(700, 300)
		require.NoError(t, err)
		require.NoError(t, dev.CopyToDevice(part, pointer(in), 300))
		require.NoError(t, dev.CopyToHost(pointer(out), part, 300))
		assert.Equal(t, in, out)
	})
}

func TestRangesOfDeviceMemoryAreChecked(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	m := alloc(t, dev, 100)
	for _, r := range [][2]int{{0, 0}, {0, 100}, {100, 0}, {99, 1}, {40, 20}} {
		p, err := m.Range(r[0], r[1])
		require.NoError(t, err, "%v", r)
		assert.Equal(t, m.Ptr()+cudart.DevPtr(r[0]), p)
	}
	for _, r := range [][2]int{{-1, 1}, {0, -1}, {0, 101}, {101, 0}, {100, 1}, {1, 100}, {math.MaxInt, math.MaxInt}, {1, math.MaxInt}, {math.MinInt, 0}} {
		p, err := m.Range(r[0], r[1])
		assert.ErrorIs(t, err, cudart.ErrInvalidValue, "%v", r)
		assert.Zero(t, p)
	}
}

func TestDeviceMemoryIsFreedOnce(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	_, err = dev.Alloc(0)
	assert.ErrorIs(t, err, cudart.ErrInvalidValue)
	_, err = dev.Alloc(math.MaxInt)
	assert.ErrorIs(t, err, cudart.ErrMemoryAllocation)

	m, err := dev.Alloc(64)
	require.NoError(t, err)
	sim.Fail("cudaFree", cudasim.Fault{Code: cudart.ErrUnknown, Times: 1})
	require.ErrorIs(t, m.Close(), cudart.ErrUnknown)
	assert.Zero(t, m.Ptr(), "refused from the first Close on")
	require.NoError(t, rt.Close())
	before := sim.Calls("cudaFree")
	var closers sync.WaitGroup
	for range 4 {
		closers.Go(func() { assert.NoError(t, m.Close(), "also after the Runtime") })
	}
	closers.Wait()
	assert.Equal(t, 1, sim.Calls("cudaFree")-before)
	assert.Zero(t, sim.Outstanding().DeviceAllocs)

	_, err = m.Range(0, 1)
	assert.ErrorIs(t, err, cudart.ErrClosed)
	assert.Equal(t, 64, m.Len())
	_, err = dev.Alloc(64)
	assert.ErrorIs(t, err, cudart.ErrClosed)
}

func TestNoDeviceMemory(t *testing.T) {
	t.Parallel()
	var none *cudart.DeviceMemory
	for _, m := range []*cudart.DeviceMemory{none, new(cudart.DeviceMemory)} {
		assert.Zero(t, m.Ptr())
		assert.Zero(t, m.Len())
		assert.Nil(t, m.Device())
		assert.NoError(t, m.Close())
		assert.Equal(t, "no device memory", m.String())
		_, err := m.Range(0, 0)
		assert.ErrorIs(t, err, cudart.ErrInvalidValue)
	}
	var dev *cudart.Device
	_, err := dev.Alloc(1)
	assert.ErrorContains(t, err, "nil, or a zero value")
}

func TestDeviceAddressesPrintInHex(t *testing.T) {
	t.Parallel()
	p := cudart.DevPtr(0xabc0)
	assert.Equal(t, "0xabc0 0xabc0 43968 abc0 0xabc0 {0xabc0}", fmt.Sprintf("%v %s %d %x %#x %v", p, p, p, p, p, struct{ P cudart.DevPtr }{p}))
}
