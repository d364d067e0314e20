//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// pool makes a pool that is closed at the end, and then must hold nothing.
func (g *rig) pool(o PoolOptions) *Pool {
	g.Helper()
	p, err := NewPool(g.dev, o)
	require.NoError(g, err)
	g.Cleanup(func() {
		assert.NoError(g, p.Close())
		st := p.Stats()
		assert.Zero(g, [6]int{st.Leases, st.AskedBytes, st.InUseBytes, st.PendingBytes, st.CachedBytes, st.KeptBytes}, "%+v", st)
	})
	return p
}

func get(tb testing.TB, p *Pool, n int) Lease {
	tb.Helper()
	l, err := p.Get(tb.Context(), n)
	require.NoError(tb, err)
	require.Len(tb, l.Bytes(), n)
	return l
}

// stall makes a stream wait until the returned function is called.
func stall(tb testing.TB, s *cudart.Stream) (open func()) {
	tb.Helper()
	gate := make(chan struct{})
	require.NoError(tb, s.LaunchHostFunc(func() { <-gate }))
	return func() { close(gate) }
}

// balanced checks that every byte kept is accounted for, when nobody uses the pool.
func balanced(tb testing.TB, p *Pool) {
	tb.Helper()
	p.core.sweep.Lock() // the timer may be about to trim
	defer p.core.sweep.Unlock()
	st := p.Stats()
	assert.Equal(tb, st.KeptBytes, st.InUseBytes+st.PendingBytes+st.CachedBytes+st.SpareBytes, "%+v", st)
	kept := 0
	for _, a := range p.core.arenas {
		kept += a.buf.Len()
		free := 0
		for _, used := range a.used {
			if !used {
				free++
			}
		}
		assert.Equal(tb, free, a.free)
	}
	for b := range p.core.large {
		kept += b.size
	}
	assert.Equal(tb, st.KeptBytes, kept)
	slack := 0
	for i := range p.core.shards {
		assert.GreaterOrEqual(tb, p.core.shards[i].slack, 0)
		slack += p.core.shards[i].slack
	}
	assert.Equal(tb, st.PeakInUseBytes, st.InUseBytes+slack)
	assert.GreaterOrEqual(tb, st.PeakKeptBytes, st.KeptBytes)
}

func TestPoolLendsAgainWhatCameBack(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 64, 65, 4096, 100_000, mib, 2*mib - 1, 2 * mib, 3*mib + 1, 16 * mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			g := newSimRig(t, cudasim.Config{})
			p := g.pool(PoolOptions{})
			l := get(t, p, n)
			fill(l.Bytes(), 1)
			at := l.Pointer()
			assert.Zero(t, uintptr(at)%granule)
			require.NoError(t, l.Release())
			st := p.Stats()
			assert.Equal(t, 1, st.Misses)
			assert.Zero(t, st.InUseBytes)
			assert.NotZero(t, st.CachedBytes)
			for range 3 {
				l = get(t, p, n)
				assert.Equal(t, at, l.Pointer())
				assert.Equal(t, n, p.Stats().AskedBytes)
				require.NoError(t, l.Release())
			}
			st = p.Stats()
			assert.Equal(t, 3, st.Hits)
			assert.Equal(t, 1, g.registrations())
			balanced(t, p)
		})
	}
}

// The peak is the true one, between what callers know to be in use for certain
// and what they know can be at most.
func TestPoolPeakIsTrue(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	var sure, possible gauge
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			random := rand.New(rand.NewPCG(13, uint64(i)))
			for range 500 {
				n := 1 << (6 + random.IntN(12)) // of which there are classes: blocks are as large
				possible.add(n)
				l, err := p.Get(t.Context(), n)
				if !assert.NoError(t, err) {
					return
				}
				sure.add(n)
				runtime.Gosched()
				sure.add(-n)
				assert.NoError(t, l.Release())
				possible.add(-n)
			}
		})
	}
	group.Wait()
	peak := p.Stats().PeakInUseBytes
	assert.GreaterOrEqual(t, peak, int(sure.peak.Load()))
	assert.LessOrEqual(t, peak, int(possible.peak.Load()))
	balanced(t, p)
}

