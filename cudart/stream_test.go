package cudart_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestEventsTimeTheLink(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n = 64 << 20
	s := stream(t, dev)
	start, end := event(t, dev), event(t, dev)
	mem, host := device(t, dev, n), pinned(t, dev, n)
	require.NoError(t, s.Record(start))
	require.NoError(t, s.CopyToDevice(mem, pointer(host), n))
	require.NoError(t, s.Record(end))
	require.NoError(t, s.Synchronize(context.Background()))
	took, err := end.Since(start)
	require.NoError(t, err)
	rate := n / took.Seconds() / 1e9
	if testgpu.Real() {
		assert.Greater(t, rate, 1.0, "GB/s")
	} else {
		assert.InDelta(t, 55.4, rate, 1.5, "GB/s of the simulated link")
	}
}

func TestAStreamWaitsForACopy(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n = 16 << 20
	first, second := stream(t, dev), stream(t, dev)
	mem := device(t, dev, n)
	src, dst := pinned(t, dev, n), pinned(t, dev, n)
	fill(src, 8)
	require.NoError(t, first.CopyToDevice(mem, pointer(src), n))
	require.NoError(t, second.WaitPoint(first.Point()))
	require.NoError(t, second.CopyToHost(pointer(dst), mem, n))
	require.NoError(t, second.Synchronize(context.Background()))
	require.Equal(t, src, dst)
}

func TestHostFuncsRunInOrder(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	var mu sync.Mutex
	var got []int
	for i := range 50 {
		require.NoError(t, s.LaunchHostFunc(func() {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, i)
		}))
	}
	require.NoError(t, s.Synchronize(context.Background()))
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, got, 50)
	assert.IsIncreasing(t, got)
}

func TestPriorities(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	for _, priority := range []int{0, -5, -6, 1, math.MinInt, math.MaxInt} {
		s, err := dev.NewStream(cudart.StreamOptions{Priority: priority, Blocking: true})
		require.NoError(t, err, priority)
		require.NoError(t, s.Close())
	}
}

func TestUseAfterClose(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	e, err := dev.NewEvent()
	require.NoError(t, err)
	open := stream(t, dev)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close(), "a second Close does nothing")
	require.NoError(t, e.Close())
	require.NoError(t, e.Close())
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	_, queryErr := s.Query()
	_, eventErr := raw.QueryEvent(e)
	_, mallocErr := s.Malloc(1)
	_, sinceErr := e.Since(e)
	for what, err := range map[string]error{
		"copy": s.CopyToDevice(mem, pointer(host), 64), "memset": s.Memset(mem, 0, 64),
		"query": queryErr, "synchronize": s.Synchronize(context.Background()), "malloc": mallocErr,
		"record": open.Record(e), "wait": raw.WaitEvent(open, e), "event query": eventErr, "since": sinceErr,
		"host function": s.LaunchHostFunc(func() { t.Error("must not run") }),
	} {
		assert.ErrorIs(t, err, cudart.ErrClosed, what)
	}
}

// Close must not destroy a handle that another goroutine is passing to CUDA.
func TestCloseWhileInUse(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	for range 20 {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		e, err := dev.NewEvent()
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					err := s.CopyToDevice(mem, pointer(host), 64)
					if err == nil {
						err = s.Record(e)
					}
					if err == nil {
						_, err = raw.QueryEvent(e)
					}
					if err == nil {
						err = s.Synchronize(context.Background())
					}
					if err != nil {
						assert.ErrorIs(t, err, cudart.ErrClosed)
						return
					}
				}
			})
		}
		assert.NoError(t, e.Close())
		assert.NoError(t, s.Close())
		wg.Wait()
	}
	require.NoError(t, dev.Synchronize(context.Background()))
	for _, m := range sim.Misuses() {
		assert.NotEqual(t, "stale handle", m.Kind, "%v", m)
	}
}

func TestLostStreamsAndEventsAreDestroyed(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	for range 10 {
		_, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		_, err = dev.NewEvent()
		require.NoError(t, err)
	}
	assert.Eventually(t, func() bool {
		runtime.GC()
		o := sim.Outstanding()
		return o.Streams == 0 && o.Events == 0
	}, 10*time.Second, 10*time.Millisecond)
}

func TestFailedCloseCanBeTriedAgain(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	sim.Fail("cudaStreamDestroy", cudasim.Fault{Code: cudart.ErrUnknown})
	require.ErrorIs(t, s.Close(), cudart.ErrUnknown)
	require.NoError(t, s.Close())
}

func TestAsynchronousErrors(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer func() { _ = sim.Close() }() // the device is lost, so nothing can be released
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	defer func() { _ = rt.Close() }()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	sim.Fail("cudaMemsetAsync", cudasim.Fault{Async: true, Code: cudart.ErrIllegalAddress})
	require.NoError(t, s.Memset(mem, 0, 64))
	err = s.Synchronize(context.Background())
	require.ErrorIs(t, err, cudart.ErrIllegalAddress)
	require.ErrorContains(t, err, "restart the process")
	_, err = dev.Malloc(1)
	require.ErrorIs(t, err, cudart.ErrIllegalAddress, "it stays")
}
