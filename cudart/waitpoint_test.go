package cudart_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// waits makes a stream wait for a point, and returns the number of calls of
// cudaStreamWaitEvent.
func (b *bench) waits(s *cudart.Stream, p cudart.Point) int {
	b.Helper()
	before := b.sim.Calls("cudaStreamWaitEvent")
	require.NoError(b, s.WaitPoint(p))
	return b.sim.Calls("cudaStreamWaitEvent") - before
}

// A stream that waits for a point waits for all before it, without another call. Only the
// last wait counts.
func TestAStreamWaitsForAPointOnce(t *testing.T) {
	b := newBench(t)
	other, third := stream(t, b.dev), stream(t, b.dev)
	gate(t, b.s)
	gate(t, third)
	first := b.s.Point()
	b.queue(b.s)
	second := b.s.Point()
	b.queue(b.s)
	last := b.s.Point()
	assert.Equal(t, 1, b.waits(other, first))
	assert.Equal(t, 0, b.waits(other, first))
	assert.Equal(t, 1, b.waits(other, last))
	for _, p := range []cudart.Point{second, last, first} {
		assert.Equal(t, 0, b.waits(other, p))
	}
	assert.Equal(t, 1, b.waits(third, second), "another stream waits for itself")
	b.queue(b.s)
	assert.Equal(t, 1, b.waits(other, b.s.Point()), "work was queued since")
	assert.Equal(t, 1, b.waits(other, third.Point()))
	assert.Equal(t, 1, b.waits(other, last), "the last wait was for the third stream")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if other.WaitPoint(first) != nil {
			t.Error("it waits")
		}
	}))
}

// What a stream does not have to wait for again is before its later work all the same.
func TestAWaitThatNeedsNoCall(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := stream(t, b.dev)
	fill(b.host, 1)
	back := pinned(t, b.dev, 64)
	open := gate(t, b.s)
	require.NoError(t, b.s.CopyToDevice(b.mem, pointer(b.host), 64))
	p := b.s.Point()
	assert.Equal(t, 1, b.waits(other, p))
	require.NoError(t, other.CopyToHost(pointer(back), b.mem, 64))
	fill(back, 2)
	require.Equal(t, 0, b.waits(other, p))
	require.NoError(t, other.CopyToHost(pointer(back), b.mem, 64))
	require.ErrorIs(t, other.Synchronize(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, other.Synchronize(t.Context()))
	assert.Equal(t, b.host, back)
}

// A wait that makes no call queues nothing, so that the end of the stream's work stays
// where it is, and needs no event.
func TestAWaitThatNeedsNoCallIsNoWork(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := stream(t, b.dev)
	gate(t, b.s)
	p := b.s.Point()
	require.Equal(t, 1, b.waits(other, p))
	end := other.Point()
	calls := b.sim.TotalCalls()
	for range 10 {
		require.NoError(t, other.WaitPoint(p))
		require.Equal(t, end, other.Point())
	}
	assert.Equal(t, calls, b.sim.TotalCalls())
}

// A point without an event yet has the number of a later one, which more work may be
// queued before.
func TestAStreamWaitsForWorkThatWasQueuedSinceAPointWithoutAnEvent(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := stream(t, b.dev)
	line := b.s.Timeline()
	b.queue(b.s)
	p := line.End()
	require.NoError(t, other.WaitPoint(p))
	require.NoError(t, other.Synchronize(t.Context()))
	open := gate(t, b.s)
	require.NoError(t, other.WaitPoint(line.End()))
	b.queue(other)
	require.ErrorIs(t, other.Synchronize(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, other.Synchronize(t.Context()))
}

// A wait that failed is no wait, also if the library reports an error of earlier work by it.
func TestAStreamDoesNotRelyOnAWaitThatFailed(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		b := newBench(t)
		other := stream(t, b.dev)
		gate(t, b.s)
		p := b.s.Point()
		b.sim.Fail("cudaStreamWaitEvent", cudasim.Fault{Code: cudart.ErrUnknown, Late: late, Times: 2})
		for range 2 {
			require.ErrorIs(t, other.WaitPoint(p), cudart.ErrUnknown)
		}
		assert.Equal(t, 1, b.waits(other, p))
		assert.Equal(t, 0, b.waits(other, p))
	}
}

// What cannot wait returns the error, also if it waited for the point before.
func TestAClosedStreamCannotWaitAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	open := gate(t, b.s)
	p := b.s.Point()
	require.Equal(t, 1, b.waits(other, p))
	require.NoError(t, other.Close())
	require.ErrorIs(t, other.WaitPoint(p), cudart.ErrClosed)
	open()
	require.NoError(t, p.Wait(t.Context()))
	require.NoError(t, other.WaitPoint(p), "the point is known to be reached")
}

