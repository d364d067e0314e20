package managed

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// fillByCPU writes bytes that tell where they are, as the CPU.
func (g *fixture) fillByCPU(m *Memory) []byte {
	g.Helper()
	b, err := m.HostBytes(g.Context())
	require.NoError(g, err)
	for i := range b {
		b[i] = byte(i>>16) ^ byte(i>>8) ^ byte(i)
	}
	if g.sim != nil {
		require.True(g, g.sim.TouchManaged(uintptr(m.Ptr()), m.Len(), true))
	}
	return append([]byte(nil), b...)
}

// onDevice is how many bytes of memory are on the simulated card.
func (g *fixture) onCard(ms ...*Memory) int {
	n := 0
	for _, m := range ms {
		n += g.at(m.Whole())[0]
	}
	return n
}

// Work over eight times its budget reads what the CPU wrote, and the CPU reads what it
// wrote: without a page fault on the device, and never more than the budget there.
func TestPlanRunsOverMoreThanItsBudget(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	g.needConcurrent()
	chunk, n := 2*mib, 64*mib
	if g.sim == nil {
		chunk, n = 32*mib, 1*gib
	}
	in, out := g.alloc(n), g.alloc(n)
	want := g.fillByCPU(in)
	const passes = 2
	var steps []Step
	for range passes {
		for off := 0; off < n; off += chunk {
			steps = append(steps, Step{in.Range(off, chunk).As(ReadOnly), out.Range(off, chunk).As(ReadWrite)})
		}
	}
	budget := 8 * chunk
	p, err := g.a.NewPlan(steps, PlanOptions{Budget: budget, Chunk: chunk})
	require.NoError(t, err)
	for range 2 { // a plan may run again
		ran := 0
		err = p.Run(t.Context(), g.s, func(i int) error {
			assert.Equal(t, ran, i)
			ran++
			off := cudart.DevPtr(i % (n / chunk) * chunk)
			if g.sim != nil {
				assert.LessOrEqual(t, g.onCard(in, out), budget)
			}
			return g.s.CopyOnDevice(out.Ptr()+off, in.Ptr()+off, chunk)
		})
		require.NoError(t, err)
		assert.Equal(t, len(steps), ran)
		if g.sim != nil {
			assert.Zero(t, raw.TrafficOf(g.sim).FaultsOnDevice)
			assert.Zero(t, raw.TrafficOf(g.sim).Evictions)
			assert.Zero(t, g.onCard(in, out), "all of it is on the host again")
		}
	}
	require.Equal(t, want, out.Bytes())
	require.Equal(t, want, in.Bytes())
	at, err := g.attributes(in, 0, n)
	require.NoError(t, err)
	assert.False(t, at.ReadMostly)
}

// The CPU's copy is what stays of memory that is only read, so nothing is copied back. Memory
// that was never on the host is, once.
func TestPlanDropsMemoryThatIsOnlyRead(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	in, fresh := g.alloc(16*mib), g.alloc(4*mib)
	g.fillByCPU(in)
	steps := append(sequential(in.Whole(), 2*mib, 2, ReadOnly), sequential(fresh.Whole(), 2*mib, 1, ReadOnly)...)
	p, err := g.a.NewPlan(steps, PlanOptions{Budget: 8 * mib, Chunk: 2 * mib})
	require.NoError(t, err)
	assert.Zero(t, p.Traffic().Out)
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { return nil }))
	assert.Equal(t, map[int]int{onHost: 16 * mib}, g.at(in.Whole()))
	assert.Equal(t, map[int]int{onHost: 4 * mib}, g.at(fresh.Whole()))
	toHost := g.sim.Calls("cudaMemPrefetchAsync") - len(p.fetches)
	never := 0
	for _, c := range p.chunks {
		if c.Memory == fresh {
			never++
		}
	}
	assert.Equal(t, never, toHost, "the chunks that the host never had")
}

func TestPlanWithNothingToDo(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	p, err := g.a.NewPlan([]Step{{}, {}}, PlanOptions{Budget: 1})
	require.NoError(t, err)
	ran := 0
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { ran++; return nil }))
	assert.Equal(t, 2, ran)
	for _, err := range []error{
		p.Run(noContext, g.s, func(int) error { return nil }),
		p.Run(t.Context(), nil, func(int) error { return nil }),
		p.Run(t.Context(), g.s, nil),
	} {
		assert.ErrorContains(t, err, "managed: run plan of 2 steps on device 0")
		assert.ErrorContains(t, err, "is nil")
	}
}

// Run ends with the first error, whatever it is doing then, and leaves no advice.
func TestPlanEndsWithTheFirstError(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(32 * mib)
	want := g.fillByCPU(m)
	p, err := g.a.NewPlan(sequential(m.Whole(), 2*mib, 1, ReadOnly), PlanOptions{Budget: 8 * mib, Chunk: 2 * mib})
	require.NoError(t, err)
	failure := errors.New("no")
	err = p.Run(t.Context(), g.s, func(i int) error {
		if i == 7 {
			return failure
		}
		return nil
	})
	require.ErrorIs(t, err, failure)
	assert.ErrorContains(t, err, "step 7")
	ctx, cancel := context.WithCancel(t.Context())
	err = p.Run(ctx, g.s, func(i int) error {
		if i == 3 {
			cancel()
		}
		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
	at, err := g.attributes(m, 0, m.Len())
	require.NoError(t, err)
	assert.False(t, at.ReadMostly)
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { return nil }))
	assert.Equal(t, map[int]int{onHost: 32 * mib}, g.at(m.Whole()))
	assert.Equal(t, want, m.Bytes())
}

