package managed

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
)

// CPU and GPU write in turn, and each reads what the other wrote, with and without moves
// in between.
func TestCPUAndGPUWriteInTurn(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	const n = 8*mib + 13
	m := g.alloc(n)
	back := make([]byte, n)
	for turn := range byte(3) {
		b, err := m.HostBytes(t.Context())
		require.NoError(t, err)
		for i := range b {
			b[i] = byte(i) ^ byte(i>>8) + turn
		}
		if g.a.concurrent && turn > 0 {
			require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
		}
		g.sync()
		require.NoError(t, g.dev.CopyToHost(unsafe.Pointer(&back[0]), m.Ptr(), n))
		require.Equal(t, b, back, "what the CPU wrote, as the GPU reads it")
		require.NoError(t, g.s.Memset(m.Ptr(), 0xa0+turn, n-1))
		if g.a.concurrent && turn == 2 {
			require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, cudart.HostLocation()))
		}
		g.sync()
		last := back[n-1]
		for i := range back {
			back[i] = 0xa0 + turn
		}
		back[n-1] = last
		require.Equal(t, back, m.Bytes(), "what the GPU wrote, as the CPU reads it")
	}
}

func TestSliceOfMemory(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	m := g.alloc(4*5 + 3)
	x := hostmem.Slice[float32](m.Bytes())
	require.Len(t, x, 5)
	x[4] = 1
	assert.EqualValues(t, 0x3f80, uint16(m.Bytes()[19])<<8|uint16(m.Bytes()[18]))
}

func TestPrefetchMovesRangesAndAttributesSayWhere(t *testing.T) {
	t.Parallel()
	for _, v := range versions {
		g := newSimFixture(t, cudasim.Config{Version: v}, Options{})
		m := g.alloc(4 * mib)
		require.Equal(t, map[int]int{nowhere: 4 * mib}, g.at(m.Whole()))
		require.NoError(t, m.Range(mib, mib).Prefetch(t.Context(), g.s, g.dev.Location()))
		g.sync()
		assert.Equal(t, map[int]int{nowhere: 3 * mib, 0: mib}, g.at(m.Whole()))
		require.NoError(t, g.a.Move(t.Context(), cudart.HostLocation(), m.Range(0, mib), m.Range(mib, mib)))
		assert.Equal(t, map[int]int{nowhere: 2 * mib, onHost: 2 * mib}, g.at(m.Whole()))
		at, err := g.attributes(m, 0, 2*mib)
		require.NoError(t, err)
		assert.Equal(t, cudart.RangeAttributes{LastPrefetch: cudart.HostLocation()}, at)
		at, err = g.attributes(m, 0, 4*mib)
		require.NoError(t, err)
		assert.Equal(t, cudart.LocationNone, at.LastPrefetch.Kind, "not the same for all")
	}
}

// Move has moved everything when it returns, also the parts at both ends.
func TestMove(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	const n = 130*mib + 777
	m := g.alloc(n)
	want := g.fillByCPU(m)
	require.NoError(t, g.a.Move(t.Context(), g.dev.Location(), m.Range(0, 100), m.Range(5*mib, n-5*mib)))
	if g.sim != nil {
		assert.Equal(t, map[int]int{onHost: 3 * mib}, g.at(m.Range(mib, 3*mib)))
		assert.Equal(t, map[int]int{0: 100}, g.at(m.Range(0, 100)))
		assert.Equal(t, map[int]int{0: n - 6*mib}, g.at(m.Range(6*mib, n-6*mib)))
	}
	at, err := g.attributes(m, 6*mib, n-6*mib)
	require.NoError(t, err)
	assert.Equal(t, g.dev.Location(), at.LastPrefetch)
	require.NoError(t, g.a.Move(t.Context(), cudart.HostLocation(), m.Whole()))
	if g.sim != nil {
		assert.Equal(t, map[int]int{onHost: n}, g.at(m.Whole()))
	}
	require.Equal(t, want, m.Bytes())
	require.NoError(t, g.a.Move(t.Context(), cudart.HostLocation()))
	require.ErrorIs(t, g.a.Move(noContext, cudart.HostLocation()), errNilContext)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, g.a.Move(ctx, cudart.HostLocation(), m.Whole()), context.Canceled)
	require.ErrorContains(t, g.a.Move(t.Context(), cudart.HostLocation(), m.Range(0, n+1)), "managed: move 1 ranges to the host")
}