// The waste that the documentation states, from the pool's own account.
func TestPoolWastesLittle(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	random := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		n := 1 + random.IntN(1<<random.IntN(24))
		l := get(t, p, n)
		waste := p.Stats().InUseBytes - n
		assert.GreaterOrEqual(t, waste, 0)
		switch {
		case isSmall(classOf(n)):
			assert.Less(t, waste, max(granule, (n+7)/8), "%d bytes", n)
		case p.Stats().Misses == 0:
			assert.Less(t, waste, p.core.page, "%d bytes, new", n)
		default:
			assert.Less(t, waste, (n+7)/8+p.core.page, "%d bytes", n)
		}
		require.NoError(t, l.Release())
	}
	for class := 0; isSmall(class); class++ {
		size, run := classSize(class), runSize(class)
		assert.LessOrEqual(t, run%size, run/32, "what a run for blocks of %d bytes leaves", size)
		assert.Zero(t, run%runUnit)
	}
	l := get(t, p, 40*mib+1)
	assert.Contains(t, p.Outstanding(), Holding{ID: 1, Kind: "lease", Label: "pool", Bytes: 40*mib + p.core.page}, "large blocks are exact to a page")
	require.NoError(t, l.Release())
}

func TestSmallBlocksShareRegistrations(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	var leases []Lease
	random := rand.New(rand.NewPCG(5, 6))
	total := 0
	for range 3000 {
		n := 1 + random.IntN(1<<random.IntN(21))
		l := get(t, p, n)
		for i := range min(n, 64) {
			l.Bytes()[i] = byte(len(leases))
		}
		l.Bytes()[n-1] = byte(len(leases))
		leases = append(leases, l)
		total += n
	}
	// At most a quarter more arenas than blocks, each but the last few larger than 2 MiB.
	assert.Less(t, g.registrations(), 8+total/(8*mib), "for 3000 blocks of %d bytes in all", total)
	assert.Less(t, p.Stats().KeptBytes, total*5/4+maxArena)
	balanced(t, p)
	dst := g.device(2 * mib)
	seen := make(map[unsafe.Pointer]bool)
	for i, l := range leases {
		assert.Equal(t, byte(i), l.Bytes()[l.Len()-1], "blocks overlap")
		assert.Equal(t, byte(i), l.Bytes()[0], "blocks overlap")
		assert.False(t, seen[l.Pointer()])
		seen[l.Pointer()] = true
		if l.Len() > 30<<10 {
			assert.Zero(t, uintptr(l.Pointer())%runUnit)
		}
		// No block crosses a seam: CUDA would refuse a copy that does.
		require.NoError(t, l.CopyToDevice(g.stream, dst, 0, l.Len()))
	}
	g.synchronize()
	random.Shuffle(len(leases), func(i, j int) { leases[i], leases[j] = leases[j], leases[i] })
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	g.synchronize()
	balanced(t, p)
	freed, err := p.Trim(0)
	require.NoError(t, err)
	assert.Positive(t, freed)
	assert.Zero(t, p.Stats().KeptBytes, "no block is leased, so no arena is needed")
	assert.Zero(t, g.registrations())
}

func TestPoolRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	for name, o := range map[string]PoolOptions{
		"limit": {MaxBytes: -1},
		"chunk": {Buffer: Options{Chunk: 2 * mib}},
		"pages": {Buffer: Options{HugePages: 99}},
	} {
		_, err := NewPool(g.dev, o)
		assert.Error(t, err, name)
	}
	p := g.pool(PoolOptions{MaxBytes: 4 * mib})
	for _, n := range []int{0, -1, maxBlock + 1} {
		_, err := p.Get(t.Context(), n)
		assert.ErrorIs(t, err, errBlockSize)
	}
	_, err := p.Get(t.Context(), 4*mib+1)
	assert.ErrorIs(t, err, ErrTooLarge)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.Get(ended, 1)
	assert.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, g.registrations())
}

