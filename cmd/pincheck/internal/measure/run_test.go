package measure

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hostos"
)

// counted is a case whose samples are 1, 2, 3 …
func counted(name string) Case {
	n := 0.0
	return Case{Series: result.Series{Name: name, Unit: result.Count}, Samples: 5, Budget: time.Hour, Sample: func(context.Context) (float64, error) {
		n++
		return n, nil
	}}
}

func experiment(groups ...Group) Experiment {
	for i := range groups {
		if g := &groups[i]; g.Open == nil {
			g.Open = func(context.Context) error { return nil }
		}
		if g := &groups[i]; g.Close == nil {
			g.Close = func() error { return nil }
		}
	}
	return Experiment{Name: "test", Plan: func(Env) ([]Group, error) { return groups, nil }, Explain: func(_ Env, b *result.Bench) ([]string, []result.Table) {
		return []string{fmt.Sprintf("%d series", len(b.Series))}, []result.Table{{Title: "t", Columns: []string{"n"}, Rows: []result.Row{{Name: "r", Cells: []*result.Quantity{{Value: float64(len(b.Series)), Unit: result.Count}}}}}}
	}}
}

func TestRunTakesTheSamplesOfAllCases(t *testing.T) {
	t.Parallel()
	warm, verified := counted("warm"), counted("verified")
	warm.WarmUp = 2
	verified.Verify = func(context.Context) error { return nil }
	verified.Node = func() (int, bool) { return 3, true }
	var shown []Progress
	env := Env{Expect: func(s *result.Series) *result.Expected { return &result.Expected{Value: 7, Source: s.Name} }}
	b, err := Run(t.Context(), experiment(Group{Name: "g", Cases: []Case{warm, verified}}), env, func(p Progress) { shown = append(shown, p) })
	require.NoError(t, err)
	require.Len(t, b.Series, 2)
	assert.Equal(t, []float64{3, 4, 5, 6, 7}, b.Series[0].Samples)
	assert.InDelta(t, 5, b.Series[0].Median, 0)
	assert.False(t, b.Series[0].Verified)
	assert.True(t, b.Series[1].Verified)
	assert.Equal(t, 3, *b.Series[1].NUMANode)
	assert.Equal(t, &result.Expected{Value: 7, Source: "verified"}, b.Series[1].Expected)
	assert.True(t, b.Complete)
	assert.Equal(t, []string{"2 series"}, b.Answers)
	assert.InDelta(t, 2, b.Figures[0].Rows[0].Cells[0].Value, 0)
	assert.Empty(t, b.Errors)
	last := shown[len(shown)-1]
	assert.Equal(t, 2, last.Done)
	assert.Equal(t, 2, last.Total)
}

// A case is named in words: sizes with their units, numbers with their names, nothing twice.
func TestCasesAreNamedInWords(t *testing.T) {
	t.Parallel()
	c := Case{Series: result.Series{Name: "copy_rate", Labels: result.Labels{{Key: result.Device, Value: "0"}, {Key: result.Memory, Value: "registered"},
		{Key: result.Direction, Value: result.HostToDevice}, {Key: result.Size, Value: "65536"}, {Key: "cpu_workers", Value: "2"},
		{Key: "gpu_work", Value: "no"}, {Key: "mode", Value: "O_DIRECT"}}}}
	assert.Equal(t, "GPU 0, registered memory: copy rate, to GPU, 64 KiB, CPU workers 2, no GPU work, O_DIRECT",
		caseName(&Group{Name: "GPU 0, registered memory"}, &c))
	var shown []string
	_, err := Run(t.Context(), experiment(Group{Name: "pool_first_use", Cases: []Case{counted("pin_time"), counted("pin_time")}}), Env{}, func(p Progress) { shown = append(shown, p.What) })
	require.NoError(t, err)
	assert.Equal(t, []string{"pool first use", "pool first use: pin time, 1 of 2", "pool first use: pin time, 2 of 2", ""}, shown)
}

