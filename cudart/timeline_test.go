package cudart_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A bench is a simulated device with a stream and memory to copy.
type bench struct {
	testing.TB
	sim  *cudasim.Sim
	rt   *cudart.Runtime
	dev  *cudart.Device
	s    *cudart.Stream
	mem  cudart.DevPtr
	host []byte
}

func newBench(tb testing.TB) *bench {
	tb.Helper()
	sim, rt := testgpu.Sim(tb, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(tb, err)
	return &bench{TB: tb, sim: sim, rt: rt, dev: dev, s: stream(tb, dev), mem: device(tb, dev, 64), host: pinned(tb, dev, 64)}
}

func (b *bench) queue(s *cudart.Stream) {
	b.Helper()
	require.NoError(b, s.CopyToHost(pointer(b.host), b.mem, 64))
}

// done waits, by looks only, until a point is reached.
func (b *bench) done(p cudart.Point) {
	b.Helper()
	require.Eventually(b, func() bool { return p.Done(context.Background()) }, 20*time.Second, 100*time.Microsecond)
}

func TestPointsShareAnEventUntilWorkIsQueued(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.True(t, b.s.Point().Completed(), "nothing was ever queued")
	require.Zero(t, b.sim.Calls("cudaEventRecord"))
	open := gate(t, b.s)
	first := b.s.Point()
	for range 10 {
		assert.Equal(t, first, b.s.Point())
	}
	assert.Equal(t, 1, b.sim.Calls("cudaEventRecord"))
	b.queue(b.s)
	second := b.s.Point()
	assert.NotEqual(t, first, second)
	assert.Equal(t, 2, b.sim.Calls("cudaEventRecord"))
	for _, p := range []cudart.Point{first, second} {
		assert.False(t, p.Done(context.Background()))
	}
	open()
	require.NoError(t, second.Wait(t.Context()))
	queries := b.sim.Calls("cudaEventQuery")
	assert.True(t, first.Completed(), "a later point is reached later")
	assert.Equal(t, queries, b.sim.Calls("cudaEventQuery"))
	assert.Equal(t, second, b.s.Point())
	assert.Equal(t, 1, b.sim.Calls("cudaEventCreateWithFlags")-1, "two events at a time")
}

// Work that other code queues by the handle is not seen: each point records an event.
func TestPointsOfAnExposedStream(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_ = b.s.Handle()
	for range 3 {
		require.NoError(t, b.s.Point().Wait(t.Context()))
	}
	assert.Equal(t, 3, b.sim.Calls("cudaEventRecord"))
}

// Any call may fail once, or always: a point is reached when the work before it is done,
// not earlier, and the device is asked only if no event answers.
func TestPointsSurviveFailedCalls(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		fn     string
		times  int
		device bool
	}{
		{"cudaEventRecord", 1, false},
		{"cudaEventQuery", 1, false},
		{"cudaEventCreateWithFlags", 1, false},
		{"cudaEventRecord", -1, true},
		{"cudaEventQuery", -1, true},
		{"cudaEventCreateWithFlags", -1, true},
	} {
		for _, by := range []string{"Done", "Wait", "Notify"} {
			t.Run(tt.fn+" fails for "+by, func(t *testing.T) {
				t.Parallel()
				b := newBench(t)
				open := gate(t, b.s)
				b.queue(b.s)
				b.sim.Fail(tt.fn, cudasim.Fault{Code: cudart.ErrUnknown, Times: tt.times})
				p := b.s.Point()
				for range 5 {
					require.False(t, p.Done(context.Background()))
				}
				require.ErrorIs(t, p.Wait(soon(t)), context.DeadlineExceeded)
				open()
				switch by {
				case "Done":
					b.done(p)
				case "Wait":
					require.NoError(t, p.Wait(t.Context()))
				case "Notify":
					c := make(chan struct{}, 1)
					for !p.Completed() {
						p.Notify(c)
						<-c
					}
				}
				require.True(t, p.Completed())
				if !tt.device {
					assert.Zero(t, b.sim.Calls("cudaDeviceSynchronize"))
				}
				assert.ErrorIs(t, p.Err(), cudart.ErrUnknown, "the error may be one of the work")
				b.sim.ResetFaults()
				b.queue(b.s)
				p = b.s.Point()
				require.NoError(t, p.Wait(t.Context()))
				assert.ErrorIs(t, b.s.Synchronize(t.Context()), cudart.ErrUnknown, "reported once")
			})
		}
	}
}

