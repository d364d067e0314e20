package loader

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	"github.com/gopinned/pinned/internal/testgpu"
)

// A sweep makes CUDA calls of a loader's life fail, one at a time.
type sweep struct {
	*testing.T
	outer *testing.T
	sim   *cudasim.Sim
	dev   *cudart.Device
	s     *cudart.Stream

	lives, failed, absorbed int
}

// patience is how long a life may take before it counts as hung.
const patience = 20 * time.Second

// live makes a loader, consumes two epochs, and closes it. A batch that comes
// without an error holds what it should. It returns the first error.
func (w *sweep) live(shape func(*Options)) (err error) {
	fields := []int{5, 300}
	o := Options{BatchSize: 4, Workers: 2, Prefetch: 2, Shuffle: true}
	shape(&o)
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	l, err := New(ctx, w.dev, numbered(18, fields...), o)
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
		next := w.consume(ctx, l, fields)
		if l.broken == nil {
			require.NoError(w, next, "the next epoch after %v", err)
		} else {
			require.ErrorContains(w, next, "the device cannot tell")
		}
	}
	return err
}

func (w *sweep) consume(ctx context.Context, l *Loader, fields []int) (err error) {
	var kept *Batch
	defer func() {
		if kept != nil {
			if release := kept.Release(); err == nil {
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
		if kept == nil {
			kept = b
			b.Keep()
		}
	}
	return nil
}

// learn counts the calls of a life.
func (w *sweep) learn(shape func(*Options)) map[string]int {
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
	require.Equal(w, before, w.holding(), "not given back after %v", err)
	require.Empty(w, w.sim.Misuses())
}

func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	w := &sweep{T: t, outer: t, sim: sim, dev: dev, s: stream(t, dev)}
	shapes := map[string]func(*Options){
		"ordered":   func(*Options) {},
		"unordered": func(o *Options) { o.Unordered, o.Workers = true, 9 },
	}
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		calls := w.learn(shapes[name])
		for _, fn := range slices.Sorted(maps.Keys(calls)) {
			if strings.HasPrefix(fn, "cudaGetLastError") {
				continue // it cannot fail
			}
			for nth := range calls[fn] {
				code := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrInvalidValue}[nth%2]
				what := fmt.Sprintf("%s/%s #%d", name, fn, nth+1)
				if !t.Run(what, func(t *testing.T) {
					w.T = t
					defer func(outer *testing.T) { w.T = outer }(w.outer)
					w.suffer(fn, nth+1, code, shapes[name])
				}) {
					return
				}
			}
		}
	}
	require.NoError(t, w.s.Synchronize(t.Context()))
	t.Logf("%d calls failed: %d lives told so, %d went on all the same", w.lives, w.failed, w.absorbed)
	assert.Greater(t, w.failed, 100)
}

// Nobody can tell when the memory of a batch is free again: a loop that waits for
// it ends, and no other begins.
func TestReleaseThatCannotTell(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	given := make(chan *Batch, len(l.slots))
	released := make(chan error, 1)
	go func() {
		for range l.slots { // all memory is kept
			b := <-given
			if b.Number() == len(l.slots)-1 {
				for _, fn := range []string{"cudaEventRecord", "cudaEventCreateWithFlags", "cudaStreamQuery", "cudaDeviceSynchronize"} {
					sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
				}
				released <- b.Release()
			}
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all []*Batch
	var last error
	for b, err := range l.Batches(ctx) {
		if last = err; err == nil {
			require.NoError(t, b.Use(s))
			require.NoError(t, s.Synchronize(ctx))
			b.Keep()
			all = append(all, b)
			given <- b
		}
	}
	require.ErrorIs(t, last, cudart.ErrUnknown)
	require.NoError(t, ctx.Err(), "it hung")
	err := <-released
	require.ErrorIs(t, err, cudart.ErrUnknown)
	require.ErrorContains(t, err, "loader: release batch 2 of epoch 0: ")
	sim.ResetFaults()
	for _, err := range l.Batches(ctx) {
		require.ErrorContains(t, err, "loader: the device cannot tell what it is done with: ")
	}
	require.ErrorIs(t, all[2].Release(), ErrReleased)
	for _, b := range all[:2] {
		require.NoError(t, b.Release())
	}
	// Close waits for the device as a whole.
}

// A device that is lost for good is told, and nobody hangs.
func TestLostDevice(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(cudasim.Config{})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer sim.Close() // says what a lost device keeps
	rt, err := cudart.Open(cudart.Options{Source: sim})
	require.NoError(t, err)
	defer rt.Close()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Workers: 3, Prefetch: 2})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
