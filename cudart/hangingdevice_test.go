//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// wait begins a wait.
func wait(f func(context.Context) error, ctx context.Context) <-chan error {
	outcome := make(chan error, 1)
	go func() { outcome <- f(ctx) }()
	return outcome
}

// ended requires that a wait ends, and with which error.
func ended(t *testing.T, what string, outcome <-chan error, want error) {
	t.Helper()
	select {
	case err := <-outcome:
		require.ErrorIs(t, err, want, what)
	case <-time.After(20 * time.Second):
		require.FailNow(t, "the wait does not end", what)
	}
}

// inside returns the number of goroutines in a function.
func inside(function string) int {
	stacks := make([]byte, 16<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), function+"(")
}

// A device of which no call returns holds up no wait for another one, however many wait
// for it, and they occupy a bounded number of threads.
func TestADeviceThatHangsHoldsUpNoOther(t *testing.T) {
	const streams, each = 60, 20
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	hung, err := rt.Device(0)
	require.NoError(t, err)
	good, err := rt.Device(1)
	require.NoError(t, err)
	var bad []*cudart.Stream
	var opens []func()
	for range streams {
		s := stream(t, hung)
		opens = append(opens, gate(t, s))
		bad = append(bad, s)
	}
	s := stream(t, good)
	unblock := sim.Block("", cudasim.Fault{Devices: []int{0}, Times: -1})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	for i := range streams {
		for range each {
			all.Go(func() { assert.ErrorIs(t, bad[i].Synchronize(ctx), context.Canceled) })
			all.Go(func() { assert.ErrorIs(t, bad[i].Timeline().End().Wait(ctx), context.Canceled) })
			all.Go(func() { assert.False(t, bad[i].Timeline().End().Done(ctx)) })
		}
	}
	all.Go(func() { assert.ErrorIs(t, hung.Synchronize(ctx), context.Canceled) })
	require.NoError(t, sim.AwaitBlocked(t.Context(), "", bounded.MaxInside))
	for range 20 {
		open := gate(t, s)
		waits := map[string]<-chan error{
			"stream":                    wait(s.Synchronize, t.Context()),
			"stream, ctx cannot end":    wait(s.Synchronize, context.Background()),
			"point":                     wait(s.Point().Wait, t.Context()),
			"point, ctx cannot end":     wait(s.Point().Wait, context.Background()),
			"point without an event":    wait(s.Timeline().End().Wait, t.Context()),
			"device":                    wait(good.Synchronize, t.Context()),
			"another stream":            wait(stream(t, good).Synchronize, t.Context()),
			"a point of another stream": wait(stream(t, good).Point().Wait, t.Context()),
		}
		open()
		for what, outcome := range waits {
			ended(t, what, outcome, nil)
		}
	}
	// Each call that does not return occupies a thread: those of pollers, of waits that
	// query, of looks, and one for the whole device.
	assert.LessOrEqual(t, len(rt.Stuck(t.Context(), 0)), 2*bounded.MaxInside+max(2, runtime.GOMAXPROCS(0)/4)+2)
	cancel()
	all.Wait()
	unblock()
	for i, open := range opens {
		open()
		require.NoError(t, bad[i].Synchronize(t.Context()))
	}
	drained(t, sim)
}

// Waits that were given up while a query blocks leave neither goroutines nor threads.
func TestAbandonedWaitsLeaveNothing(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	open := gate(t, s)
	unblock := sim.Block("", cudasim.Fault{Stream: s.Handle(), Times: -1})
	defer unblock()
	goroutines, before := runtime.NumGoroutine(), threads(t)
	for range 100 {
		var all sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for range 10 {
			for _, f := range []func(context.Context) error{s.Synchronize, s.Timeline().End().Wait, dev.Synchronize} {
				all.Go(func() { assert.ErrorIs(t, f(ctx), context.Canceled) })
			}
		}
		cancel()
		all.Wait()
	}
	assert.LessOrEqual(t, runtime.NumGoroutine()-goroutines, 3*bounded.MaxInside)
	assert.LessOrEqual(t, threads(t)-before, 3*bounded.MaxInside)
	assert.Zero(t, rt.Waiting())
	assert.Zero(t, dev.Drains(), "requests that nobody waits for")
	unblock()
	open()
	require.NoError(t, s.Synchronize(t.Context()))
	drained(t, sim)
}

