package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestAllocMeasuresEachMethod(t *testing.T) {
	t.Parallel()
	sim, devices := simulatedDevices(t, cudasim.Config{})
	const odd = 4<<20 + 1
	env := measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1 << 20, odd}}}
	b, err := measure.Run(t.Context(), alloc, env, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	assert.Equal(t, []string{"the simulated GPU neither pins nor populates memory: what this took is the time of the simulator and of this host"}, b.Notes)
	for _, n := range env.Sizes {
		for _, m := range pinMethods {
			if m.name == powerOfTwo && n != odd {
				assert.Nil(t, b.Find(pinTime, result.Label{Key: result.Method, Value: powerOfTwo}, result.Label{Key: result.Size, Value: fmt.Sprint(n)}),
					"a power of two is cudaHostAlloc's own")
				continue
			}
			seconds := find(t, b, pinTime, m.name, n)
			assert.Equal(t, result.Seconds, seconds.Unit)
			assert.True(t, seconds.Verified, m.name)
			if m.name == poolReuse {
				assert.Nil(t, b.Find(pinRate, seconds.Labels...), "it pins nothing")
				continue
			}
			rate := find(t, b, pinRate, m.name, n)
			require.Len(t, rate.Samples, len(seconds.Samples), m.name)
			assert.GreaterOrEqual(t, len(seconds.Samples), 3)
			for i, s := range seconds.Samples {
				assert.InEpsilon(t, float64(n)/1e9, s*rate.Samples[i], 1e-9)
			}
			assert.Equal(t, result.GBPerSecond, rate.Unit)
			unpin := b.Find(unpinTime, seconds.Labels...)
			if m.pooled {
				assert.Nil(t, unpin, m.name)
			} else {
				require.NotNil(t, unpin, m.name)
				assert.Len(t, unpin.Samples, len(seconds.Samples))
				assert.NotNil(t, b.Find(unpinRate, seconds.Labels...))
			}
		}
	}
	text := strings.Join(b.Answers, "\n")
	for _, want := range []string{" as fast as ", "rounds up to a power of two pins 8 MiB for 4 MiB + 1 B, and takes ", "of resident memory takes "} {
		assert.Contains(t, text, want)
	}
	assert.Len(t, b.Answers, 3)
	assert.Equal(t, []string{"at 4 MiB + 1 B", "pool, 4 MiB + 1 B"}, titles(b))
	assert.Zero(t, sim.Outstanding().Registrations+sim.Outstanding().HostAllocs)
}

// What a host refuses is left out, and the rest is measured.
func TestAllocWithoutRegistering(t *testing.T) {
	t.Parallel()
	_, devices := simulatedDevices(t, cudasim.ConfidentialComputing())
	b, err := measure.Run(t.Context(), alloc, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1<<20 + 1}}}, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	notes := strings.Join(b.Notes, "\n")
	assert.Contains(t, notes, registerPlain+": not measured: ")
	assert.Contains(t, notes, registerPopulated+": not measured: ")
	assert.Contains(t, notes, ours+": ", "why the memory is cudaHostAlloc's")
	assert.Nil(t, b.Find(pinTime, result.Label{Key: result.Method, Value: registerPlain}))
	find(t, b, pinTime, ours, 1<<20+1)
	assert.NotContains(t, strings.Join(b.Answers, "\n"), "resident")
}

// Whichever call fails, everything else is measured and all is released: testgpu looks.
func TestAllocFails(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cudaFreeHost"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim, devices := simulatedDevices(t, cudasim.Config{})
			// Late: the call did its work, so that nothing is left to release.
			late := strings.Contains(fn, "Un") || strings.Contains(fn, "Free")
			sim.Fail(fn, cudasim.Fault{Nth: 3, Code: 999, Late: late})
			b, err := measure.Run(t.Context(), alloc, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1<<20 + 1}, Quick: true}}, nil)
			require.NoError(t, err)
			assert.Contains(t, strings.Join(append(b.Errors, b.Notes...), "\n"), fn, "hostmem has another way where registering fails")
			assert.NotNil(t, b.Find(pinTime, result.Label{Key: result.Method, Value: poolReuse}), "the last method is measured")
			assert.True(t, b.Complete)
		})
	}
}

// A call that does not return does not keep the run once ctx has ended.
func TestAllocInterruptedInACall(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaHostAlloc", "cudaHostRegister", "cudaFreeHost", "cudaHostUnregister"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim, devices := simulatedDevices(t, cudasim.Config{})
			unblock := sim.Block(fn, cudasim.Fault{Nth: 4})
			defer unblock()
			ctx, cancel := context.WithCancelCause(t.Context())
			stop := errors.New("stop")
			go func() {
				if sim.AwaitBlocked(ctx, fn, 1) == nil {
					cancel(stop)
				}
			}()
			b, err := measure.Run(ctx, alloc, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1<<20 + 1}}}, nil)
			require.ErrorIs(t, err, stop)
			assert.False(t, b.Complete)
			assert.Empty(t, b.Errors)
			unblock()
		})
	}
}

func TestAllocPlans(t *testing.T) {
	t.Parallel()
	_, err := alloc.Plan(measure.Env{})
	require.EqualError(t, err, "no device")
	_, devices := simulatedDevices(t, cudasim.Config{})
	_, footprint, err := measure.Estimate(alloc, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1<<28 + 1}}})
	require.NoError(t, err)
	assert.Equal(t, 1<<29, footprint.Pinned)
}
