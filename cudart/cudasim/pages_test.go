//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// managedRig is managed memory on one device of CUDA 13.0 with 8 MiB, and a stream.
func managedRig(t *testing.T, n int) (l *lib, s, p uintptr) {
	locked(t)
	l = open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 8 * mib}}})
	s, p = l.stream(), get[uintptr](l, "cudaMallocManaged", uintptr(n), 1)
	t.Cleanup(func() { l.ok("cudaFree", p) })
	return l, s, p
}

const (
	toDevice0 = 1
	toHost    = 2
	page      = 64 << 10
)

func (l *lib) prefetch(p uintptr, n int, to, s uintptr) {
	l.t.Helper()
	l.ok("cudaMemPrefetchAsync", p, uintptr(n), to, 0, s)
	l.ok("cudaStreamSynchronize", s)
}

func TestManagedPagesMoveByPrefetchAndByFaults(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, 4*mib)
	at := func() map[int]int { return l.ManagedResidence(p, 4*mib) }
	assert.Equal(t, map[int]int{-2: 4 * mib}, at())
	require.True(t, l.TouchManaged(p, 2*mib, true))
	assert.Equal(t, map[int]int{-1: 2 * mib, -2: 2 * mib}, at())
	l.prefetch(p+mib, mib, toDevice0, s)
	assert.Equal(t, map[int]int{-1: mib, 0: mib, -2: 2 * mib}, at())
	l.ok("cudaMemsetAsync", p, 1, 3*mib, s)
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, map[int]int{0: 3 * mib, -2: mib}, at())
	l.TouchManaged(p+page+1, 1, false)
	assert.Equal(t, map[int]int{-1: page, 0: 3*mib - page, -2: mib}, at())
	assert.Equal(t, raw.ManagedTraffic{FaultsOnDevice: 2 * mib / page, FaultsOnHost: 2*mib/page + 1}, raw.TrafficOf(l.Sim))

	assert.Nil(t, l.ManagedResidence(p, 4*mib+1))
	assert.Nil(t, l.ManagedResidence(p, 0))
	assert.Equal(t, map[int]int{-1: 1, 0: 1}, l.ManagedResidence(p+2*page-1, 2))
	assert.False(t, l.TouchManaged(p+4*mib, 1, true))
}

// Nothing moves before the stream gets there.
func TestManagedPagesMoveInTheOrderOfTheStream(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, mib)
	l.Hold()
	l.ok("cudaMemPrefetchAsync", p, mib, toDevice0, 0, s)
	l.ok("cudaMemPrefetchAsync", p, mib, toHost, 0, s)
	assert.Equal(t, map[int]int{-2: mib}, l.ManagedResidence(p, mib))
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, map[int]int{-1: mib}, l.ManagedResidence(p, mib))
}

func TestManagedCopiesOfMemoryThatIsReadMostly(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, mib)
	l.TouchManaged(p, mib, true)
	l.ok("cudaMemAdvise", p, mib, 1, toHost)
	l.prefetch(p, mib, toDevice0, s)
	both := map[int]int{0: mib, -1: mib}
	assert.Equal(t, both, l.ManagedResidence(p, mib))
	l.prefetch(p, mib, toHost, s)
	assert.Equal(t, both, l.ManagedResidence(p, mib), "the device keeps its copy")
	l.TouchManaged(p, mib, true)
	assert.Equal(t, map[int]int{-1: mib}, l.ManagedResidence(p, mib), "a write drops the others")
	l.prefetch(p, mib, toDevice0, s)
	l.ok("cudaMemAdvise", p, mib, 2, toHost)
	assert.Equal(t, map[int]int{-1: mib}, l.ManagedResidence(p, mib), "the host's copy stays")
	l.ok("cudaMemAdvise", p, mib, 1, toHost)
	l.prefetch(p, mib, toDevice0, s)
	l.ok("cudaMemAdvise", p, mib, 3, toDevice0)
	l.ok("cudaMemAdvise", p, mib, 2, toHost)
	assert.Equal(t, map[int]int{0: mib}, l.ManagedResidence(p, mib), "the copy at the preferred location stays")
}

// Managed pages take device memory, and evict one another, but make no room for cudaMalloc.
func TestManagedPagesOnADeviceThatIsFull(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, 12*mib)
	free := func() int {
		v := new([2]uintptr)
		l.ok("cudaMemGetInfo", addr(&v[0]), addr(&v[1]))
		assert.EqualValues(t, 8*mib, v[1])
		return int(v[0])
	}
	l.prefetch(p, 6*mib, toDevice0, s)
	assert.Equal(t, 2*mib, free())
	v := new(uintptr)
	assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaMalloc", addr(v), 2*mib+1))
	l.prefetch(p+6*mib, 6*mib, toDevice0, s)
	assert.Equal(t, map[int]int{-1: 4 * mib, 0: 8 * mib}, l.ManagedResidence(p, 12*mib))
	assert.Equal(t, map[int]int{-1: 4 * mib}, l.ManagedResidence(p, 4*mib), "those that came first")
	assert.Equal(t, 4*mib/page, raw.TrafficOf(l.Sim).Evictions)
	assert.Zero(t, free())
	q := get[uintptr](l, "cudaMallocManaged", mib, 1)
	l.prefetch(q, mib, toDevice0, s)
	l.ok("cudaFree", q)
	assert.Equal(t, mib, free(), "memory that is freed has no pages")
}