// A wait whose caller leaves while it queries is not left to the poller.
func TestAbandonedWaitIsNotQueued(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	open := gate(t, s)
	unblock := sim.Block("cudaStreamQuery", cudasim.Fault{})
	ctx, cancel := context.WithCancel(t.Context())
	outcome := wait(s.Synchronize, ctx)
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaStreamQuery", 1))
	cancel()
	ended(t, "stream", outcome, context.Canceled)
	unblock()
	require.Eventually(t, func() bool { return inside("(*waits).begin") == 0 }, 20*time.Second, time.Millisecond)
	assert.Zero(t, rt.Waiting())
	open()
	require.NoError(t, s.Synchronize(t.Context()))
}

// A Point is recorded without blocking the caller, also on a stream that is full.
func TestRecordDoesNotBlockOnAFullStream(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{QueueDepth: 600})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, mem := stream(t, dev), device(t, dev, 64)
	open := gate(t, s)
	for range 599 {
		require.NoError(t, s.Memset(mem, 0, 64))
	}
	p := s.Timeline().End()
	recorded := make(chan error, 1)
	go func() {
		for range 100 {
			p.Record()
		}
		recorded <- nil
	}()
	ended(t, "Record", recorded, nil)
	assert.False(t, p.Completed())
	assert.LessOrEqual(t, sim.Calls("cudaEventRecord"), 1, "one goroutine is inside")
	open()
	require.NoError(t, p.Wait(t.Context()))
	drained(t, sim)
}

// Stream.Handle was called: how full the stream is is not known.
func TestRecordDoesNotBlockOnAStreamOfOtherCode(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_ = b.s.Handle()
	open := gate(t, b.s)
	unblock := b.sim.Block("cudaEventRecord", cudasim.Fault{})
	p := b.s.Timeline().End()
	p.Record()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaEventRecord", 1))
	unblock()
	open()
	require.NoError(t, p.Wait(t.Context()))
	drained(t, b.sim)
}

// Disabling peer access may work and return an error of earlier work all the same.
func TestPeerAccessIsDisabledByACallThatReportsAnEarlierError(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	a, err := rt.Device(0)
	require.NoError(t, err)
	b, err := rt.Device(1)
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, a.EnablePeerAccess(b))
		sim.Fail("cudaDeviceDisablePeerAccess", cudasim.Fault{Code: cudart.ErrUnknown, Late: true})
		require.ErrorIs(t, a.DisablePeerAccess(b), cudart.ErrUnknown)
		require.NoError(t, a.DisablePeerAccess(b))
		require.ErrorIs(t, a.DisablePeerAccess(b), cudart.ErrPeerAccessNotEnabled, "all are retryAtClose")
	}
}

// Closing a Runtime destroys all of its events, some of them by a second try, or by a
// second Close.
func TestCloseDestroysEventsAlthoughCallsFail(t *testing.T) {
	t.Parallel()
	for _, failures := range []int{1, 2, 7} {
		sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
		require.NoError(t, err)
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		for range 3 {
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			require.NoError(t, s.LaunchHostFunc(func() {}))
			require.NoError(t, s.Point().Wait(t.Context()))
			_ = s.Point()
			require.NoError(t, s.Close())
		}
		require.NotZero(t, sim.Outstanding().Events)
		sim.Fail("cudaEventDestroy", cudasim.Fault{Code: cudart.ErrUnknown, Times: failures})
		closes := 1
		for ; rt.Close() != nil; closes++ {
			require.True(t, raw.Closed(rt))
			require.LessOrEqual(t, closes, failures)
		}
		require.NoError(t, rt.Close())
		if failures == 1 {
			require.Equal(t, 1, closes)
		}
		require.Zero(t, sim.Outstanding().Events)
		testgpu.End(t, sim)
	}
}