// Sizes of one class that grow must not leave their smaller forerunners behind.
func TestGrowingSizesReplaceSmallerBlocks(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	for n := 16*mib + 1; n < 17*mib; n += 100_000 {
		l := get(t, p, n)
		require.NoError(t, l.Release())
		assert.Equal(t, 1, g.registrations())
	}
	assert.LessOrEqual(t, p.Stats().KeptBytes, 17*mib+p.core.page)
}

func TestPoolLimitMakesRoomOfOtherSizes(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{MaxBytes: 8 * mib})
	for _, n := range []int{3 * mib, 5 * mib, 8 * mib, 1, 4 * mib, 100_000, 4 * mib, 8 * mib, mib} {
		l := get(t, p, n)
		assert.LessOrEqual(t, p.Stats().KeptBytes, 8*mib)
		require.NoError(t, l.Release())
	}
	// Small blocks of one size give way to small blocks of another.
	var leases []Lease
	for range 7 {
		leases = append(leases, get(t, p, mib))
	}
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	leases = leases[:0]
	for range 100 {
		leases = append(leases, get(t, p, 64*kib))
	}
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	assert.LessOrEqual(t, p.Stats().PeakKeptBytes, 8*mib)
	balanced(t, p)
}

func TestPoolWorksUnderATinyLimit(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{MaxBytes: 64 * kib})
	var leases []Lease
	for range 100 {
		leases = append(leases, get(t, p, 64))
	}
	assert.LessOrEqual(t, p.Stats().KeptBytes, 64*kib)
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	_, err := p.Get(t.Context(), 65*kib)
	assert.ErrorIs(t, err, ErrTooLarge)
	require.NoError(t, get(t, p, 64*kib).Release())
}

func TestPoolTrim(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	var leases []Lease
	for range 4 {
		leases = append(leases, get(t, p, 4*mib))
	}
	small := get(t, p, 1000)
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	freed, err := p.Trim(8*mib + minArena)
	require.NoError(t, err)
	assert.Equal(t, 8*mib, freed)
	assert.Equal(t, 8*mib, p.Stats().CachedBytes)
	freed, err = p.Trim(0)
	require.NoError(t, err)
	assert.Equal(t, 8*mib, freed, "the arena is in use")
	require.NoError(t, small.Release())
	freed, err = p.Trim(minArena)
	require.NoError(t, err)
	assert.Zero(t, freed, "as much may stay")
	freed, err = p.Trim(-1)
	require.NoError(t, err)
	assert.Equal(t, minArena, freed)
	st := p.Stats()
	assert.Equal(t, 16*mib+minArena, st.TrimmedBytes)
	assert.Equal(t, 16*mib+minArena, st.PeakKeptBytes)
	assert.Zero(t, g.registrations())
}

func TestIdleMemoryGoesBackInTime(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{}) // ticks are made here
	hot, cold := get(t, p, 4*mib), get(t, p, 6*mib)
	small := get(t, p, 100)
	require.NoError(t, cold.Release())
	require.NoError(t, small.Release())
	require.NoError(t, hot.Release())
	for range idleTicks - 1 {
		p.core.tick()
		hot = get(t, p, 4*mib)
		require.NoError(t, hot.Release())
		assert.Equal(t, 3, g.registrations(), "no block was idle for long enough")
	}
	p.core.tick()
	assert.Equal(t, 1, g.registrations(), "what was used stays")
	assert.Equal(t, 4*mib, p.Stats().KeptBytes)
	for range idleTicks {
		p.core.tick()
	}
	assert.Zero(t, g.registrations())
}

func TestIdleTimeRunsByItself(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{IdleTime: 1000})
	for range 3 {
		l := get(t, p, 4*mib)
		require.NoError(t, l.CopyToDevice(g.stream, g.device(1), 0, 1))
		require.NoError(t, l.Release())
		eventually(t, "idle memory is given back", func() bool { return g.registrations() == 0 })
		eventually(t, "the timer stops", func() bool { return !p.core.ticking.Load() })
	}
}

