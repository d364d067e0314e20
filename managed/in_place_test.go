package managed

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// Work reads what the CPU wrote and writes memory that was never touched, in place, while
// the rest of its memory moves: there are no page faults, and what is used in place stays on
// the host, where the first run moved it.
func TestPlanLeavesMemoryInPlace(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	const chunk, n = 2 * mib, 32 * mib
	in, out, moved := g.alloc(n), g.alloc(n), g.alloc(chunk)
	want := g.fillByCPU(in)
	var steps []Step
	for off := 0; off < n; off += chunk {
		steps = append(steps, Step{in.Range(off, chunk).As(InPlace), moved.Whole().As(Overwrite)}, Step{moved.Whole().As(ReadOnly), out.Range(off, chunk).As(InPlace)})
	}
	p, err := g.a.NewPlan(steps, PlanOptions{Budget: chunk + blockSize, Chunk: chunk})
	require.NoError(t, err)
	assert.Equal(t, 2*n, p.Traffic().InPlace)
	assert.LessOrEqual(t, p.Traffic().In, chunk)
	for run := range 2 {
		before := 0
		if g.sim != nil {
			before = g.sim.Calls("cudaMemAdvise")
		}
		require.NoError(t, p.Run(t.Context(), g.s, func(i int) error {
			off := cudart.DevPtr(i / 2 * chunk)
			if g.sim != nil {
				assert.Zero(t, g.onCard(in, out), "step %d", i)
			}
			if i%2 == 0 {
				return g.s.CopyOnDevice(moved.Ptr(), in.Ptr()+off, chunk)
			}
			return g.s.CopyOnDevice(out.Ptr()+off, moved.Ptr(), chunk)
		}))
		assert.Equal(t, want, out.Bytes())
		for _, m := range []*Memory{in, out} {
			at, err := g.attributes(m, 0, n)
			require.NoError(t, err)
			assert.Equal(t, cudart.HostLocation(), at.Preferred)
			assert.Len(t, at.AccessedBy, 1)
		}
		if g.sim != nil && run > 0 {
			assert.Equal(t, before, g.sim.Calls("cudaMemAdvise"), "the advice is given once")
		}
	}
	if g.sim != nil {
		assert.Zero(t, raw.TrafficOf(g.sim).FaultsOnDevice)
		assert.Equal(t, map[int]int{onHost: n}, g.at(out.Whole()))
	}
}

// Uses of several steps that overlap or touch are advised for at once, and bytes between them
// move.
func TestRangesInPlaceAreMerged(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, other := g.alloc(8*mib), g.alloc(mib)
	steps := []Step{
		{m.Range(mib, mib).As(InPlace), other.Whole().As(InPlace)},
		{m.Range(2*mib, 100).As(InPlace), m.Range(0, mib).As(ReadOnly), m.Range(3*mib, 5*mib).As(ReadOnly)},
		{m.Range(mib+100, 10).As(InPlace), m.Range(mib+105, 10).As(InPlace), m.Range(mib+100, 2).As(InPlace)},
	}
	held, accessed, err := findInPlace(steps)
	require.NoError(t, err)
	assert.ElementsMatch(t, []Range{m.Range(mib, mib+100), other.Whole()}, held)
	assert.Equal(t, 2*mib+115, accessed, "a step counts each byte once")
	p, err := g.a.NewPlan(steps, PlanOptions{Budget: 16 * mib})
	require.NoError(t, err)
	moved := 0
	for _, c := range p.chunks {
		moved += c.Len
	}
	assert.Equal(t, 6*mib, moved)
	require.NoError(t, m.Close())
	err = p.Run(t.Context(), g.s, func(int) error { return nil })
	require.ErrorIs(t, err, cudart.ErrClosed)
	m = g.alloc(8 * mib)
	p, err = g.a.NewPlan([]Step{{m.Whole().As(InPlace)}}, PlanOptions{Budget: 1})
	require.NoError(t, err, "nothing counts for the budget")
	require.NoError(t, m.Close())
	require.ErrorIs(t, p.Run(t.Context(), g.s, func(int) error { return nil }), cudart.ErrClosed)
}

// A plan that cannot advise leaves the advice of another one, which gives it only once, and
// does so itself when it runs again.
func TestAPlanThatFailsLeavesAdvice(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, other := g.alloc(4*mib), g.alloc(mib)
	work := func(int) error { return g.s.Memset(m.Ptr(), 7, m.Len()) }
	plan := func(ranges ...Range) *Plan {
		var step Step
		for _, r := range ranges {
			step = append(step, r.As(InPlace))
		}
		p, err := g.a.NewPlan([]Step{step}, PlanOptions{Budget: 1})
		require.NoError(t, err)
		return p
	}
	first, second := plan(m.Whole()), plan(m.Whole(), other.Whole())
	require.NoError(t, first.Run(t.Context(), g.s, work))
	for nth := 1; nth <= 4; nth++ {
		g.sim.Fail("cudaMemAdvise", cudasim.Fault{Code: cudart.ErrUnknown, Nth: nth})
		require.ErrorIs(t, second.Run(t.Context(), g.s, work), cudart.ErrUnknown)
		g.sim.ResetFaults()
		require.NoError(t, first.Run(t.Context(), g.s, work))
		require.Equal(t, map[int]int{onHost: 4 * mib}, g.at(m.Whole()))
		require.Zero(t, raw.TrafficOf(g.sim).FaultsOnDevice)
	}
	require.NoError(t, second.Run(t.Context(), g.s, work))
	for _, one := range []*Memory{m, other} {
		at, err := g.attributes(one, 0, one.Len())
		require.NoError(t, err)
		assert.Equal(t, cudart.HostLocation(), at.Preferred)
		assert.Len(t, at.AccessedBy, 1)
	}
}

// Memory beyond the capacity is used in place with the advice that it has anyway, and keeps it.
func TestInPlaceBeyondTheCapacityKeepsItsAdvice(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(32*mib), Options{Oversubscribe: true})
	m := g.alloc(64 * mib)
	require.True(t, m.OnHost())
	p, err := g.a.NewPlan([]Step{{m.Whole().As(InPlace)}}, PlanOptions{Budget: mib})
	require.NoError(t, err)
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { return g.s.Memset(m.Ptr(), 7, m.Len()) }))
	at, err := g.attributes(m, 0, m.Len())
	require.NoError(t, err)
	assert.Equal(t, cudart.HostLocation(), at.Preferred)
	assert.Equal(t, map[int]int{onHost: 64 * mib}, g.at(m.Whole()))
	assert.Equal(t, byte(7), m.Bytes()[64*mib-1])
	assert.Zero(t, raw.TrafficOf(g.sim).FaultsOnDevice)
}
