//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// All exported methods and functions, with values that nobody should pass.
func TestZeroAndNilAreErrors(t *testing.T) {
	t.Parallel()
	for _, zero := range []any{new(Pool), (*Pool)(nil), Lease{}} {
		hostmemtest.ZeroArguments(t, zero)
	}
	_, err := New(nil, Options{})
	require.ErrorIs(t, err, errNilDevice)
	g := newSimFixture(t, cudasim.Config{})
	p, err := New(g.Dev, Options{})
	require.NoError(t, err)
	l := get(t, p, 1)
	assert.ErrorIs(t, l.Release(nil), errNilStream)
	assert.ErrorIs(t, l.CopyToDevice(nil, 0, 0, 1), errNilStream)
	assert.ErrorIs(t, l.CopyFromDevice(nil, 0, 0, 1), errNilStream)
	require.NoError(t, l.Release())
	hostmemtest.ZeroArguments(t, l) // released
	hostmemtest.ZeroArguments(t, p, "Close")
}