func TestPoolCloseWithLeasesOut(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{Buffer: Options{Label: "batches"}})
	cached, large, small := get(t, p, 3*mib), get(t, p, 5*mib), get(t, p, 10)
	require.NoError(t, cached.Release())
	err := p.Close()
	require.ErrorIs(t, err, ErrLeased)
	assert.ErrorContains(t, err, `pool "batches"`)
	assert.ErrorContains(t, err, fmt.Sprintf("2 with %d bytes", 5*mib+64))
	assert.Equal(t, 2, g.registrations(), "what nobody leased is given back")
	_, err = p.Get(t.Context(), 1)
	require.ErrorIs(t, err, ErrClosed)

	fill(large.Bytes(), 9) // is still there
	dst := g.device(5 * mib)
	open := stall(t, g.stream)
	require.NoError(t, large.CopyToDevice(g.stream, dst, 0, 5*mib))
	want := append([]byte(nil), large.Bytes()...)
	ended := make(chan error)
	go func() { ended <- large.Release() }()
	eventually(t, "the lease is over", func() bool { return large.Bytes() == nil })
	assert.Equal(t, 2, g.registrations(), "the copy is not done")
	open()
	require.NoError(t, <-ended)
	assert.Equal(t, 1, g.registrations())
	assert.Equal(t, want, g.download(dst, 5*mib))
	require.ErrorIs(t, p.Close(), ErrLeased)
	require.NoError(t, small.Release())
	assert.Zero(t, g.registrations())
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
}

func TestPoolCloseGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	l := get(t, p, 4*mib)
	open := stall(t, g.stream)
	require.NoError(t, l.Release(g.stream))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.CloseContext(ctx), context.Canceled)
	assert.Equal(t, 1, g.registrations(), "work may still use the memory")
	open()
	require.NoError(t, p.Close())
	assert.Zero(t, g.registrations())
}

func TestLostPoolGivesItsMemoryBack(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	out := func() Lease {
		p, err := NewPool(g.dev, PoolOptions{})
		require.NoError(t, err)
		require.NoError(t, get(t, p, 4*mib).Release(g.stream))
		return get(t, p, 5*mib)
	}()
	eventually(t, "the pool is closed", func() bool { runtime.GC(); return g.registrations() == 1 })
	fill(out.Bytes(), 3)
	require.NoError(t, out.Release())
	assert.Zero(t, g.registrations())
	eventually(t, "its events are closed", func() bool { return g.sim.Outstanding().Events == 0 })
}

func TestLostLeasesAreTold(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	rt, err := cudart.Open(cudart.Options{Source: g.sim, Debug: true})
	require.NoError(t, err)
	defer func() { assert.NoError(t, rt.Close()) }()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	p, err := NewPool(dev, PoolOptions{})
	require.NoError(t, err)
	kept := get(t, p, 3*mib)
	func() { get(t, p, 5*mib) }()
	require.NoError(t, get(t, p, 100).Release())
	eventually(t, "the lease is found lost", func() bool { runtime.GC(); return p.Stats().Lost == 1 })
	out := p.Outstanding()
	require.Len(t, out, 2)
	assert.True(t, out[0].Lost)
	assert.False(t, out[1].Lost)
	assert.Contains(t, out[0].Stack, "TestLostLeasesAreTold")
	assert.Equal(t, 5*mib, out[0].Bytes)
	require.NoError(t, kept.Release())
	err = p.Close()
	require.ErrorIs(t, err, ErrLeased, "memory of a lost lease may be in use")
	assert.ErrorContains(t, err, "TestLostLeasesAreTold")
	assert.Equal(t, 1, g.registrations())
	for b := range p.core.large { // what no user can do
		require.NoError(t, Lease{b: b, gen: b.generation(), n: 5 * mib}.Release())
	}
	require.NoError(t, p.Close())
}
