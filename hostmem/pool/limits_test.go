//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// limitProcess sets the limit of the process to so much more than is pinned. Tests
// that do are not parallel.
func limitProcess(t *testing.T, more int) {
	t.Helper()
	require.NoError(t, hostmem.SetLimits(hostmem.Limits{MaxBytes: hostmem.ReadStats().PinnedBytes + more}))
	t.Cleanup(func() { assert.NoError(t, hostmem.SetLimits(hostmem.Limits{})) })
}

// reserves waits until a pool has so many bytes: others can use what it gives back a moment
// before it has counted that.
func reserves(t *testing.T, p *Pool, n int) {
	t.Helper()
	assert.Eventually(t, func() bool { return p.Stats().ReservedBytes == n }, 10*time.Second, time.Millisecond, "%d bytes, and not those of %v", n, p)
}

type got struct {
	l   Lease
	err error
}

// waiting starts a Get that has to wait.
func waiting(t *testing.T, p *Pool, ctx context.Context, n int) <-chan got {
	t.Helper()
	before := p.Stats().Waiting
	result := make(chan got, 1)
	go func() {
		l, err := p.Get(ctx, n)
		result <- got{l, err}
	}()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == before+1 })
	return result
}

// A Get that the process's limit makes wait is served by all that returns memory to its
// pool or to the process.
func TestGetsThatTheProcessLimitMakesWait(t *testing.T) {
	for name, wake := range map[string]func(t *testing.T, g *fixture, p *Pool, held Lease, buf *hostmem.Buffer) (hit bool){
		"a release to its own pool": func(t *testing.T, _ *fixture, _ *Pool, held Lease, _ *hostmem.Buffer) bool {
			require.NoError(t, held.Release())
			return true
		},
		"the GPU is done with a block of its own pool": func(t *testing.T, g *fixture, _ *Pool, held Lease, _ *hostmem.Buffer) bool {
			open := g.Stall(g.Stream)
			queueCopy(t, held, g.Stream, g.Device(1), 1)
			require.NoError(t, held.Release())
			open()
			return true
		},
		"a buffer is closed": func(t *testing.T, _ *fixture, _ *Pool, _ Lease, buf *hostmem.Buffer) bool {
			require.NoError(t, buf.Close())
			return false
		},
		"the limit is raised": func(t *testing.T, _ *fixture, _ *Pool, _ Lease, _ *hostmem.Buffer) bool {
			require.NoError(t, hostmem.SetLimits(hostmem.Limits{}))
			return false
		},
	} {
		for pools, maxBytes := range map[string]int{"no limit of its own": 0, "a larger limit of its own": 1 << 30} {
			t.Run(name+", "+pools, func(t *testing.T) {
				pinned := hostmem.ReadStats().PinnedBytes
				g := newSimFixture(t, cudasim.Config{})
				p := g.pool(Options{IdleTime: -1, MaxBytes: maxBytes})
				limitProcess(t, 8*mib)
				held := get(t, p, 4*mib)
				buf, err := hostmem.Alloc(t.Context(), g.Dev, 4*mib, hostmem.Options{})
				require.NoError(t, err)
				result := waiting(t, p, t.Context(), 4*mib)
				hits := p.Stats().Hits
				hit := wake(t, g, p, held, buf)
				served := <-result
				require.NoError(t, served.err)
				assert.Equal(t, hit, p.Stats().Hits > hits)
				require.NoError(t, served.l.Release())
				_ = held.Release() // some have
				require.NoError(t, buf.Close())
				require.NoError(t, p.Close())
				assert.Equal(t, pinned, hostmem.ReadStats().PinnedBytes, "its share of the limit returns")
			})
		}
	}
}

func TestCloseEndsAGetThatTheProcessLimitMakesWait(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p, q := g.pool(Options{IdleTime: -1}), g.pool(Options{IdleTime: -1})
	limitProcess(t, 4*mib)
	held := get(t, q, 4*mib)
	result := waiting(t, p, t.Context(), 4*mib)
	require.NoError(t, p.Close())
	require.ErrorIs(t, (<-result).err, cudart.ErrClosed)
	require.NoError(t, held.Release())
}

