package bench

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestLink(t *testing.T) {
	t.Parallel()
	sim, env := simulated(t, 1)
	env.Duration = 0
	b := run(t, Link(LinkPlan{SizeBytes: 1 << 20, Copies: 3, Samples: 4, Budget: time.Hour}), env)
	require.Len(t, b.Series, 2)
	for _, s := range b.Series {
		assert.Len(t, s.Samples, 4)
		assert.InDelta(t, modelled(1<<20), s.Median, modelled(1<<20)/50)
		assert.True(t, s.Verified)
	}
	before := sim.TotalCalls()
	for _, bad := range []LinkPlan{{SizeBytes: -1}, {Copies: -1}, {Samples: -1}, {Budget: -1}} {
		for _, e := range []measure.Experiment{Link(bad), Together(bad, 0)} {
			_, err := measure.Run(t.Context(), e, env, nil)
			require.ErrorContains(t, err, "must not be negative")
		}
	}
	_, err := measure.Run(t.Context(), Together(LinkPlan{}, 0), env, nil)
	require.ErrorContains(t, err, "1 devices: want two at least")
	assert.Equal(t, before, sim.TotalCalls())
}

// The doctor finds what it asks for: each device, and the sum.
func TestTogether(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 3)
	env.Duration = 0
	b := run(t, Together(LinkPlan{SizeBytes: 1 << 20, Samples: 4, Budget: time.Hour}, 0), env)
	require.Len(t, b.Series, 8)
	for _, direction := range bothDirections {
		sum := 0.0
		for _, device := range []string{"0", "1", "2", doctor.TogetherSum} {
			s := b.Find(doctor.TogetherBandwidth, result.Label{Key: result.Device, Value: device}, result.Label{Key: result.Direction, Value: direction})
			require.NotNil(t, s, "%s %s", device, direction)
			assert.True(t, s.Verified)
			assert.Len(t, s.Samples, 4)
			if device == doctor.TogetherSum {
				assert.Equal(t, 3*8<<20, s.BytesPerSample)
				assert.InDelta(t, sum, s.Median, sum/20)
				continue
			}
			assert.InDelta(t, modelled(1<<20), s.Median, modelled(1<<20)/20)
			sum += s.Median
		}
	}
	for rate, copies := range map[float64]int{0: 8, 1000: 8, 0.25: 2, 0.001: 1} {
		b := run(t, Together(LinkPlan{SizeBytes: 1 << 20, Samples: 3}, rate), env)
		assert.Equal(t, 3*copies<<20, b.Find(doctor.TogetherBandwidth).BytesPerSample, "%g", rate)
	}
}

// A call that fails on one of the devices ends neither the run nor what is released.
func TestACallOfTogetherFails(t *testing.T) {
	t.Parallel()
	for _, nth := range []int{1, 4, 9} {
		sim, env := simulated(t, 2)
		env.Duration = 0
		sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: nth, Code: cudart.ErrUnknown})
		b, err := measure.Run(t.Context(), Together(LinkPlan{SizeBytes: 1 << 20, Copies: 1, Samples: 3}, 0), env, nil)
		require.NoError(t, err)
		require.NotEmpty(t, b.Errors, nth)
		assert.Contains(t, b.Errors[0], "all devices at once", nth)
		assert.Contains(t, b.Errors[0], "cudaErrorUnknown", nth)
	}
}

func TestBudgetEndsASlowLink(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1)
	env.Duration = 0
	b := run(t, Link(LinkPlan{SizeBytes: 1 << 16, Copies: 1, Samples: 1000, Budget: 1}), env)
	for _, s := range b.Series {
		assert.Len(t, s.Samples, 3)
	}
}

// On a slow link a sample has fewer copies, and says so.
func TestSamplesOfASlowLinkHaveFewerCopies(t *testing.T) {
	t.Parallel()
	slow := cudasim.Link{HostToDevice: cudasim.Speed{Rate: 0.5}, DeviceToHost: cudasim.Speed{Rate: 0.3}}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: slow}}})
	env := measure.Env{Devices: rt.Devices()}
	b := run(t, Link(LinkPlan{Samples: 3}), env)
	require.Len(t, b.Series, 2)
	assert.Equal(t, 64<<20, b.Series[1].BytesPerSample, "two take 0.45 s")
	assert.InDelta(t, 0.3, b.Series[1].Median, 0.006)
	assert.Equal(t, 64<<20, b.Series[0].BytesPerSample, "two take 0.27 s")
	assert.InDelta(t, 0.5, b.Series[0].Median, 0.01)
}

// When a run is interrupted at any copy, everything is released: testgpu fails the test for
// what is not.
func TestLinkInterruptedAtEveryCopy(t *testing.T) {
	t.Parallel()
	for at, done := 1, false; !done; at++ {
		t.Run(fmt.Sprint("copy ", at), func(t *testing.T) {
			sim, env := simulated(t, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: at, After: cancel})
			b, err := measure.Run(ctx, Link(LinkPlan{SizeBytes: 1 << 16, Copies: 2, Samples: 3}), env, nil)
			require.NotNil(t, b)
			assert.Empty(t, b.Errors)
			assert.Zero(t, sim.Outstanding().Registrations)
			if done = sim.Calls("cudaMemcpyAsync") < at; done {
				require.NoError(t, err)
				assert.Greater(t, at, 15, "the sweep met the copies of a run")
				return
			}
			require.ErrorIs(t, err, context.Canceled)
		})
		require.Less(t, at, 100)
	}
}

// Each call of a run fails once. The result names it, everything that can be released is,
// and the next run works.
func TestEveryCallOfLinkFails(t *testing.T) {
	t.Parallel()
	// A call that releases something and fails has not released it.
	releasing := []string{"cudaFree", "cudaHostUnregister", "cudaStreamDestroy", "cudaEventDestroy"}
	for _, fn := range append(releasing, "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cudaMalloc", "cudaHostRegister",
		"cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord", "cudaEventElapsedTime") {
		t.Run(fn, func(t *testing.T) {
			for nth := 1; linkFails(t, fn, nth, slices.Contains(releasing, fn)); nth += hosttest.Stride() {
				require.Less(t, nth, 100)
			}
		})
	}
}

// linkFails runs Link with one call that fails. It is false if there is no such call.
func linkFails(t *testing.T, fn string, nth int, keeps bool) bool {
	p := LinkPlan{SizeBytes: 1 << 16, Copies: 1, Samples: 1}
	sim, err := cudasim.New(cudasim.Config{})
	require.NoError(t, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	env := measure.Env{Devices: rt.Devices()}
	sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrUnknown})
	b, err := measure.Run(t.Context(), Link(p), env, nil)
	require.NoError(t, err)
	sim.ResetFaults()
	met := sim.Calls(fn) >= nth
	if met && fn != "cudaHostRegister" { // without it, hostmem has cudaHostAlloc
		require.NotEmpty(t, b.Errors, nth)
		assert.Contains(t, b.Errors[0], "GPU 0, registered memory", nth)
		assert.Contains(t, b.Errors[0], fn, nth)
		assert.Contains(t, b.Errors[0], "cudaErrorUnknown", nth)
	} else {
		assert.Empty(t, b.Errors)
	}
	if !keeps {
		o := sim.Outstanding()
		assert.Zero(t, o.DeviceAllocs+o.Registrations+o.Streams, "%d: %v", nth, o)
	}
	b, err = measure.Run(t.Context(), Link(p), env, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors, "the next run after %d", nth)
	require.NoError(t, rt.Close())
	if err := sim.Close(); !keeps {
		assert.NoError(t, err, nth)
	}
	return met
}
