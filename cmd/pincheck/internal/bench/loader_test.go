package bench

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/loader"
)

// tiny is a grid that takes no time.
var tiny = grid{
	workers: []int{0, 3}, prefetch: []int{1, 5}, sources: fullGrid.sources, dataBytes: 16 * oneSample,
	batch: 4, ioBatch: 3, delay: 50 * time.Microsecond, window: 1, budget: 1,
}

func TestLoaderMeasuresTheGrid(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	b := runAll(t, loading(tiny, tiny), measure.Env{Devices: []*cudart.Device{dev, dev}})
	all := b.Select(result.View{Series: samplesRate})
	// In memory: plain readers with two kinds of memory and a loader, by copies and GPU work, and both without copies.
	require.Len(t, all, (2*2+1)*2*2+2+1+2*(2+1+1))
	seen := make(map[string]bool)
	for _, s := range all {
		text := s.Labels.Get(sourceKey) + fmt.Sprint(s.Labels)
		assert.False(t, seen[text], text)
		seen[text] = true
		assert.True(t, s.Verified, text)
		assert.Positive(t, s.Min, text)
		assert.Len(t, s.Samples, 2, text)
		waited := other(b, s, waitedShare)
		require.NotNil(t, waited, text)
		assert.GreaterOrEqual(t, waited.Min, 0.0, text)
		assert.LessOrEqual(t, waited.Max, 1.0, text)
		if hostos.CPUTime() >= 0 {
			assert.NotNil(t, other(b, s, cpuPerMillion), text)
		}
		bounds := 0
		for _, bound := range b.Select(result.View{Series: boundBy, Where: s.Labels}) {
			bounds += len(bound.Samples)
			assert.LessOrEqual(t, bound.Max, 1.0, text)
		}
		assert.Equal(t, len(s.Samples), bounds, "one stage bounds each sample: %s", text)
	}
	assert.Len(t, b.Select(result.View{Series: prefetchRate}), 2)
	text := strings.Join(b.Answers, "\n")
	for _, want := range []string{
		" samples a second reach the GPU with ", "A plain reader is ", "With pinned memory ", "From pinned memory, ",
		"Samples in memory load ", "Samples computed load ", "Samples with I/O load ",
	} {
		assert.Contains(t, text, want)
	}
	require.Len(t, b.Figures, 1)
	assert.Len(t, b.Figures[0].Rows, 3)
	assert.Contains(t, strings.Join(b.Notes, "\n"), "persistent workers are no factor")
}

// newLoop opens a loop on samples in memory, or on others.
func newLoop(t *testing.T, dev *cudart.Device, source string) *loop {
	t.Helper()
	g := tiny
	l := &loop{resources: resources{dev: dev, now: wall()}, grid: &g, source: source, batch: g.batch}
	t.Cleanup(func() { assert.NoError(t, l.close()) })
	require.NoError(t, l.open(t.Context()))
	return l
}

func TestLoaderCopiesAsItSays(t *testing.T) {
	t.Parallel()
	for _, s := range tiny.settings(fromMemory) {
		t.Run(fmt.Sprintf("%+v", s), func(t *testing.T) { copiesAsItSays(t, s) })
	}
}

func copiesAsItSays(t *testing.T, s setting) {
	sim, dev := slowSim(t)
	l := newLoop(t, dev, fromMemory)
	registered := sim.Calls("cudaHostRegister")
	require.NoError(t, l.set(t.Context(), s))
	assert.Equal(t, s.memory == inPinned, sim.Calls("cudaHostRegister") > registered)
	waits, async, works := sim.Calls("cudaStreamSynchronize"), sim.Calls("cudaMemcpyAsync"), sim.Calls("cuLaunchKernel")
	for range 5 {
		_, err := l.turn(t.Context())
		require.NoError(t, err)
	}
	waits, async, works = sim.Calls("cudaStreamSynchronize")-waits, sim.Calls("cudaMemcpyAsync")-async, sim.Calls("cuLaunchKernel")-works
	switch {
	case s.copies == noCopies:
		assert.Equal(t, []int{0, 0}, []int{waits, async})
	case s.reader == byLoader:
		assert.Positive(t, async)
	case s.copies == nonBlocking:
		assert.Equal(t, []int{0, 5}, []int{waits, async})
	default:
		assert.Equal(t, []int{5, 5}, []int{waits, async})
	}
	if s.gpuWork {
		assert.Equal(t, 5, works)
	} else {
		assert.Zero(t, works)
	}
	require.NoError(t, l.verify(t.Context()))
	l.data = &samples{data: make([]float32, features)}
	assert.ErrorContains(t, l.verify(t.Context()), "has not arrived", "other samples")
}

// A batch that does not block its caller is handed over while no copy can run; one that
// does is on the device.
func TestLoaderBlocksOnlyWhereItSays(t *testing.T) {
	t.Parallel()
	sim, dev := slowSim(t)
	l := newLoop(t, dev, fromMemory)
	s := setting{workers: 1, reader: byLoader, memory: inPinned, copies: nonBlocking, prefetch: 3}
	require.NoError(t, l.set(t.Context(), s))
	sim.Hold()
	for range 2 {
		_, err := l.turn(t.Context())
		require.NoError(t, err)
	}
	sim.Release()

	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{HostToDevice: cudasim.Speed{Rate: 20, Latency: 20 * time.Millisecond}}}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	l = newLoop(t, dev, fromMemory)
	s.copies = blockingText
	require.NoError(t, l.set(t.Context(), s))
	_, err = l.turn(t.Context())
	require.NoError(t, err)
	got, want := make([]byte, l.batch*oneSample), make([]byte, oneSample)
	indices, err := l.feed.read(got)
	require.NoError(t, err)
	l.data.copy(indices[len(indices)-1], want)
	assert.Equal(t, want, got[len(got)-oneSample:])
}