// One wait for the device serves all streams that need it.
func TestDeviceIsSynchronizedOnceForAllStreams(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const n = 50
	b.sim.Fail("cudaEventRecord", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	open := gate(t, b.s)
	points := []cudart.Point{b.s.Point()}
	for range n {
		s := stream(t, b.dev)
		b.queue(s)
		points = append(points, s.Point())
	}
	for range 5 {
		for _, p := range points {
			require.False(t, p.Done(context.Background()), "the device is busy")
		}
	}
	open()
	for _, p := range points {
		require.NoError(t, p.Wait(t.Context()))
	}
	assert.LessOrEqual(t, b.sim.Calls("cudaDeviceSynchronize"), 3)
	b.sim.ResetFaults()
}

// An error of a wait for the device is for those who waited before it began, and not for those since: what failed then may
// work again.
func TestErrorsOfTheDeviceAreForEarlierWaits(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sim.Fail("cudaEventRecord", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	fail := b.sim.Block("cudaDeviceSynchronize", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	open := gate(t, b.s)
	p := b.s.Point()
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- p.Wait(t.Context()) }()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaDeviceSynchronize", 1))
	go func() { second <- p.Wait(t.Context()) }()
	require.Eventually(t, func() bool { return cudart.QueuedWaits(p) == 2 }, 20*time.Second, time.Millisecond)
	b.sim.ResetFaults()
	fail()
	require.ErrorIs(t, <-first, cudart.ErrMemoryAllocation)
	select {
	case err := <-second:
		t.Fatalf("ended before the work: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	open()
	require.NoError(t, <-second)
}

func TestPointsOfClosedAndLostStreams(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		lose, fail bool
	}{"closed": {}, "lost": {lose: true}, "closed, without an event": {fail: true}, "lost, without an event": {true, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			hold := make(chan struct{})
			line := func() *cudart.Timeline {
				s, err := b.dev.NewStream(cudart.StreamOptions{})
				require.NoError(t, err)
				line := s.Timeline()
				require.NoError(t, s.LaunchHostFunc(func() { <-hold }))
				b.queue(s)
				if tt.fail {
					b.sim.Fail("cudaEventRecord", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
				}
				if !tt.lose {
					require.NoError(t, s.Close())
				}
				return line
			}()
			require.Eventually(t, func() bool {
				runtime.GC()
				return b.sim.Outstanding().Streams == 1
			}, 20*time.Second, 10*time.Millisecond)
			p := line.Point()
			require.False(t, p.Done(context.Background()))
			close(hold)
			require.NoError(t, p.Wait(t.Context()))
			require.Equal(t, p, line.End(), "nothing can be queued any more")
			if quiet, ok := line.Idle(); assert.True(t, ok) {
				assert.Equal(t, p, quiet)
			}
			if !tt.fail {
				assert.Zero(t, b.sim.Calls("cudaDeviceSynchronize"))
			}
			b.sim.ResetFaults()
		})
	}
}

// A stream without points is closed without an event.
func TestCloseRecordsNothingWithoutPoints(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	b.queue(s)
	require.NoError(t, s.Close())
	assert.Zero(t, b.sim.Calls("cudaEventRecord"))
	require.NoError(t, b.dev.Synchronize(t.Context()))
}

// On a lost device no call reports what is done: that is an error, and asking ends.
func TestPointsOfALostDevice(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	require.NoError(t, err)
	defer func() { _ = sim.Close() }() // what the device held stays
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	defer func() { _ = rt.Close() }()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	open := gate(t, s)
	p := s.Point()
	waits := make(chan error, 1)
	go func() { waits <- p.Wait(context.Background()) }()
	require.NoError(t, sim.LoseDevice(0))
	open()
	err = <-waits
	if err == nil {
		// The host function ended, and the event with it: that was before.
		t.Skip("the work ended before the device was lost")
	}
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	require.False(t, p.Done(context.Background()))
	require.ErrorIs(t, p.Wait(t.Context()), cudart.ErrLaunchFailure)
	require.ErrorIs(t, p.Err(), cudart.ErrLaunchFailure)
	calls := sim.TotalCalls()
	require.ErrorIs(t, p.Wait(t.Context()), cudart.ErrLaunchFailure)
	assert.Less(t, sim.TotalCalls()-calls, 50)
}

// An error of asynchronous work is that of the points which were not reached
// when it was found, and of no others.
func TestPointsReportErrorsOfTheirWork(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.queue(b.s)
	before := b.s.Point()
	require.NoError(t, before.Wait(t.Context()))
	b.sim.Fail("cudaMemcpyAsync", cudasim.Fault{Async: true, Transient: true, Code: cudart.ErrIllegalAddress})
	b.queue(b.s)
	failed := b.s.Point()
	require.NoError(t, failed.Wait(t.Context()), "the memory is not used any more")
	b.queue(b.s)
	after := b.s.Point()
	require.NoError(t, after.Wait(t.Context()))
	assert.NoError(t, before.Err())
	assert.ErrorIs(t, failed.Err(), cudart.ErrIllegalAddress)
	assert.NoError(t, after.Err())
	done, err := b.s.Query()
	assert.ErrorIs(t, err, cudart.ErrIllegalAddress, "it was not seen by the stream's owner")
	assert.False(t, done)
	done, err = b.s.Query()
	assert.NoError(t, err)
	assert.True(t, done)
}

// The number of pending events is limited, the number of points is not.
func TestManyPendingPointsShareEvents(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	open := gate(t, b.s)
	var points []cudart.Point
	for range 900 {
		if len(points)%2 == 0 {
			b.queue(b.s)
		}
		points = append(points, b.s.Point())
	}
	assert.Less(t, b.sim.Outstanding().Events, 150)
	for _, p := range points {
		require.False(t, p.Done(context.Background()))
	}
	open()
	for i := range points {
		b.done(points[i])
		for _, earlier := range points[:i] {
			require.True(t, earlier.Completed())
		}
	}
}

func TestStreamsWaitForPoints(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := stream(t, b.dev)
	fill(b.host, 1)
	back := pinned(t, b.dev, 64)
	open := gate(t, b.s)
	require.NoError(t, b.s.CopyToDevice(b.mem, pointer(b.host), 64))
	require.NoError(t, other.WaitPoint(b.s.Timeline().End()), "which records an event")
	require.NoError(t, other.CopyToHost(pointer(back), b.mem, 64))
	require.ErrorIs(t, other.Synchronize(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, other.Synchronize(t.Context()))
	assert.Equal(t, b.host, back)
	p := b.s.Point()
	require.NoError(t, p.Wait(t.Context()))
	calls := b.sim.Calls("cudaStreamWaitEvent")
	require.NoError(t, other.WaitPoint(p))
	require.NoError(t, other.WaitPoint(cudart.Point{}))
	require.NoError(t, b.s.WaitPoint(b.s.Point()), "a stream is in order with itself")
	assert.Equal(t, calls, b.sim.Calls("cudaStreamWaitEvent"))

	b.sim.Fail("cudaEventRecord", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	open = gate(t, b.s)
	require.ErrorIs(t, other.WaitPoint(b.s.Point()), cudart.ErrUnknown)
	open()
	b.sim.ResetFaults()
	_ = b.s.Synchronize(t.Context())
}

// A destruction that reports an error of earlier work is not tried again: the
// handle is gone.
func TestDestroyThatReportsAnEarlierError(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	e, err := b.dev.NewEvent()
	require.NoError(t, err)
	b.sim.Fail("cudaStreamDestroy", cudasim.Fault{Code: cudart.ErrLaunchFailure, Late: true})
	b.sim.Fail("cudaEventDestroy", cudasim.Fault{Code: cudart.ErrLaunchFailure, Late: true})
	require.ErrorIs(t, s.Close(), cudart.ErrLaunchFailure)
	require.ErrorIs(t, e.Close(), cudart.ErrLaunchFailure)
	require.NoError(t, s.Close())
	require.NoError(t, e.Close())
	assert.Empty(t, b.sim.Misuses())
}

// The last call in progress destroys a stream that was closed during the call. If that
// fails, closing the runtime tries again.
func TestCloseDuringACall(t *testing.T) {
	t.Parallel()
	for _, times := range []int{0, 1} {
		b := newBench(t)
		s, err := b.dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		unblock := b.sim.Block("cudaMemcpyAsync", cudasim.Fault{})
		copied := make(chan error, 1)
		go func() { copied <- s.CopyToHost(pointer(b.host), b.mem, 64) }()
		require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
		line := s.Timeline()
		if times > 0 {
			b.sim.Fail("cudaStreamDestroy", cudasim.Fault{Code: cudart.ErrUnknown, Times: times})
		}
		require.NoError(t, s.Close())
		require.ErrorIs(t, s.Memset(b.mem, 0, 1), cudart.ErrClosed)
		unblock()
		require.NoError(t, <-copied)
		require.NoError(t, line.End().Wait(t.Context()))
		assert.Equal(t, 1+times, b.sim.Outstanding().Streams)
	}
}

// A stream that is closed while another goroutine records an event gets the event of its end all
// the same: cudaDeviceSynchronize would wait for other streams as well.
func TestCloseWhileAnEventIsRecorded(t *testing.T) {
	t.Parallel()
	for fn, name := range map[string]string{
		"cudaEventCreateWithFlags": "before the handle is used",
		"cudaEventRecord":          "with the handle in use, and work that the event does not cover",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			stalled := make(chan struct{})
			t.Cleanup(func() { close(stalled) })
			require.NoError(t, b.s.LaunchHostFunc(func() { <-stalled }))
			s, err := b.dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			b.queue(s)
			line := s.Timeline()
			unblock := b.sim.Block(fn, cudasim.Fault{})
			recorded := make(chan cudart.Point, 1)
			go func() { recorded <- line.Point() }()
			require.NoError(t, b.sim.AwaitBlocked(t.Context(), fn, 1))
			b.queue(s)
			end := line.End()
			require.NoError(t, s.Close())
			ctx, synchronizes := context.WithCancel(t.Context())
			defer synchronizes()
			b.sim.OnCall(func(fn string, _ int) {
				if fn == "cudaDeviceSynchronize" || fn == "cuCtxSynchronize" {
					synchronizes()
				}
			})
			unblock()
			require.NoError(t, (<-recorded).Wait(ctx))
			require.NoError(t, end.Wait(ctx))
			b.sim.OnCall(nil)
			assert.Equal(t, 1, b.sim.Outstanding().Streams)
		})
	}
}

func TestPointsAreCheap(t *testing.T) {
	b := newBench(t)
	b.queue(b.s)
	p := b.s.Point()
	require.NoError(t, p.Wait(t.Context()))
	ctx := context.Background()
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if q := b.s.Point(); !q.Done(ctx) || q.Err() != nil || b.s.WaitPoint(q) != nil {
			t.Error("not reached")
		}
	}))
}

