package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/verify"
)

// A stageLog is an examiner of GPUs that writes down what happens, in order. No GPU of a group
// goes on to wait for its turn before all of the group verify, so that a run which verifies them
// one after the other never ends.
type stageLog struct {
	t       *testing.T
	groupOf func(gpu int) int
	sizes   map[int]int // of the groups

	mu        sync.Mutex
	events    []string
	verifying map[int]int           // GPUs of a group that have begun
	begun     map[int]chan struct{} // closed when all of them have
	alone     int                   // GPUs that measure now
	dies      map[int]bool          // at the end of its round trips
	peers     map[int][]int         // GPUs that may be used beside one
	slow      map[int][]float64     // rates of the measurements, 55 without
	nvml      doctor.ProbeState     // how reading the clocks ends

	nvmlSeconds float64 // how long that takes

	clock *skippedTime  // of pauses
	left  time.Duration // until the end of the run; 0 without
	again func()        // called after the first measurement
}

func (l *stageLog) add(format string, args ...any) {
	l.events = append(l.events, fmt.Sprintf(format, args...))
}

func (l *stageLog) group(n int) chan struct{} {
	if l.begun[n] == nil {
		l.begun[n] = make(chan struct{})
	}
	return l.begun[n]
}

func (l *stageLog) Device(ctx context.Context, r probe.Request, show func(probe.Device)) (probe.Device, error) {
	var out probe.Device
	out.Facts.Ordinal = r.Device
	if len(r.Steps.Together) > 0 {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.add("together %v", r.Steps.Together)
		assert.Zero(l.t, l.alone)
		out.Together = &result.Bench{}
		return out, nil
	}
	if r.Steps.Verify {
		n := l.groupOf(r.Device)
		l.mu.Lock()
		l.add("verify")
		if l.peers != nil {
			l.peers[r.Device] = r.Peers
		}
		all := l.group(n)
		if l.verifying[n]++; l.verifying[n] == l.sizes[n] {
			close(all)
		}
		l.mu.Unlock()
		select {
		case <-all:
		case <-ctx.Done():
			return out, ctx.Err()
		}
		out.Facts.Verify = &verify.Report{Cases: 1, CasesPlanned: 1}
	}
	l.mu.Lock()
	dies := l.dies[r.Device]
	l.mu.Unlock()
	if dies {
		out.Probe = doctor.Probe{Name: "gpu", Device: &r.Device, Stage: doctor.StageRoundTrips, State: doctor.ProbeCrashed}
		return out, nil
	}
	if r.Turn != nil {
		l.mu.Lock()
		l.add("wait")
		l.mu.Unlock()
		out.Stage = doctor.StageWaiting
		show(out)
		show(out) // each second
		<-r.Turn
	}
	if !r.Steps.Bandwidth {
		return out, nil
	}
	l.mu.Lock()
	l.add("measure %d", r.Device)
	l.alone++
	assert.Equal(l.t, 1, l.alone, "one GPU after the other")
	rate := 55.0
	if rates := l.slow[r.Device]; len(rates) > 0 {
		rate, l.slow[r.Device] = rates[0], rates[1:]
	}
	if l.again != nil && !r.Steps.Again {
		l.again()
	}
	if rate < 0 {
		l.alone--
		l.mu.Unlock()
		return out, nil
	}
	l.mu.Unlock()
	out.Stage = doctor.StageCopies
	show(out)
	out.Facts.Bandwidth = &result.Bench{Series: []result.Series{{
		Name: "bandwidth", Labels: result.Labels{{Key: result.Direction, Value: result.HostToDevice}, {Key: result.Size, Value: "67108864"}, {Key: result.Memory, Value: "registered"}},
		Samples: []float64{rate}, Stats: result.Summarize([]float64{rate}),
	}}}
	l.mu.Lock()
	l.alone--
	l.mu.Unlock()
	return out, nil
}

func (l *stageLog) NVML(context.Context, probe.Request) (probe.NVML, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add("clocks")
	assert.Zero(l.t, l.alone)
	return probe.NVML{Probe: doctor.Probe{Name: "nvml", Stage: doctor.StageNVML, State: l.nvml, Seconds: l.nvmlSeconds}}, nil
}

// examined returns what happens on a host with n GPUs, and the facts at the end.
func examined(t *testing.T, n, groups int, steps probe.Steps, change func(*stageLog, *doctor.Facts)) ([]string, *doctor.Facts) {
	t.Helper()
	l := &stageLog{t: t, groupOf: func(gpu int) int { return gpu / groups }, sizes: map[int]int{}, verifying: map[int]int{}, begun: map[int]chan struct{}{}}
	facts := &doctor.Facts{Host: &hostinfo.Host{}, ExpectedRate: 50}
	for i := range n {
		l.sizes[i/groups]++
		facts.Devices = append(facts.Devices, doctor.Device{Ordinal: i, Name: "NVIDIA H200"})
	}
	if change != nil {
		change(l, facts)
	}
	facts.SetHealth(&nvml.Report{}) // there is a library: the clocks are read, too
	cmd := &cobra.Command{}
	s := &session{options: &options{quiet: true}, cmd: cmd, sys: system{root: fstest.MapFS{}, isolated: true}, result: &report.Result{Facts: facts}}
	ctx := t.Context()
	if l.clock == nil {
		l.clock = &skippedTime{}
	}
	s.sys.after, s.sys.now = l.clock.after, l.clock.now
	if l.left > 0 {
		limited, cancel := context.WithTimeout(ctx, l.left)
		defer cancel()
		ctx = limited
	}
	require.NoError(t, s.examine(ctx, l, probe.Request{Steps: steps}))
	return l.events, facts
}