// The same if the runtime is closed.
func TestAStreamOfAClosedRuntimeCannotWaitAgain(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	require.NoError(t, err)
	defer sim.Close()
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	other, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	open := gate(t, s)
	p := s.Point()
	require.NoError(t, other.WaitPoint(p))
	require.NoError(t, other.WaitPoint(p))
	require.NoError(t, rt.Close())
	require.ErrorIs(t, other.WaitPoint(p), cudart.ErrClosed)
	open()
}

// Other code that has the handle may capture a wait into a graph, which the stream then
// does not do.
func TestAStreamThatOtherCodeHasWaitsAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner := stream(t, b.dev)
	open := gate(t, b.s)
	p := b.s.Point()
	assert.Equal(t, 1, b.waits(owner, p))
	assert.Equal(t, 0, b.waits(owner, p))
	foreign, err := b.dev.StreamFromHandle(owner.Handle())
	require.NoError(t, err)
	legacy, err := b.dev.StreamFromHandle(0)
	require.NoError(t, err)
	for range 2 {
		for _, s := range []*cudart.Stream{owner, foreign, legacy} {
			assert.Equal(t, 1, b.waits(s, p), s)
		}
	}
	open()
	require.NoError(t, foreign.Close())
	require.NoError(t, legacy.Close())
}

// Streams of two devices wait for one another.
func TestAStreamWaitsOnceForAPointOfAnotherDevice(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	var streams []*cudart.Stream
	var points []cudart.Point
	for i := range 2 {
		dev, err := rt.Device(i)
		require.NoError(t, err)
		streams = append(streams, stream(t, dev))
		gate(t, streams[i])
		points = append(points, streams[i].Point())
	}
	for range 3 {
		require.NoError(t, streams[0].WaitPoint(points[1]))
	}
	assert.Equal(t, 1, sim.Calls("cudaStreamWaitEvent"))
	assert.Empty(t, sim.Misuses())
}

// An event stands for other work if it is recorded again, on another stream, just before a
// stream waits for it.
func TestStreamsWaitForPointsWhoseEventsWereRecordedAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other, third := stream(t, b.dev), stream(t, b.dev)
	fill(b.host, 1)
	back := pinned(t, b.dev, 64)
	mem := map[*cudart.Stream]cudart.DevPtr{b.s: device(t, b.dev, 64), third: device(t, b.dev, 64)}
	queue := func(s *cudart.Stream) cudart.Point {
		assert.NoError(t, s.Memset(mem[s], 0, 64))
		return s.Point()
	}
	var done []cudart.Point
	for range 4 {
		done = append(done, queue(b.s))
	}
	opened := gate(t, b.s)
	require.NoError(t, b.s.CopyToDevice(b.mem, pointer(b.host), 64))
	p := b.s.Point()

	// Other goroutines go on: so many points share events, others are found to be reached,
	// and a third stream gets the events that are not needed any more.
	begin, end := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(end)
		<-begin
		for range 130 {
			queue(b.s)
		}
		for _, p := range done {
			assert.NoError(t, p.Wait(t.Context()))
		}
		for range 130 {
			assert.NoError(t, queue(third).Wait(t.Context()))
			queue(third)
		}
	}()
	waiting := true
	b.sim.OnCall(func(fn string, _ int) {
		if fn == "cudaStreamWaitEvent" && waiting {
			waiting = false
			close(begin)
			<-end
		}
	})
	require.NoError(t, other.WaitPoint(p))
	b.sim.OnCall(nil)
	require.NoError(t, other.CopyToHost(pointer(back), b.mem, 64))
	require.ErrorIs(t, other.Synchronize(soon(t)), context.DeadlineExceeded)
	opened()
	require.NoError(t, other.Synchronize(t.Context()))
	assert.Equal(t, b.host, back)
	require.NoError(t, b.s.Synchronize(t.Context()))
	require.NoError(t, third.Synchronize(t.Context()))
}

// A stream does not keep another one, or its Timeline, for having waited for it.
func TestAStreamThatWaitedKeepsNoOther(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	lost := make(chan struct{})
	func() {
		s, err := b.dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		open := gate(t, s)
		p := s.Point()
		require.Equal(t, 1, b.waits(b.s, p))
		require.Equal(t, 0, b.waits(b.s, p))
		open()
		require.NoError(t, p.Wait(t.Context()))
		runtime.AddCleanup(s.Timeline(), func(c chan struct{}) { close(c) }, lost)
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		select {
		case <-lost:
			return true
		default:
			return false
		}
	}, 20*time.Second, time.Millisecond)
	runtime.KeepAlive(b.s)
}
