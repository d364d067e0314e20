package bench

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testLink is slow enough for the time of calls not to matter, on the device's clock.
var testLink = cudasim.Link{
	HostToDevice: cudasim.Speed{Rate: 20}, DeviceToHost: cudasim.Speed{Rate: 10},
	PageableHostToDevice: cudasim.Speed{Rate: 5}, PageableDeviceToHost: cudasim.Speed{Rate: 4},
	OnDevice: cudasim.Speed{Rate: 200},
}

// slowSim opens a simulated GPU with testLink.
func slowSim(t *testing.T) (*cudasim.Sim, *cudart.Device) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: testLink}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return sim, dev
}

// simClock is the caller's time by the simulated GPU: an event that is recorded on an
// idle stream has the time of the last work that the host has waited for. It is the same
// on any machine, at any load. Each look takes half a microsecond.
func simClock(t *testing.T, dev *cudart.Device) clock {
	t.Helper()
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	event := func() *cudart.Event {
		e, err := dev.NewEvent()
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, e.Close()) })
		return e
	}
	start, now := event(), event()
	require.NoError(t, s.Record(start))
	return func() time.Duration {
		assert.NoError(t, s.Record(now))
		assert.NoError(t, s.Synchronize(context.Background()))
		d, err := now.Since(start)
		assert.NoError(t, err)
		return d
	}
}

// long reports whether sweeps try all combinations.
func long() bool { return os.Getenv("PINNED_SOAK") != "" }

// runAll runs an experiment, all of it.
func runAll(t *testing.T, e measure.Experiment, env measure.Env) *result.Bench {
	t.Helper()
	b, err := measure.Run(t.Context(), e, env, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	for _, note := range b.Notes {
		assert.Regexp(t, "measured on GPU 0 alone|persistent workers are no factor", note)
	}
	assert.True(t, b.Complete)
	for _, v := range b.Views {
		assert.NotEmpty(t, b.Select(v), "view %q", v.Title)
	}
	return b
}

// label is short for tests.
func label(key, value string) result.Label { return result.Label{Key: key, Value: value} }

func TestLoadsTakeAboutAsLongAsIsWanted(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	w := resources{dev: dev}
	defer func() { assert.NoError(t, w.close()) }()
	s, err := w.stream()
	require.NoError(t, err)
	span, err := w.span()
	require.NoError(t, err)
	l, err := w.newLoad(t.Context())
	require.NoError(t, err)
	assert.False(t, l.fitted())
	for want, least := range map[time.Duration]time.Duration{5 * time.Millisecond: 5 * time.Millisecond, 1: time.Microsecond} {
		require.NoError(t, l.fit(t.Context(), span, s, want))
		assert.True(t, l.fitted())
		took, err := span.Time(t.Context(), s, func() error { return l.queue(s) })
		require.NoError(t, err)
		assert.InDelta(t, least, took, float64(5*time.Microsecond)) // of a launch
	}
}

func TestSizesAreThoseAskedFor(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	quick, all := []int{1 << 20, 16 << 20}, []int{64 << 20, 256 << 20}
	env := measure.Env{}
	assert.Equal(t, all, sizesOr(env, quick, all))
	env.Quick = true
	assert.Equal(t, quick, sizesOr(env, quick, all))
	env.Devices = []*cudart.Device{dev}
	assert.Equal(t, []int{1 << 20, maxSimulated}, sizesOr(env, quick, all))
	env.Quick = false
	assert.Equal(t, []int{maxSimulated}, sizesOr(env, quick, all))
	env.Sizes = []int{9, 1 << 30, 9}
	assert.Equal(t, []int{9, 1 << 30}, sizesOr(env, quick, all))
	for _, e := range All() {
		_, _, err := measure.Estimate(e, measure.Env{})
		assert.ErrorContains(t, err, "no device", e.Name)
	}
}

// Samples are prepared once, before the first: again after an error.
func TestSamplesArePreparedOnce(t *testing.T) {
	t.Parallel()
	broken, calls := errors.New("broken"), []string(nil)
	sample := after(func(context.Context) error {
		calls = append(calls, "prepare")
		if len(calls) == 1 {
			return broken
		}
		return nil
	}, func(context.Context) (float64, error) {
		calls = append(calls, "sample")
		return 1, nil
	})
	_, err := sample(t.Context())
	require.ErrorIs(t, err, broken)
	for range 2 {
		_, err := sample(t.Context())
		require.NoError(t, err)
	}
	assert.Equal(t, []string{"prepare", "prepare", "sample", "sample"}, calls)
}