// Eight GPUs: the processes start, make their contexts and verify at the same time. Only what
// would spoil a measurement is done one after the other, and needs no new process.
func TestEightGPUsSideBySide(t *testing.T) {
	t.Parallel()
	both := probe.Steps{Verify: true, Bandwidth: true}
	events, facts := examined(t, 8, 8, both, nil)
	want := slices.Concat(slices.Repeat([]string{"verify"}, 8), slices.Repeat([]string{"wait"}, 8))
	for i := range 8 {
		want = append(want, fmt.Sprintf("measure %d", i), "clocks")
	}
	want = append(want, "together [0 1 2 3 4 5 6 7]")
	assert.Equal(t, want, events)
	for _, d := range facts.Devices {
		assert.NotNil(t, d.Verify)
		assert.NotNil(t, d.Bandwidth)
		assert.Nil(t, d.Slower, "as fast as it should be")
	}

	events, _ = examined(t, 8, 8, probe.Steps{Verify: true}, nil)
	assert.Equal(t, slices.Repeat([]string{"verify"}, 8), events, "without measurements none waits")

	events, _ = examined(t, 1, 1, both, nil)
	assert.Equal(t, []string{"verify", "measure 0", "clocks"}, events)

	events, _ = examined(t, 4, 2, both, func(_ *stageLog, f *doctor.Facts) { f.Host.Memory.Available = 2<<30 + 7 })
	pair := func(a, b int) []string {
		return []string{"verify", "verify", "wait", "wait", fmt.Sprintf("measure %d", a), "clocks", fmt.Sprintf("measure %d", b), "clocks"}
	}
	assert.Equal(t, slices.Concat(pair(0, 1), pair(2, 3), []string{"together [0 1 2 3]"}), events, "as many at once as there is memory for")
}

// Each GPU may be verified with the others that were asked for, and begins with another one.
func TestRoundTripsByTheNextGPU(t *testing.T) {
	t.Parallel()
	peers := map[int][]int{}
	examined(t, 3, 3, probe.Steps{Verify: true}, func(l *stageLog, f *doctor.Facts) {
		l.peers = peers
		for i := range f.Devices {
			f.Devices[i].Ordinal = 2 * i // of more GPUs
		}
		l.groupOf = func(int) int { return 0 }
	})
	assert.Equal(t, map[int][]int{0: {2, 4}, 2: {4, 0}, 4: {0, 2}}, peers)
}

// A GPU whose process dies before its turn holds up no other.
func TestAGPUThatDiesBeforeItsTurn(t *testing.T) {
	t.Parallel()
	events, facts := examined(t, 3, 3, probe.Steps{Verify: true, Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) { l.dies = map[int]bool{1: true} })
	assert.Equal(t, []string{"verify", "verify", "verify", "wait", "wait", "measure 0", "clocks", "measure 2", "clocks", "together [0 2]"}, events)
	require.Len(t, facts.Probes, 1)
	assert.Equal(t, 1, *facts.Probes[0].Device)
}

// Copies that are slow are measured again, when all the others are done, until they are as fast as they should be.
// What is slow by half is measured once more, and at once.
func TestSlowCopiesAreMeasuredAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		first  float64
		again  []float64
		better float64
		slower float64
		pauses int
	}{
		{40, []float64{54}, 54, 40, 0},
		{40, []float64{45, 54}, 54, 40, 1},
		{40, []float64{45, 35, 42, 54}, 54, 35, 3},
		{40, []float64{45, 45, 45, 45, 45, 45}, 45, 40, 5},
		{20, []float64{25}, 25, 20, 0},
		{20, []float64{30, 35, 52}, 52, 20, 2}, // of 50, 60% at the second time
	} {
		clock := &skippedTime{}
		events, facts := examined(t, 2, 2, probe.Steps{Verify: true, Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) {
			l.slow = map[int][]float64{0: append([]float64{c.first}, c.again...)}
			l.clock = clock
		})
		want := []string{"verify", "verify", "wait", "wait", "measure 0", "clocks", "measure 1", "clocks"}
		for range c.again {
			want = append(want, "measure 0", "clocks")
		}
		assert.Equal(t, append(want, "together [0 1]"), events)
		assert.Len(t, clock.pauses, c.pauses)
		d := facts.Devices[0]
		assert.InDelta(t, c.better, d.Slowest(), 0)
		require.NotNil(t, d.Slower)
		assert.InDelta(t, c.slower, d.Slower.Series[0].Median, 0)
		require.NotNil(t, d.Repeats)
		assert.Len(t, d.Repeats.Benches, 1+len(c.again))
		assert.InDelta(t, clock.passed.Seconds(), d.Repeats.Seconds, 0)
		assert.Nil(t, facts.Devices[1].Slower)
	}
}

