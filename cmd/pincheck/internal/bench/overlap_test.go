package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

// short is one sample or a few of each case.
func short(dev *cudart.Device, sizes ...int) measure.Env {
	return measure.Env{Devices: []*cudart.Device{dev}, Options: measure.Options{Quick: true, Duration: 1, Sizes: sizes}}
}

func TestOverlapMeasuresTheLinkModel(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	const n = 4 << 20
	b := runAll(t, without(overlap(simClock(t, dev)), isStale), short(dev, 1<<20, n))
	size := label(result.Size, strconv.Itoa(n))
	find := func(name string, labels ...result.Label) float64 {
		t.Helper()
		s := b.Find(name, labels...)
		require.NotNil(t, s, "%s %v", name, labels)
		assert.True(t, s.Verified, "%s %v", name, labels)
		return s.Median
	}
	for _, c := range []struct {
		direction, memory string
		rate, blocked     float64
	}{
		{result.HostToDevice, inPageable, 5, 1}, {result.HostToDevice, inPinned, 20, 0},
		{result.DeviceToHost, inPageable, 4, 1}, {result.DeviceToHost, inPinned, 10, 0},
	} {
		where := []result.Label{size, label(result.Direction, c.direction), label(result.Memory, c.memory)}
		took := n / c.rate / 1e9
		assert.InDelta(t, c.blocked, find(blockedShare, where...), 0.02, where)
		assert.InEpsilon(t, took, find(copyTime, where...), 0.02, where)
		assert.InDelta(t, c.blocked*took, find(callTime, where...), 0.02*took, where)
		for _, order := range []string{firstWork, firstCopy} {
			where := append(where, label(first, order))
			assert.InEpsilon(t, took, find(copyAlone, where...), 0.02, where)
			work := find(workAlone, where...)
			assert.InEpsilon(t, took, work, 0.06, where) // whole memsets
			// The one that blocks its caller hides only behind what is queued already.
			hidden := 1.0
			if c.memory == inPageable && order == firstCopy {
				hidden = 0
			}
			assert.InDelta(t, hidden, find(hiddenShare, where...), 0.03, where)
			assert.InEpsilon(t, max(took, work)+(1-hidden)*min(took, work), find(togetherTime, where...), 0.02, where)
		}
	}
	// One stream does one after another, cut or not. Several are no slower, and no faster than the link: how much they
	// overlap is the order in which the simulator's streams run.
	piped := func(direction string, pieces, streams int) float64 {
		return find(pipedRate, size, label(result.Direction, direction), label(piecesKey, piecesText(pieces)), label(streamsKey, strconv.Itoa(streams)))
	}
	const up, down = 1 / 20.0, 1 / 10.0 // seconds a GB
	for _, pieces := range []int{1, maxPieces} {
		assert.InEpsilon(t, 1/(up+up), piped(result.HostToDevice, pieces, 1), 0.1, pieces)
		assert.InEpsilon(t, 2/(up+up+down), piped(result.Both, pieces, 1), 0.1, pieces)
	}
	for _, streams := range streamCounts[1:] {
		for _, c := range []struct {
			direction string
			fastest   float64
		}{{result.HostToDevice, 1 / up}, {result.Both, 2 / down}} {
			rate := piped(c.direction, maxPieces, streams)
			assert.GreaterOrEqual(t, rate, 0.95*piped(c.direction, maxPieces, 1), streams)
			assert.Less(t, rate, c.fastest, streams)
		}
	}
	for _, r := range []string{readerOther, readerSame} {
		assert.Zero(t, find(oldShare, size, label(reader, r)), "the simulated calls return when the bytes have arrived")
	}

	require.Len(t, b.Answers, 3)
	assert.Contains(t, b.Answers[0], "Beside work, a copy is ")
	assert.Contains(t, b.Answers[1], "after cudaMemcpy of pageable memory found all bytes in ")
	assert.Contains(t, b.Answers[2], "on the same stream found all bytes in ")
	assert.Equal(t, []string{"with work", "time in the call, 4 MiB", "Share of a copy of 4 MiB that hides behind work of its length"}, titles(b))
}

// without leaves groups out of an experiment.
func without(e measure.Experiment, omit func(name string) bool) measure.Experiment {
	plan := e.Plan
	e.Plan = func(env measure.Env) ([]measure.Group, error) {
		groups, err := plan(env)
		return slices.DeleteFunc(groups, func(g measure.Group) bool { return omit(g.Name) }), err
	}
	return e
}

// isStale is of the group whose memory is not of the sizes that are asked for.
func isStale(name string) bool { return strings.HasPrefix(name, "reads before synchronising") }

