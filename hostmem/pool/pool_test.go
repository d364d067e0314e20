//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
)

func TestPoolReusesWhatWasReleased(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 64, 65, 4096, 100_000, mib, 2*mib - 1, 2 * mib, 3*mib + 1, 16 * mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(Options{})
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
				assert.Equal(t, n, p.Stats().RequestedBytes)
				require.NoError(t, l.Release())
			}
			st = p.Stats()
			assert.Equal(t, 3, st.Hits)
			assert.Equal(t, 1, g.Registrations())
			balanced(t, p)
		})
	}
}

// A gauge is a number and its maximum so far.
type gauge struct{ now, peak atomic.Int64 }

func (g *gauge) add(n int) {
	now := g.now.Add(int64(n))
	for peak := g.peak.Load(); now > peak && !g.peak.CompareAndSwap(peak, now); peak = g.peak.Load() {
	}
}

// The peak is the true one: between what is in use for certain and what can be at
// most.
func TestPoolPeakIsTrue(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
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

// The waste that the documentation states, by the pool's own figures.
func TestPoolWastesLittle(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
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
			assert.Less(t, waste, p.core.unit, "%d bytes, new", n)
		default:
			assert.Less(t, waste, (n+7)/8+p.core.unit, "%d bytes", n)
		}
		require.NoError(t, l.Release())
	}
	for class := 0; isSmall(class); class++ {
		size, run := classSize(class), runSize(class)
		assert.LessOrEqual(t, run%size, run/32, "what a run for blocks of %d bytes leaves", size)
		assert.Zero(t, run%runUnit)
	}
	l := get(t, p, 40*mib+1)
	assert.Contains(t, p.Outstanding(), hostmem.Holding{ID: 1, Kind: "lease", Label: "pool", Bytes: 40*mib + p.core.unit}, "large blocks are exact to a page")
	require.NoError(t, l.Release())
}

func TestSmallBlocksShareRegistrations(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
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
	assert.Less(t, g.Registrations(), 8+total/(8*mib), "for 3000 blocks of %d bytes in all", total)
	assert.Less(t, p.Stats().ReservedBytes, total*5/4+maxArena)
	balanced(t, p)
	dst := g.Device(2 * mib)
	seen := make(map[unsafe.Pointer]bool)
	for i, l := range leases {
		assert.Equal(t, byte(i), l.Bytes()[l.Len()-1], "blocks overlap")
		assert.Equal(t, byte(i), l.Bytes()[0], "blocks overlap")
		assert.False(t, seen[l.Pointer()])
		seen[l.Pointer()] = true
		if l.Len() > 30<<10 {
			assert.Zero(t, uintptr(l.Pointer())%runUnit)
		}
		// No block crosses from one registration to the next: CUDA would refuse a copy that does.
		require.NoError(t, l.CopyToDevice(g.Stream, dst, 0, l.Len()))
	}
	g.Synchronize()
	random.Shuffle(len(leases), func(i, j int) { leases[i], leases[j] = leases[j], leases[i] })
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	g.Synchronize()
	balanced(t, p)
	freed, err := p.Trim(context.Background(), 0)
	require.NoError(t, err)
	assert.Positive(t, freed)
	assert.Zero(t, p.Stats().ReservedBytes, "no block is leased, so no arena is needed")
	assert.Zero(t, g.Registrations())
}

func TestPoolRefusesOptionsAndSizes(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	for want, o := range map[string]Options{
		"pool: new: Options.MaxBytes of -1: must not be negative":                                   {MaxBytes: -1},
		"pool: new: Options.Buffer.Chunk: must be 0, as a block is one registration":                {Buffer: hostmem.Options{Chunk: 2 * mib}},
		"pool: new: Options.Buffer: Options.HugePages of 99: no such value":                         {Buffer: hostmem.Options{HugePages: 99}},
		"pool: new: Options.Buffer: Options.Align of 3 bytes: must be a power of two":               {Buffer: hostmem.Options{Align: 3}},
		"pool: new: Options.Buffer: Options.Workers of 4611686018427387904: must be from 0 to 1024": {Buffer: hostmem.Options{Workers: 1 << 62}},
	} {
		_, err := New(g.Dev, o)
		assert.EqualError(t, err, want)
	}
	_, err := New(nil, Options{})
	assert.EqualError(t, err, "pool: new: the device is nil")
	p := g.pool(Options{MaxBytes: 4 * mib})
	for _, n := range []int{0, -1, maxBlock + 1} {
		_, err := p.Get(t.Context(), n)
		assert.ErrorIs(t, err, errBlockSize)
	}
	_, err = p.Get(t.Context(), 4*mib+1)
	assert.ErrorIs(t, err, hostmem.ErrTooLarge)
	var none context.Context
	_, err = p.Get(none, 1)
	assert.ErrorIs(t, err, errNilContext)
	assert.ErrorIs(t, p.CloseContext(none), errNilContext)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.Get(ended, 1)
	assert.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, g.Registrations())
}