// Memory that stays on the host is accessed there.
func TestManagedMemoryIsAccessedWhereItResides(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, mib)
	l.ok("cudaMemAdvise", p, mib, 3, toHost)
	l.ok("cudaMemAdvise", p, mib, 5, toDevice0)
	l.ok("cudaMemsetAsync", p, 1, mib, s)
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, map[int]int{-1: mib}, l.ManagedResidence(p, mib))
	assert.Zero(t, raw.TrafficOf(l.Sim).FaultsOnDevice)
	l.prefetch(p, mib, toDevice0, s)
	assert.Equal(t, map[int]int{0: mib}, l.ManagedResidence(p, mib), "a prefetch moves it all the same")
}

// Faults take longer than prefetches, and what is there already takes none.
func TestManagedMovesTakeTimeByTheLink(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, 6*mib)
	l.TouchManaged(p, 6*mib, true)
	rate := func(took float64) float64 { return 6 * mib / took }
	faults := elapsed(l, s, func() { l.ok("cudaMemsetAsync", p, 1, 6*mib, s) })
	there := elapsed(l, s, func() { l.ok("cudaMemsetAsync", p, 1, 6*mib, s) })
	back := elapsed(l, s, func() { l.ok("cudaMemPrefetchAsync", p, 6*mib, toHost, 0, s) })
	prefetch := elapsed(l, s, func() { l.ok("cudaMemPrefetchAsync", p, 6*mib, toDevice0, 0, s) })
	assert.InDelta(t, 12.3, rate(float64(faults)), 0.5)
	assert.Less(t, there, faults/50)
	assert.InDelta(t, 15.5, rate(float64(back)), 0.5)
	assert.InDelta(t, 43.8, rate(float64(prefetch)), 1)
}

func TestManagedDiscardTakesTheContents(t *testing.T) {
	t.Parallel()
	l, s, p := managedRig(t, mib)
	b := bytesOf(p, mib)
	for i := range b {
		b[i] = 1
	}
	l.TouchManaged(p, mib, true)
	at, size := new(uintptr), new(uintptr)
	*at, *size = p+1, mib/2
	l.ok("cudaMemDiscardBatchAsync", addr(at), addr(size), 1, 0, s)
	l.ok("cudaStreamSynchronize", s)
	assert.EqualValues(t, 1, b[0])
	assert.NotEqualValues(t, 1, b[1])
	assert.NotEqualValues(t, 1, b[mib/2])
	assert.EqualValues(t, 1, b[mib/2+1])
	assert.Equal(t, map[int]int{-2: mib/2 - page, -1: mib/2 + page}, l.ManagedResidence(p, mib), "whole pages")
	for _, args := range [][]uintptr{{0, addr(size), 1, 0, s}, {addr(at), 0, 1, 0, s}, {addr(at), addr(size), 0, 0, s}, {addr(at), addr(size), 1, 1, s}, {addr(at), addr(size), 1, 0, 0}} {
		assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemDiscardBatchAsync", args...), "%v", args)
	}
}

func TestManagedRangeAttributes(t *testing.T) {
	t.Parallel()
	l, _, p := managedRig(t, mib)
	v := new([2]int32)
	for _, args := range [][]uintptr{{0, 4, 1, p, mib}, {addr(v), 3, 1, p, mib}, {addr(v), 6, 3, p, mib}, {addr(v), 8, 1, p, mib}, {addr(v), 4, 9, p, mib},
		{addr(v), 4, 1, p, mib + 1}, {addr(v), 4, 1, p, 0}} {
		assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemRangeGetAttribute", args...), "%v", args)
	}
	l.ok("cudaMemAdvise", p, mib, 5, toHost)
	l.ok("cudaMemAdvise", p, mib, 5, toDevice0)
	l.ok("cudaMemRangeGetAttribute", addr(v), 8, 3, p, mib)
	assert.ElementsMatch(t, []int32{0, -1}, v[:])
	l.ok("cudaMemAdvise", p, page, 6, toHost)
	l.ok("cudaMemRangeGetAttribute", addr(v), 8, 3, p, mib)
	assert.Equal(t, [2]int32{-2, -2}, *v, "not the same for all pages")
}
