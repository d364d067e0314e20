package bench

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Each call that is measured is made by the calls that its name says.
func TestCallsAreThoseOfTheirNames(t *testing.T) {
	t.Parallel()
	sim, env := simulated(t, 1)
	r := &callFixture{resources: resources{dev: env.Devices[0]}}
	defer func() { require.NoError(t, r.close()) }()
	require.NoError(t, r.open(t.Context()))
	names := map[string]bool{}
	for _, c := range r.calls() {
		assert.False(t, names[c.name], "%s: twice", c.name)
		names[c.name] = true
		name, _, _ := strings.Cut(c.name, ",")
		name = strings.TrimSuffix(strings.TrimSuffix(name, " to device"), " to host")
		functions := map[string][]string{
			"cudaStreamCreate + Destroy":      {"cudaStreamCreateWithPriority", "cudaStreamDestroy"},
			"cudaEventCreate + Destroy":       {"cudaEventCreateWithFlags", "cudaEventDestroy"},
			"cudaMalloc + cudaFree":           {"cudaMalloc", "cudaFree"},
			"cudaMallocAsync + cudaFreeAsync": {"cudaMallocAsync", "cudaFreeAsync"},
			"cudaHostAlloc + FreeHost":        {"cudaHostAlloc", "cudaFreeHost"},
			"cudaHostRegister + Unregister":   {"cudaHostRegister", "cudaHostUnregister"},
		}[name]
		if functions == nil {
			functions = []string{name}
		}
		for _, fn := range functions {
			before := sim.Calls(fn)
			require.NoError(t, repeat(t.Context(), c, 3), c.name)
			assert.Equal(t, before+3, sim.Calls(fn), "%s: calls of %s", c.name, fn)
			require.NoError(t, r.stream.Synchronize(t.Context()), "the next call may use the same memory")
		}
	}
}

func TestCalls(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 2)
	b, err := measure.Run(t.Context(), Calls(), env, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	want := len((&callFixture{}).calls())
	for _, device := range []string{"0", "1"} {
		for name, unit := range map[string]result.Unit{seriesCallTime: result.Seconds, seriesCallAllocations: result.Count} {
			all := b.Select(result.View{Series: name, Where: result.Labels{{Key: result.Device, Value: device}}})
			assert.Len(t, all, want)
			for _, s := range all {
				assert.Equal(t, unit, s.Unit)
				if name == seriesCallTime {
					assert.Positive(t, s.Min)
				}
			}
		}
	}
	text := strings.Join(b.Answers, "\n")
	assert.Contains(t, text, "A call takes from ")
	assert.Equal(t, []string{"queueing a copy"}, titles(b))
	assert.NotContains(t, text, "allocate")

	text = strings.Join(answersTo(explainCalls, b), "\n") // as of a real library
	assert.Contains(t, text, "These calls allocate Go memory, so many times each: cudaStreamQuery (")
	b.Series = []result.Series{{Name: seriesCallAllocations, Labels: result.Labels{{Key: result.Device, Value: "0"}}}}
	assert.Equal(t, []string{"No call allocates Go memory."}, answersTo(explainCalls, b))
}

// An allocation of a call is counted.
func TestAllocationsAreCounted(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1)
	r := &callFixture{resources: resources{dev: env.Devices[0]}}
	defer func() { require.NoError(t, r.close()) }()
	require.NoError(t, r.open(t.Context()))
	var retained [][]byte
	n, err := r.allocationsOf(t.Context(), call{do: func() error { retained = append(retained[:0], make([]byte, 64<<10)); return nil }}, 100)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, n, 1.0)
	require.Len(t, retained, 1)
}

func TestCallsInterruptedOrUnsupported(t *testing.T) {
	t.Parallel()
	sim, env := simulated(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sim.Fail("cudaMemcpy", cudasim.Fault{Nth: 5, After: cancel})
	b, err := measure.Run(ctx, Calls(), env, nil)
	require.ErrorIs(t, err, context.Canceled)
	assert.NotEmpty(t, b.Series)
	assert.Empty(t, b.Errors)

	noPools := known
	noPools.Attributes = map[cudart.Attr]int{cudart.AttrMemoryPoolsSupported: 0}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{noPools}})
	b, err = measure.Run(t.Context(), Calls(), measure.Env{Devices: rt.Devices(), Options: env.Options}, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	require.NotEmpty(t, b.Notes)
	assert.Contains(t, b.Notes[0], "cudaMallocAsync")
}
