package stage

import (
	"context"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A bench is a simulated device with a ring of eight units of 64 KiB.
type bench struct {
	*testing.T
	sim  *cudasim.Sim
	dev  *cudart.Device
	ring *ring
	mem  cudart.DevPtr
}

const benchUnit = 64 * kib

func newBench(t *testing.T) *bench {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	b := &bench{T: t, sim: sim, dev: dev, mem: device(t, dev, mib)}
	b.ring, err = newRing(t.Context(), dev, ringSize{unit: benchUnit, ring: 8 * benchUnit, maxChunk: 4 * benchUnit})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, b.ring.close(context.Background())) })
	return b
}

func (b *bench) stream() *cudart.Stream {
	b.Helper()
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	b.Cleanup(func() { assert.NoError(b, s.Close()) })
	return s
}

// blocked makes a stream wait until open is called, or the test ends.
func (b *bench) blocked(s *cudart.Stream) (open func()) {
	b.Helper()
	blocked := make(chan struct{})
	open = sync.OnceFunc(func() { close(blocked) })
	b.Cleanup(open)
	require.NoError(b, s.LaunchHostFunc(func() { <-blocked }))
	return open
}

// use queues a copy from an extent, and releases that.
func (b *bench) use(x *extent, s *cudart.Stream) {
	b.Helper()
	require.NoError(b, s.CopyToDevice(b.mem, unsafe.Pointer(&x.mem[0]), len(x.mem)))
	x.fence.AddPoint(s.Point())
	x.release()
}

// taken takes as much memory for a direction as there is.
func (b *bench) taken(units int, d direction) []*extent {
	return b.takenFor(request{n: units * benchUnit, dir: d})
}

func (b *bench) takenFor(q request) (all []*extent) {
	for x := b.ring.try(q); x != nil; x = b.ring.try(q) {
		all = append(all, x)
	}
	return all
}

func TestExtentsDoNotOverlap(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	all := b.taken(1, toDevice)
	require.Len(t, all, 8)
	for i, x := range all {
		require.Len(t, x.mem, benchUnit)
		for j := range x.mem {
			x.mem[j] = byte(i)
		}
	}
	for i, x := range all {
		for j := range x.mem {
			if x.mem[j] != byte(i) {
				t.Fatalf("extent %d was overwritten at %d", i, j)
			}
		}
		x.release()
	}
	x := b.ring.try(request{n: 3*benchUnit + 1, dir: toDevice}) // which takes four units
	require.Len(t, x.mem, 3*benchUnit+1)
	y := b.ring.try(request{n: 4 * benchUnit, dir: toDevice})
	require.NotNil(t, y, "the rest in a row")
	require.Nil(t, b.ring.try(request{n: 1, dir: toDevice}))
	x.release()
	y.release()
}

// A direction has half of the ring if the other one wants some, and all of it
// otherwise. Slow copies have half together.
func TestSharesOfTheRing(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	up := b.taken(1, toDevice)
	require.Len(t, up, 8)
	wake := make(chan struct{}, 1)
	w := b.ring.wait(wake, request{n: benchUnit, dir: toHost})
	require.False(t, w.poll())
	for _, x := range up[:4] {
		require.Nil(t, b.ring.try(request{n: benchUnit, dir: toDevice}), "half is for the other direction")
		x.release()
	}
	require.True(t, w.poll())
	x := w.stop()
	require.NotNil(t, x)
	require.Nil(t, b.ring.try(request{n: benchUnit, dir: toDevice}))
	x.release()
	for _, x := range up[4:] {
		x.release()
	}
	slow := append(b.takenFor(request{n: benchUnit, dir: toDevice, slow: true}), b.takenFor(request{n: benchUnit, dir: toHost, slow: true})...)
	require.Len(t, slow, 4)
	fast := append(b.taken(1, toDevice), b.taken(1, toHost)...)
	require.Len(t, fast, 4)
	for _, x := range append(slow, fast...) {
		x.release()
	}
}

// Those who wait have memory in the order in which they began to, and none is taken
// before them.
func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	all := b.taken(1, toDevice)
	var wakes [3]chan struct{}
	var waiters [3]*waiter
	for i := range waiters {
		wakes[i] = make(chan struct{}, 1)
		waiters[i] = b.ring.wait(wakes[i], request{n: []int{3, 1, 1}[i] * benchUnit, dir: toDevice})
	}
	for i, x := range all {
		x.release()
		require.Equal(t, i >= 2, waiters[0].poll(), "after %d units", i+1)
		require.Equal(t, i >= 3, waiters[1].poll())
		require.Equal(t, i >= 4, waiters[2].poll())
		if i < 4 {
			require.Nil(t, b.ring.try(request{n: benchUnit, dir: toDevice}))
		}
	}
	for i, w := range waiters {
		require.Len(t, wakes[i], 1)
		w.stop().release()
	}
}

// What one goroutine finds to be done, another that waits is given, though it finds
// nothing itself.
func TestWaitersAreServedByOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	open := b.blocked(s)
	for _, x := range b.taken(1, toDevice) {
		b.use(x, s)
	}
	wake := make(chan struct{}, 1)
	down := b.ring.wait(wake, request{n: benchUnit, dir: toHost})
	require.False(t, down.poll())
	open()
	require.NoError(t, s.Synchronize(t.Context()))
	x := b.ring.try(request{n: benchUnit, dir: toDevice})
	require.NotNil(t, x)
	require.Len(t, wake, 1)
	require.NotNil(t, down.x)
	x.release()
	down.stop().release()
}

