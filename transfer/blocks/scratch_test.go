package blocks

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
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
	for seed, c := range []Copy{f.contiguous(16, 2048), f.contiguous(16, 60_000), f.contiguous(40, 20_001), f.contiguous(4098, 255), f.contiguous(30_001, 33), f.contiguous(32<<10, 31)} {
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
			one := queued
			require.NoError(t, one.count())
			one.HostStride = one.Size
			require.True(t, f.canStage(&one, false))
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
		"larger than a half":               func(c *Copy) { c.Size, c.HostStride, c.DeviceStride = 32<<10+16, 32<<10+16, 32<<10+16 },
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
	for _, fn := range []string{"cudaStreamCreateWithPriority", "cudaMalloc"} {
		sim.Fail(fn, cudasim.Fault{Code: cudart.ErrMemoryAllocation, Times: scratches})
		assert.Equal(t, 0, copies(f.s), "no stream, and no memory")
		require.NoError(t, f.s.Synchronize(t.Context()))
		f.requireCopied(t, c)
	}

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

// slow has a link on which a copy to a half of a small scratch takes 0.3 ms: longer than the calls that queue the next.
var slow = cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{HostToDevice: cudasim.Speed{Rate: 0.1}, DeviceToHost: cudasim.Speed{Rate: 0.1}}}}}

// engineStream returns the stream of the scratch that was used last.
func (f *fixture) engineStream() (used *cudart.Stream) {
	for range scratches {
		s := <-f.scratches
		if f.scratches <- s; s.stream != nil {
			used = s.stream
		}
	}
	return used
}

// The engine copies to one half of the scratch memory while the kernel reads the other, and never to a half that the
// kernel has yet to read.
func TestTheEngineCopiesBesideTheKernel(t *testing.T) {
	t.Parallel()
	kernels := make(chan struct{})
	defer close(kernels)
	_, rt := testgpu.Sim(t, cudasim.Config{Kernels: map[string]cudasim.KernelFunc{"pinned_blocks": func(l *cudasim.Launch) {
		<-kernels
		count, size := int(cudasim.Arg[uint32](l, 6)), cudasim.Arg[int](l, 7)
		index := cudasim.Elements[uint32](l.Read(cudasim.Arg[cudart.DevPtr](l, 1), 4*count))
		for i, at := range index {
			copy(l.Write(cudasim.Arg[cudart.DevPtr](l, 0)+cudart.DevPtr(int(at)*size), size), l.Read(cudasim.Arg[cudart.DevPtr](l, 3)+cudart.DevPtr(i*size), size))
		}
	}}})
	f := withScratch(t, rt.Devices()[0], hostmem.Options{})
	for parts := 2; parts <= 6; parts++ {
		copy(f.mem, bytesOf(uint64(parts), f.n))
		require.NoError(t, f.dev.Memset(f.p, 0, f.n))
		require.NoError(t, f.dev.Synchronize(t.Context()))
		c := f.contiguous(1000, 32*parts-1) // the last part is shorter
		_, err := f.CopyToDevice(t.Context(), f.s, c)
		require.NoError(t, err)
		engine := f.engineStream()
		for part := range parts {
			copied := func() bool {
				done, err := engine.Query()
				return assert.NoError(t, err) && done
			}
			if part < parts-2 {
				time.Sleep(time.Millisecond)
				require.False(t, copied(), "part %d of %d: the kernel has yet to read that of the next copy but one", part, parts)
			} else {
				require.Eventually(t, copied, time.Minute, 100*time.Microsecond, "part %d of %d: all copies run before the kernel reads the last two parts", part, parts)
			}
			kernels <- struct{}{}
		}
		require.NoError(t, f.s.Synchronize(t.Context()))
		f.requireCopied(t, c)
	}
}

