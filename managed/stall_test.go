//go:build linux && !android && (amd64 || arm64)

package managed

import (
	"context"
	"errors"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A waiting operation takes a context. prepare makes it, with memory that it uses.
type waiting struct {
	cfg     cudasim.DeviceConfig
	o       Options
	prepare func(g *fixture) (m *Memory, do func(ctx context.Context) error)
}

// closeOperation is the one that succeeds if its context has ended and CUDA returns.
const closeOperation = "close"

var waitingOperations = map[string]waiting{
	"host bytes": {exclusive().Devices[0], Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m, err := g.a.Alloc(g.Context(), mib, AllocOptions{})
		require.NoError(g, err)
		return m, func(ctx context.Context) error { _, err := m.HostBytes(ctx); return err }
	}},
	"alloc": {small(64 * mib).Devices[0], Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		return g.mustAlloc(mib), func(ctx context.Context) error {
			m, err := g.a.Alloc(ctx, 48*mib, AllocOptions{})
			if err == nil {
				err = m.CloseContext(ctx)
			}
			return err
		}
	}},
	"alloc beyond the capacity": {small(8 * mib).Devices[0], Options{Oversubscribe: true}, func(g *fixture) (*Memory, func(context.Context) error) {
		return g.mustAlloc(mib), func(ctx context.Context) error {
			m, err := g.a.Alloc(ctx, 48*mib, AllocOptions{})
			if err == nil {
				err = m.CloseContext(ctx)
			}
			return err
		}
	}},
	"prefetch": {small(8 * mib).Devices[0], Options{Oversubscribe: true}, func(g *fixture) (*Memory, func(context.Context) error) {
		m := g.mustAlloc(16 * mib)
		return m, func(ctx context.Context) error { return m.Range(0, 4*mib).Prefetch(ctx, g.s, g.dev.Location()) }
	}},
	"discard": {cudasim.DeviceConfig{}, Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m := g.mustAlloc(mib)
		return m, func(ctx context.Context) error { return m.Whole().Discard(ctx, g.s) }
	}},
	"advise": {cudasim.DeviceConfig{}, Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m := g.mustAlloc(mib)
		return m, func(ctx context.Context) error {
			return m.Whole().Advise(ctx, cudart.AdviseReadMostly, cudart.HostLocation())
		}
	}},
	"unadvise": {cudasim.DeviceConfig{}, Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m := g.mustAlloc(mib)
		return m, func(ctx context.Context) error {
			return m.Whole().Advise(ctx, cudart.AdviseUnsetReadMostly, cudart.HostLocation())
		}
	}},
	closeOperation: {cudasim.DeviceConfig{}, Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m := g.mustAlloc(mib)
		return m, m.CloseContext
	}},
	"move": {small(8 * mib).Devices[0], Options{Oversubscribe: true}, func(g *fixture) (*Memory, func(context.Context) error) {
		m, err := g.a.Alloc(g.Context(), 16*mib, AllocOptions{})
		require.NoError(g, err)
		return m, func(ctx context.Context) error { return g.a.Move(ctx, g.dev.Location(), m.Range(0, 4*mib)) }
	}},
	"reclaim": {small(64 * mib).Devices[0], Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m, err := g.a.Alloc(g.Context(), mib, AllocOptions{})
		require.NoError(g, err)
		require.NoError(g, m.Whole().Advise(g.Context(), cudart.AdviseReadMostly, cudart.HostLocation()))
		require.NoError(g, m.Whole().Prefetch(g.Context(), g.s, g.dev.Location()))
		g.sync()
		return m, func(ctx context.Context) error { _, err := g.a.Reclaim(ctx, g.s, 64*mib); return err }
	}},
	"plan": {cudasim.DeviceConfig{}, Options{}, func(g *fixture) (*Memory, func(context.Context) error) {
		m, err := g.a.Alloc(g.Context(), 12*mib, AllocOptions{})
		require.NoError(g, err)
		p, err := g.a.NewPlan(mixed(m), PlanOptions{Budget: 6 * mib, Chunk: 2 * mib, In: 2, Out: 2})
		require.NoError(g, err)
		return m, func(ctx context.Context) error {
			return p.Run(ctx, g.s, func(int) error { return g.s.Memset(m.Ptr()+cudart.DevPtr(8*mib), 1, 100) })
		}
	}},
}

// functions returns those that an operation calls, with the device current.
func (w waiting) functions(t *testing.T) []string {
	g := newSimFixture(t, cudasim.Config{Devices: []cudasim.DeviceConfig{w.cfg}}, w.o)
	m, do := w.prepare(g)
	called := make(map[string]bool)
	var mu sync.Mutex
	g.sim.OnCall(func(fn string, _ int) {
		if fn != "cudaGetLastError" { // cannot block
			mu.Lock()
			defer mu.Unlock()
			called[fn] = true
		}
	})
	require.NoError(t, do(context.Background()))
	g.sim.OnCall(nil)
	require.NoError(t, m.Close())
	mu.Lock()
	defer mu.Unlock()
	return slices.Sorted(maps.Keys(called))
}

// If a call into the library never returns, or a function of the caller, all that takes a
// context ends with that: with its error and its cause. When the call returns after all,
// nothing is left. All wait for the same end, as each takes a second from there.
func TestNoCallHoldsUpTheEndOfAContext(t *testing.T) {
	t.Parallel()
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ended := func(err error, name string) {
		require.ErrorIs(t, err, context.Canceled, name)
		require.ErrorIs(t, err, cause, name)
		assert.True(t, strings.HasPrefix(err.Error(), "managed: "), "%v", err)
	}
	var checks []func()
	for _, start := range []func(*testing.T, context.Context, func(error, string)) (check func()){
		startEveryOperation, startManyMoves, startPlanWhoseFunctionBlocks, startNew,
	} {
		checks = append(checks, start(t, ctx, ended))
	}
	cancel(cause)
	for _, check := range checks {
		check()
	}
}