// Streams wait for points that another goroutine is just recording.
func TestStreamsWaitForPointsFromManyGoroutines(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var all sync.WaitGroup
	for range 8 {
		other := stream(t, b.dev)
		all.Go(func() {
			for range 200 {
				b.queue(b.s)
				assert.NoError(t, other.WaitPoint(b.s.Point()))
			}
			assert.NoError(t, other.Synchronize(t.Context()))
		})
	}
	all.Wait()
	require.NoError(t, b.s.Synchronize(t.Context()))
	drained(t, b.sim)
}

// An event that cannot be queried is destroyed, perhaps by another goroutine, when a stream is
// about to wait for it.
func TestStreamsWaitForPointsWhoseEventsWereDestroyed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := stream(t, b.dev)
	fill(b.host, 1)
	back := pinned(t, b.dev, 64)
	open := gate(t, b.s)
	require.NoError(t, b.s.CopyToDevice(b.mem, pointer(b.host), 64))
	p := b.s.Point()
	require.NoError(t, p.CloseEvent())
	require.NoError(t, other.WaitPoint(p))
	require.NoError(t, other.CopyToHost(pointer(back), b.mem, 64))
	require.ErrorIs(t, other.Synchronize(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, other.Synchronize(t.Context()))
	assert.Equal(t, b.host, back)
	require.NoError(t, p.Wait(t.Context()))
	_ = b.s.Synchronize(t.Context()) // reports the look at the event
	b.queue(b.s)
	require.NoError(t, other.Close())
	require.ErrorIs(t, other.WaitPoint(b.s.Timeline().End()), cudart.ErrClosed, "a stream that is closed is an error still")
}

