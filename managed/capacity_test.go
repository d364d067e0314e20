package managed

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// other allocates device memory as another program does, and returns a function that frees it.
func (g *fixture) other(n int) (free func()) {
	g.Helper()
	p, err := g.dev.Malloc(n)
	require.NoError(g, err)
	return func() {
		g.Helper()
		require.NoError(g, g.dev.Free(p))
	}
}

// Device memory that others free after the first allocation can be allocated, whether what
// was allocated is on the device or not.
func TestMemoryThatOthersFreeCanBeAllocated(t *testing.T) {
	t.Parallel()
	for _, onDevice := range []bool{false, true} {
		g := newSimFixture(t, small(64*mib), Options{})
		free := g.other(56 * mib)
		m := g.alloc(4 * mib)
		_, err := g.a.Alloc(t.Context(), 8*mib, AllocOptions{})
		require.ErrorIs(t, err, ErrOversubscribed)
		if onDevice {
			require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
			g.sync()
		}
		free()
		g.alloc(40 * mib)
		g.alloc(20 * mib)
		_, err = g.a.Alloc(t.Context(), 1, AllocOptions{})
		require.ErrorIs(t, err, ErrOversubscribed)
		assert.ErrorContains(t, err, "64 MiB of managed memory are allocated")
	}
}

// The same for the budgets of plans: a plan may run beside another one on memory that others
// have freed since that one began.
func TestMemoryThatOthersFreeCanBeBudgeted(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{Oversubscribe: true})
	free := g.other(48 * mib)
	plan := func(budget int) *Plan {
		p, err := g.a.NewPlan([]Step{{g.alloc(2 * mib).Whole().As(ReadOnly)}}, PlanOptions{Budget: budget, Chunk: 2 * mib})
		require.NoError(t, err)
		return p
	}
	nothing := func(int) error { return nil }
	first, second := plan(12*mib), plan(40*mib)
	require.NoError(t, first.Run(t.Context(), g.s, func(int) error {
		require.ErrorIs(t, second.Run(t.Context(), g.s, nothing), ErrOversubscribed)
		free()
		return second.Run(t.Context(), g.s, nothing)
	}))
}

// Memory that others free after the query that refuses a plan or an allocation counts, also if
// another goroutine has used a newer query meanwhile.
func TestMemoryThatOthersFreeDuringAQueryCounts(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{"allocate": {}, "plan": {Oversubscribe: true}} {
		for _, newer := range []bool{false, true} {
			g := newSimFixture(t, small(64*mib), o)
			free := g.other(48 * mib)
			try := func() error {
				m, err := g.a.Alloc(t.Context(), 40*mib, AllocOptions{})
				if err == nil {
					err = m.Close()
				}
				return err
			}
			if name == "plan" {
				p, err := g.a.NewPlan([]Step{{g.alloc(2 * mib).Whole().As(ReadOnly)}}, PlanOptions{Budget: 40 * mib, Chunk: 2 * mib})
				require.NoError(t, err)
				try = func() error { return p.Run(t.Context(), g.s, func(int) error { return nil }) }
			}
			unblock := g.sim.Block("cudaMemGetInfo", cudasim.Fault{Late: true})
			tried := make(chan error)
			go func() { tried <- try() }()
			require.NoError(t, g.sim.AwaitBlocked(t.Context(), "cudaMemGetInfo", 1))
			free()
			if newer {
				g.alloc(20 * mib)
			}
			unblock()
			require.NoError(t, <-tried, "%s, newer: %v", name, newer)
		}
	}
}

// The guard queries the device memory again as allocations add up: others may have allocated
// device memory meanwhile.
func TestManySmallAllocationsAreRefusedAsOneLargeIs(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	g.alloc(mib)
	defer g.other(48 * mib)()
	allocated := 1
	for ; allocated <= 64; allocated++ {
		m, err := g.a.Alloc(t.Context(), mib, AllocOptions{})
		if err != nil {
			require.ErrorIs(t, err, ErrOversubscribed)
			break
		}
		require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
		g.sync()
		t.Cleanup(func() { assert.NoError(t, m.Close()) })
	}
	assert.InDelta(t, 16, allocated, 2)
	assert.Zero(t, raw.TrafficOf(g.sim).Evictions)
}

// A share's estimate is exact if nothing of it has been allocated, always lies between none
// and all of it being on the device, and does not change while that may be right.
func TestCapacityEstimate(t *testing.T) {
	t.Parallel()
	const total = 1000
	random := rand.New(rand.NewPCG(1, 2))
	var s share
	others, onDevice := 0, 0
	for range 10_000 {
		switch random.IntN(5) {
		case 0: // others allocate or free
			others = random.IntN(total - onDevice + 1)
		case 1: // pages move
			onDevice = random.IntN(min(s.used, total-others) + 1)
		case 2:
			s.used += random.IntN(100)
		case 3:
			s.used = random.IntN(s.used + 1)
			onDevice = min(onDevice, s.used)
		default:
			free, before := total-others-onDevice, s.available
			s.update(free, total)
			require.GreaterOrEqual(t, s.available, free)
			require.LessOrEqual(t, s.available, min(free+s.used, total))
			if s.used == 0 {
				require.Equal(t, free, s.available)
			}
			if free <= before && before <= min(free+s.used, total) {
				require.Equal(t, before, s.available)
			}
			alone := s
			alone.update(total-onDevice, total) // others have freed everything
			require.GreaterOrEqual(t, alone.available, total-onDevice)
		}
	}
}

