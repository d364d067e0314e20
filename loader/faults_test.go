package loader

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A sweep makes CUDA calls of a loader's life fail, one at a time.
type sweep struct {
	*testing.T
	outer *testing.T
	sim   *cudasim.Sim
	dev   *cudart.Device
	s     *cudart.Stream
	src   Source // nil for one whose samples workers write

	lives, failed, absorbed int
}

// timeout is how long a life may take before it counts as hung.
const timeout = time.Minute

// live makes a loader, consumes two epochs, and closes it. A batch that comes
// without an error holds what it should. It returns the first error.
func (w *sweep) live(shape func(*Options)) (err error) {
	fields := []int{5, 300}
	o := Options{BatchSize: 4, Workers: 2, Prefetch: 2, Shuffle: true}
	shape(&o)
	ctx, cancel := context.WithTimeout(w.Context(), timeout)
	defer cancel()
	src := w.src
	if src == nil {
		src = numbered(18, fields...)
	}
	l, err := New(ctx, w.dev, src, o)
	if err != nil {
		return err
	}
	defer func() {
		closing := l.Close()
		for tries := 0; closing != nil && tries < 3; tries++ {
			if err == nil {
				err = closing
			}
			closing = l.Close()
		}
		require.NoError(w, closing, "Close again")
		require.NoError(w, ctx.Err(), "it hung")
	}()
	for range 2 {
		if err = w.consume(ctx, l, fields); err != nil {
			break
		}
	}
	if err != nil { // the fault is over
		require.NoError(w, w.consume(ctx, l, fields), "the next epoch after %v", err)
	}
	return err
}

func (w *sweep) consume(ctx context.Context, l *Loader, fields []int) (err error) {
	var retained *Batch
	defer func() {
		if retained != nil {
			if release := retained.Release(); err == nil {
				err = release
			}
		}
	}()
	for b, err := range l.Batches(ctx) {
		if err != nil {
			return err
		}
		if err := b.Use(w.s); err != nil {
			return err
		}
		if err := w.s.Synchronize(ctx); err != nil {
			return fmt.Errorf("the test's own wait: %w", err)
		}
		for f, size := range fields {
			got, err := download(l.dev, b.Field(f), b.Len()*size)
			if err != nil {
				return fmt.Errorf("the test's own copy: %w", err)
			}
			want := make([]byte, size)
			for at, i := range b.Indices() {
				writeSample(want, i, f)
				require.Equal(w, want, got[at*size:(at+1)*size], "%v: sample %d, place %d, field %d", b, i, at, f)
			}
		}
		if retained == nil {
			retained = b
			b.Retain()
		}
	}
	return nil
}

// count counts the calls of a life.
func (w *sweep) count(shape func(*Options)) map[string]int {
	var mu sync.Mutex
	calls := make(map[string]int)
	w.sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	require.NoError(w, w.live(shape))
	w.sim.OnCall(nil)
	return calls
}

func (w *sweep) holding() cudasim.Outstanding {
	o := w.sim.Outstanding()
	o.Events = 0 // a runtime keeps some for the next wait
	o.PendingOps = 0
	return o
}

func (w *sweep) suffer(fn string, nth int, code cudart.Code, shape func(*Options)) {
	before := w.holding()
	var met atomic.Bool
	w.sim.Fail(fn, cudasim.Fault{Nth: nth, Code: code, After: func() { met.Store(true) }})
	err := w.live(shape)
	w.sim.ResetFaults()
	if !met.Load() {
		return // fewer questions were asked this time
	}
	w.lives++
	if err != nil {
		w.failed++
		require.ErrorIs(w, err, code)
		require.Regexp(w, "^loader: |^the test's own ", err.Error())
	} else {
		w.absorbed++
	}
	require.Equal(w, before, w.holding(), "not released after %v", err)
	require.Empty(w, w.sim.Misuses())
}

// sweep makes each call of lives of these shapes fail in turn.
func (w *sweep) sweep(shapes map[string]func(*Options)) {
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		calls := w.count(shapes[name])
		for _, fn := range slices.Sorted(maps.Keys(calls)) {
			if strings.HasPrefix(fn, "cudaGetLastError") {
				continue // it cannot fail
			}
			for nth := range calls[fn] {
				if nth%4 > 0 && os.Getenv("PINNED_SOAK") == "" {
					continue
				}
				code := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrInvalidValue}[nth/4%2]
				what := fmt.Sprintf("%s/%s #%d", name, fn, nth+1)
				if !w.outer.Run(what, func(t *testing.T) {
					w.T = t
					defer func(outer *testing.T) { w.T = outer }(w.outer)
					w.suffer(fn, nth+1, code, shapes[name])
				}) {
					return
				}
			}
		}
	}
}

