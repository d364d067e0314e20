package fence_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A bench is a simulated device with memory to copy.
type bench struct {
	testing.TB
	sim  *cudasim.Sim
	dev  *cudart.Device
	mem  cudart.DevPtr
	host unsafe.Pointer

	places sync.Map // of streams: two that write the same bytes would race
	placed atomic.Int64
}

const (
	benchCopy   = 64
	benchPlaces = 4096
)

func newBench(tb testing.TB, cfg cudasim.Config) *bench {
	tb.Helper()
	sim, rt := testgpu.Sim(tb, cfg)
	dev, err := rt.Device(0)
	require.NoError(tb, err)
	b := &bench{TB: tb, sim: sim, dev: dev}
	b.mem, err = dev.Malloc(benchPlaces * benchCopy)
	require.NoError(tb, err)
	b.host, err = dev.HostAlloc(benchCopy, 0)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		assert.NoError(tb, dev.Free(b.mem))
		assert.NoError(tb, dev.FreeHost(b.host))
	})
	return b
}

func (b *bench) stream() *cudart.Stream {
	b.Helper()
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	b.Cleanup(func() { assert.NoError(b, s.Close()) })
	return s
}

// use queues a copy, of which the fence is told.
func (b *bench) use(f *fence.Fence, s *cudart.Stream) {
	b.Helper()
	place, ok := b.places.Load(s)
	if !ok {
		place, _ = b.places.LoadOrStore(s, b.placed.Add(1)%benchPlaces)
	}
	require.NoError(b, s.CopyToDevice(b.mem+cudart.DevPtr(place.(int64)*benchCopy), b.host, benchCopy))
	f.Add(s)
}

func TestFenceOfUnusedMemory(t *testing.T) {
	t.Parallel()
	var f fence.Fence
	assert.True(t, f.Empty())
	assert.True(t, f.Completed())
	f.Record()
	assert.True(t, f.Done(t.Context()))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, f.Wait(ended))
	assert.NoError(t, f.Err())
	assert.Nil(t, f.Only())
}

func TestFenceOfSeveralStreams(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	b.sim.Hold()
	t.Cleanup(b.sim.Release)
	var f fence.Fence
	first, second := b.stream(), b.stream()
	b.use(&f, first)
	assert.Equal(t, fence.TimelineOf(first), f.Only())
	b.use(&f, second)
	b.use(&f, first)
	assert.Nil(t, f.Only())
	assert.False(t, f.Empty())
	assert.Empty(t, f.Points(nil), "none is fixed")
	f.Record()
	assert.Len(t, f.Points(nil), 2)
	assert.False(t, f.Completed())
	assert.False(t, f.Done(t.Context()))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.Wait(ctx), context.DeadlineExceeded)
	b.sim.Release()
	require.NoError(t, f.Wait(t.Context()))
	assert.True(t, f.Empty())
	assert.True(t, f.Completed())
}

// Next goes from stream to stream, makes no calls, and fixes the end of the work.
func TestFenceNext(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	var f fence.Fence
	_, ok := f.Next()
	assert.False(t, ok)
	first, second := b.stream(), b.stream()
	b.use(&f, first)
	b.use(&f, second)
	calls := b.sim.TotalCalls()
	p, ok := f.Next()
	assert.True(t, ok)
	assert.Len(t, f.Points(nil), 2)
	assert.Equal(t, calls, b.sim.TotalCalls())
	require.NoError(t, p.Wait(t.Context()))
	q, ok := f.Next()
	assert.True(t, ok)
	assert.NotEqual(t, fence.TimelineAt(p), fence.TimelineAt(q))
	require.NoError(t, q.Wait(t.Context()))
	_, ok = f.Next()
	assert.False(t, ok)
	assert.True(t, f.Empty())
}

// What is queued after Record is not waited for, and what is added is.
func TestFenceIsAsLateAsItsLastAdd(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	var f fence.Fence
	s := b.stream()
	b.use(&f, s)
	f.Record()
	gate := make(chan struct{})
	require.NoError(t, s.LaunchHostFunc(func() { <-gate }))
	require.NoError(t, f.Wait(t.Context()), "the copy was before")
	f.Add(s)
	assert.False(t, f.Done(t.Context()))
	close(gate)
	require.NoError(t, f.Wait(t.Context()))
}