// An event is work, too: who has synchronized a stream may ask an event for its time.
func TestSynchronizeWaitsForEvents(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, mem := stream(t, dev), device(t, dev, 64)
	e, err := dev.NewEvent()
	require.NoError(t, err)
	require.NoError(t, s.Memset(mem, 0, 64))
	require.NoError(t, s.Point().Wait(t.Context()))
	sim.Hold()
	defer sim.Release()
	require.NoError(t, s.Record(e))
	require.ErrorIs(t, s.Synchronize(soon(t)), context.DeadlineExceeded)
	sim.Release()
	require.NoError(t, s.Synchronize(t.Context()))
	_, err = e.Since(e)
	require.NoError(t, err)
	require.NoError(t, e.Close())
}

// A wait inside of CUDA is for all work so far, which is known to be done then; it
// reports the work's errors, also those that a look at a Point has found.
func TestSynchronizeBlocking(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, mem := stream(t, dev), device(t, dev, 64)
	open := gate(t, s)
	require.NoError(t, s.Memset(mem, 0, 64))
	p := s.Point()
	done := make(chan error)
	go func() { done <- s.SynchronizeBlocking() }()
	require.Eventually(t, func() bool { return sim.Calls("cudaStreamSynchronize") == 1 }, 20*time.Second, time.Millisecond)
	require.False(t, p.Done(t.Context()))
	open()
	require.NoError(t, <-done)
	require.True(t, p.Completed())

	sim.Fail("cudaStreamSynchronize", cudasim.Fault{Code: cudart.ErrLaunchFailure})
	require.ErrorIs(t, s.SynchronizeBlocking(), cudart.ErrLaunchFailure)
	require.NoError(t, s.SynchronizeBlocking())
	require.NoError(t, s.Memset(mem, 0, 64))
	p = s.Point()
	sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrLaunchFailure})
	require.False(t, p.Done(context.Background()))
	require.ErrorIs(t, s.SynchronizeBlocking(), cudart.ErrLaunchFailure)
	require.NoError(t, s.SynchronizeBlocking())

	closed, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	require.ErrorIs(t, closed.SynchronizeBlocking(), cudart.ErrClosed)
}