// With PINNED_SOAK at every position, else at the first one of each call and every fourth.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	t.Parallel()
	// The link takes its time, so that small batches are copied together.
	sim, dev := simulated(t, cudasim.Link{HostToDevice: late(50 * time.Microsecond)})
	w := &sweep{T: t, outer: t, sim: sim, dev: dev, s: stream(t, dev)}
	shapes := map[string]func(*Options){
		"ordered":   func(*Options) {},
		"unordered": func(o *Options) { o.Unordered, o.Workers = true, 9 },
		"small":     func(o *Options) { o.BatchSize, o.Prefetch = 1, 9 },
		"blocks":    func(o *Options) { o.BatchSize, o.Prefetch, o.Workers = 1, 15, 3 }, // of 4 batches
		"on device": func(o *Options) {
			o.OnDevice = func(s *cudart.Stream, b *Batch) error { return s.Memset(b.Field(1)-1, 0, 1) } // between the fields
		},
	}
	w.sweep(shapes)
	// The GPU gathers: other memory, a kernel to load and to launch.
	w.src, _ = pinnedOf(t, dev, 18, 5, 300)
	shapes = map[string]func(*Options){"gathered": func(o *Options) { o.BatchSize = 5 }}
	w.sweep(shapes)
	// From files that are registered and replaced meanwhile.
	w.src = shardsOf(t, 2*os.Getpagesize(), []int{6, 5, 7}, 5, 300)
	w.sweep(map[string]func(*Options){"shards": func(o *Options) { o.BatchSize = 5 }})
	require.NoError(t, w.s.Synchronize(t.Context()))
	t.Logf("%d calls failed: %d lives reported it, %d went on all the same", w.lives, w.failed, w.absorbed)
	assert.Greater(t, w.failed, 30)
}

// unanswered are the calls by which CUDA says whether work is done.
var unanswered = []string{"cudaEventRecord", "cudaEventQuery", "cudaStreamQuery", "cudaStreamWaitEvent", "cudaDeviceSynchronize"}

func failAlways(sim *cudasim.Sim, functions []string) {
	for _, fn := range functions {
		sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	}
}

// Release neither fails nor waits when no event can be recorded, and the memory
// waits for the stream all the same.
func TestReleaseWithoutAnEvent(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(6*batch, width), Options{BatchSize: batch, Prefetch: 1})
	all := newLog(t, stream(t, dev), 6, batch*width)
	sim.Hold()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		all.add(b)
		if b.Number() < 2 { // both slots are filled, and no worker can go on
			require.Eventually(t, func() bool { return l.Stats().Samples == 2*batch }, time.Minute, time.Millisecond)
			failAlways(sim, []string{"cudaEventRecord", "cudaEventCreateWithFlags"})
			require.NoError(t, b.Release(), "its work has not begun")
			sim.ResetFaults()
		}
		if b.Number() == 1 {
			require.Positive(t, sim.Outstanding().PendingOps)
			sim.Release()
		}
	}
	// The stream reports that an event could not be recorded, to its owner, once.
	require.ErrorIs(t, all.s.Synchronize(t.Context()), cudart.ErrUnknown)
	all.requireAll()
}

// Where the device cannot be made to wait for the consumer's streams, the host
// waits for them.
func TestTheHostWaitsIfTheDeviceCannot(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{OnDevice: late(2 * time.Millisecond)})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(12*batch, width), Options{BatchSize: batch, Prefetch: 2})
	all := newLog(t, stream(t, dev), 12, batch*width)
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if b.Number() == 0 {
			// From now on only the streams' own order is left. The batches are
			// on the device when their work is queued.
			sim.Fail("cudaStreamWaitEvent", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
		}
		require.NoError(t, b.Wait(t.Context()))
		all.add(b)
	}
	sim.ResetFaults()
	all.requireAll()
}

// Memory of which it cannot be known whether the consumer's streams still use it
// is not written.
func TestMemoryInUnknownStateIsNotWritten(t *testing.T) {
	t.Parallel()
	f := newDriven(t, numbered(8, 8), Options{BatchSize: 4, Prefetch: 1}, nil)
	s := f.l.slots[0]
	s.begin(0, 0, 4)
	f.sim.Hold()
	user := stream(t, f.l.dev)
	require.NoError(t, user.Memset(s.mem, 0, 32))
	s.using.Add(user)
	s.using.Record()
	failAlways(f.sim, unanswered)
	require.True(t, f.d.copy(f.p, f.l.slots[:1]))
	err := f.e.failedBefore(0)
	require.ErrorIs(t, err, cudart.ErrUnknown)
	require.ErrorContains(t, err, "loader: copy batch 0 of epoch 0: the GPU may be using the memory: ")
	require.Zero(t, f.sim.Calls("cudaMemcpyAsync"))

	// It is waited for, until the loop ends; the next one copies it.
	f.sim.ResetFaults()
	f.sim.Fail("cudaStreamWaitEvent", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	f.e.failure.Store(nil)
	next := &loop{e: f.e, ctx: t.Context()}
	f.p.cancel(nil)
	require.False(t, f.d.copy(f.p, f.l.slots[:1]))
	require.NoError(t, f.e.failedBefore(0))
	require.Zero(t, f.sim.Calls("cudaMemcpyAsync"))
	f.sim.ResetFaults()
	f.sim.Release()
	require.True(t, f.d.copy(next, f.l.slots[:1]))
	require.Equal(t, 1, f.sim.Calls("cudaMemcpyAsync"))
	require.NoError(t, f.e.failedBefore(0))
}

// A batch of which some was queued when its copy failed keeps its pinned memory
// until that is done.
func TestMemoryOfABatchThatFailed(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(6, 8, 300), Options{BatchSize: 4, Prefetch: 1, Workers: 1})
	sim.Hold()
	// The first batch is one copy, the second, which is short, one for each field.
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 3, Code: cudart.ErrInvalidValue})
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, cudart.ErrInvalidValue)
	require.ErrorContains(t, last, "loader: copy batch 1 of epoch 0: ")
	for _, slot := range l.slots {
		require.False(t, slot.copied.Done(t.Context()), "batch %d", slot.number)
	}
	sim.Release()
	require.Len(t, slices.Concat(epochOf(t, l, s, 8, 300)...), 6)
}