func TestRunTakesWhatSamplesMeasureAsWell(t *testing.T) {
	t.Parallel()
	c := counted("c")
	c.WarmUp = 1
	c.Verify = func(context.Context) error { return nil }
	last := 0.0
	sample := c.Sample
	c.Sample = func(ctx context.Context) (v float64, err error) {
		last, err = sample(ctx)
		return last, err
	}
	c.Also = []Also{
		{result.Series{Name: "twice", Unit: result.Seconds}, func() (float64, bool) { return 2 * last, true }},
		{result.Series{Name: "odd"}, func() (float64, bool) { return last, int(last)%2 == 1 }},
		{result.Series{Name: "none"}, func() (float64, bool) { return 0, false }},
	}
	env := Env{Expect: func(s *result.Series) *result.Expected { return &result.Expected{Source: s.Name} }}
	b, err := Run(t.Context(), experiment(Group{Name: "g", Cases: []Case{c}}), env, nil)
	require.NoError(t, err)
	require.Len(t, b.Series, 3)
	assert.Equal(t, []float64{2, 3, 4, 5, 6}, b.Series[0].Samples)
	assert.Equal(t, []float64{4, 6, 8, 10, 12}, b.Series[1].Samples)
	assert.InDelta(t, 8, b.Series[1].Median, 0)
	assert.Equal(t, result.Seconds, b.Series[1].Unit)
	assert.True(t, b.Series[1].Verified)
	assert.Equal(t, "twice", b.Series[1].Expected.Source)
	assert.Equal(t, []float64{3, 5}, b.Series[2].Samples)
}

func TestRunGoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	bad, late, wrong := counted("bad"), counted("late"), counted("wrong")
	bad.Sample = func(context.Context) (float64, error) { return 0, errors.New("no") }
	n := 0
	late.Sample = func(context.Context) (float64, error) {
		if n++; n > 2 {
			return 0, errors.New("late")
		}
		return 1, nil
	}
	wrong.Verify = func(context.Context) error { return fmt.Errorf("%w: byte 7", ErrMismatch) }
	closed := 0
	done := func() error { closed++; return nil }
	b, err := Run(t.Context(), experiment(
		Group{Name: "a", Cases: []Case{bad, late, wrong, counted("good")}, Close: done},
		Group{Name: "b", Cases: []Case{counted("never")}, Open: func(context.Context) error { return errors.New("full") }, Close: done},
		Group{Name: "c", Cases: []Case{counted("never")}, Open: func(context.Context) error { return fmt.Errorf("old: %w", errors.ErrUnsupported) }, Close: done},
		Group{Name: "d", Cases: []Case{counted("last")}, Close: func() error { return errors.New("stuck") }},
	), Env{}, nil)
	require.NoError(t, err)
	var names []string
	for _, s := range b.Series {
		names = append(names, s.Name)
	}
	assert.Equal(t, []string{"late", "wrong", "good", "last"}, names)
	assert.Len(t, b.Series[0].Samples, 2)
	assert.False(t, b.Series[1].Verified)
	assert.Equal(t, "wrong bytes: byte 7", b.Series[1].Mismatch)
	assert.Empty(t, b.Series[2].Mismatch)
	assert.Equal(t, []string{"a: bad: no", "a: late: late", "a: wrong: compared afterwards: wrong bytes: byte 7", "b: full", "d: release: stuck"}, b.Errors)
	assert.Equal(t, []string{"c: not measured: old: unsupported operation"}, b.Notes)
	require.Len(t, b.Unmeasured, 1, "failures are no such thing")
	assert.Equal(t, "never", b.Unmeasured[0].Name)
	assert.Equal(t, "old: unsupported operation", b.Unmeasured[0].Reason)
	assert.Equal(t, 3, closed)
	assert.True(t, b.Complete, "it came to its end")
}

func TestRunThatIsInterruptedKeepsWhatItHas(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("interrupt")
	slow := counted("slow")
	n := 0.0
	slow.Sample = func(ctx context.Context) (float64, error) {
		if n++; n == 3 {
			cancel(stop)
			return 0, context.Cause(ctx)
		}
		return n, nil
	}
	closed := false
	b, err := Run(ctx, experiment(Group{Name: "a", Cases: []Case{counted("first"), slow, counted("never")}, Close: func() error { closed = true; return nil }},
		Group{Name: "b", Cases: []Case{counted("never")}}), Env{}, nil)
	require.ErrorIs(t, err, stop)
	require.Len(t, b.Series, 2)
	assert.Equal(t, []float64{1, 2}, b.Series[1].Samples)
	assert.False(t, b.Complete)
	assert.True(t, closed)
	assert.Empty(t, b.Errors)
	assert.Equal(t, []string{"2 series"}, b.Answers)
	assert.InDelta(t, 2, b.Figures[0].Rows[0].Cells[0].Value, 0)
}

