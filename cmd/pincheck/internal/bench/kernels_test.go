package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A chain visits entries of a stride, each once before any again.
func TestChainVisitsEachEntryOnce(t *testing.T) {
	t.Parallel()
	entries := make([]uint64, 100*16)
	ends := chain(entries, 16, 99)
	seen := map[uint64]bool{}
	at := uint64(0)
	for range 99 {
		require.False(t, seen[at])
		seen[at] = true
		require.Zero(t, at%16)
		at = entries[at]
	}
	assert.EqualValues(t, ends, at)

	ends = chain(entries, 16, 250) // around more than twice
	at = 0
	for range 250 {
		at = entries[at]
	}
	assert.EqualValues(t, ends, at)
}

// On a simulated GPU, which runs no kernels, memsets are the load, and what needs kernels is left
// out with the reason.
func TestSimulatedGPUsHaveNoKernelGroups(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	w := &resources{dev: dev, now: wall()}
	l, err := w.newLoad(t.Context(), 1<<20)
	require.NoError(t, err)
	assert.Nil(t, l.busy)
	assert.False(t, l.fitted())
	span, err := w.span()
	require.NoError(t, err)
	s, err := w.stream()
	require.NoError(t, err)
	require.NoError(t, l.fit(t.Context(), span, s, time.Millisecond))
	assert.True(t, l.fitted())
	require.NoError(t, w.close())

	k := &kernels{resources: resources{dev: dev}, n: 100, host: true}
	assert.ErrorIs(t, k.open(t.Context()), errors.ErrUnsupported)
	require.NoError(t, k.close())
}

// On a real GPU each case of kernels measures something, and its bytes are right.
func TestGPUKernelGroups(t *testing.T) {
	if !testgpu.Real() {
		t.Skipf("needs a real GPU, which %s=1 requests: a simulated one runs no kernels", testgpu.Env)
	}
	dev := testgpu.Device(t)
	z := sizing{sizes: []int{4096, 16 << 20}, sampleBytes: 64 << 20}
	for _, g := range []measure.Group{mappedMemory(dev, z), checkedMemory(dev), loads(dev)} {
		require.NoError(t, g.Open(t.Context()), g.Name)
		for _, c := range g.Cases {
			for range 2 {
				v, err := c.Sample(t.Context())
				require.NoError(t, err)
				assert.Positive(t, v)
				t.Logf("%s: %s %v: %v %s", g.Name, c.Name, c.Labels, v, c.Unit)
			}
			require.NoError(t, c.Verify(t.Context()), "%s %v", g.Name, c.Labels)
		}
		require.NoError(t, g.Close())
	}

	w := &resources{dev: dev, now: wall()}
	l, err := w.newLoad(t.Context(), 1<<20)
	require.NoError(t, err)
	require.NotNil(t, l.busy)
	span, err := w.span()
	require.NoError(t, err)
	s, err := w.stream()
	require.NoError(t, err)
	require.NoError(t, l.fit(t.Context(), span, s, 5*time.Millisecond))
	took, err := span.Time(t.Context(), s, func() error { return l.queue(s) })
	require.NoError(t, err)
	assert.InDelta(t, 5e-3, took.Seconds(), 1e-3)
	require.NoError(t, w.close())
}
