package managed

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func (g *rig) pool(o PoolOptions) *Pool {
	g.Helper()
	p, err := g.a.NewPool(o)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, p.Close(context.Background())) })
	return p
}

func get(t *testing.T, p *Pool, n int) Lease {
	t.Helper()
	l, err := p.Get(t.Context(), n)
	require.NoError(t, err)
	return l
}

func TestClassSizes(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int{1: 64 * kib, 64 * kib: 64 * kib, 64*kib + 1: 128 * kib, mib: mib, mib + 1: mib + 128*kib,
		2 * mib: 2 * mib, 100 * mib: 104 * mib, gib + 1: gib + 128*mib, poolMost: poolMost} {
		assert.Equal(t, want, classSize(n), "%d", n)
	}
	for range 1000 {
		n := rand.N(1 << 40)
		size := classSize(n + 1)
		assert.GreaterOrEqual(t, size, n+1)
		assert.LessOrEqual(t, size-(n+1), max(64*kib, (n+1)/8), "%d", n+1)
		assert.Equal(t, size, classSize(size), "%d", n+1)
	}
}

func TestPoolReusesMemory(t *testing.T) {
	t.Parallel()
	g := newRig(t, Options{})
	p := g.pool(PoolOptions{Label: "tensors"})
	l := get(t, p, 100)
	assert.Len(t, l.Bytes(), 100)
	assert.Equal(t, 100, l.Len())
	at := l.DevPtr()
	l.Bytes()[99] = 1
	assert.Equal(t, PoolStats{Leases: 1, InUse: 64 * kib, Allocated: 64 * kib, Misses: 1}, p.Stats())
	require.NoError(t, l.Release())
	assert.Equal(t, PoolStats{Idle: 64 * kib, Allocated: 64 * kib, Misses: 1}, p.Stats())
	assert.Nil(t, l.Bytes())
	assert.Zero(t, l.DevPtr())
	assert.Equal(t, Range{}, l.Range())
	require.ErrorIs(t, l.Release(), ErrReleased)
	require.ErrorIs(t, l.Prefetch(g.s, Host()), ErrReleased)

	again := get(t, p, 64*kib)
	assert.Equal(t, at, again.DevPtr())
	assert.Nil(t, l.Bytes(), "the old handle does not reach it")
	require.ErrorIs(t, again.Release(nil), errNilStream)
	require.NoError(t, again.Release())
	assert.Equal(t, 1, g.a.Stats().Labels["tensors"].Allocs)
	freed, err := p.Trim()
	require.NoError(t, err)
	assert.Equal(t, 64*kib, freed)
	assert.Zero(t, g.a.Stats().Allocated)

	require.ErrorIs(t, Lease{}.Release(), errNoLease)
	require.ErrorIs(t, Lease{}.Prefetch(g.s, Host()), errNoLease)
	for _, n := range []int{0, -1, poolMost + 1} {
		_, err := p.Get(t.Context(), n)
		require.ErrorIs(t, err, errSize)
	}
	_, err = p.GetFor(t.Context(), nil, 1)
	require.ErrorIs(t, err, errNilStream)
	_, err = p.Get(noContext, 1)
	require.ErrorIs(t, err, errNilContext)
	_, err = g.a.NewPool(PoolOptions{MaxBytes: -1})
	require.ErrorContains(t, err, "PoolOptions.MaxBytes of -1")
}

// Memory that a stream uses is not another's until the stream is done; the same stream may
// have it at once.
func TestPoolReusesInTheOrderOfStreams(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{}, Options{})
	p := g.pool(PoolOptions{})
	other, err := g.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, other.Close()) }()

	g.sim.Hold()
	first := get(t, p, mib)
	at := first.DevPtr()
	require.NoError(t, g.s.Memset(at, 1, mib))
	require.NoError(t, first.Release(g.s))
	assert.Equal(t, mib, p.Stats().Pending)

	l := get(t, p, mib)
	assert.NotEqual(t, at, l.DevPtr(), "the GPU works on it")
	theirs, err := p.GetFor(t.Context(), other, mib)
	require.NoError(t, err)
	assert.NotEqual(t, at, theirs.DevPtr(), "another stream is in no order with it")
	mine, err := p.GetFor(t.Context(), g.s, mib)
	require.NoError(t, err)
	assert.Equal(t, at, mine.DevPtr())
	require.NoError(t, g.s.Memset(at, 2, mib))
	require.NoError(t, mine.Release(g.s))
	require.NoError(t, theirs.Release())
	require.NoError(t, l.Release())

	g.sim.Release()
	g.sync()
	for range 3 {
		l := get(t, p, mib)
		defer func() { assert.NoError(t, l.Release()) }()
	}
	assert.Equal(t, 3, p.Stats().Misses)
	assert.Zero(t, p.Stats().Pending)
}

// A prefetch of a lease counts as its work.
func TestPoolWaitsForPrefetchesOfLeases(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{}, Options{})
	p := g.pool(PoolOptions{})
	g.sim.Hold()
	l := get(t, p, mib)
	require.NoError(t, l.Prefetch(g.s, g.dev.Location()))
	require.NoError(t, l.Release())
	assert.Equal(t, mib, p.Stats().Pending)
	g.sim.Release()
}

