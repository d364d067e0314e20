package managed

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// The steps of a plan that moves 8 MiB of memory in all modes, and leaves 2 in place. Chunks of
// 2 MiB are on a grid of addresses, on which the memory need not begin.
func mixed(m *Memory) (steps []Step) {
	at := int(-m.Ptr() % (2 * mib))
	for i := range 3 {
		steps = append(steps,
			Step{m.Range(at+i*2*mib, 2*mib).As(ReadOnly), m.Range(at+8*mib, 2*mib).As(InPlace)},
			Step{m.Range(at+(2-i)*2*mib, mib).As(ReadWrite), m.Range(at+6*mib, 2*mib).As(Overwrite)})
	}
	return steps
}

// unheld requires that nothing is left of runs of a plan: no advice but that for what is
// used in place, no goroutine that moves, and no call that holds up Close.
func (g *fixture) unheld(m *Memory) {
	g.Helper()
	for off := 0; off < m.Len(); off += 2 * mib {
		at, err := g.attributes(m, off, 2*mib)
		require.NoError(g, err)
		require.False(g, at.ReadMostly, "at %d", off)
	}
	moves := g.moves()
	for range 100 {
		runtime.Gosched()
	}
	require.Equal(g, moves, g.moves(), "nothing is under way")
}

// moves counts the calls that a plan makes to move memory.
func (g *fixture) moves() int {
	return g.sim.Calls("cudaMemPrefetchAsync") + g.sim.Calls("cudaMemAdvise")
}

// However a step's function ends, also by a panic or by ending its goroutine, the moves end
// before Run does, the advice is undone, and the plan may run again. So it is with a context
// that can end, with which the function is called on another goroutine.
func TestAPlanWhoseFunctionDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 13000}, Options{})
	m, err := g.a.Alloc(t.Context(), 12*mib, AllocOptions{})
	require.NoError(t, err)
	g.fillByCPU(m)
	p, err := g.a.NewPlan(mixed(m), PlanOptions{Budget: 6 * mib, Chunk: 2 * mib, In: 2, Out: 2})
	require.NoError(t, err)
	for step := range p.steps {
		for i, end := range []func(){func() { panic("no") }, runtime.Goexit, func() { panic("no") }, runtime.Goexit} {
			ctx, over := context.Background(), make(chan any)
			if i < 2 {
				ctx = t.Context()
			}
			go func() {
				defer close(over)
				defer func() {
					if r := recover(); r != nil {
						over <- r
					}
				}()
				_ = p.Run(ctx, g.s, func(i int) error {
					if i == step {
						end()
					}
					return nil
				})
			}()
			if r, panicked := <-over; panicked {
				require.Equal(t, "no", r)
				<-over
			}
			g.unheld(m)
		}
	}
	require.NoError(t, p.Run(t.Context(), g.s, func(int) error { return nil }))
	assert.Zero(t, g.onCard(m))
	require.NoError(t, m.Close())
}

// A context that ends at any call of a run ends it, and leaves nothing behind.
func TestAPlanWhoseContextEndsAtAnyCall(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 13000}, Options{})
	m := g.alloc(12 * mib)
	p, err := g.a.NewPlan(mixed(m), PlanOptions{Budget: 6 * mib, Chunk: 2 * mib, In: 2, Out: 2})
	require.NoError(t, err)
	work := func(int) error { return g.s.Memset(m.Ptr()+cudart.DevPtr(8*mib), 1, 100) }
	ended := 0
	for k := int64(1); ; k++ {
		ctx, cancel := context.WithCancel(t.Context())
		var calls atomic.Int64
		g.sim.OnCall(func(string, int) {
			if calls.Add(1) == k {
				cancel()
			}
		})
		err := p.Run(ctx, g.s, work)
		g.sim.OnCall(nil)
		cancel()
		if err != nil {
			ended++
			require.ErrorIs(t, err, context.Canceled, "call %d", k)
		}
		g.unheld(m)
		if calls.Load() < k {
			break
		}
	}
	assert.Greater(t, ended, 20)
	require.NoError(t, p.Run(t.Context(), g.s, work))
	assert.Zero(t, g.onCard(m))
}

// A run that fails at any call leaves no advice.
func TestAPlanThatFailsAtAnyCallLeavesNoAdvice(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 13000}, Options{})
	m := g.alloc(12 * mib)
	p, err := g.a.NewPlan(mixed(m), PlanOptions{Budget: 6 * mib, Chunk: 2 * mib, In: 2, Out: 2})
	require.NoError(t, err)
	work := func(int) error { return nil }
	failed := 0
	for k := 1; ; k++ {
		at := g.sim.TotalCalls() + k
		g.sim.FailCall(at, cudart.ErrUnknown)
		err := p.Run(t.Context(), g.s, work)
		met := g.sim.TotalCalls() >= at
		g.sim.ResetFaults()
		if err != nil {
			failed++
			require.True(t, errors.Is(err, cudart.ErrUnknown), "call %d: %v", k, err)
		}
		g.unheld(m)
		if !met {
			break
		}
	}
	assert.Greater(t, failed, 20)
	require.NoError(t, p.Run(t.Context(), g.s, work))
	assert.Zero(t, g.onCard(m))
}