// Sizes of one class that grow must replace the smaller ones.
func TestGrowingSizesReplaceSmallerBlocks(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	for n := 16*mib + 1; n < 17*mib; n += 100_000 {
		l := get(t, p, n)
		require.NoError(t, l.Release())
		assert.Equal(t, 1, g.Registrations())
	}
	assert.LessOrEqual(t, p.Stats().ReservedBytes, 17*mib+p.core.unit)
}

func TestPoolUnmapsIdleBlocksOfOtherSizesAtItsLimit(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 8 * mib})
	for _, n := range []int{3 * mib, 5 * mib, 8 * mib, 1, 4 * mib, 100_000, 4 * mib, 8 * mib, mib} {
		l := get(t, p, n)
		assert.LessOrEqual(t, p.Stats().ReservedBytes, 8*mib)
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
	assert.LessOrEqual(t, p.Stats().PeakReservedBytes, 8*mib)
	balanced(t, p)
}

func TestPoolWorksUnderATinyLimit(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 64 * kib})
	var leases []Lease
	for range 100 {
		leases = append(leases, get(t, p, 64))
	}
	assert.LessOrEqual(t, p.Stats().ReservedBytes, 64*kib)
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	_, err := p.Get(t.Context(), 65*kib)
	assert.ErrorIs(t, err, hostmem.ErrTooLarge)
	require.NoError(t, get(t, p, 64*kib).Release())
}

func TestPoolTrim(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	var leases []Lease
	for range 4 {
		leases = append(leases, get(t, p, 4*mib))
	}
	small := get(t, p, 1000)
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	freed, err := p.Trim(context.Background(), 8*mib+minArena)
	require.NoError(t, err)
	assert.Equal(t, 8*mib, freed)
	assert.Equal(t, 8*mib, p.Stats().CachedBytes)
	freed, err = p.Trim(context.Background(), 0)
	require.NoError(t, err)
	assert.Equal(t, 8*mib, freed, "the arena is in use")
	require.NoError(t, small.Release())
	freed, err = p.Trim(context.Background(), minArena)
	require.NoError(t, err)
	assert.Zero(t, freed, "as much may stay")
	freed, err = p.Trim(context.Background(), -1)
	require.NoError(t, err)
	assert.Equal(t, minArena, freed)
	st := p.Stats()
	assert.Equal(t, 16*mib+minArena, st.TrimmedBytes)
	assert.Equal(t, 16*mib+minArena, st.PeakReservedBytes)
	assert.Zero(t, g.Registrations())
}

func TestIdleMemoryIsUnmappedInTime(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{}) // ticks are made here
	hot, cold := get(t, p, 4*mib), get(t, p, 6*mib)
	small := get(t, p, 100)
	require.NoError(t, cold.Release())
	require.NoError(t, small.Release())
	require.NoError(t, hot.Release())
	for range idleTicks - 1 {
		p.core.tick()
		hot = get(t, p, 4*mib)
		require.NoError(t, hot.Release())
		assert.Equal(t, 3, g.Registrations(), "no block was idle for long enough")
	}
	p.core.tick()
	assert.Equal(t, 1, g.Registrations(), "what was used stays")
	assert.Equal(t, 4*mib, p.Stats().ReservedBytes)
	for range idleTicks {
		p.core.tick()
	}
	assert.Zero(t, g.Registrations())
}

func TestIdleTimeRunsByItself(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: 1000})
	for range 3 {
		l := get(t, p, 4*mib)
		require.NoError(t, l.CopyToDevice(g.Stream, g.Device(1), 0, 1))
		require.NoError(t, l.Release())
		eventually(t, "idle memory is unmapped", func() bool { return g.Registrations() == 0 })
		eventually(t, "the timer stops", func() bool { return !p.core.ticking.Load() })
	}
}