// What is known of a device is forgotten with its last Allocator, so that the device can be
// collected.
func TestCapacityIsForgottenWithTheLastAllocator(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	known := func() bool {
		ledger.mu.Lock()
		defer ledger.mu.Unlock()
		return ledger.devices[g.dev] != nil
	}
	other, err := New(t.Context(), g.dev, Options{})
	require.NoError(t, err)
	require.NoError(t, other.Close())
	require.True(t, known(), "the fixture's allocator is open")
	require.NoError(t, g.a.Close())
	require.NoError(t, g.a.Close())
	require.False(t, known())
}

// Ranges of memory of several allocators move together, while those allocate and move it
// themselves; the order of its uses is that of its own allocator. (The race detector sees the
// accesses.)
func TestRangesOfSeveralAllocatorsMoveTogether(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	other, err := New(t.Context(), g.dev, Options{})
	require.NoError(t, err)
	m, err := other.Alloc(t.Context(), 4*mib, AllocOptions{})
	require.NoError(t, err)
	recent, err := other.Alloc(t.Context(), 4*mib, AllocOptions{})
	require.NoError(t, err)
	over := make(chan error, 3)
	const rounds = 50
	go func() {
		var err error
		for i := 0; i < rounds && err == nil; i++ {
			err = g.a.Move(t.Context(), g.dev.Location(), m.Whole(), recent.Range(0, mib))
		}
		over <- err
	}()
	go func() {
		var err error
		for i := 0; i < rounds && err == nil; i++ {
			err = g.a.Move(t.Context(), g.dev.Location(), m.Range(0, mib))
		}
		over <- err
	}()
	go func() {
		s, err := g.dev.NewStream(cudart.StreamOptions{})
		for i := 0; i < rounds && err == nil; i++ {
			if err = m.Whole().Prefetch(t.Context(), s, g.dev.Location()); err == nil {
				_, err = other.Reclaim(t.Context(), s, 1)
			}
		}
		if err == nil {
			err = s.Close()
		}
		over <- err
	}()
	for range cap(over) {
		require.NoError(t, <-over)
	}

	// Many uses by another allocator do not make memory younger than it is.
	s := g.s
	require.NoError(t, recent.Whole().Prefetch(t.Context(), s, g.dev.Location()))
	g.sync()
	moved, err := other.Reclaim(t.Context(), s, 58*mib)
	require.NoError(t, err)
	assert.Equal(t, 4*mib, moved)
	assert.Equal(t, map[int]int{0: 4 * mib}, g.at(recent.Whole()))
	assert.Equal(t, map[int]int{onHost: 4 * mib}, g.at(m.Whole()))
	require.NoError(t, m.Close())
	require.NoError(t, recent.Close())
	require.NoError(t, other.Close())
}

// The reserve that counts for memory which stays on the host is that of its own allocator,
// whichever allocator moves it.
func TestMovesLeaveTheReserveOfTheMemorysAllocator(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	other, err := New(t.Context(), g.dev, Options{Reserve: 32 * mib, Oversubscribe: true})
	require.NoError(t, err)
	m, err := other.Alloc(t.Context(), 128*mib, AllocOptions{})
	require.NoError(t, err)
	require.True(t, m.OnHost())
	for what, move := range map[string]func(r Range) error{
		"Move":     func(r Range) error { return g.a.Move(t.Context(), g.dev.Location(), r) },
		"Prefetch": func(r Range) error { return r.Prefetch(t.Context(), g.s, g.dev.Location()) },
	} {
		require.ErrorIs(t, move(m.Range(0, 48*mib)), ErrReserve, what)
		require.NoError(t, move(m.Range(0, mib)), what)
	}
	g.sync()
	require.NoError(t, m.Close())
	require.NoError(t, other.Close())
}

// An Allocator whose streams are in use is not closed, and one that is closed takes none:
// they would never be destroyed.
func TestMoveOfOtherMemoryByAClosedAllocator(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(4 * mib)
	other, err := New(t.Context(), g.dev, Options{})
	require.NoError(t, err)
	unblock := g.sim.Block("cudaMemPrefetchAsync", cudasim.Fault{})
	defer unblock()
	moved := make(chan error, 1)
	go func() { moved <- other.Move(t.Context(), g.dev.Location(), m.Whole()) }()
	require.NoError(t, g.sim.AwaitBlocked(t.Context(), "cudaMemPrefetchAsync", 1))
	err = other.Close()
	require.ErrorIs(t, err, cudart.ErrInUse)
	assert.ErrorContains(t, err, "1 calls are in progress")
	unblock()
	require.NoError(t, <-moved)
	require.ErrorIs(t, other.Move(t.Context(), cudart.HostLocation(), m.Whole()), cudart.ErrClosed)
	require.NoError(t, other.Close())
}
