package pending_test

import (
	"context"
	"errors"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/pending"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A block is all that a pool has to be to test with.
type block struct {
	pending.Block[block]
	name string
}

// A fixture is a pool on a simulated device.
type fixture struct {
	*testing.T
	sim   *cudasim.Sim
	dev   *cudart.Device
	mem   cudart.DevPtr
	host  unsafe.Pointer
	queue *pending.Queue[block]

	mu   sync.Mutex
	idle []string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := &fixture{T: t, sim: sim, dev: dev}
	r.mem, err = dev.Malloc(64)
	require.NoError(t, err)
	r.host, err = dev.HostAlloc(64, 0)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, dev.Free(r.mem))
		assert.NoError(t, dev.FreeHost(r.host))
	})
	r.queue = pending.New(func(b *block) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.idle = append(r.idle, b.name)
	})
	return r
}

func (r *fixture) stream() *cudart.Stream {
	r.Helper()
	s, err := r.dev.NewStream(cudart.StreamOptions{})
	require.NoError(r, err)
	r.Cleanup(func() { assert.NoError(r, s.Close()) })
	return s
}

// stall makes a stream busy until open is called, or the test ends.
func (r *fixture) stall(s *cudart.Stream) (open func()) {
	r.Helper()
	gate := make(chan struct{})
	require.NoError(r, s.LaunchHostFunc(func() { <-gate }))
	open = sync.OnceFunc(func() { close(gate) })
	r.Cleanup(open)
	return open
}

// release releases a block of a class and 10 bytes, in use by work on all these streams.
func (r *fixture) release(name string, class int, streams ...*cudart.Stream) *block {
	r.Helper()
	b := &block{name: name}
	b.Outer, b.Class, b.Size = b, class, 10
	for _, s := range streams {
		require.NoError(r, s.LaunchHostFunc(func() {}))
		b.Fence.Add(s)
	}
	r.queue.Add(&b.Block, r.end(b))
	return b
}

// end returns the Point that a block is to be added with.
func (r *fixture) end(b *block) cudart.Point {
	b.Fence.Record()
	at, ok := b.Fence.Next()
	require.True(r, ok)
	return at
}

// quiet waits for streams without asking for the blocks' Points.
func (r *fixture) quiet(streams ...*cudart.Stream) {
	r.Helper()
	for _, s := range streams {
		done := make(chan struct{})
		require.NoError(r, s.LaunchHostFunc(func() { close(done) }))
		<-done
	}
}

// recovers waits for a stream that can be queried again. A call that had failed before may
// still report that once.
func (r *fixture) recovers(s *cudart.Stream) {
	r.Helper()
	require.Eventually(r, func() bool { return r.queue.Wait(r.Context(), fence.TimelineOf(s)) == nil }, 20*time.Second, time.Millisecond)
}

func (r *fixture) takeIdle() (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	names, r.idle = r.idle, nil
	return names
}

func (r *fixture) find(class, size int) string {
	if b := r.queue.Find(r.Context(), class, size, noOther); b != nil {
		return b.name
	}
	return ""
}

func noOther() *block { return nil }

// A block that fits is found; those before it on its stream become idle, what is behind it
// stays, and so does what is busy.
func TestFind(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	s, busy := r.stream(), r.stream()
	for _, name := range []string{"first", "second", "third"} {
		r.release(name, len(name), s)
	}
	r.stall(busy)
	r.release("busy", 6, busy)
	r.quiet(s)
	assert.Equal(t, 40, r.queue.Bytes())
	assert.Empty(t, r.find(6, 11), "it is too small")
	assert.Equal(t, []string{"first", "second", "third"}, r.takeIdle())
	assert.Empty(t, r.find(6, 10))
	assert.Equal(t, 10, r.queue.Bytes())

	for _, name := range []string{"first", "second", "third"} {
		r.release(name, len(name), s)
	}
	r.quiet(s)
	assert.Equal(t, "second", r.find(6, 10))
	assert.Equal(t, []string{"first"}, r.takeIdle())
	idle := &block{name: "idle"}
	other := func() *block { return idle }
	assert.Equal(t, "third", r.queue.Find(t.Context(), 5, 10, other).name, "its stream had done work at its last query")
	queries := r.sim.Calls("cudaEventQuery")
	r.stall(s)
	r.release("third", 6, s)
	assert.Equal(t, "idle", r.queue.Find(t.Context(), 6, 10, other).name)
	assert.Equal(t, 1, r.sim.Calls("cudaEventQuery")-queries, "of the first stream alone")
	assert.Len(t, r.queue.Streams(), 2)
}

