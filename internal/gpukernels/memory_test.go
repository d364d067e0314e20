//go:build linux && !android && (amd64 || arm64)

package gpukernels

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

// What a check has found is read from its two words.
func TestReadResultDecodesCounters(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	m, err := NewMemory(t.Context(), dev)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	p, err := dev.Malloc(ResultBytes)
	require.NoError(t, err)
	require.NoError(t, m.ResetResult(s, p))
	require.NoError(t, s.Synchronize(t.Context()))
	found, err := m.ReadResult(t.Context(), p)
	require.NoError(t, err)
	assert.Equal(t, Found{Mismatches: 0, First: -1}, found)
	words := [2]uint64{3, 12345678901}
	require.NoError(t, dev.CopyToDevice(p, unsafe.Pointer(&words), ResultBytes))
	found, err = m.ReadResult(t.Context(), p)
	require.NoError(t, err)
	assert.Equal(t, Found{Mismatches: 3, First: 12345678901}, found)
	require.NoError(t, dev.Free(p))
	require.NoError(t, s.Close())
	require.NoError(t, m.Close())
}

// No more threads are launched than a device runs at once, and never none.
func TestSpreadIsBoundedByTheDevice(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ n, block, processors, blocks int }{
		{0, 256, 132, 1}, {1, 256, 132, 1}, {257, 256, 132, 2}, {1 << 40, 256, 132, 132 * 8}, {1 << 40, 512, 132, 132 * 4}, {1 << 40, 256, 0, 8},
	} {
		c := spread(tt.n, tt.block, tt.processors)
		assert.Equal(t, kernel.Config{Grid: kernel.Dim{X: tt.blocks}, Block: kernel.Dim{X: tt.block}}, c, "%+v", tt)
	}
}