func TestPlansThatCannotBe(t *testing.T) {
	t.Parallel()
	e := experiment(Group{Name: "a", Footprint: Footprint{Pinned: math.MaxInt / 2}, Cases: []Case{counted("never")}})
	for want, env := range map[string]Env{
		"measure: test: duration -1s: must not be negative":     {Options: Options{Duration: -time.Second}},
		"measure: test: size 0: must be positive":               {Options: Options{Sizes: []int{1, 0}}},
		"measure: test: it takes 4.00 EiB of host memory, and ": {},
	} {
		b, err := Run(t.Context(), e, env, nil)
		require.ErrorContains(t, err, want)
		assert.Nil(t, b)
		_, _, err = Estimate(e, env)
		require.ErrorContains(t, err, want)
	}
	none := Experiment{Name: "test", Plan: func(Env) ([]Group, error) { return nil, errors.New("what?") }}
	_, err := Run(t.Context(), none, Env{}, nil)
	require.EqualError(t, err, "measure: test: what?")
}

func TestDurationIsSharedByTheCases(t *testing.T) {
	t.Parallel()
	short, long := counted("short"), counted("long")
	short.Budget, long.Budget = time.Second, 3*time.Second
	e := experiment(Group{Name: "a", Setup: time.Second, Footprint: Footprint{Pageable: 7}, Cases: []Case{short}}, Group{Name: "b", Footprint: Footprint{Pageable: 5, Disk: 1}, Cases: []Case{long}})
	d, footprint, err := Estimate(e, Env{})
	require.NoError(t, err)
	assert.Equal(t, 5*time.Second, d)
	assert.Equal(t, Footprint{Pageable: 7, Disk: 1}, footprint)
	p, err := newPlan(e, Env{Options: Options{Duration: 9 * time.Second}})
	require.NoError(t, err)
	assert.Equal(t, 9*time.Second, p.time)
	assert.Equal(t, 6*time.Second, p.groups[1].Cases[0].Budget)
	assert.Equal(t, 10, p.groups[1].Cases[0].Samples)
}

func TestNotesFollow(t *testing.T) {
	t.Parallel()
	n := 0
	note := func() []string { n++; return []string{fmt.Sprintf("note %d", n)} }
	b, err := Run(t.Context(), experiment(Group{Name: "a", Cases: []Case{counted("one")}, Notes: note},
		Group{Name: "b", Open: func(context.Context) error { return errors.New("full") }, Notes: note}), Env{}, nil)
	require.NoError(t, err)
	assert.Equal(t, []string{"note 1"}, b.Notes)
	assert.Equal(t, []string{"b: full"}, b.Errors)
}

func TestBytesOfASampleMayBeKnownAfterwards(t *testing.T) {
	t.Parallel()
	c := counted("copies")
	c.BytesPerSample = 100
	c.Bytes = func() int { return 7 }
	b, err := Run(t.Context(), experiment(Group{Name: "a", Cases: []Case{c}}), Env{}, nil)
	require.NoError(t, err)
	assert.Equal(t, 7, b.Series[0].BytesPerSample)
}

// The CPU time a GB is that of all samples by the bytes of all samples, without the warm-up.
func TestCPUTimeIsOfAllSamples(t *testing.T) {
	t.Parallel()
	if hostos.CPUTime() < 0 {
		t.Skip("the CPU time of a process is not known on this platform")
	}
	for _, samples := range []int{3, 5} {
		c := counted("copies")
		c.WarmUp, c.Samples, c.BytesPerSample = 2, samples, 500_000_000
		var used time.Duration
		sample := c.Sample
		c.Sample = func(ctx context.Context) (float64, error) {
			used += 3 * time.Second
			return sample(ctx)
		}
		c.CPU = func() time.Duration { return used }
		b, err := Run(t.Context(), experiment(Group{Name: "a", Cases: []Case{c}}), Env{}, nil)
		require.NoError(t, err)
		require.Len(t, b.Series[0].Samples, samples)
		require.NotNil(t, b.Series[0].CPUSecondsPerGB)
		assert.InDelta(t, 6, *b.Series[0].CPUSecondsPerGB, 1e-9)
	}
}