// Every stream is queried, each once, however many are busy and however many blocks they have.
func TestEachStreamIsQueriedOnce(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	const streams, each = 40, 5
	for range streams {
		s := r.stream()
		r.stall(s)
		for range each {
			r.release("busy", 1, s)
		}
	}
	s := r.stream()
	r.release("done", 1, s)
	r.quiet(s)
	before := r.sim.Calls("cudaEventQuery")
	assert.Equal(t, 1, r.queue.Reclaim(t.Context()))
	assert.Equal(t, []string{"done"}, r.takeIdle())
	assert.Equal(t, streams+1, r.sim.Calls("cudaEventQuery")-before)
	r.release("done", 1, s)
	r.quiet(s)
	assert.Equal(t, "done", r.find(1, 10))
	assert.Equal(t, 10*streams*each, r.queue.Bytes())
}

// A block of several streams is found when all of them are done with it, by the first look
// then, and hides nothing before.
func TestBlocksOfSeveralStreams(t *testing.T) {
	t.Parallel()
	for name, find := range map[string]func(r *fixture, of fence.Timeline) string{
		"Find": func(r *fixture, _ fence.Timeline) string { return r.find(1, 10) },
		"Reclaim": func(r *fixture, _ fence.Timeline) string {
			if r.queue.Reclaim(r.Context()) == 1 {
				return r.takeIdle()[0]
			}
			return ""
		},
		"Wait": func(r *fixture, of fence.Timeline) string {
			require.NoError(r, r.queue.Wait(r.Context(), of))
			return r.takeIdle()[0]
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFixture(t)
			a, b, c := r.stream(), r.stream(), r.stream()
			open := []func(){r.stall(a), r.stall(b), r.stall(c)}
			r.release("several", 1, a, b, c)
			for range open { // whichever stream's line it is in
				of := r.queue.Streams()
				require.Len(t, of, 1)
				if name != "Wait" { // which would
					assert.Empty(t, find(r, of[0]))
				}
				for i, s := range []*cudart.Stream{a, b, c} {
					if fence.TimelineOf(s) == of[0] {
						open[i]()
						r.quiet(s)
					}
				}
				got := r.queue.Reclaim(t.Context())
				if got == 1 {
					assert.Equal(t, []string{"several"}, r.takeIdle())
				}
			}
			assert.Zero(t, r.queue.Bytes())

			// All are done, and none was queried.
			r.release("several", 1, a, b, c)
			r.quiet(a, b, c)
			assert.Equal(t, "several", find(r, r.queue.Streams()[0]))
			assert.Zero(t, r.queue.Bytes())
		})
	}
}

// A block that moves to another stream's line comes before what was queued there later, so
// that it is found though that is not done.
func TestABlockMovesToItsPlace(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	a, b := r.stream(), r.stream()
	openA, openB := r.stall(a), r.stall(b)
	r.release("several", 1, a, b)
	of, other, open, openOther := a, b, openA, openB
	if r.queue.Streams()[0] != fence.TimelineOf(a) {
		of, other, open, openOther = b, a, openB, openA
	}
	r.release("behind", 2, of)
	r.release("early", 2, other)
	openOther()
	r.quiet(other)
	r.stall(other)
	r.release("late", 2, other)
	open()
	r.quiet(of)
	assert.Equal(t, 3, r.queue.Reclaim(t.Context()))
	assert.ElementsMatch(t, []string{"early", "several", "behind"}, r.takeIdle())
}

// Changes changes whenever another block is the oldest of a stream.
func TestChangesCountsOldestBlocks(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	s := r.stream()
	open := r.stall(s)
	changes := r.queue.Changes()
	changed := func() bool {
		before := changes
		changes = r.queue.Changes()
		return changes != before
	}
	late := &block{}
	late.Outer, late.Size = late, 10
	require.NoError(r, s.LaunchHostFunc(func() {}))
	late.Fence.Add(s)
	early := r.end(late)
	first := r.release("first", 1, s)
	assert.True(t, changed())
	points := first.Fence.Points(nil)
	assert.Equal(t, points, r.queue.Oldest())
	r.release("second", 2, s)
	assert.False(t, changed())
	assert.Equal(t, points, r.queue.Oldest())
	r.queue.Add(&late.Block, early)
	assert.True(t, changed(), "released late, it is the oldest all the same")
	assert.Equal(t, []cudart.Point{early}, r.queue.Oldest())
	open()
	require.NoError(t, r.queue.Wait(t.Context(), fence.TimelineOf(s)))
	assert.True(t, changed())
	assert.Empty(t, r.queue.Oldest())
}

