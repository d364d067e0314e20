package verify

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

// A byte that is flipped on its way is found in the copies of a case and in the guards. In the copy
// that fills the target before it cannot be: it is overwritten before it is read.
func TestWhichFlipsAreSeen(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	const n = 4096
	tr := newTrip(t, dev, nil, pathPinned, n, 1)
	defer func() { assert.NoError(t, tr.release(t.Context())) }()
	c := Case{Path: pathPinned, Pattern: patternRandom, SizeBytes: n, Streams: 1}
	want := c.Pattern.content(7)
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

// Of a thousand bytes that are flipped anywhere on their way, all are found but those inside of a fill, which
// are a third of what crosses the link.
func TestAThousandFlips(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	found, overwritten := 0, 0
	for seed := uint64(0); seed < 1000; seed += uint64(hosttest.Stride()) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := 1 + r.IntN(9000)
		tr := newTrip(t, dev, nil, pathPinned, n, 1)
		c := Case{Path: pathPinned, Pattern: patternRandom, SizeBytes: n, Streams: 1}
		want := c.Pattern.content(seed)
		mask := byte(1) << r.IntN(8)
		require.NoError(t, tr.poison(t.Context(), c, want))
		at, phase := r.IntN(n+2*guardBytes), r.IntN(3)
		fill := at >= guardBytes && at < guardBytes+n
		var one [1]byte
		switch phase {
		case 0: // the fill, with its guards
			p := tr.targets[0].of(c) - guardBytes + cudart.DevPtr(at)
			require.NoError(t, dev.CopyToHost(unsafe.Pointer(&one[0]), p, 1))
			require.NoError(t, dev.Memset(p, one[0]^mask, 1))
			require.NoError(t, dev.Synchronize(t.Context()))
		case 1: // the upload
			tr.sent(c)[guardBytes+at%n] ^= mask
		}
		require.NoError(t, tr.copies(t.Context(), c))
		require.NoError(t, tr.synchronize(t.Context()))
		if phase == 2 { // the download
			tr.returned(c)[guardBytes+at%n] ^= mask
		}
		wrong, err := tr.arrived(t.Context(), c, want, tr.targets[0])
		require.NoError(t, err)
		require.NoError(t, tr.release(t.Context()))
		if phase == 0 && fill {
			overwritten++
			require.Empty(t, wrong, "seed %d: it was overwritten", seed)
			continue
		}
		found++
		require.NotEmpty(t, wrong, "seed %d: phase %d, byte %d of %d", seed, phase, at, n)
	}
	t.Logf("%d found, %d overwritten before they were read", found, overwritten)
}
