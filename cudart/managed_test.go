package cudart_test

import (
	"context"
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestManagedRangesOfEachLibrary(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const n = 4 << 20
		s := stream(t, dev)
		p, err := dev.MallocManaged(n, cudart.ManagedGlobal)
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
		var batch cudart.PrefetchBatch
		require.NoError(t, s.PrefetchBatch(&batch), "an empty one")
		batch.Add(mem, n/2, here)
		batch.Add(mem+n/2, n/2, host)
		assert.Equal(t, 2, batch.Len())
		require.NoError(t, s.PrefetchBatch(&batch))
		require.NoError(t, s.Synchronize(context.Background()))
		at, err = dev.RangeAttributes(mem, n)
		require.NoError(t, err)
		assert.Equal(t, cudart.RangeAttributes{ReadMostly: true, Preferred: host, AccessedBy: []cudart.Location{here}}, at)
		for off, position := range map[cudart.DevPtr]cudart.Location{0: here, n / 2: host} {
			at, err = dev.RangeAttributes(mem+off, n/2)
			require.NoError(t, err)
			assert.Equal(t, position, at.LastPrefetch)
		}
		batch.Reset()
		batch.Add(mem, n, host)
		require.NoError(t, s.PrefetchBatch(&batch))
		require.NoError(t, s.Synchronize(context.Background()))
		require.Equal(t, want, b)

		if dev.Runtime().CanDiscard() {
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
			var batch cudart.PrefetchBatch
			batch.Add(1, n, dev.Location())
			require.ErrorIs(t, s.PrefetchBatch(&batch), cudart.ErrInvalidValue)
		}
		require.ErrorContains(t, s.PrefetchBatch(nil), "the batch is nil")
		p, err := dev.Malloc(4096)
		require.NoError(t, err)
		_, err = dev.RangeAttributes(p, 4096)
		require.ErrorIs(t, err, cudart.ErrInvalidValue, "device memory is not managed")
		var batch cudart.PrefetchBatch
		batch.Add(p, 4096, dev.Location())
		require.ErrorIs(t, s.PrefetchBatch(&batch), cudart.ErrInvalidValue)
		require.NoError(t, dev.Free(p))
	})
}

// A list is one call from CUDA 13.0 on, and one for each range before.
func TestPrefetchBatchIsOneCallFromCUDA13(t *testing.T) {
	t.Parallel()
	for version, want := range map[cudart.Version][2]int{11080: {2, 0}, 12040: {2, 0}, 13000: {0, 1}} {
		sim, err := cudasim.New(testgpu.Config(cudasim.Config{Version: version}))
		require.NoError(t, err)
		rt, err := cudart.Open(cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		assert.Equal(t, version >= 13000, rt.CanPrefetchBatch())
		p, err := dev.MallocManaged(2<<20, cudart.ManagedGlobal)
		require.NoError(t, err)
		s := stream(t, dev)
		mem := cudart.DevPtr(uintptr(p))
		var batch cudart.PrefetchBatch
		batch.Add(mem, 1<<20, dev.Location())
		batch.Add(mem+1<<20, 1<<20, dev.Location())
		require.NoError(t, s.PrefetchBatch(&batch))
		require.NoError(t, s.Synchronize(context.Background()))
		single := "cudaMemPrefetchAsync"
		if version == 12040 {
			single += "_v2"
		}
		assert.Equal(t, want, [2]int{sim.Calls(single), sim.Calls("cudaMemPrefetchBatchAsync")}, version)
		assert.Equal(t, map[int]int{0: 2 << 20}, sim.ManagedResidence(uintptr(p), 2<<20))
		require.NoError(t, dev.Free(mem))
		require.NoError(t, s.Close())
		require.NoError(t, rt.Close())
		testgpu.End(t, sim)
	}
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