// One pool's idle memory serves another, however long it would stay idle by itself.
func TestIdleMemoryOfOnePoolServesAnother(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p, q := g.pool(Options{IdleTime: -1}), g.pool(Options{IdleTime: -1})
	limitProcess(t, 8*mib)
	idle, busy := get(t, q, 4*mib), get(t, q, 3*mib)
	require.NoError(t, idle.Release())
	open := g.Stall(g.Stream)
	queueCopy(t, busy, g.Stream, g.Device(1), 1)
	require.NoError(t, busy.Release())
	require.NoError(t, get(t, p, 5*mib).Release())
	reserves(t, q, 3*mib) // what the GPU may use stays
	result := waiting(t, p, t.Context(), 8*mib)
	open() // the GPU is done, and nothing is released to p
	served := <-result
	require.NoError(t, served.err)
	reserves(t, q, 0)
	require.NoError(t, served.l.Release())
	_, err := p.Get(t.Context(), hostmem.ReadStats().PinnedBytes+9*mib)
	require.ErrorIs(t, err, hostmem.ErrTooLarge)
	require.ErrorIs(t, err, hostmem.ErrLimit)
}

// A pool keeps no idle memory from others under the process's limit, although a Get waits
// in it that the idle memory does not serve.
func TestIdleMemoryOfAPoolWhoseGetWaitsServesAnother(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p, q := g.pool(Options{IdleTime: -1, MaxBytes: 8 * mib}), g.pool(Options{IdleTime: -1})
	limitProcess(t, 10*mib)
	held, idle := get(t, p, 4*mib), get(t, p, 3*mib)
	require.NoError(t, idle.Release())
	waits := waiting(t, p, t.Context(), 8*mib)
	l, err := q.Get(timeout(t, 20*time.Second), 5*mib)
	require.NoError(t, err)
	reserves(t, p, 4*mib)
	require.Equal(t, 1, p.Stats().Waiting)
	require.NoError(t, l.Release())
	require.NoError(t, held.Release())
	r := <-waits
	require.NoError(t, r.err)
	require.NoError(t, r.l.Release())
}

// The limit of a pool holds also after a Get has waited for the process's limit.
func TestThePoolsLimitHoldsWhenTheProcessHasMore(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 8 * mib})
	limitProcess(t, 4*mib)
	before := hostmem.ReadStats().PinnedBytes
	full, err := hostmem.Alloc(t.Context(), g.Dev, 4*mib, hostmem.Options{})
	require.NoError(t, err)
	waits := waiting(t, p, t.Context(), 4*mib)
	eventually(t, "the Get waits for the process", func() bool { return sleepingGets(p) == 1 })
	require.True(t, p.core.reserve(6*mib), "by a Get that did not have to wait")
	require.NoError(t, full.Close())
	eventually(t, "the Get does not keep its share of the process's limit", func() bool {
		return hostmem.ReadStats().PinnedBytes == before && sleepingGets(p) == 1
	})
	require.Empty(t, waits)
	p.core.unreserve(6 * mib)
	r := <-waits
	require.NoError(t, r.err)
	require.NoError(t, r.l.Release())
	assert.LessOrEqual(t, p.Stats().PeakReservedBytes, 8*mib)
}

// What a Get that fails had reserved wakes the next one.
func TestAGetThatFailsWakesTheNext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 8 * mib})
	unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{Code: cudart.ErrInvalidValue})
	failed := make(chan error)
	go func() { _, err := p.Get(t.Context(), 8*mib); failed <- err }()
	g.AwaitBlocked("cudaHostRegister", 1)
	waits := waiting(t, p, t.Context(), 8*mib)
	eventually(t, "the next Get sleeps", func() bool { return sleepingGets(p) == 1 })
	unblock()
	require.ErrorIs(t, <-failed, cudart.ErrInvalidValue)
	within(t, "the next Get", func() {
		r := <-waits
		assert.NoError(t, r.err)
		assert.NoError(t, r.l.Release())
	})
}

// The guard refuses a Get only when nothing idle is left in any pool.
func TestTheGuardRefusesWhenNothingIdleIsLeft(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p, q := g.pool(Options{IdleTime: -1}), g.pool(Options{IdleTime: -1})
	for _, pool := range []*Pool{p, q} {
		l := get(t, pool, 5*mib)
		require.NoError(t, l.Release())
	}
	require.NoError(t, hostmem.SetLimits(hostmem.Limits{MaxShare: 1e-12}))
	t.Cleanup(func() { assert.NoError(t, hostmem.SetLimits(hostmem.Limits{})) })
	_, err := p.Get(t.Context(), 7*mib)
	require.ErrorIs(t, err, hostmem.ErrLimit)
	reserves(t, p, 0)
	reserves(t, q, 0)
	assert.Equal(t, 1, p.Stats().Failures)
}

