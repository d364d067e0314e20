package cudart_test

import (
	"context"
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

func TestManagedRangesOfEachLibrary(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const n = 4 << 20
		s := stream(t, dev)
		p, err := dev.MallocManaged(n)
		require.NoError(t, err)
		mem := cudart.DevPtr(uintptr(p))
		b := unsafe.Slice((*byte)(p), n)
		fill(b, 7)
		want := make([]byte, n)
		fill(want, 7)
		host, here := cudart.Location{Kind: cudart.LocationHost}, dev.Location()

		at, err := dev.RangeAttributes(mem, n)
		require.NoError(t, err)
		assert.Equal(t, cudart.RangeAttributes{}, at)
		for advice, where := range map[cudart.Advice]cudart.Location{
			cudart.AdviseReadMostly: host, cudart.AdvisePreferredLocation: host, cudart.AdviseAccessedBy: here,
		} {
			require.NoError(t, dev.MemAdvise(mem, n, advice, where))
		}
		require.NoError(t, s.Prefetch(mem, n/2, here))
		require.NoError(t, s.Prefetch(mem+n/2, n/2, host))
		require.NoError(t, s.Synchronize(context.Background()))
		at, err = dev.RangeAttributes(mem, n)
		require.NoError(t, err)
		assert.Equal(t, cudart.RangeAttributes{ReadMostly: true, Preferred: host, AccessedBy: []cudart.Location{here}}, at)
		for off, position := range map[cudart.DevPtr]cudart.Location{0: here, n / 2: host} {
			at, err = dev.RangeAttributes(mem+off, n/2)
			require.NoError(t, err)
			assert.Equal(t, position, at.LastPrefetch)
		}
		require.NoError(t, s.Prefetch(mem, n, host))
		require.NoError(t, s.Synchronize(context.Background()))
		require.Equal(t, want, b)

		if dev.Runtime().Library().Discard {
			require.NoError(t, s.Discard(mem, n/2))
			require.NoError(t, s.Synchronize(context.Background()))
			require.Equal(t, want[n/2:], b[n/2:])
		} else {
			require.ErrorIs(t, s.Discard(mem, n/2), errors.ErrUnsupported)
		}
		require.NoError(t, dev.Free(mem))
	})
}

func TestInvalidManagedRanges(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		s := stream(t, dev)
		for _, n := range []int{0, -1} {
			_, err := dev.RangeAttributes(1, n)
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			require.ErrorIs(t, s.Discard(1, n), cudart.ErrInvalidValue)
			require.ErrorIs(t, s.Prefetch(1, n, dev.Location()), cudart.ErrInvalidValue)
		}
		p, err := dev.Malloc(4096)
		require.NoError(t, err)
		_, err = dev.RangeAttributes(p, 4096)
		require.ErrorIs(t, err, cudart.ErrInvalidValue, "device memory is not managed")
		require.ErrorIs(t, s.Prefetch(p, 4096, dev.Location()), cudart.ErrInvalidValue)
		require.NoError(t, dev.Free(p))
	})
}

func TestLocationsInMessages(t *testing.T) {
	t.Parallel()
	for l, want := range map[cudart.Location]string{
		{}: "no location", {Kind: cudart.LocationDevice, ID: 3}: "device 3", {Kind: cudart.LocationHost}: "the host",
		{Kind: cudart.LocationHostNUMA, ID: 1}: "NUMA node 1", {Kind: cudart.LocationHostNUMACurrent}: "the NUMA node of the calling thread", {Kind: 9}: "location of kind 9",
	} {
		assert.Equal(t, want, l.String())
	}
}