// A GPU whose process dies when it is measured again, or measures nothing, is not measured until
// the last pause, and holds up no other.
func TestSlowCopiesThatCannotBeMeasuredAgain(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*stageLog){
		"dies":             func(l *stageLog) { l.dies = map[int]bool{0: true} },
		"measures nothing": func(l *stageLog) { l.slow[0] = append(l.slow[0], -1) },
	} {
		clock := &skippedTime{}
		events, facts := examined(t, 1, 1, probe.Steps{Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) {
			l.slow, l.clock = map[int][]float64{0: {40}}, clock
			l.again = func() { change(l) }
		})
		assert.Empty(t, clock.pauses, name)
		assert.InDelta(t, 40, facts.Devices[0].Slowest(), 0, name)
		assert.LessOrEqual(t, len(events), 4, name)
	}
}

// What is left of --timeout decides how often slow copies are measured again: the run comes to its end.
func TestSlowCopiesWithLittleTime(t *testing.T) {
	t.Parallel()
	for left, pauses := range map[time.Duration]int{time.Second: 0, 6 * time.Second: 2, time.Hour: 5} {
		clock := &skippedTime{}
		examined(t, 1, 1, probe.Steps{Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) {
			l.slow, l.clock, l.left = map[int][]float64{0: {40, 40, 40, 40, 40, 40, 40}}, clock, left
		})
		assert.Len(t, clock.pauses, pauses, "%v", left)
	}
}

// An interrupt ends a pause.
func TestInterruptedBetweenMeasurements(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	e := &examination{session: &session{sys: system{after: func(time.Duration) <-chan time.Time { cancel(); return nil }}}}
	assert.ErrorIs(t, e.wait(ctx, time.Hour), context.Canceled)
}

func TestHowManyGPUsSideBySide(t *testing.T) {
	t.Parallel()
	const gib = 1 << 30
	for _, c := range []struct {
		available, headroom int
		full                bool
		want                int
	}{
		{0, -1, false, 8},
		{2000 * gib, -1, false, 8},
		{2000 * gib, -1, true, 8},
		{2000 * gib, 5 * gib, false, 5},
		{40 * gib, -1, true, 3},
		{200 << 20, -1, false, 1},
	} {
		h := &hostinfo.Host{}
		h.Memory.Available, h.Cgroup.Headroom = c.available, hostinfo.Limit{Known: true, Unlimited: c.headroom < 0, N: c.headroom}
		assert.Equal(t, c.want, sideBySide(h, c.full), "%+v", c)
	}
	assert.Equal(t, 8, sideBySide(nil, false))
}

// GPUs that are done count as such in what is shown, before it is the others' turn, and what is
// shown does not go back when one is measured again.
func TestShareOfGPUsThatAreDone(t *testing.T) {
	t.Parallel()
	l := &stageLog{t: t, groupOf: func(gpu int) int { return gpu }, sizes: map[int]int{0: 1}, verifying: map[int]int{}, begun: map[int]chan struct{}{}}
	s := &session{options: &options{quiet: true}, cmd: &cobra.Command{}, sys: system{root: fstest.MapFS{}}, result: &report.Result{}}
	e := &examination{session: s, p: l, facts: &doctor.Facts{Devices: make([]doctor.Device, 2)}, ordinals: []int{0, 1}, failed: make([]bool, 2), measured: make([]time.Time, 2),
		shown: &totalProgress{s: s, shares: make([]float64, 2), scale: 1}}
	require.NoError(t, e.examineGPU(t.Context(), 0, probe.Steps{Verify: true, Bandwidth: true}, nil, func() {}))
	assert.Equal(t, []float64{1, 0}, e.shown.shares)
	require.NoError(t, e.examineGPU(t.Context(), 0, probe.Steps{Bandwidth: true}, nil, func() {}))
	assert.Equal(t, []float64{1, 0}, e.shown.shares)
}

// A management library that does not return from one look would take as long with each GPU.
func TestClocksAreNotReadAfterNVMLHung(t *testing.T) {
	t.Parallel()
	for _, state := range []doctor.ProbeState{doctor.ProbeHung, doctor.ProbeCrashed} {
		events, facts := examined(t, 3, 3, probe.Steps{Verify: true, Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) { l.nvml = state })
		assert.Equal(t, []string{"verify", "verify", "verify", "wait", "wait", "wait", "measure 0", "clocks", "measure 1", "measure 2", "together [0 1 2]"}, events)
		assert.Len(t, facts.Probes, 1, "it is reported once")
	}
	events, facts := examined(t, 2, 2, probe.Steps{Bandwidth: true}, func(l *stageLog, _ *doctor.Facts) { l.nvmlSeconds = 6 })
	assert.Equal(t, 1, len(slices.DeleteFunc(slices.Clone(events), func(e string) bool { return e != "clocks" })), "one look that is slow is enough: %v", events)
	assert.Empty(t, facts.Probes, "it returns")
}
