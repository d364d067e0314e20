package blocks

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// withScratch is a fixture whose scratches are small.
func withScratch(t *testing.T, dev *cudart.Device, buffer hostmem.Options) *fixture {
	f := newFixture(t, dev, Quickest, buffer)
	f.scratchBytes = 64 << 10
	return f
}

// contiguous is copies of blocks one after the other in host memory to random places of the device.
func (f *fixture) contiguous(size, count int) Copy {
	c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, Size: size}
	for _, at := range rand.New(rand.NewPCG(1, uint64(size))).Perm(f.n / size)[:count] {
		c.DeviceIndex = append(c.DeviceIndex, uint32(at))
	}
	return c
}

// requireCopied compares the device's memory with what a naive model says.
func (f *fixture) requireCopied(t *testing.T, c Copy) {
	t.Helper()
	want, got := make([]byte, f.n), make([]byte, f.n)
	require.NoError(t, f.dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, f.n))
	require.NoError(t, f.dev.Synchronize(t.Context()))
	c.HostStride, c.Count = c.Size, len(c.DeviceIndex)
	if c.DeviceStride == 0 {
		c.DeviceStride = c.Size
	}
	copyByModel(c, f.mem, want, 0, 0, false)
	require.True(t, bytes.Equal(want, got), "%d blocks of %d bytes", c.Count, c.Size)
}

// Blocks pass through scratch memory, in several parts, of any size, across the seams of registrations, with lists on either
// side, and twice on a stream without a wait between.
func TestBlocksThroughScratch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	f := withScratch(t, dev, hostmem.Options{Chunk: 2 << 20})
	list, err := dev.Malloc(f.n)
	require.NoError(t, err)
	defer func() { assert.NoError(t, dev.Free(list)) }()
	for seed, c := range []Copy{f.contiguous(16, 2048), f.contiguous(16, 60_000), f.contiguous(40, 20_001), f.contiguous(4098, 255), f.contiguous(33_000, 31), f.contiguous(60_001, 16)} {
		for _, onDevice := range []bool{false, true} {
			copy(f.mem, bytesOf(uint64(seed), f.n))
			require.NoError(t, dev.Memset(f.p, 0, f.n))
			require.NoError(t, dev.Synchronize(t.Context()))
			queued := c
			if onDevice {
				index := c.DeviceIndex
				queued.Count, queued.DeviceIndexOnDevice = len(index), listOnDevice(t, dev, list, &index)
				queued.DeviceIndex = nil
			}
			half := queued
			half.Count /= 2
			half.DeviceIndex = half.DeviceIndex[:len(half.DeviceIndex)/2]
			for _, c := range []Copy{half, queued} {
				_, err := f.CopyToDevice(t.Context(), f.s, c)
				require.NoError(t, err)
			}
			require.NoError(t, f.s.Synchronize(t.Context()))
			f.requireCopied(t, c)
		}
	}
}

// What does not pass through scratch memory: downloads, copies that are small or not contiguous on the host, and those
// of a Copier whose method or multiprocessors are given.
func TestWhatPassesThroughScratch(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	f := withScratch(t, rt.Devices()[0], hostmem.Options{})
	usual := f.contiguous(16, 2048)
	usual.HostStride, usual.DeviceStride, usual.Count = 16, 16, 2048
	assert.Equal(t, staged, f.choose(&usual, false))
	assert.Equal(t, ByKernel, f.choose(&usual, true))
	for name, change := range map[string]func(c *Copy){
		"a list of the host":               func(c *Copy) { c.HostIndex = c.DeviceIndex },
		"a list of the host on the device": func(c *Copy) { c.HostIndexOnDevice = f.p },
		"a stride on the host":             func(c *Copy) { c.HostStride++ },
		"too few":                          func(c *Copy) { c.Count-- },
	} {
		c := usual
		change(&c)
		assert.Equal(t, ByKernel, f.choose(&c, false), name)
	}
	for name, b := range map[string]*Copier{"method": {method: ByKernel, scratchBytes: f.scratchBytes}, "multiprocessors": {processors: 4, scratchBytes: f.scratchBytes}} {
		assert.Equal(t, ByKernel, b.choose(&usual, false), name)
	}
}

// Copies do not wait for those of another stream, which may wait for them: without scratch memory that is free, or if none
// can be allocated, the kernel reads the host's memory.
func TestBusyScratches(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	f := withScratch(t, dev, hostmem.Options{})
	copy(f.mem, bytesOf(1, f.n))
	c := f.contiguous(16, 2048)
	copies := func(s *cudart.Stream) (byEngine int) {
		before := sim.Calls("cudaMemcpyAsync")
		_, err := f.CopyToDevice(t.Context(), s, c)
		require.NoError(t, err)
		return sim.Calls("cudaMemcpyAsync") - before
	}
	sim.Fail("cudaMalloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation, Times: scratches})
	assert.Equal(t, 0, copies(f.s), "no memory")
	require.NoError(t, f.s.Synchronize(t.Context()))
	f.requireCopied(t, c)

	sim.Hold()
	var streams [scratches + 1]*cudart.Stream
	for i := range streams {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		streams[i] = s
		want := 1
		if i == scratches {
			want = 0
		}
		assert.Equal(t, want, copies(s), "stream %d", i)
	}
	assert.Equal(t, 1, copies(streams[0]), "its own")
	assert.Equal(t, 1, copies(streams[1]), "its own")
	sim.Release()
	for _, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
	}
	assert.Equal(t, 1, copies(streams[scratches]), "one of another stream, which is done")
	for _, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
		require.NoError(t, s.Close())
	}
	f.requireCopied(t, c)
}

// Whichever call fails, the next copies are right, and Close frees all.
func TestEveryCallThroughScratchCanFail(t *testing.T) {
	t.Parallel()
	failed := 0
	for k := 1; k <= 20; k++ {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			f := withScratch(t, rt.Devices()[0], hostmem.Options{})
			copy(f.mem, bytesOf(uint64(k), f.n))
			c := f.contiguous(1000, 200) // in four parts
			sim.FailCall(sim.TotalCalls()+k, cudart.ErrMemoryAllocation)
			_, err := f.CopyToDevice(t.Context(), f.s, c)
			sim.ResetFaults()
			if err != nil {
				failed++
				require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			}
			_, err = f.CopyToDevice(t.Context(), f.s, c)
			require.NoError(t, err)
			if err := f.s.Synchronize(t.Context()); err != nil { // of an event
				require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			}
			f.requireCopied(t, c)
		})
	}
	assert.GreaterOrEqual(t, failed, 8, "each copy and each launch")

	sim, rt := testgpu.Sim(t, cudasim.Config{})
	f := withScratch(t, rt.Devices()[0], hostmem.Options{})
	_, err := f.CopyToDevice(t.Context(), f.s, f.contiguous(1000, 200))
	require.NoError(t, err)
	sim.Fail("cudaFree", cudasim.Fault{Code: cudart.ErrUnknown, Times: 1})
	require.ErrorIs(t, f.Close(), cudart.ErrUnknown)
	require.NoError(t, f.Close(), "it frees the rest")
}