// Drain makes idle what one stream is done with although another takes long, and ends with
// its context.
func TestDrain(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	then := make(chan struct{}, 10)
	called := func() error { then <- struct{}{}; return nil }
	waited, err := r.queue.Drain(t.Context(), called)
	require.NoError(t, err)
	assert.False(t, waited)
	assert.Empty(t, then)

	s, busy, both := r.stream(), r.stream(), r.stream()
	open := r.stall(busy)
	r.release("done", 1, s)
	r.release("busy", 1, busy)
	r.release("several", 1, both, s)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error)
	go func() {
		_, err := r.queue.Drain(ctx, called)
		ended <- err
	}()
	<-then
	for r.queue.Bytes() > 10 {
		runtime.Gosched()
	}
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	assert.ElementsMatch(t, []string{"done", "several"}, r.takeIdle())
	open()
	failure := errors.New("made up")
	waited, err = r.queue.Drain(t.Context(), func() error { return failure })
	require.ErrorIs(t, err, failure)
	assert.True(t, waited)
	assert.Equal(t, []string{"busy"}, r.takeIdle())
	assert.Zero(t, r.queue.Bytes())
}

// Of a stream that cannot be queried nothing is taken, what others have done is, also of a
// block that was on both, and later answers are found.
func TestAStreamThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	s, broken := r.stream(), r.stream()
	r.release("broken", 1, broken)
	r.release("done", 1, s)
	r.release("several", 1, s, broken)
	r.quiet(s, broken)
	r.sim.Fail("cudaEventQuery", cudasim.Fault{Stream: broken.Handle(), Times: -1, Code: cudart.ErrUnknown})
	r.sim.Fail("cudaEventRecord", cudasim.Fault{Stream: broken.Handle(), Times: -1, Code: cudart.ErrUnknown})
	r.sim.Fail("cudaDeviceSynchronize", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	waited, err := r.queue.Drain(t.Context(), func() error { return nil })
	require.ErrorIs(t, err, cudart.ErrUnknown)
	assert.True(t, waited)
	assert.Equal(t, []string{"done"}, r.takeIdle())
	r.sim.ResetFaults()
	r.recovers(broken)
	r.queue.Reclaim(t.Context())
	assert.ElementsMatch(t, []string{"broken", "several"}, r.takeIdle())
}

// A block that moves to another stream is waited for there though the first one fails.
func TestWaitFollowsBlocksPastAFailure(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	s, broken := r.stream(), r.stream()
	several := r.release("several", 1, s, broken)
	require.Equal(t, []fence.Timeline{fence.TimelineOf(broken)}, r.queue.Streams())
	require.NoError(t, broken.Synchronize(t.Context()))
	require.True(t, several.Fence.Points(nil)[1].Done(context.Background())) // which waits for the query, however long it takes
	r.release("broken", 1, broken)
	r.quiet(s)
	r.sim.Fail("cudaEventQuery", cudasim.Fault{Stream: broken.Handle(), Times: -1, Code: cudart.ErrUnknown})
	r.sim.Fail("cudaEventRecord", cudasim.Fault{Stream: broken.Handle(), Times: -1, Code: cudart.ErrUnknown})
	r.sim.Fail("cudaDeviceSynchronize", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	require.ErrorIs(t, r.queue.Wait(t.Context(), fence.TimelineOf(broken)), cudart.ErrUnknown)
	assert.Equal(t, []string{"several"}, r.takeIdle())
	assert.Equal(t, 10, r.queue.Bytes())
	r.sim.ResetFaults()
	r.recovers(broken)
}

// Of a stream that was closed nothing is kept once its blocks are found.
func TestStreamsAreNotRetained(t *testing.T) {
	t.Parallel()
	r := newFixture(t)
	s, err := r.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	b := r.release("block", 1, s)
	require.NoError(t, s.Close())
	require.NoError(t, r.queue.Wait(t.Context(), fence.TimelineOf(s)))
	kept := weak.Make((*byte)(reflect.ValueOf(fence.TimelineOf(s)).UnsafePointer()))
	s = nil
	require.Eventually(t, func() bool { runtime.GC(); return kept.Value() == nil }, 20*time.Second, time.Millisecond)
	runtime.KeepAlive(b)
	runtime.KeepAlive(r)
}

// Not parallel: AllocsPerRun counts what others allocate, too.
func TestPendingDoesNotAllocate(t *testing.T) {
	r := newFixture(t)
	s := r.stream()
	b := r.release("block", 1, s)
	at := r.queue.Oldest()[0]
	require.NoError(t, at.Wait(t.Context()))
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if r.queue.Find(context.Background(), 1, 10, noOther) != b {
			t.Error("it is not found")
		}
		r.queue.Add(&b.Block, at)
	}))
}