// startEveryOperation starts each operation once for each function of the library that it
// calls, and that does not return.
func startEveryOperation(t *testing.T, ctx context.Context, ended func(error, string)) (check func()) {
	type stalled struct {
		waiting
		name    string
		fn      string
		a       *Allocator
		m       *Memory
		unblock func()
		over    chan error
		blocked bool
	}
	var all []*stalled
	var cfg cudasim.Config
	for name, w := range waitingOperations {
		var functions []string
		t.Run(name, func(t *testing.T) { functions = w.functions(t) }) // which closes its simulated GPU
		for _, fn := range functions {
			all = append(all, &stalled{waiting: w, name: name + ", " + fn, fn: fn, over: make(chan error, 1)})
			cfg.Devices = append(cfg.Devices, w.cfg)
		}
	}
	sim, rt := testgpu.Sim(t, cfg)
	for i, st := range all { // each on a device of its own
		g := (&fixture{T: t, sim: sim}).on(rt.Devices()[i], st.o)
		var do func(context.Context) error
		st.m, do = st.prepare(g)
		st.a = g.a
		before := sim.Blocked()[st.fn]
		st.unblock = sim.Block(st.fn, cudasim.Fault{Devices: []int{i}, Times: -1})
		t.Cleanup(st.unblock)
		waiting, over := context.WithCancel(t.Context())
		go func() {
			defer over()
			st.over <- do(ctx)
		}()
		st.blocked = sim.AwaitBlocked(waiting, st.fn, before+1) == nil
	}
	return func() {
		blocked := 0
		for _, st := range all {
			err := <-st.over
			if !st.blocked { // it was over without a query
				require.NoError(t, err, st.name)
				continue
			}
			blocked++
			ended(err, st.name)
		}
		assert.Greater(t, blocked, 25) // copies may complete without a query
		for _, st := range all {
			st.unblock()
			require.NoError(t, st.m.Close(), "%s: waits for the call", st.name)
			for st.a.life.Calls() > 0 {
				runtime.Gosched() // memory that a caller did not get is freed
			}
		}
	}
}

// startManyMoves starts moves that do not return, which occupy a bounded number of threads.
func startManyMoves(t *testing.T, ctx context.Context, ended func(error, string)) (check func()) {
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m, err := g.a.Alloc(g.Context(), 200*mib, AllocOptions{})
	require.NoError(t, err)
	unblock := g.sim.Block("cudaMemPrefetchAsync", cudasim.Fault{Times: -1})
	t.Cleanup(unblock)
	moved := make(chan error, 20)
	for range cap(moved) {
		go func() { moved <- g.a.Move(ctx, cudart.HostLocation(), m.Whole()) }()
	}
	require.NoError(t, g.sim.AwaitBlocked(t.Context(), "cudaMemPrefetchAsync", bounded.MaxInside))
	return func() {
		for range cap(moved) {
			ended(<-moved, "one of many moves")
		}
		assert.Equal(t, bounded.MaxInside, g.sim.Blocked()["cudaMemPrefetchAsync"])
		require.ErrorIs(t, g.a.Close(), cudart.ErrInUse)
		unblock()
		require.NoError(t, m.Close())
	}
}

// startNew starts a New whose query of an attribute does not return.
func startNew(t *testing.T, ctx context.Context, ended func(error, string)) (check func()) {
	g := newSimFixture(t, cudasim.Config{}, Options{})
	unblock := g.sim.Block("cudaDeviceGetAttribute", cudasim.Fault{})
	t.Cleanup(unblock)
	made := make(chan error, 1)
	go func() {
		_, err := New(ctx, g.dev, Options{})
		made <- err
	}()
	require.NoError(t, g.sim.AwaitBlocked(t.Context(), "cudaDeviceGetAttribute", 1))
	return func() {
		ended(<-made, "new")
		unblock()
	}
}

// startPlanWhoseFunctionBlocks starts a plan whose function does not return. It runs again
// when the function has returned.
func startPlanWhoseFunctionBlocks(t *testing.T, ctx context.Context, ended func(error, string)) (check func()) {
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(4 * mib)
	p, err := g.a.NewPlan([]Step{{m.Whole().As(ReadOnly)}, {m.Whole().As(ReadWrite)}}, PlanOptions{Budget: 64 * mib})
	require.NoError(t, err)
	blocked, unblock, ran := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		ran <- p.Run(ctx, g.s, func(step int) error {
			if step == 1 {
				close(blocked)
				<-unblock
			}
			return nil
		})
	}()
	<-blocked
	nothing := func(int) error { return nil }
	return func() {
		err := <-ran
		ended(err, "plan")
		require.ErrorIs(t, err, bounded.ErrStuck)
		assert.ErrorContains(t, err, "step 1: the function has not returned")
		ended(p.Run(ctx, g.s, nothing), "a Run while another one is in progress")
		close(unblock)
		require.NoError(t, p.Run(t.Context(), g.s, nothing))
	}
}

// The error of a context that has ended is its own and its cause, wherever it is noticed.
func TestErrorsOfEndedContexts(t *testing.T) {
	t.Parallel()
	cause := errors.New("the cause")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := New(ended, newSimFixture(t, cudasim.Config{}, Options{}).dev, Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	for name, w := range waitingOperations {
		if name == closeOperation {
			continue
		}
		t.Run(name, func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{Devices: []cudasim.DeviceConfig{w.cfg}}, w.o)
			m, do := w.prepare(g)
			err := do(ended)
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, cause)
			require.NoError(t, m.Close())
		})
	}
}
