package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
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

// Each case of kernels measures something, and its bytes are right.
func TestKernelGroups(t *testing.T) {
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
	l, err := w.newLoad(t.Context())
	require.NoError(t, err)
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