// Copies through scratch memory come after what was queued on the stream before, and before what is queued later.
func TestScratchIsInStreamOrder(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, slow)
	dev := rt.Devices()[0]
	f := withScratch(t, dev, hostmem.Options{})
	source, err := dev.Malloc(f.n)
	require.NoError(t, err)
	defer func() { assert.NoError(t, dev.Free(source)) }()
	c := f.contiguous(1000, 200)
	for seed, held := range []bool{false, true, false} {
		want := bytesOf(uint64(seed), f.n)
		testgpu.CopyToDevice(t, dev, source, want)
		require.NoError(t, dev.Memset(f.p, 0, f.n))
		require.NoError(t, dev.Synchronize(t.Context()))
		if held {
			sim.Hold()
		}
		require.NoError(t, f.s.CopyToHost(unsafe.Pointer(&f.mem[0]), source, f.n))
		for range 2 {
			_, err := f.CopyToDevice(t.Context(), f.s, c)
			require.NoError(t, err)
		}
		require.NoError(t, f.s.Memset(source, 0, f.n))
		require.NoError(t, f.s.CopyToHost(unsafe.Pointer(&f.mem[0]), source, f.n))
		if held {
			sim.Release()
		}
		require.NoError(t, f.s.Synchronize(t.Context()))
		require.Zero(t, sim.Outstanding().PendingOps)
		copy(f.mem, want)
		f.requireCopied(t, c)
	}
}

// Copies of two streams at once, several on each, are right.
func TestScratchesOfTwoStreams(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	f := withScratch(t, dev, hostmem.Options{Chunk: 2 << 20})
	copy(f.mem, bytesOf(1, f.n))
	require.NoError(t, dev.Memset(f.p, 0, f.n))
	require.NoError(t, dev.Synchronize(t.Context()))
	other, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	const size, parts = 500, 8
	all := f.contiguous(size, f.n/size)
	var copying sync.WaitGroup
	for i, s := range []*cudart.Stream{f.s, other} {
		copying.Go(func() {
			for part := i; part < parts; part += 2 {
				n := len(all.DeviceIndex) / parts
				c := all
				c.Host, c.DeviceIndex = f.mem[part*n*size:], all.DeviceIndex[part*n:][:n]
				_, err := f.CopyToDevice(t.Context(), s, c)
				assert.NoError(t, err)
			}
			assert.NoError(t, s.Synchronize(t.Context()))
		})
	}
	copying.Wait()
	require.NoError(t, other.Close())
	all.DeviceIndex = all.DeviceIndex[:len(all.DeviceIndex)/parts*parts]
	f.requireCopied(t, all)
}

// Whichever call fails, no copy is under way when the stream has done its work, the next copies are right, and Close
// frees all. With a stream that has not begun its work the call returns all the same.
func TestEveryCallThroughScratchCanFail(t *testing.T) {
	t.Parallel()
	failed := 0
	for k, calls := 1, 1; k <= calls; k++ {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			sim, rt := testgpu.Sim(t, slow)
			f := withScratch(t, rt.Devices()[0], hostmem.Options{})
			copy(f.mem, bytesOf(uint64(k), f.n))
			c := f.contiguous(1000, 150) // in five parts
			if k%2 == 0 {
				sim.Hold()
			}
			before := sim.TotalCalls()
			sim.FailCall(before+k, cudart.ErrMemoryAllocation)
			point, err := f.CopyToDevice(context.Background(), f.s, c)
			calls = max(calls, sim.TotalCalls()-before)
			sim.ResetFaults()
			sim.Release()
			if err != nil {
				failed++
				require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
				point = f.s.Point()
			}
			require.NoError(t, point.Wait(t.Context()))
			_ = f.s.SynchronizeBlocking() // of events after the Point
			assert.Zero(t, sim.Outstanding().PendingOps)
			copy(f.mem, bytesOf(uint64(k)+1, f.n))
			_, err = f.CopyToDevice(t.Context(), f.s, c)
			require.NoError(t, err)
			if err := f.s.Synchronize(t.Context()); err != nil { // of an event
				require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			}
			f.requireCopied(t, c)
		})
	}
	assert.GreaterOrEqual(t, failed, 3*5+3, "a copy, a wait and a launch for each part, and a wait for each half that is used again")

	for _, fn := range []string{"cudaFree", "cudaStreamDestroy"} {
		sim, rt := testgpu.Sim(t, cudasim.Config{})
		f := withScratch(t, rt.Devices()[0], hostmem.Options{})
		_, err := f.CopyToDevice(t.Context(), f.s, f.contiguous(1000, 200))
		require.NoError(t, err)
		sim.Fail(fn, cudasim.Fault{Code: cudart.ErrUnknown, Times: 1})
		require.ErrorIs(t, f.Close(), cudart.ErrUnknown, fn)
		require.NoError(t, f.Close(), "it frees the rest")
	}
}