// A timedFeed has batches that take a time of a clock of their own, of which the loop waits for
// a part.
type timedFeed struct {
	feed
	now          *time.Duration
	took, waits  time.Duration
	batches      int
	waitedAround time.Duration
}

func (f *timedFeed) next(context.Context) (time.Duration, error) {
	f.batches++
	*f.now += f.took
	return f.waits, nil
}

func (f *timedFeed) waited(d time.Duration)         { f.waitedAround += d }
func (f *timedFeed) bound() (loader.Stage, float64) { return loader.StageSource, 1 }
func (f *timedFeed) close(context.Context) error    { return nil }

// The rate is that of the whole loop: the time in which it waits for batches counts.
func TestLoaderRateHasTheTimeWaited(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	var now time.Duration
	l := newLoop(t, dev, fromMemory)
	l.now, l.grid.window = func() time.Duration { return now }, 100*time.Millisecond
	f := &timedFeed{now: &now, took: 20 * time.Millisecond, waits: 15 * time.Millisecond}
	l.feed, l.setting = f, setting{workers: 1}
	rate, err := l.sample(t.Context(), l.setting)
	require.NoError(t, err)
	assert.Equal(t, 5, f.batches)
	assert.Zero(t, f.waitedAround)
	assert.InDelta(t, float64(l.batch)/0.020, rate, 1e-6)
	assert.InDelta(t, 0.75, l.waited, 1e-9)
}

func TestLoaderSaysWhatBounds(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	l := newLoop(t, dev, fromMemory)
	l.data.delay = 60 * time.Millisecond // the largest part of the time on a busy machine, too
	for _, s := range []setting{
		{1, byPlain, inPageable, nonBlocking, false, 0}, {0, byPlain, inPinned, nonBlocking, false, 0}, {1, byPlain, inPageable, noCopies, false, 0},
		{1, byLoader, inPinned, nonBlocking, false, 3}, {1, byLoader, inPageable, noCopies, false, 3},
	} {
		_, err := l.sample(t.Context(), s)
		require.NoError(t, err)
		assert.Equal(t, loader.StageSource, l.stage, "%+v", s)
		for _, share := range []float64{l.waited, l.share} {
			assert.Greater(t, share, 0.1, "%+v", s)
			assert.LessOrEqual(t, share, 1.0, "%+v", s)
		}
	}

	now := time.Duration(100)
	f := plainFeed{resources: resources{now: func() time.Duration { return now }}}
	for _, c := range []struct {
		waiting, copying, waited time.Duration
		reading, transforming    int64
		stage                    loader.Stage
		share                    float64
	}{
		{10, 20, 0, 1, 1, loader.StageConsumer, 0.7},
		{10, 60, 0, 1, 1, loader.StageCopy, 0.6},
		{10, 0, 60, 1, 1, loader.StageCopy, 0.6},
		{80, 5, 0, 2, 1, loader.StageSource, 0.8},
		{80, 5, 0, 1, 2, loader.StageTransform, 0.8},
	} {
		f.waiting, f.copying = c.waiting, c.copying
		f.waited(c.waited)
		f.reading.Store(c.reading)
		f.transforming.Store(c.transforming)
		stage, share := f.bound()
		assert.Equal(t, c.stage, stage, "%+v", c)
		assert.InDelta(t, c.share, share, 1e-9, "%+v", c)
	}
}

// The budgets are what users are told before a run.
func TestLoaderStaysWithinItsTime(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	for quick, largest := range map[bool]time.Duration{false: 40 * time.Second, true: 5 * time.Second} {
		took, footprint, err := measure.Estimate(loading(fullGrid, quickGrid), measure.Env{Devices: []*cudart.Device{dev}, Options: measure.Options{Quick: quick}})
		require.NoError(t, err)
		assert.LessOrEqual(t, took, largest)
		assert.Less(t, footprint.Pinned, 128<<20)
		assert.Less(t, footprint.Pageable, 512<<20)
	}
}

func TestLoaderInterruptedAnywhere(t *testing.T) {
	t.Parallel()
	small := tiny
	small.workers, small.prefetch, small.sources, small.delay = []int{2}, []int{1}, []string{fromMemory}, 0
	interruptAnywhere(t, func(*cudart.Device) measure.Experiment { return loading(small, small) }, 4096)
}

// The workers of a feed end with it.
func TestLoaderLeavesNoWorkers(t *testing.T) {
	_, dev := slowSim(t)
	l := newLoop(t, dev, fromMemory)
	plain := setting{workers: 1, reader: byPlain, memory: inPageable, copies: blockingText}
	_, err := l.sample(t.Context(), plain)
	require.NoError(t, err)
	before := runtime.NumGoroutine()
	for range 3 {
		for _, s := range tiny.settings(fromMemory) {
			s.workers += 5
			_, err := l.sample(t.Context(), s)
			require.NoError(t, err)
		}
	}
	require.NoError(t, l.stop())
	assert.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+4 }, 10*time.Second, time.Millisecond)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, plain.workers = range []int{1, 0} {
		_, err = l.sample(ctx, plain)
		assert.ErrorIs(t, err, context.Canceled)
	}
}