// The answer of an event's query is about no Point if the event was recorded on another
// stream during the query.
func TestQueryOfAnEventOfAnotherStreamIsIgnored(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	open := gate(t, s)
	p := s.Point()
	unblock := b.sim.Block("cudaEventQuery", cudasim.Fault{})
	looked := make(chan bool)
	go func() { looked <- p.Done(context.Background()) }()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaEventQuery", 1))
	// So many Points share events, and those that are not needed go to other streams.
	for range 130 {
		b.queue(s)
		s.Point()
	}
	require.NoError(t, s.Close())
	openOther := gate(t, b.s)
	for range 130 {
		b.queue(b.s)
		b.s.Point()
	}
	openOther()
	require.NoError(t, b.s.Synchronize(t.Context()))
	unblock()
	assert.False(t, <-looked)
	assert.False(t, p.Completed(), "the stream has not done it")
	open()
	require.NoError(t, p.Wait(t.Context()))
}

// An answer without an event is older than events that were recorded during the call.
func TestQueryLeavesLaterEventsInPlace(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_ = b.s.Timeline()
	unblock := b.sim.Block("cudaStreamQuery", cudasim.Fault{Late: true})
	queried := make(chan error, 1)
	go func() {
		_, err := b.s.Query()
		queried <- err
	}()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaStreamQuery", 1))
	open := gate(t, b.s)
	p := b.s.Point()
	records := b.sim.Calls("cudaEventRecord")
	unblock()
	require.NoError(t, <-queried)
	assert.Equal(t, p, b.s.Point())
	assert.Equal(t, records, b.sim.Calls("cudaEventRecord"), "the event stands for it still")
	assert.False(t, p.Done(context.Background()))
	open()
	require.NoError(t, p.Wait(t.Context()))
}