// Where there is no room, the pool frees what is idle, and waits for what is pending, but
// for no lease.
func TestPoolMakesRoom(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(t *testing.T) (*rig, *Pool){
		"MaxBytes": func(t *testing.T) (*rig, *Pool) {
			g := newSimRig(t, cudasim.Config{}, Options{})
			return g, g.pool(PoolOptions{MaxBytes: 4 * mib})
		},
		"card": func(t *testing.T) (*rig, *Pool) {
			g := newSimRig(t, small(4*mib), Options{})
			return g, g.pool(PoolOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, p := setup(t)
			a, b := get(t, p, 2*mib), get(t, p, 2*mib)
			_, err := p.Get(t.Context(), 3*mib)
			require.ErrorIs(t, err, ErrOversubscribed)
			assert.Equal(t, 2, p.Stats().Leases)
			require.NoError(t, a.Release())
			require.NoError(t, g.s.Memset(b.DevPtr(), 1, 2*mib))
			require.NoError(t, b.Release(g.s))
			c := get(t, p, 4*mib)
			assert.Equal(t, PoolStats{Leases: 1, InUse: 4 * mib, Allocated: 4 * mib, Misses: 3}, p.Stats())
			require.NoError(t, c.Release())
		})
	}
}

func TestPoolClose(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{}, Options{})
	p, err := g.a.NewPool(PoolOptions{})
	require.NoError(t, err)
	a, b := get(t, p, mib), get(t, p, mib)
	require.NoError(t, b.Release())
	require.ErrorIs(t, p.Close(t.Context()), ErrInUse)
	_, err = p.Get(t.Context(), 1)
	require.ErrorIs(t, err, ErrClosed)
	assert.Equal(t, mib, g.a.Stats().Allocated, "what is not in use is freed")
	require.NoError(t, g.s.Memset(a.DevPtr(), 1, mib))
	require.NoError(t, a.Release(g.s))
	g.sim.Fail("cudaFree", cudasim.Fault{Code: cudart.ErrInvalidValue})
	require.ErrorIs(t, p.Close(t.Context()), cudart.ErrInvalidValue)
	require.NoError(t, p.Close(t.Context()), "tried again")
	require.NoError(t, p.Close(t.Context()))
	assert.Zero(t, g.a.Stats().Allocated)
	assert.Zero(t, p.Stats().Allocated)
	require.ErrorIs(t, p.Close(noContext), errNilContext)
	require.NoError(t, g.a.Close())
	_, err = g.a.NewPool(PoolOptions{})
	require.ErrorIs(t, err, ErrClosed)
}

// No two leases have the same bytes: each goroutine writes its own, also by the GPU, and
// finds them.
func TestPoolFromManyGoroutines(t *testing.T) {
	t.Parallel()
	g := newRig(t, Options{})
	p := g.pool(PoolOptions{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s, err := g.dev.NewStream(cudart.StreamOptions{})
			if !assert.NoError(t, err) {
				return
			}
			defer func() { assert.NoError(t, s.Close()) }()
			for round := range 30 {
				l, err := p.Get(context.Background(), 1+rand.N(300*kib))
				if !assert.NoError(t, err) {
					return
				}
				value := byte(i*30 + round)
				err = s.Memset(l.DevPtr(), value, l.Len())
				if assert.NoError(t, err) && round%2 == 0 {
					assert.NoError(t, s.Synchronize(context.Background()))
					assert.Equal(t, value, l.Bytes()[0])
					assert.Equal(t, value, l.Bytes()[l.Len()-1])
				}
				assert.NoError(t, l.Release(s))
			}
			assert.NoError(t, s.Synchronize(context.Background()))
		})
	}
	wg.Wait()
	s := p.Stats()
	assert.Zero(t, s.Leases)
	assert.Zero(t, s.InUse)
	assert.Equal(t, s.Allocated, s.Idle+s.Pending)
	assert.Equal(t, 240, s.Hits+s.Misses)
	assert.Greater(t, s.Hits, 0)
}

// What a device is done with is found behind memory of any number of busy streams: one
// lease at a time, beside them, needs one block more.
func TestBusyStreamsHideNothing(t *testing.T) {
	t.Parallel()
	for _, busy := range []int{1, 4, 8, 32} {
		g := newSimRig(t, cudasim.Config{}, Options{})
		p := g.pool(PoolOptions{})
		gate := make(chan struct{})
		open := sync.OnceFunc(func() { close(gate) })
		t.Cleanup(open)
		var held []Lease
		var streams []*cudart.Stream
		for range busy {
			s, err := g.dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, s.Close()) })
			require.NoError(t, s.LaunchHostFunc(func() { <-gate }))
			held, streams = append(held, get(t, p, mib)), append(streams, s)
		}
		for i, l := range held {
			require.NoError(t, l.Release(streams[i]))
		}
		for range 50 {
			l := get(t, p, mib)
			require.NoError(t, g.s.Memset(l.DevPtr(), 1, 64))
			require.NoError(t, l.Release(g.s))
			require.NoError(t, g.s.Synchronize(t.Context()))
		}
		assert.Equal(t, busy+1, p.Stats().Misses, "%d busy streams", busy)
		open()
	}
}