// If the stream cannot be made to wait for the engine's copies, the call does, and lasts as long for Close when its
// context ends before.
func TestTheCallWaitsIfTheStreamCannot(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{false, true} {
		sim, rt := testgpu.Sim(t, slow)
		f := withScratch(t, rt.Devices()[0], hostmem.Options{})
		copy(f.mem, bytesOf(1, f.n))
		c := f.contiguous(1000, 200)
		require.NoError(t, f.s.Memset(f.p, 0, f.n))
		ctx, cancel := context.WithCancel(t.Context())
		if ends {
			sim.Hold()
			defer sim.Release()
		}
		sim.Fail("cudaStreamWaitEvent", cudasim.Fault{Stream: f.s.Handle(), Code: cudart.ErrMemoryAllocation, Times: 2})
		if ends {
			sim.OnCall(func(fn string, _ int) {
				if fn == "cudaMemcpyAsync" {
					cancel()
				}
			})
		}
		_, err := f.CopyToDevice(ctx, f.s, c)
		sim.OnCall(nil)
		if ends {
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, stage.ErrUnderWay)
			require.ErrorIs(t, f.CloseContext(ctx), context.Canceled)
			sim.Release()
		} else {
			require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			done, err := f.engineStream().Query()
			require.NoError(t, err)
			assert.True(t, done)
			_, err = f.CopyToDevice(t.Context(), f.s, c)
			require.NoError(t, err)
			require.NoError(t, f.s.Synchronize(t.Context()))
			f.requireCopied(t, c)
		}
		cancel()
	}
}

// A call that fills the streams waits for room, or returns when its context ends.
func TestScratchOnFullStreams(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{false, true} {
		sim, rt := testgpu.Sim(t, cudasim.Config{QueueDepth: 300})
		f := withScratch(t, rt.Devices()[0], hostmem.Options{})
		f.scratchBytes = 8 << 10
		copy(f.mem, bytesOf(1, f.n))
		c := f.contiguous(1000, 1000) // in 250 parts
		sim.Hold()
		defer sim.Release()
		require.NoError(t, f.s.Memset(f.p, 0, f.n))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		returned := make(chan error, 1)
		go func() {
			_, err := f.CopyToDevice(ctx, f.s, c)
			returned <- err
		}()
		for len(sim.Blocked()) == 0 {
			time.Sleep(100 * time.Microsecond)
		}
		if ends {
			cancel()
			err := <-returned
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, stage.ErrUnderWay)
			sim.Release()
			continue
		}
		sim.Release()
		require.NoError(t, <-returned)
		require.NoError(t, f.s.Synchronize(t.Context()))
		f.requireCopied(t, c)
	}
}

// Close of the Copier and of the host memory wait for copies that are under way.
func TestCloseWaitsForScratches(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, slow)
	dev := rt.Devices()[0]
	f := withScratch(t, dev, hostmem.Options{})
	host, err := hostmem.Alloc(t.Context(), dev, f.n, hostmem.Options{})
	require.NoError(t, err)
	copy(host.Bytes(), bytesOf(1, f.n))
	copy(f.mem, host.Bytes())
	c := f.contiguous(1000, 1000)
	c.Host = host.Bytes()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	sim.Hold()
	_, err = f.CopyToDevice(t.Context(), f.s, c)
	require.NoError(t, err)
	require.ErrorIs(t, host.CloseContext(ended), context.Canceled)
	require.ErrorIs(t, f.CloseContext(ended), context.Canceled)
	sim.Release()
	require.NoError(t, host.Close())
	require.NoError(t, f.Close())
	assert.Equal(t, 1, sim.Outstanding().Streams, "the fixture's")
	f.requireCopied(t, c)
}