func TestPoolCloseWithLeases(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{Buffer: hostmem.Options{Label: "batches"}})
	cached, large, small := get(t, p, 3*mib), get(t, p, 5*mib), get(t, p, 10)
	require.NoError(t, cached.Release())
	err := p.Close()
	require.ErrorIs(t, err, errLeased)
	assert.ErrorContains(t, err, `pool: close "batches" of device 0`)
	assert.ErrorContains(t, err, fmt.Sprintf("2 with %d bytes", 5*mib+64))
	assert.Equal(t, 2, g.Registrations(), "what is not leased is unmapped")
	_, err = p.Get(t.Context(), 1)
	require.ErrorIs(t, err, cudart.ErrClosed)

	fill(large.Bytes(), 9) // is still there
	dst := g.Device(5 * mib)
	open := g.Stall(g.Stream)
	require.NoError(t, large.CopyToDevice(g.Stream, dst, 0, 5*mib))
	want := append([]byte(nil), large.Bytes()...)
	require.NoError(t, large.Release(), "it does not wait for the copy")
	assert.Nil(t, large.Bytes())
	assert.Equal(t, 2, g.Registrations(), "the copy is not done")
	open()
	eventually(t, "the memory is unmapped", func() bool { return g.Registrations() == 1 })
	assert.Equal(t, want, g.Download(dst, 5*mib))
	require.ErrorIs(t, p.Close(), errLeased)
	require.NoError(t, small.Release())
	require.NoError(t, p.Close())
	assert.Zero(t, g.Registrations())
	require.NoError(t, p.Close())
}

// A lease that is released after Close is unmapped with no other call, also if its
// neighbours are leased, and no goroutine is left at work.
func TestLeasesReleasedAfterCloseAreUnmapped(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	small, neighbour, large := get(t, p, 100), get(t, p, 100), get(t, p, 3*mib)
	require.ErrorIs(t, p.Close(), errLeased)
	require.NoError(t, small.Release())
	atRest(t, p) // it does not look for ever at what it cannot unmap
	assert.Equal(t, 2, g.Registrations())
	require.NoError(t, large.Release())
	atRest(t, p)
	assert.Equal(t, 1, g.Registrations())
	require.NoError(t, neighbour.Release())
	atRest(t, p)
	assert.Zero(t, g.Registrations())
	requireEmpty(t, p)
}

func TestPoolCloseGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	busy, done := get(t, p, 4*mib), get(t, p, 3*mib)
	other := g.NewStream()
	require.NoError(t, done.CopyToDevice(other, g.Device(1), 0, 1))
	open := g.Stall(g.Stream)
	require.NoError(t, busy.Release(g.Stream))
	require.NoError(t, done.Release())
	require.NoError(t, other.Synchronize(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error)
	go func() { closed <- p.CloseContext(ctx) }()
	eventually(t, "the memory of the other stream is unmapped", func() bool { return g.Registrations() == 1 })
	cancel()
	require.ErrorIs(t, <-closed, context.Canceled)
	assert.Equal(t, 1, g.Registrations(), "work may still use the memory")
	require.ErrorIs(t, p.CloseContext(ctx), context.Canceled, "it has ended already")
	open()
	require.NoError(t, p.Close())
	assert.Zero(t, g.Registrations())
}

func TestLostPoolUnmapsItsMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	out := func() Lease {
		p, err := New(g.Dev, Options{})
		require.NoError(t, err)
		require.NoError(t, get(t, p, 4*mib).Release(g.Stream))
		return get(t, p, 5*mib)
	}()
	eventually(t, "the pool is closed", func() bool { runtime.GC(); return g.Registrations() == 1 })
	fill(out.Bytes(), 3)
	require.NoError(t, out.Release())
	eventually(t, "the lease's memory is unmapped", func() bool { return g.Registrations() == 0 })
}

func TestLostLeasesAreListed(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: g.Sim, Debug: true})
	require.NoError(t, err)
	defer func() { assert.NoError(t, rt.Close()) }()
	dev, err := rt.Device(0)
	require.NoError(t, err)
	p, err := New(dev, Options{})
	require.NoError(t, err)
	held := get(t, p, 3*mib)
	func() { get(t, p, 5*mib) }()
	require.NoError(t, get(t, p, 100).Release())
	eventually(t, "the lease is found lost", func() bool { runtime.GC(); return p.Stats().Lost == 1 })
	out := p.Outstanding()
	require.Len(t, out, 2)
	assert.True(t, out[0].Lost)
	assert.False(t, out[1].Lost)
	assert.Contains(t, out[0].Stack, "TestLostLeasesAreListed")
	assert.Equal(t, 5*mib, out[0].Bytes)
	require.NoError(t, held.Release())
	err = p.Close()
	require.ErrorIs(t, err, errLeased, "memory of a lost lease may be in use")
	assert.ErrorContains(t, err, "TestLostLeasesAreListed")
	assert.Equal(t, 1, g.Registrations())
	p.core.mu.Lock() // a Release that finds the system short unmaps later
	large := slices.Collect(maps.Keys(p.core.large))
	p.core.mu.Unlock()
	for _, b := range large { // what no user can do
		if b.Size >= 5*mib {
			require.NoError(t, Lease{b: b, generation: b.users.Generation(), n: 5 * mib}.Release())
		}
	}
	require.NoError(t, p.Close())
}
