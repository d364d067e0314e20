package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// quick is short on the simulated GPU, where copies cost the host's time.
var quick = Plan{SizeBytes: 4 << 20, Copies: 3, Samples: 4, WarmUp: 2, Budget: time.Hour}

func device(t *testing.T, rt *cudart.Runtime) *cudart.Device {
	t.Helper()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return dev
}

func TestBandwidthIsTheLinks(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{
		HostToDevice: cudasim.Way{Rate: 20}, DeviceToHost: cudasim.Way{Rate: 10},
	}}}})
	r, err := Bandwidth(t.Context(), device(t, rt), quick)
	require.NoError(t, err)
	assert.Equal(t, 4<<20, r.SizeBytes)
	assert.Equal(t, 3, r.CopiesPerSample)
	assert.Equal(t, 2, r.WarmUpCopies)
	assert.Positive(t, r.Pin)
	require.Len(t, r.Series, 2)
	for d, rate := range map[Direction]float64{HostToDevice: 20, DeviceToHost: 10} {
		s, ok := r.Find(d)
		require.True(t, ok)
		assert.Len(t, s.Samples, 4)
		assert.InDelta(t, rate, s.Median, rate/50, d)
		assert.Equal(t, Summarize(s.Samples), s.Stats)
	}
	_, ok := r.Find("upwards")
	assert.False(t, ok)
	assert.Equal(t, 2*(probes+2+4*3), sim.Calls("cudaMemcpyAsync"), "small copies, warm-up and samples, both ways")

	b, err := json.Marshal(r)
	require.NoError(t, err)
	for _, name := range []string{"size_bytes", "copies_per_sample", "warm_up_copies", "pin_ns", "series", "samples_gb_per_s", "median_gb_per_s", "spread"} {
		assert.Contains(t, string(b), `"`+name+`":`)
	}
	again := new(Result)
	require.NoError(t, json.Unmarshal(b, again))
	assert.Equal(t, r, again)
}

func TestBudgetEndsASlowLink(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	p := quick
	p.Samples, p.Budget, p.Directions = 1000, 1, []Direction{DeviceToHost}
	r, err := Bandwidth(t.Context(), device(t, rt), p)
	require.NoError(t, err)
	require.Len(t, r.Series, 1)
	assert.Equal(t, DeviceToHost, r.Series[0].Direction)
	assert.Len(t, r.Series[0].Samples, fewestSamples)
}

// A slow link gets fewer and then smaller copies, because a run that is stopped waits for
// those in flight.
func TestCopiesFitASlowLink(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate         float64
		copies, size int
	}{
		{20, 3, 4 << 20}, {10, 2, 4 << 20}, {5, 1, 4 << 20}, {2, 1, 2_000_000}, {0.1, 1, 1 << 20},
	} {
		_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{
			HostToDevice: cudasim.Way{Rate: 20}, DeviceToHost: cudasim.Way{Rate: c.rate},
		}}}})
		b, err := newBench(t.Context(), device(t, rt), quick.SizeBytes)
		require.NoError(t, err)
		p := quick
		p.Directions = Directions()
		require.NoError(t, b.fit(t.Context(), &p, time.Millisecond))
		assert.Equal(t, c.copies, p.Copies, c.rate)
		assert.InDelta(t, c.size, p.SizeBytes, float64(c.size)/50, c.rate)
		require.NoError(t, b.close())
	}
}

func TestBadPlanCallsNothing(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := device(t, rt)
	before := sim.TotalCalls()
	_, err := Bandwidth(t.Context(), dev, Plan{Copies: -1})
	assert.ErrorContains(t, err, "copies -1")
	assert.Equal(t, before, sim.TotalCalls())
}

// When a caller cancels, everything is released: testgpu fails the test for what is not.
func TestCancelledAtEveryCopy(t *testing.T) {
	t.Parallel()
	for at := range 2 * (probes + 2 + 4*3) {
		t.Run(fmt.Sprint("copy ", at), func(t *testing.T) {
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: at + 1, After: cancel})
			p := quick
			p.SizeBytes = 1 << 16
			r, err := Bandwidth(ctx, device(t, rt), p)
			if err == nil {
				// A wait may find its work done before it looks at ctx.
				assert.NotNil(t, r)
				return
			}
			assert.ErrorIs(t, err, context.Canceled)
			for i, s := range r.Series { // those that were measured to their end
				assert.Equal(t, Directions()[i], s.Direction)
				assert.Len(t, s.Samples, 4)
				assert.NotZero(t, s.Median)
			}
			assert.Zero(t, sim.Outstanding().Registrations)
		})
	}
}

func TestCancelledBeforehand(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Bandwidth(ctx, device(t, rt), quick)
	assert.ErrorIs(t, err, context.Canceled)
}

// Each call of a run fails once. The error names the call, everything that can be
// released is, and the next run works.
func TestEveryCallFails(t *testing.T) {
	t.Parallel()
	p := quick
	p.SizeBytes, p.Copies, p.Samples, p.WarmUp = 1<<16, 1, 1, 1
	p.Directions = Directions()[:1]

	// A call that releases something and fails has not released it.
	releasing := []string{"cudaFree", "cudaHostUnregister", "cudaStreamDestroy", "cudaEventDestroy"}
	const most = 200
	failed := 0
	for k := 1; k <= most; k++ {
		sim, err := cudasim.New(cudasim.Config{})
		require.NoError(t, err)
		rt, err := cudart.Open(cudart.Options{Source: sim})
		require.NoError(t, err)
		dev := device(t, rt)
		before := sim.TotalCalls()
		sim.FailCall(before+k, cudart.ErrMemoryAllocation)
		_, err = Bandwidth(t.Context(), dev, p)
		sim.ResetFaults()
		name := "none"
		if call := (*cudart.Error)(nil); errors.As(err, &call) {
			name = call.Op
		}
		reached := sim.TotalCalls() >= before+k
		if err != nil {
			failed++
			assert.ErrorIs(t, err, cudart.ErrMemoryAllocation, "call %d, %s", k, name)
			assert.ErrorContains(t, err, "measure: bandwidth of device 0", "call %d, %s", k, name)
		}
		if !slices.Contains(releasing, name) {
			o := sim.Outstanding()
			assert.Zero(t, o.DeviceAllocs+o.Registrations+o.Streams, "call %d, %s: %v", k, name, o)
		}
		_, err = Bandwidth(t.Context(), dev, p)
		assert.NoError(t, err, "the next run after call %d, %s", k, name)
		require.NoError(t, rt.Close())
		if err := sim.Close(); !slices.Contains(releasing, name) {
			assert.NoError(t, err, "call %d, %s", k, name)
		}
		if !reached {
			assert.Greater(t, failed, 10, "the sweep met the calls of a run")
			return
		}
	}
	t.Errorf("a run makes more than %d calls", most)
}
