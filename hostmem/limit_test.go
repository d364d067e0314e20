//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

// The process's own limit makes Alloc wait, in turn, until enough is released.
func TestTheProcessLimitWaits(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	held := ReadStats().PinnedBytes // by what other tests lost on purpose
	const n = 1 << 20
	require.NoError(t, SetLimits(Limits{MaxBytes: held + n}))
	t.Cleanup(func() { assert.NoError(t, SetLimits(Limits{})) })
	first, err := Alloc(t.Context(), g.Dev, n, Options{})
	require.NoError(t, err)

	_, err = Alloc(endsWaiting(t), g.Dev, n, Options{})
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorIs(t, err, context.Canceled)

	_, err = Alloc(t.Context(), g.Dev, held+2*n, Options{})
	require.ErrorIs(t, err, ErrLimit, "more than the limit can never be had")
	require.ErrorIs(t, err, ErrTooLarge)

	got := make(chan error, 1)
	go func() {
		b, err := Alloc(t.Context(), g.Dev, n, Options{})
		if err == nil {
			err = b.Close()
		}
		got <- err
	}()
	require.NoError(t, first.Close())
	require.NoError(t, <-got)
}

// endsWaiting is a context that ends when a request waits for the limit.
func endsWaiting(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	stop := limits.Reclaim(func(context.Context, int) int { cancel(); return 0 })
	t.Cleanup(func() { stop(); cancel() })
	return ctx
}

// Limits that cannot be are refused and change nothing. A share that is not a number
// would refuse every request from then on.
func TestLimitsThatCannotBe(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	for want, l := range map[string]Limits{
		"hostmem: set limits: Limits.MaxBytes of -1: must not be negative": {MaxBytes: -1},
		"hostmem: set limits: Limits.MaxShare of NaN: must be 0 or more":   {MaxShare: math.NaN()},
		"hostmem: set limits: Limits.MaxShare of -0.1: must be 0 or more":  {MaxShare: -0.1},
	} {
		require.EqualError(t, SetLimits(l), want)
		require.NoError(t, g.alloc(kib, Options{}).Close())
	}
	require.NoError(t, SetLimits(Limits{MaxShare: math.Inf(1)}), "switched off")
	t.Cleanup(func() { assert.NoError(t, SetLimits(Limits{})) })
	require.NoError(t, g.alloc(kib, Options{}).Close())
}

func TestAvailable(t *testing.T) {
	t.Parallel()
	n, ok := Available()
	require.True(t, ok)
	require.Positive(t, n)
	require.Less(t, n, 1<<50, "no host has that much: a missing limit was taken for one")
}