func TestPlanNeedsItsBudgetOfDeviceMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{Reserve: 8 * mib})
	m, err := g.a.Alloc(t.Context(), 32*mib, AllocOptions{})
	require.NoError(t, err)
	p, err := g.a.NewPlan([]Step{{m.Range(0, 2*mib).As(ReadOnly)}}, PlanOptions{Budget: 40 * mib, Chunk: 2 * mib})
	require.NoError(t, err)
	nothing := func(int) error { return nil }
	require.NoError(t, p.Run(t.Context(), g.s, nothing))
	other, err := g.dev.Malloc(17 * mib)
	require.NoError(t, err)
	err = p.Run(t.Context(), g.s, nothing)
	require.ErrorIs(t, err, ErrOversubscribed)
	assert.ErrorContains(t, err, "Options.Reserve 8 MiB")
	assert.ErrorContains(t, err, "47 MiB free of 64 MiB")
	require.NoError(t, g.dev.Free(other))
	require.NoError(t, m.Close())
	require.ErrorIs(t, p.Run(t.Context(), g.s, nothing), cudart.ErrClosed)
}

// A budget and a reserve whose sum is no int are too much, too.
func TestABudgetThatOverflowsIsRefused(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{Reserve: math.MaxInt})
	_, err := g.a.Alloc(t.Context(), mib, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
	p, err := g.a.NewPlan([]Step{{}}, PlanOptions{Budget: 1 << 40})
	require.NoError(t, err)
	require.ErrorIs(t, p.Run(t.Context(), g.s, func(int) error { return nil }), ErrOversubscribed)
	assert.Zero(t, g.a.Stats().Allocated)
}

// Memory that is larger than the device memory goes through it, next to the reserve.
func TestPlanMovesMemoryBeyondTheCapacity(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(32*mib), Options{Reserve: 8 * mib, Oversubscribe: true})
	m := g.alloc(128 * mib)
	require.True(t, m.OnHost())
	g.fillByCPU(m)
	p, err := g.a.NewPlan(sequential(m.Whole(), 2*mib, 1, ReadWrite), PlanOptions{Budget: 16 * mib, Chunk: 2 * mib})
	require.NoError(t, err)
	err = p.Run(t.Context(), g.s, func(i int) error {
		free, _, err := g.dev.MemInfo()
		assert.GreaterOrEqual(t, free, 16*mib)
		return errors.Join(err, g.s.Memset(m.Ptr()+cudart.DevPtr(i*2*mib), byte(i), 2*mib))
	})
	require.NoError(t, err)
	for i := range 64 {
		assert.Equal(t, byte(i), m.Bytes()[i*2*mib+12345])
	}
	assert.Zero(t, raw.TrafficOf(g.sim).FaultsOnDevice)
	assert.Zero(t, raw.TrafficOf(g.sim).Evictions)
}

// Plans that run at once share the device memory, and not each has all of it.
func TestConcurrentPlansShareTheDeviceMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 100 * mib}}}, Options{Reserve: 4 * mib})
	free, _, err := g.dev.MemInfo()
	require.NoError(t, err)
	plan := func(budget int) *Plan {
		m, err := g.a.Alloc(t.Context(), 8*mib, AllocOptions{})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, m.Close()) })
		p, err := g.a.NewPlan([]Step{{m.Whole().As(ReadOnly)}}, PlanOptions{Budget: budget, Chunk: 2 * mib})
		require.NoError(t, err)
		return p
	}
	nothing := func(int) error { return nil }
	half, rest, more := plan(free/2), plan(free-free/2-4*mib), plan(free-free/2-4*mib+1)
	for range 2 { // the first one is over
		require.NoError(t, half.Run(t.Context(), g.s, func(int) error {
			require.NoError(t, g.s.Synchronize(t.Context()), "now it has memory on the device")
			require.ErrorIs(t, more.Run(t.Context(), g.s, nothing), ErrOversubscribed)
			return rest.Run(t.Context(), g.s, nothing)
		}))
		require.NoError(t, more.Run(t.Context(), g.s, nothing))
	}
	require.ErrorIs(t, plan(free).Run(t.Context(), g.s, nothing), ErrOversubscribed, "with the reserve")
}

// A Run that waits for another one of the same plan ends with its context.
func TestARunWaitsForAnother(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, err := g.a.Alloc(t.Context(), 4*mib, AllocOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, m.Close()) })
	p, err := g.a.NewPlan([]Step{{m.Range(0, 4*mib).As(ReadOnly)}}, PlanOptions{Budget: 64 * mib})
	require.NoError(t, err)
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, p.Run(ctx, g.s, func(int) error { return nil }), context.DeadlineExceeded)
		return nil
	}))
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { return nil }))
}