// Requests that wait for the process's limit and are served otherwise, or canceled,
// keep nothing of it.
func TestWaitsForTheProcessLimitKeepNothingOfIt(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	before := hostmem.ReadStats().PinnedBytes
	pools := []*Pool{g.pool(Options{}), g.pool(Options{MaxBytes: 6 * mib}), g.pool(Options{IdleTime: 1000})}
	limitProcess(t, 10*mib)
	dst := g.Device(1)
	var group sync.WaitGroup
	for i := range 12 {
		p := pools[i%len(pools)]
		s := g.NewStream()
		group.Go(func() {
			for round := range 60 {
				ctx, cancel := context.WithCancel(t.Context())
				if round%7 == i%7 {
					go func() { runtime.Gosched(); cancel() }()
				}
				n := []int{100, 70 * kib, 2 * mib, 3 * mib, 5 * mib}[(round+i)%5]
				l, err := p.Get(ctx, n)
				if err != nil {
					assert.ErrorIs(t, err, context.Canceled)
				} else {
					assert.LessOrEqual(t, hostmem.ReadStats().PinnedBytes, before+10*mib)
					assert.NoError(t, l.CopyFromDevice(s, dst, 0, 1))
					assert.NoError(t, l.Release())
				}
				cancel()
			}
		})
	}
	group.Wait()
	for _, p := range pools {
		require.NoError(t, p.Close())
		requireEmpty(t, p)
	}
	assert.Equal(t, before, hostmem.ReadStats().PinnedBytes)
}

// Reserved huge pages come whole: what the pool counts is what it has, and its limit
// holds for that.
func TestReservedHugePagesCountWhole(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	sys := hostmemtest.NewSystem()
	sys.Unpopulated()
	sys.Plenty()
	plenty := sys.Calls.Map
	fallback := false
	sys.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		if hugetlb > 0 && fallback {
			return nil, errTest
		}
		return plenty(n, hugetlb)
	}
	ctx := sys.Context(t)
	p := g.pool(Options{MaxBytes: 21 * mib, Buffer: hostmem.Options{HugePages: hostmem.HugeTLB}})
	var leases []Lease
	for range 5 {
		l, err := p.Get(ctx, 3*mib)
		require.NoError(t, err)
		leases = append(leases, l)
	}
	st := p.Stats()
	assert.Equal(t, 20*mib, st.ReservedBytes)
	assert.Equal(t, 20*mib, st.InUseBytes)
	assert.Equal(t, 15*mib, st.RequestedBytes)
	ended, cancel := context.WithCancel(ctx)
	result := waiting(t, p, ended, 3*mib)
	cancel()
	require.ErrorIs(t, (<-result).err, context.Canceled, "21 MiB have no room for another 2 pages")
	require.NoError(t, leases[0].Release())
	l, err := p.Get(ctx, mib) // instead of it
	require.NoError(t, err)
	require.NoError(t, l.Release())
	for _, l := range leases[1:] {
		require.NoError(t, l.Release())
	}
	assert.LessOrEqual(t, p.Stats().PeakReservedBytes, 21*mib)
	balanced(t, p)
	_, err = p.Trim(context.Background(), 0)
	require.NoError(t, err)

	fallback = true
	l, err = p.Get(ctx, 3*mib)
	require.NoError(t, err)
	require.NoError(t, l.Release())
	balanced(t, p)
}

var errTest = cudart.ErrUnknown

// TryGet takes what is there, and maps what the limits allow. It does not wait for
// more, nor overtake those that do.
func TestTryGet(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 4 * mib})
	first, err := p.TryGet(t.Context(), 2*mib)
	require.NoError(t, err, "it may map memory")
	second, err := p.TryGet(t.Context(), 2*mib)
	require.NoError(t, err)
	_, err = p.TryGet(t.Context(), 2*mib)
	require.ErrorIs(t, err, hostmem.ErrLimit)
	require.Zero(t, p.Stats().Failures)
	require.NoError(t, first.Release())
	first, err = p.TryGet(t.Context(), 2*mib)
	require.NoError(t, err, "it takes what was released")

	open := g.Stall(g.Stream)
	queueCopy(t, first, g.Stream, g.Device(1), 1)
	require.NoError(t, first.Release())
	_, err = p.TryGet(t.Context(), 2*mib)
	require.ErrorIs(t, err, hostmem.ErrLimit, "the GPU uses it")
	result := waiting(t, p, t.Context(), 2*mib)
	require.NoError(t, second.Release())
	r := <-result
	require.NoError(t, r.err)
	result = waiting(t, p, t.Context(), 4*mib)
	_, err = p.TryGet(t.Context(), 100)
	require.ErrorIs(t, err, hostmem.ErrLimit, "another Get waits")
	require.NoError(t, r.l.Release())
	open()
	r = <-result
	require.NoError(t, r.err)
	require.NoError(t, r.l.Release())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.TryGet(ctx, 100)
	require.ErrorIs(t, err, context.Canceled)
}
