package budget

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// A reservation changes its size in place: the bytes that it returns serve others, and it
// grows only as far as the limit allows.
func TestAReservationChanges(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	g := b.mustReserve(t, 8)
	waits := b.Reserve(5)
	require.False(t, decided(waits))
	require.NoError(t, g.Change(t.Context(), Request{Bytes: 5}))
	require.True(t, decided(waits))
	require.Equal(t, 10, b.Used())

	err := g.Change(t.Context(), Request{Bytes: 6})
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorContains(t, err, "1 more bytes, of which 0 are left")
	require.Equal(t, 10, b.Used())
	require.NoError(t, g.Change(t.Context(), Request{Bytes: 5}))
	waits.Release()
	require.NoError(t, g.Change(t.Context(), Request{Bytes: 10}))
	require.Equal(t, 10, b.Used())
	b.Set(4, DefaultShare)
	require.ErrorIs(t, g.Change(t.Context(), Request{Bytes: 11}), ErrLimit)
	require.NoError(t, g.Change(t.Context(), Request{Bytes: 9}), "less is never refused")
	g.Release()
	g.Release()
	assert.Zero(t, b.Used())
}

// The guard checks the new memory, and forgets the old.
func TestTheGuardAdmitsWhatAReservationChangesTo(t *testing.T) {
	t.Parallel()
	b := guardOf(hostWith(64, 10))
	g, err := b.Acquire(t.Context(), Request{Bytes: 20 * gib, Reserved: true})
	require.NoError(t, err, "these pages are not among those available")
	g.MarkResident()
	require.ErrorIs(t, g.Change(t.Context(), Request{Bytes: 20 * gib}), ErrLimit)
	require.NoError(t, g.Change(t.Context(), Request{Bytes: 8 * gib}))
	require.ErrorIs(t, take(b, 2*gib), ErrLimit)
	g.MarkResident()
	g.Release()
	require.NoError(t, take(b, 8*gib), "nothing is left of it")
	require.Equal(t, 8*gib, b.guard.taken)
	require.Equal(t, 8*gib, b.guard.arriving)
	require.Zero(t, b.guard.unseen)
}

// Memory is short where less is available than the process keeps for itself and than
// lists of the pages take.
func TestLowMemory(t *testing.T) {
	t.Parallel()
	h := linux.Headroom{Total: 64 * gib, Source: "here"}
	b := New(func(int) (linux.Headroom, error) { return h, nil })
	for available, want := range map[int]bool{0: true, 68*mib - 1: true, 68 * mib: false, gib: false} {
		h.Available = available
		require.Equal(t, want, b.LowMemory(gib), "%d bytes", available)
	}
	h = linux.Headroom{Available: 20 * mib, Total: 128 * mib}
	require.False(t, b.LowMemory(gib), "a small cgroup keeps an eighth")
	require.False(t, withLimit(0).LowMemory(1), "unknown")
}