func TestFenceBefore(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	other, err := b.dev.Runtime().Device(1)
	require.NoError(t, err)
	s, err := other.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, s.Close()) }()
	var f fence.Fence
	gates := make([]chan struct{}, 5)
	for i := range gates {
		gates[i] = make(chan struct{})
		user := b.stream()
		require.NoError(t, user.LaunchHostFunc(func() { <-gates[i] }))
		f.Add(user)
	}
	require.NoError(t, f.Before(s))
	ran := make(chan struct{})
	require.NoError(t, s.LaunchHostFunc(func() { close(ran) }))
	for _, gate := range gates {
		select {
		case <-ran:
			t.Fatal("the stream did not wait")
		case <-time.After(2 * time.Millisecond):
		}
		close(gate)
	}
	<-ran
	require.NoError(t, f.Wait(t.Context()))
	require.NoError(t, s.Synchronize(t.Context()))
}

// A fence does not grow with the streams that memory was ever used on, nor does
// it wait for a device because they were closed.
func TestFenceForgetsShortLivedStreams(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	var f fence.Fence
	maximum := 0
	for i := range 2000 {
		s, err := b.dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		b.use(&f, s)
		require.NoError(t, s.Close())
		if i%10 == 0 { // else the simulated device may lag behind
			require.NoError(t, s.Point().Wait(t.Context()))
		}
		f.Record() // so that Points shows them
		maximum = max(maximum, len(f.Points(nil)))
	}
	assert.Less(t, maximum, 100)
	require.NoError(t, f.Wait(t.Context()))
	assert.Zero(t, b.sim.Calls("cudaDeviceSynchronize"))
}

// Errors of the work come from Err, once; the memory is free all the same.
func TestFenceErr(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	s := b.stream()
	var f fence.Fence
	b.sim.Fail("cudaMemcpyAsync", cudasim.Fault{Async: true, Transient: true, Code: cudart.ErrIllegalAddress})
	b.use(&f, s)
	require.NoError(t, f.Wait(t.Context()))
	require.ErrorIs(t, f.Err(), cudart.ErrIllegalAddress)
	require.NoError(t, f.Err())
	b.use(&f, s)
	require.NoError(t, f.Wait(t.Context()))
	require.NoError(t, f.Err())
	_ = s.Synchronize(t.Context())
}

// Many goroutines may add while others wait and ask.
func TestFenceFromManyGoroutines(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	var f fence.Fence
	var all sync.WaitGroup
	for i := range 8 {
		s := b.stream()
		all.Go(func() {
			for range 200 {
				b.use(&f, s)
				switch i % 4 {
				case 0:
					assert.NoError(t, f.Wait(t.Context()))
				case 1:
					f.Done(t.Context())
				case 2:
					f.Record()
				}
			}
		})
	}
	all.Wait()
	require.NoError(t, f.Wait(t.Context()))
	assert.True(t, f.Empty())
}

// The way of a pool's block: no allocation, and no call without work.
func TestFenceDoesNotAllocate(t *testing.T) {
	b := newBench(t, cudasim.Config{})
	s := b.stream()
	var f fence.Fence
	ctx := context.Background()
	cycle := func() {
		f.Add(s)
		f.Record()
		if !f.Done(ctx) {
			t.Error("nothing was queued")
		}
	}
	cycle()
	calls := b.sim.TotalCalls()
	assert.Zero(t, testing.AllocsPerRun(100, cycle))
	assert.Equal(t, calls, b.sim.TotalCalls())
}

// An error that was found before a later Point took a Point's place stays the memory's.
func TestFenceErrOfAnEarlierPoint(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	s := b.stream()
	var f fence.Fence
	b.use(new(fence.Fence), s)
	first := s.Point()
	f.AddPoint(first)
	b.sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrLaunchFailure})
	first.Done(t.Context())
	require.ErrorIs(t, first.Err(), cudart.ErrLaunchFailure)
	b.use(new(fence.Fence), s)
	last := s.Point()
	f.AddPoint(last)
	require.NoError(t, f.Wait(t.Context()))
	require.NoError(t, last.Err())
	require.ErrorIs(t, f.Err(), cudart.ErrLaunchFailure)
}

func TestFenceKeepsTheLatestPoint(t *testing.T) {
	t.Parallel()
	b := newBench(t, cudasim.Config{})
	s := b.stream()
	var f fence.Fence
	b.use(new(fence.Fence), s)
	first := s.Point()
	b.use(new(fence.Fence), s)
	last := s.Point()
	require.True(t, last.After(first))
	f.AddPoint(last)
	f.AddPoint(first)
	require.Equal(t, []cudart.Point{last}, f.Points(nil))
	require.NoError(t, f.Wait(t.Context()))
}
