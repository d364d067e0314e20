package cudart_test

import (
	"context"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// gate makes a stream wait until open is called, at the latest at the end of
// the test. Tests that do so on a real GPU are not parallel ones: calls of others,
// such as cudaMalloc, would wait for it inside of CUDA, and hold up open's caller.
func gate(tb testing.TB, s *cudart.Stream) (open func()) {
	tb.Helper()
	closed := make(chan struct{})
	open = sync.OnceFunc(func() { close(closed) })
	require.NoError(tb, s.LaunchHostFunc(func() { <-closed }))
	tb.Cleanup(open)
	return open
}

// drained waits until no work is queued, also by calls that were blocked.
func drained(tb testing.TB, sim *cudasim.Sim) {
	tb.Helper()
	require.Eventually(tb, func() bool { return len(sim.Blocked()) == 0 && sim.Outstanding().PendingOps == 0 }, 20*time.Second, time.Millisecond)
}

// soon is a context that ends soon.
func soon(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(tb.Context(), 10*time.Millisecond)
	tb.Cleanup(cancel)
	return ctx
}

// threads returns the number of threads of the process.
func threads(tb testing.TB) int {
	tb.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(tb, err)
	_, rest, _ := strings.Cut(string(status), "Threads:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(tb, err)
	return n
}

// A stream on which a call blocks must hold up no wait for other streams, and no wait may
// outlast its context.
func TestCallThatBlocksHoldsUpItsOwnStreamOnly(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaStreamQuery", "cudaEventRecord", "cudaEventQuery", ""} {
		t.Run("one of "+fn, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			bad, good := stream(t, dev), stream(t, dev)
			openBad, openGood := gate(t, bad), gate(t, good)
			unblock := sim.Block(fn, cudasim.Fault{Stream: bad.Handle(), Times: -1})
			t.Cleanup(unblock)

			var crowd sync.WaitGroup
			for range 50 {
				crowd.Go(func() {
					assert.ErrorIs(t, bad.Synchronize(soon(t)), context.DeadlineExceeded)
					assert.ErrorIs(t, bad.Timeline().End().Wait(soon(t)), context.DeadlineExceeded)
					assert.False(t, bad.Timeline().End().Done(soon(t)))
				})
			}
			goodDone := make(chan error, 3)
			go func() { goodDone <- good.Synchronize(t.Context()) }()
			go func() { goodDone <- good.Point().Wait(t.Context()) }()
			go func() { goodDone <- good.Synchronize(context.Background()) }()
			crowd.Wait()
			openGood()
			for range cap(goodDone) {
				require.NoError(t, <-goodDone)
			}
			require.NotEmpty(t, sim.Blocked())
			unblock()
			openBad()
			require.NoError(t, bad.Synchronize(t.Context()))
			drained(t, sim)
		})
	}
}

// The same for a stream whose queue is full: every call that queues work there blocks
// until there is room.
func TestFullStreamHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{QueueDepth: 8})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	full, other := stream(t, dev), stream(t, dev)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	open := gate(t, full)
	var copies sync.WaitGroup
	copies.Go(func() {
		for range 20 {
			assert.NoError(t, full.CopyToHost(pointer(host), mem, 64))
		}
	})
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
	require.ErrorIs(t, full.Synchronize(soon(t)), context.DeadlineExceeded)
	require.ErrorIs(t, full.Timeline().End().Wait(soon(t)), context.DeadlineExceeded)
	require.NoError(t, other.CopyToDevice(mem, pointer(host), 64))
	require.NoError(t, other.Synchronize(t.Context()))
	require.NoError(t, other.Point().Wait(t.Context()))
	open()
	copies.Wait()
	require.NoError(t, full.Synchronize(t.Context()))
	drained(t, sim)
}

// Goroutines that stop waiting for a device must not leave a thread each.
func TestDeviceIsWaitedForByOneThread(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	open := gate(t, s)
	before := threads(t)
	first := make(chan error, 1)
	go func() { first <- dev.Synchronize(context.Background()) }()
	require.Eventually(t, func() bool { return sim.Calls("cudaDeviceSynchronize") == 1 }, 20*time.Second, time.Millisecond)
	var all sync.WaitGroup
	for range 2000 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		all.Go(func() {
			defer cancel()
			assert.ErrorIs(t, dev.Synchronize(ctx), context.DeadlineExceeded)
		})
	}
	all.Wait()
	assert.Equal(t, 1, sim.Calls("cudaDeviceSynchronize"), "the others wait for the next one")
	assert.Less(t, threads(t)-before, 50)
	late := make(chan error, 1)
	go func() { late <- dev.Synchronize(context.Background()) }()
	open()
	require.NoError(t, <-first)
	require.NoError(t, <-late)
	assert.LessOrEqual(t, sim.Calls("cudaDeviceSynchronize"), 3)
}

// A wait for a device covers what was queued before it began, although another
// one was under way.
func TestDeviceWaitsCoverWhatWasQueuedBefore(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	a, b := stream(t, dev), stream(t, dev)
	openA := gate(t, a)
	first := make(chan error, 1)
	go func() { first <- dev.Synchronize(context.Background()) }()
	require.Eventually(t, func() bool { return sim.Calls("cudaDeviceSynchronize") == 1 }, 20*time.Second, time.Millisecond)
	openB := gate(t, b)
	second := make(chan error, 1)
	go func() { second <- dev.Synchronize(context.Background()) }()
	openA()
	require.NoError(t, <-first)
	require.Eventually(t, func() bool { return sim.Calls("cudaDeviceSynchronize") == 2 }, 20*time.Second, time.Millisecond)
	select {
	case err := <-second:
		t.Fatalf("ended before the work that was queued before it: %v", err)
	default:
	}
	openB()
	require.NoError(t, <-second)
}