// What CUDA reports while a copy is waited for may be the copy's: the epoch ends
// with it, although the copy is done.
func TestACopyWithAnUnknownResult(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(40, 8), Options{BatchSize: 4, Workers: 1, Prefetch: 1})
	sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, cudart.ErrUnknown)
	require.Regexp(t, "^loader: (batch [0-9]+|end) of epoch 0: copy of batch [0-9]+: cudaEventQuery: ", last.Error())
	require.Len(t, epochOf(t, l, s, 8), 10, "which is that epoch's error, not the next one's")

	// It is reported to those that wait for the batch.
	sim.Hold()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		var met atomic.Bool
		sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown, After: func() { met.Store(true) }})
		for !met.Load() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			require.ErrorIs(t, b.Wait(ctx), context.DeadlineExceeded)
			cancel()
		}
		sim.Release()
		require.ErrorIs(t, b.Wait(t.Context()), cudart.ErrUnknown)
		require.ErrorContains(t, b.Wait(t.Context()), "loader: wait for batch 0 of epoch 2: cudaEventQuery: ")
		break
	}
}

// The error of the last copy ends an epoch that has given all its batches.
func TestTheLastCopyOfAnEpochThatFails(t *testing.T) {
	t.Parallel()
	for _, unordered := range []bool{false, true} {
		sim, dev := simulated(t, cudasim.Link{})
		l := newLoaderFor(t, dev, numbered(8, 8), Options{BatchSize: 4, Prefetch: 3, Unordered: unordered})
		sim.Hold()
		var last error
		n := 0
		for _, last = range l.Batches(t.Context()) {
			if n++; n == 2 {
				sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
				sim.Release()
			}
		}
		require.Equal(t, 3, n)
		require.ErrorIs(t, last, cudart.ErrUnknown)
		require.ErrorContains(t, last, "loader: end of epoch 0: copy of batch ")
		require.Equal(t, 1, gaveEpoch(t, l))
	}
}

// As long as CUDA cannot say what it is done with, epochs end with the error and
// Close returns it. When it can, all goes on.
func TestMemoryWithAFailingQueryIsNotReused(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	var last error
	for b, err := range l.Batches(ctx) {
		if last = err; err == nil && b.Number() == 2 {
			require.NoError(t, b.Use(s))
			sim.Hold()
			failAlways(sim, unanswered)
		}
	}
	require.ErrorIs(t, last, cudart.ErrUnknown)
	for range 2 {
		for _, last = range l.Batches(ctx) {
		}
		require.ErrorIs(t, last, cudart.ErrUnknown)
		require.ErrorContains(t, last, "the GPU may be using the memory: ")
	}
	require.NoError(t, ctx.Err(), "it hung")

	sim.ResetFaults()
	sim.Release()
	if err := s.Synchronize(ctx); err != nil { // if CUDA was asked for that stream, and not for all of the device
		require.ErrorIs(t, err, cudart.ErrUnknown)
	}
	require.Len(t, epochOf(t, l, s, 8), 25)

	sim.Hold()
	for b, err := range l.Batches(ctx) {
		require.NoError(t, err)
		require.NoError(t, b.Use(s))
		break
	}
	failAlways(sim, unanswered)
	before := sim.Outstanding()
	for range 2 {
		err := l.Close()
		require.ErrorIs(t, err, cudart.ErrUnknown)
		require.ErrorContains(t, err, "loader: close: all memory stays allocated, the GPU may be using it: ")
	}
	require.Equal(t, before.Registrations, sim.Outstanding().Registrations)
	require.Equal(t, before.DeviceAllocs, sim.Outstanding().DeviceAllocs)
	sim.ResetFaults()
	sim.Release()
	require.NoError(t, l.Close())
}

// A device that is lost for good is reported, and nothing hangs.
func TestLostDevice(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(cudasim.Config{})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer sim.Close() // says what a lost device keeps
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	defer rt.Close()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Workers: 3, Prefetch: 2})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	for b, loopErr := range l.Batches(ctx) {
		if loopErr != nil {
			err = loopErr
			break
		}
		if b.Number() == 5 {
			require.NoError(t, sim.LoseDevice(0))
		}
	}
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	require.ErrorContains(t, err, "loader: ")
	require.Error(t, l.Close())
	for _, err := range l.Batches(ctx) {
		require.Error(t, err)
	}
	require.NoError(t, ctx.Err(), "it hung")
}