// A job that waits is woken when there is something to ask the GPU about.
func TestWaitersAreWokenToPoll(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	all := b.taken(1, toDevice)
	wake := make(chan struct{}, 1)
	w := b.ring.wait(wake, request{n: benchUnit, dir: toDevice})
	require.Empty(t, b.ring.oldestPoints(nil))
	open := b.blocked(s)
	b.use(all[0], s)
	require.Len(t, wake, 1)
	<-wake
	b.use(all[1], s)
	require.Empty(t, wake, "the first one comes before")
	oldest := b.ring.oldestPoints(nil)
	require.Len(t, oldest, 1)
	defer oldest[0].Notify(wake)()
	open()
	<-wake
	require.True(t, w.poll())
	w.stop().release()
	for _, x := range all[2:] {
		x.release()
	}
}

// Memory is not used again before the GPU is done with it; that of one stream does not
// wait for another's.
func TestMemoryThatTheGPUUses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	slow, fast := b.stream(), b.stream()
	open := b.blocked(slow)
	all := b.taken(1, toDevice)
	for i, x := range all {
		if i%2 == 0 {
			b.use(x, slow)
		} else {
			b.use(x, fast)
		}
	}
	require.NoError(t, fast.Synchronize(t.Context()))
	again := b.taken(1, toDevice)
	require.Len(t, again, 4)
	for i, x := range again {
		require.Equal(t, 2*i+1, x.first)
		x.release()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, b.ring.close(ctx), context.Canceled)
	_, _, pinned := hostmem.Find(all[0].mem)
	require.True(t, pinned)
	open()
}

// A copy that failed has its error although another job has found it, which was about to
// use the memory; and that one has not.
func TestExtentsReportTheirOwnErrors(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	var first, second fence.Fence // of what two jobs have queued
	x := b.ring.try(request{n: 8 * benchUnit, dir: toDevice})
	b.use(x, s)
	first.AddPoint(s.Point())
	b.sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrLaunchFailure})
	var y *extent
	for y == nil {
		y = b.ring.try(request{n: benchUnit, dir: toDevice})
	}
	b.use(y, s)
	second.AddPoint(s.Point())
	require.NoError(t, second.Wait(t.Context()))
	require.NoError(t, second.Err())
	require.NoError(t, first.Wait(t.Context()))
	require.ErrorIs(t, first.Err(), cudart.ErrLaunchFailure)
	_ = s.Synchronize(t.Context()) // reports it too
}

// An extent that is not released keeps the ring.
func TestARingThatIsInUse(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	x := b.ring.try(request{n: 1, dir: toDevice})
	require.ErrorIs(t, b.ring.close(t.Context()), ErrHeld)
	x.release()
	require.NoError(t, b.ring.close(t.Context()))
}

// Memory of a stream that did not answer is used again when the stream's work is done,
// although nobody asks for that but who needs memory.
func TestQuarantinedMemoryIsUsedAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	open := b.blocked(s)
	all := b.taken(1, toDevice)
	for _, x := range all[:3] {
		b.use(x, s)
	}
	b.ring.quarantine(fence.TimelineOf(s), errTest)
	require.Nil(t, b.ring.try(request{n: benchUnit, dir: toDevice}))
	open()
	var again []*extent
	b.eventually("it is used", func() bool {
		again = append(again, b.taken(1, toDevice)...)
		return len(again) == 3
	})
	for _, x := range append(again, all[3:]...) {
		x.release()
	}
}

// A ring of which only one unit is left has none for a copy, as both directions need one.
func TestARingWithOneUsableUnit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	open := b.blocked(s)
	all := b.taken(1, toDevice)
	for _, x := range all[:6] {
		b.use(x, s)
	}
	b.ring.quarantine(fence.TimelineOf(s), errTest)
	require.NoError(t, b.ring.check(), "two units are left")
	b.use(all[6], s)
	b.ring.quarantine(fence.TimelineOf(s), errTest)
	err := b.ring.check()
	require.ErrorIs(t, err, errLost)
	require.ErrorIs(t, err, errTest)
	open()
	require.NoError(t, s.Synchronize(t.Context()))
	require.NoError(t, b.ring.check(), "the GPU is done with it")
	all[7].release()
}

// A wait for more memory than is left, when some does not come back, becomes one for less.
func TestWaitersForMoreThanTheRingGetLess(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.stream()
	open := b.blocked(s)
	all := b.taken(1, toDevice)
	wake := make(chan struct{}, 1)
	w := b.ring.wait(wake, request{n: 4 * benchUnit, dir: toDevice})
	for _, x := range all[:6] {
		b.use(x, s)
	}
	b.ring.quarantine(fence.TimelineOf(s), errTest)
	require.False(t, w.poll())
	all[6].release()
	require.True(t, w.poll())
	x := w.stop()
	require.Len(t, x.mem, benchUnit)
	x.release()
	all[7].release()
	open()
}