func TestStuckNamesTheCall(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := rt.Device(1)
	require.NoError(t, err)
	require.Empty(t, rt.Stuck(t.Context(), time.Hour), "with nothing inside it does not wait")
	unblock := sim.Block("cudaMemGetInfo", cudasim.Fault{})
	done := make(chan error, 1)
	go func() { _, _, err := dev.MemInfo(); done <- err }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemGetInfo", 1))
	want := rt.Stuck(t.Context(), time.Millisecond)
	require.Len(t, want, 1)
	assert.Equal(t, "cudaMemGetInfo", want[0].Function)
	assert.Equal(t, 1, want[0].Device)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, want, rt.Stuck(ended, time.Hour), "its context ends it")
	assert.Equal(t, "cudaMemGetInfo on device 1", want[0].String())
	unblock()
	require.NoError(t, <-done)
	require.Empty(t, rt.Stuck(t.Context(), time.Millisecond))

	unblock = sim.Block("cudaMemGetInfo", cudasim.Fault{})
	go func() { _, _, err := dev.MemInfo(); done <- err }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemGetInfo", 1))
	again := rt.Stuck(t.Context(), time.Millisecond)
	require.Len(t, again, 1)
	require.False(t, want[0] == again[0], "it is another call of the same function")
	assert.Equal(t, want[0].String(), again[0].String())
	unblock()
	require.NoError(t, <-done)
}

// Two calls of one function, one after the other, are not one call that is stuck.
func TestStuckDistinguishesCalls(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	const rounds = 20
	next := make(chan struct{})
	done := make(chan error, 1)
	unblock := sim.Block("cudaMemGetInfo", cudasim.Fault{})
	go func() {
		var err error
		for range rounds + 1 {
			if _, _, e := dev.MemInfo(); e != nil {
				err = e
			}
			<-next
		}
		done <- err
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemGetInfo", 1))
	for range rounds {
		// While Stuck waits, the call that it saw returns, and another is made.
		ctx := &endsAfter{Context: t.Context(), first: func() {
			unblock()
			unblock = sim.Block("cudaMemGetInfo", cudasim.Fault{})
			next <- struct{}{}
			assert.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemGetInfo", 1))
		}}
		assert.Empty(t, rt.Stuck(ctx, time.Hour))
	}
	assert.Len(t, rt.Stuck(t.Context(), 0), 1)
	unblock()
	close(next)
	require.NoError(t, <-done)
}

// endsAfter is a context that ends when it is waited for, once first has returned.
type endsAfter struct {
	context.Context
	first func()
}

func (c *endsAfter) Done() <-chan struct{} {
	c.first()
	ended := make(chan struct{})
	close(ended)
	return ended
}

// The runtime is closed although a call never returns.
func TestCloseWithACallThatNeverReturns(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaStreamQuery", "cudaEventRecord", "cudaEventQuery", "cudaDeviceSynchronize"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
			require.NoError(t, err)
			rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
			require.NoError(t, err)
			dev, err := rt.Device(0)
			require.NoError(t, err)
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			open := gate(t, s)
			unblock := sim.Block(fn, cudasim.Fault{Times: -1})
			waits := make(chan error, 3)
			go func() { waits <- s.Synchronize(t.Context()) }()
			go func() { waits <- s.Timeline().End().Wait(t.Context()) }()
			go func() { waits <- dev.Synchronize(t.Context()) }()
			require.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
			require.NoError(t, rt.Close())
			for i := range cap(waits) {
				select {
				case err := <-waits:
					assert.ErrorIs(t, err, cudart.ErrClosed)
					assert.ErrorIs(t, err, os.ErrClosed)
				case <-time.After(20 * time.Second):
					t.Fatalf("wait %d goes on", i)
				}
			}
			unblock()
			open()
			_ = s.Close()
			_ = sim.Close()
		})
	}
}

// A runtime without waits has neither a goroutine nor a thread nor a file descriptor.
func TestWaitsLeaveNothingBehind(t *testing.T) {
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	require.NoError(t, s.Synchronize(t.Context()))
	open := gate(t, s)
	wait := make(chan error, 1)
	go func() { wait <- s.Synchronize(t.Context()) }()
	require.Eventually(t, func() bool { return rt.Waiting() == 1 }, 20*time.Second, time.Millisecond)
	require.Eventually(t, rt.Polling, 20*time.Second, time.Millisecond)
	open()
	require.NoError(t, <-wait)
	require.Eventually(t, func() bool { return !rt.Polling() }, 20*time.Second, 10*time.Millisecond)
}

// Canceling many waits for one stream takes time that is linear in their number.
func TestManyWaitsCanceledTogether(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	open := gate(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	const n = 10_000
	var all sync.WaitGroup
	for range n {
		all.Go(func() { assert.ErrorIs(t, s.Synchronize(ctx), context.Canceled) })
	}
	require.Eventually(t, func() bool { return rt.Waiting() == n }, 60*time.Second, 10*time.Millisecond)
	cancel()
	all.Wait()
	assert.Zero(t, rt.Waiting())
	open()
	require.NoError(t, s.Synchronize(t.Context()))
}

// A lost stream is garbage, also if it was waited for.
func TestLostStreamsThatWereWaitedForAreDestroyed(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	for range 50 {
		func() {
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			open := make(chan struct{})
			require.NoError(t, s.LaunchHostFunc(func() { <-open }))
			require.ErrorIs(t, s.Synchronize(soon(t)), context.DeadlineExceeded)
			close(open)
			require.NoError(t, s.Synchronize(t.Context()))
		}()
	}
	require.Eventually(t, func() bool {
		runtime.GC()
		return sim.Outstanding().Streams == 0
	}, 20*time.Second, 10*time.Millisecond)
}