func TestRangesOutsideTheMemoryAreRefused(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	m := g.alloc(4096)
	for _, r := range []Range{{m, -1, 1}, {m, 0, 0}, {m, 0, -1}, {m, 0, 4097}, {m, 4096, 1}, {m, 1 << 62, 1 << 62}} {
		for what, err := range map[string]error{
			"prefetch": r.Prefetch(t.Context(), g.s, cudart.HostLocation()),
			"move":     g.a.Move(t.Context(), cudart.HostLocation(), r),
			"advise":   r.Advise(t.Context(), cudart.AdviseReadMostly, cudart.HostLocation()),
			"unadvise": r.Advise(t.Context(), cudart.AdviseUnsetReadMostly, cudart.HostLocation()),
			"mapped":   func() error { _, err := r.MappedByHost(); return err }(),
			"discard":  r.Discard(t.Context(), g.s),
		} {
			assert.ErrorContains(t, err, "not all within it", "%s %+v", what, r)
		}
	}
	assert.ErrorContains(t, g.a.Move(t.Context(), cudart.HostLocation(), Range{}), "the memory is nil")
	assert.ErrorIs(t, m.Whole().Prefetch(t.Context(), nil, cudart.HostLocation()), errNilStream)
	assert.ErrorIs(t, m.Whole().Discard(t.Context(), nil), errNilStream)
	for _, unknown := range []cudart.Advice{-1, 0, cudart.AdviseUnsetAccessedBy + 1} {
		assert.ErrorContains(t, m.Whole().Advise(t.Context(), unknown, cudart.HostLocation()), "is unknown")
	}
	_, err := m.HostBytes(noContext)
	assert.ErrorIs(t, err, errNilContext)
	assert.ErrorIs(t, m.Whole().Prefetch(t.Context(), g.s, cudart.Location{Kind: cudart.LocationDevice, ID: 99}), cudart.ErrInvalidDevice)
}

func TestAdviceAndItsUndoing(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	const n = 8 * mib // rounds to no page
	m := g.alloc(n)
	here := g.dev.Location()
	all := []advice{{what: cudart.AdviseReadMostly}, {cudart.AdvisePreferredLocation, here}, {cudart.AdviseAccessedBy, here}, {cudart.AdviseAccessedBy, cudart.HostLocation()}}
	for _, a := range all {
		require.NoError(t, m.Whole().Advise(t.Context(), a.what, a.at), "%v", a)
	}
	at, err := g.attributes(m, 0, n)
	require.NoError(t, err)
	assert.True(t, at.ReadMostly)
	assert.Equal(t, here, at.Preferred)
	assert.ElementsMatch(t, []cudart.Location{here, cudart.HostLocation()}, at.AccessedBy)
	require.NoError(t, m.Range(0, 4*mib).Advise(t.Context(), cudart.AdviseUnsetReadMostly, cudart.HostLocation()))
	at, err = g.attributes(m, 0, n)
	require.NoError(t, err)
	assert.False(t, at.ReadMostly, "not of all pages")
	at, err = g.attributes(m, 4*mib, 4*mib)
	require.NoError(t, err)
	assert.True(t, at.ReadMostly)
	for _, a := range all {
		require.NoError(t, m.Whole().Advise(t.Context(), a.unset().what, a.at), "%v", a)
	}
	at, err = g.attributes(m, 0, n)
	require.NoError(t, err)
	assert.Equal(t, cudart.RangeAttributes{}, at)
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, here))
	g.sync()
	at, err = g.attributes(m, 0, n)
	require.NoError(t, err)
	assert.Equal(t, here, at.LastPrefetch)
}

// Memory that is read mostly has a copy on the device beside that on the host; when it is not
// any more, the host's stays. On a real GPU the pages that the CPU has mapped show it.
func TestReadMostlyCopies(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	const n = 16 * mib
	m := g.alloc(n)
	for i := range m.Bytes() {
		m.Bytes()[i] = byte(i)
	}
	mapped := func() int {
		b, err := m.Whole().MappedByHost()
		require.NoError(t, err)
		return b
	}
	if g.sim != nil {
		g.sim.TouchManaged(uintptr(m.Ptr()), n, true)
	}
	require.Equal(t, n, mapped())
	require.NoError(t, m.Whole().Advise(t.Context(), cudart.AdviseReadMostly, cudart.HostLocation()))
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	g.sync()
	if g.sim != nil {
		assert.Equal(t, map[int]int{0: n, onHost: n}, g.at(m.Whole()))
	} else {
		t.Logf("with a copy on the device the CPU has %d of %d bytes mapped", mapped(), n)
	}
	require.NoError(t, m.Whole().Advise(t.Context(), cudart.AdviseUnsetReadMostly, cudart.HostLocation()))
	if g.sim != nil {
		assert.Equal(t, map[int]int{onHost: n}, g.at(m.Whole()))
	} else {
		t.Logf("after the copy on the device was dropped it has %d", mapped())
	}
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	g.sync()
	if g.sim != nil {
		assert.Equal(t, map[int]int{0: n}, g.at(m.Whole()))
	} else {
		assert.Zero(t, mapped(), "moved")
	}
	for i, b := range m.Bytes() {
		if b != byte(i) {
			require.Failf(t, "wrong bytes", "at %d", i)
		}
	}
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	m := g.alloc(4 * mib)
	m.Bytes()[0] = 1
	if !g.dev.Runtime().Library().Discard {
		require.ErrorIs(t, m.Range(0, 4*mib).Discard(t.Context(), g.s), errors.ErrUnsupported)
		return
	}
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	require.NoError(t, m.Range(0, 2*mib).Discard(t.Context(), g.s))
	require.NoError(t, g.s.Memset(m.Ptr(), 9, 2*mib))
	g.sync()
	assert.EqualValues(t, 9, m.Bytes()[2*mib-1])
	assert.EqualValues(t, 0, m.Bytes()[2*mib], "not discarded")
}

