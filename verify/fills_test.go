package verify

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A byte that is flipped on its way is found in the copies of a case and in the guards. In the copy
// that fills the target before it cannot be: it is overwritten before it is read.
func TestWhichFlipsAreSeen(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	const n = 4096
	tr := newTrip(t, dev, nil, PathPinned, n, 1)
	defer func() { assert.NoError(t, tr.release(t.Context())) }()
	c := Case{Path: PathPinned, Pattern: Random, SizeBytes: n, Streams: 1}
	want := content{pattern: c.Pattern, seed: 7}
	at := tr.targets[0].of(c)
	flip := func(p cudart.DevPtr) {
		t.Helper()
		require.NoError(t, dev.Memset(p, 0x3c, 1))
		require.NoError(t, dev.Synchronize(t.Context()))
	}
	seen := func(after func()) bool {
		t.Helper()
		require.NoError(t, tr.poison(t.Context(), c, want))
		after()
		require.NoError(t, tr.copies(t.Context(), c))
		require.NoError(t, tr.synchronize(t.Context()))
		wrong, err := tr.arrived(t.Context(), c, want, tr.targets[0])
		require.NoError(t, err)
		return len(wrong) > 0
	}
	assert.False(t, seen(func() {}))
	assert.False(t, seen(func() { flip(at + n/2) }), "a byte of the fill")
	assert.True(t, seen(func() { flip(at - 1) }), "a guard before")
	assert.True(t, seen(func() { flip(at + n) }), "a guard behind")
	for _, i := range []int{0, n / 2, n - 1} {
		assert.True(t, seen(func() { tr.sent(c)[guardBytes+i] ^= 0x40 }), "the upload, byte %d", i)
	}
}