// The third copy of each sample, the one that is overtaken, is held until the wait for
// it begins, so that no machine is too slow to overtake it.
func TestReadsBeforeSynchronisingFindOldBytes(t *testing.T) {
	t.Parallel()
	sim, dev := slowSim(t)
	var mu sync.Mutex // the hook is called from several threads
	copies, held := 0, false
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case held:
			held = false
			sim.Release()
		case fn == "cudaMemcpyAsync":
			if copies++; copies%3 == 0 {
				held = true
				sim.Hold()
			}
		}
	})
	b, err := measure.Run(t.Context(), without(overlap(wall()), func(name string) bool { return !isStale(name) }), short(dev), nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	require.Len(t, b.Series, 1)
	assert.Equal(t, []float64{1, 1, 1}, b.Series[0].Samples)
	assert.True(t, b.Series[0].Verified)
	require.Len(t, b.Answers, 1)
	assert.Contains(t, b.Answers[0], "finds old bytes, 100% of those sampled, and no call fails.")
}

func TestWorkThatIsNotInOrderReadsOldBytes(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	const n = 1 << 16
	o := &ordering{resources: resources{dev: dev}}
	defer func() { assert.NoError(t, o.close()) }()
	require.NoError(t, o.open(t.Context(), n))
	for late, want := range map[int]int{0: 0, 100: 100, n: n} {
		old, err := o.old(t.Context(), n, func(ctx context.Context, n int) error {
			if late == n {
				return nil
			}
			return o.source.CopyToDevice(ctx, o.stream, o.a, 0, n-late)
		})
		require.NoError(t, err)
		assert.Equal(t, want, old)
	}
	for _, u := range o.uploads() {
		old, err := o.old(t.Context(), n, u.do)
		require.NoError(t, err)
		assert.Zero(t, old)
		require.NoError(t, o.verify(t.Context(), n))
	}
}

// Every call of an experiment ends the run once: all is released.
func TestOverlapInterruptedAnywhere(t *testing.T) {
	t.Parallel()
	interruptAnywhere(t, func(*cudart.Device) measure.Experiment { return without(overlap(wall()), isStale) }, 4096)
}

// interruptAnywhere ends a run at some of its calls, and makes calls fail. All must be
// released: simulated fails the test otherwise.
func interruptAnywhere(t *testing.T, e func(*cudart.Device) measure.Experiment, size int) {
	t.Helper()
	count := func() int {
		sim, dev := slowSim(t)
		before := sim.TotalCalls()
		b, err := measure.Run(t.Context(), e(dev), short(dev, size), nil)
		require.NoError(t, err)
		assert.Empty(t, b.Errors)
		return sim.TotalCalls() - before
	}()
	places := 5
	if long() {
		places = 15
	} else if testing.Short() {
		places = 2
	}
	for i := range places {
		at := 1 + i*count/places
		t.Run(fmt.Sprint("interrupted at call ", at), func(t *testing.T) {
			sim, dev := slowSim(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var mu sync.Mutex
			calls := 0
			sim.OnCall(func(string, int) {
				mu.Lock()
				defer mu.Unlock()
				if calls++; calls == at {
					cancel()
				}
			})
			b, err := measure.Run(ctx, e(dev), short(dev, size), nil)
			if err != nil {
				assert.ErrorIs(t, err, context.Canceled)
				assert.False(t, b.Complete)
			}
			assert.Empty(t, b.Errors)
		})
	}
	// What fails is left out, and the rest is measured and released.
	for j, fn := range hosttest.Sample([]string{"cudaMalloc", "cudaHostRegister", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cudaMemcpy", "cudaMemcpyAsync",
		"cuLaunchKernel", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventElapsedTime"}) {
		for i, nth := range []int{1, 5} {
			if !long() && j%2 != i {
				continue
			}
			t.Run(fmt.Sprint(fn, " fails at call ", nth), func(t *testing.T) {
				sim, dev := slowSim(t)
				sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrMemoryAllocation})
				_, err := measure.Run(t.Context(), e(dev), short(dev, size), nil)
				assert.NoError(t, err)
			})
		}
	}
}

// What verify compares is what the copies brought, nothing that was there before.
func TestOverlapVerifiesTheCopies(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	const n = 10_001
	for _, k := range overlapKinds {
		r := &copyFixture{resources: resources{dev: dev, now: wall()}, kind: k.kind, n: n}
		require.NoError(t, r.open(t.Context()))
		for _, c := range copyCasesOf(r, k.label, []int{n - 1, n}) {
			verify := c.caseOf(measure.Case{}).Verify
			require.NoError(t, c.prepare(t.Context(), c.direction, c.n))
			assert.ErrorIs(t, verify(t.Context()), measure.ErrMismatch, c.labels())
			require.NoError(t, c.queue(t.Context()))
			require.NoError(t, r.main(c.direction).Synchronize(t.Context()))
			assert.NoError(t, verify(t.Context()), c.labels())
		}
		assert.NoError(t, r.close())
	}
}