// Bytes that share a page with others are not discarded, as the others would be lost if CUDA
// rounds up: neither by Discard nor by a plan.
func TestDiscardKeepsPagesThatHaveOtherBytes(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 13000}, Options{})
	m := g.alloc(8 * mib)
	page := os.Getpagesize()
	off := page - int(m.Ptr())&(page-1) + 100 // in a page
	first, end := off-100, off+3*mib-page
	for i, discard := range []func() error{
		func() error { return m.Range(off, 3*mib).Discard(t.Context(), g.s) },
		func() error {
			p, err := g.a.NewPlan([]Step{{m.Range(off, 3*mib).As(Overwrite)}}, PlanOptions{Budget: 8 * mib, Chunk: 4 * mib})
			require.NoError(t, err)
			return p.Run(t.Context(), g.s, func(int) error { return nil })
		},
		func() error { return m.Range(off, page-100).Discard(t.Context(), g.s) },
	} {
		want := g.fillByCPU(m)
		require.NoError(t, discard())
		g.sync()
		assert.True(t, bytes.Equal(want[:first+page], m.Bytes()[:first+page]), "%d", i)
		assert.True(t, bytes.Equal(want[end+page:], m.Bytes()[end+page:]), "%d", i)
		assert.Equal(t, i == 2, bytes.Equal(want, m.Bytes()), "whole pages are discarded")
	}
}

func TestDiscardNeedsCUDA13(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 12080}, Options{})
	m := g.alloc(mib)
	require.ErrorIs(t, m.Range(0, mib).Discard(t.Context(), g.s), errors.ErrUnsupported)
}

// Close waits for a call on the memory, so that CUDA never gets an address that was freed.
func TestCloseWaitsForCallsOnTheMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, err := g.a.Alloc(t.Context(), mib, AllocOptions{})
	require.NoError(t, err)
	unblock := g.sim.Block("cudaMemPrefetchAsync", cudasim.Fault{})
	defer unblock()
	prefetched := make(chan error, 1)
	go func() { prefetched <- m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()) }()
	require.NoError(t, g.sim.AwaitBlocked(t.Context(), "cudaMemPrefetchAsync", 1))
	closed := make(chan error, 1)
	go func() { closed <- m.Close() }()
	for !m.life.Sealed() {
		runtime.Gosched()
	}
	assert.Zero(t, g.sim.Calls("cudaFree"))
	assert.ErrorIs(t, m.Whole().Prefetch(t.Context(), g.s, cudart.HostLocation()), cudart.ErrClosed)
	unblock()
	require.NoError(t, <-prefetched)
	require.NoError(t, <-closed)
}

func TestCloseCanBeRetried(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, err := g.a.Alloc(t.Context(), mib, AllocOptions{})
	require.NoError(t, err)
	g.sim.Fail("cudaFree", cudasim.Fault{Code: cudart.ErrInvalidValue})
	err = m.Close()
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	assert.ErrorContains(t, err, "managed: close: 1048576 bytes of managed memory")
	assert.Equal(t, mib, g.a.Stats().Allocated)
	require.ErrorIs(t, g.a.Close(), cudart.ErrInUse)
	require.NoError(t, m.Close())
	assert.Equal(t, Counts{0, mib, 1, 1}, g.a.Stats().Counts)
}

func TestHostBytesEndsWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, exclusive(), Options{})
	m := g.alloc(mib)
	g.sim.Hold()
	defer g.sim.Release()
	require.NoError(t, g.s.Memset(m.Ptr(), 1, mib))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := m.HostBytes(ctx)
	require.ErrorIs(t, err, context.Canceled)
}
