//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"fmt"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
)

// within requires that f returns, although calls into CUDA do not. The time is for
// tests that fail only.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		var stacks strings.Builder
		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 2)
		require.FailNow(t, what+" does not return", stacks.String())
	}
}

func timeout(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A query of a block's work does not return, on one stream or on all. The
// pool's methods honour their contexts, other goroutines go on, what other streams are
// done with is found, and each stream costs one thread at most.
func TestAskingThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	type scenario struct {
		fn     string
		always bool
	}
	for _, sc := range []scenario{
		{"cudaEventQuery", false}, {"cudaEventQuery", true},
		{"cudaEventRecord", false}, {"cudaEventRecord", true},
		{"cudaEventCreateWithFlags", true}, {"cudaStreamQuery", true}, {"cudaDeviceSynchronize", true},
	} {
		t.Run(fmt.Sprintf("%s, always=%v", sc.fn, sc.always), func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(Options{IdleTime: -1})
			limited := g.pool(Options{IdleTime: -1, MaxBytes: 4 * mib})
			dst := g.Device(1)
			// A stream for each lease: two failures in a row on one make the pool ask the device.
			slow, slowToo, fast := g.NewStream(), g.NewStream(), g.NewStream()
			slowBlock, fastBlock, all := get(t, p, 4*mib), get(t, p, 3*mib), get(t, limited, 4*mib)
			at := fastBlock.Pointer()
			queueCopy(t, slowBlock, slow, dst, 1)
			queueCopy(t, all, slowToo, dst, 1)
			queueCopy(t, fastBlock, fast, dst, 1)
			switch sc.fn {
			case "cudaEventRecord", "cudaEventCreateWithFlags":
				// Release records no event then, and each look tries to.
				g.Sim.Fail(sc.fn, cudasim.Fault{Times: 3, Code: cudart.ErrUnknown})
			case "cudaDeviceSynchronize":
				g.Sim.Fail("cudaEventRecord", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
			}
			for _, l := range []Lease{slowBlock, all, fastBlock} {
				require.NoError(t, l.Release())
			}
			eventually(t, "the GPU is done, but the pool has not asked", func() bool { return g.Sim.Outstanding().PendingOps == 0 })
			faults := []cudasim.Fault{{Times: -1}}
			if !sc.always {
				faults = []cudasim.Fault{{Times: -1, Stream: slow.Handle()}, {Times: -1, Stream: slowToo.Handle()}}
			}
			for _, f := range faults {
				defer g.Sim.Block(sc.fn, f)()
			}

			within(t, "Get, whatever it finds", func() {
				var group sync.WaitGroup
				for range 8 {
					group.Go(func() {
						l, err := p.Get(timeout(t, 20*time.Second), 4*mib)
						if assert.NoError(t, err) {
							assert.NoError(t, l.Release())
						}
					})
				}
				group.Wait()
			})
			if !sc.always {
				within(t, "Get of what another stream is done with", func() {
					var others []Lease
					l := get(t, p, 3*mib)
					for ; l.Pointer() != at && len(others) < 100; l = get(t, p, 3*mib) {
						others = append(others, l)
						time.Sleep(time.Duration(len(others)) * time.Millisecond) // for an event that a look has recorded
					}
					assert.Equal(t, at, l.Pointer())
					for _, l := range append(others, l) {
						assert.NoError(t, l.Release())
					}
				})
			}
			within(t, "Get at its limit", func() {
				if sc.fn == "cudaStreamQuery" { // the pool queries events
					assert.NoError(t, get(t, limited, 4*mib).Release())
				} else {
					_, err := limited.Get(timeout(t, 20*time.Millisecond), 4*mib)
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				}
			})
			within(t, "Trim", func() {
				_, err := p.Trim(context.Background(), 0)
				assert.NoError(t, err)
			})
			within(t, "the idle timer", p.core.tick)
			within(t, "reclaiming for other pools", func() { p.core.reclaim(context.Background(), mib) })
			within(t, "Close with a context", func() {
				err := p.CloseContext(timeout(t, 20*time.Millisecond))
				if err != nil {
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				}
			})
			threads := 0
			for _, n := range g.Sim.Blocked() {
				threads += n
			}
			assert.LessOrEqual(t, threads, 3, "%v: three streams were asked for", g.Sim.Blocked())
			g.Sim.ResetFaults()
			within(t, "Close, once calls return", func() {
				assert.NoError(t, p.Close())
				assert.NoError(t, limited.Close())
			})
		})
	}
}

// cudaHostRegister that does not return keeps the Get that has called it, to the end
// of its context, and no other.
func TestRegisteringThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	for _, n := range []int{100, 4 * mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(Options{IdleTime: -1, MaxBytes: 20 * mib})
			cached, held := get(t, p, 3*mib), get(t, p, n)
			require.NoError(t, cached.Release())
			unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			stuck := make(chan error)
			go func() {
				var leases []Lease
				l, err := p.Get(ctx, n)
				for ; err == nil; l, err = p.Get(ctx, n) {
					leases = append(leases, l) // of the arena that there is
				}
				for _, l := range leases {
					assert.NoError(t, l.Release())
				}
				stuck <- err
			}()
			g.AwaitBlocked("cudaHostRegister", 1)
			within(t, "other Gets", func() {
				require.NoError(t, get(t, p, 3*mib).Release(), "a block that is there")
				require.NoError(t, get(t, p, 2*mib).Release(), "a new one")
				require.NoError(t, held.Release())
				l, err := p.Get(timeout(t, 20*time.Second), n)
				require.NoError(t, err, "one that was released")
				require.NoError(t, l.Release())
			})
			cancel()
			within(t, "the Get that is stuck", func() { assert.ErrorIs(t, <-stuck, context.Canceled) })
			assert.Equal(t, 1, g.Sim.Blocked()["cudaHostRegister"])
			unblock()
		})
	}
}

// cudaHostUnregister that never returns keeps the Trim or Close that waits for it. Gets
// that can be served otherwise, Releases, the timer and other pools' requests go on.
func TestUnregisteringThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 16 * mib})
	idle, held, cached := get(t, p, 4*mib), get(t, p, 5*mib), get(t, p, 3*mib)
	require.NoError(t, idle.Release())
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	defer unblock()
	trimmed := make(chan error)
	go func() { _, err := p.Trim(context.Background(), 0); trimmed <- err }()
	g.AwaitBlocked("cudaHostUnregister", 1)
	within(t, "others", func() {
		require.NoError(t, cached.Release())
		require.NoError(t, get(t, p, 3*mib).Release(), "a block that is there")
		require.NoError(t, get(t, p, 100).Release(), "room is left for it")
		p.core.tick()
		// 16 MiB, of which 4 cannot be unmapped, and 5 are leased.
		require.NoError(t, get(t, p, 6*mib).Release(), "instead of what is idle, on another thread")
		_, err := p.Get(timeout(t, 20*time.Millisecond), 15*mib)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		result := waiting(t, p, timeout(t, 20*time.Second), 10*mib)
		require.NoError(t, held.Release())
		served := <-result
		require.NoError(t, served.err)
		require.NoError(t, served.l.Release())
		assert.ErrorIs(t, p.CloseContext(timeout(t, 20*time.Millisecond)), context.DeadlineExceeded)
	})
	assert.Equal(t, 1, g.Sim.Blocked()["cudaHostUnregister"])
	unblock()
	require.NoError(t, <-trimmed)
	require.NoError(t, p.Close())
}

// However often memory is to be unmapped while cudaHostUnregister does not return, few
// threads are stuck, and what is left is unmapped later.
func TestUnregisteringThatNeverReturnsTakesFewThreads(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{Times: -1})
	defer unblock()
	var reclaims sync.WaitGroup
	for i := range bounded.MaxInside + 4 {
		l := get(t, p, (3+i)*mib) // of another class each
		require.NoError(t, l.Release())
		reclaims.Go(func() { p.core.reclaim(context.Background(), 1<<30) })
		eventually(t, "it is being unmapped", func() bool { return p.Stats().CachedBytes == 0 })
		g.AwaitBlocked("cudaHostUnregister", min(i+1, bounded.MaxInside))
	}
	within(t, "reclaiming for other pools", reclaims.Wait)
	assert.Equal(t, bounded.MaxInside, g.Sim.Blocked()["cudaHostUnregister"])
	require.NoError(t, get(t, p, 2*mib).Release())
	unblock()
	require.NoError(t, p.Close())
	assert.Zero(t, g.Registrations())
}

// Memory that is to be unmapped, and is behind a cudaHostUnregister that does not return,
// is unmapped with the next; what the call does counts when it returns.
func TestMemoryBehindAnUnregisterThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	for _, l := range []Lease{get(t, p, 3*mib), get(t, p, 4*mib), get(t, p, 5*mib)} {
		require.NoError(t, l.Release())
	}
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	within(t, "reclaiming for other pools", func() { assert.Zero(t, p.core.reclaim(context.Background(), 1<<30)) })
	assert.Equal(t, 12*mib, p.Stats().ReservedBytes)
	assert.Equal(t, 12*mib, p.Stats().SlackBytes)
	freed, err := p.Trim(context.Background(), 0)
	require.NoError(t, err)
	assert.Equal(t, p.Stats().ReservedBytes, 12*mib-freed)
	assert.Equal(t, 1, g.Registrations(), "the one whose call does not return")
	unblock()
	atRest(t, p)
	requireEmpty(t, p)
}

// The same for a Get that waits at a limit.
func TestGetBehindAnUnregisterThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 12 * mib})
	for _, l := range []Lease{get(t, p, 4*mib), get(t, p, 3*mib), get(t, p, 5*mib)} {
		require.NoError(t, l.Release())
	}
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	defer unblock()
	within(t, "Get", func() { require.NoError(t, get(t, p, 2*mib).Release()) })
	assert.Equal(t, 1, g.Sim.Blocked()["cudaHostUnregister"])
}

// Idle time unmaps the memory behind one, too.
func TestIdleTimeBehindAnUnregisterThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	for _, l := range []Lease{get(t, p, 4*mib), get(t, p, 3*mib), get(t, p, 5*mib)} {
		require.NoError(t, l.Release())
	}
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	defer unblock()
	for range idleTicks {
		within(t, "a tick", p.core.tick)
	}
	assert.Equal(t, 1, g.Registrations())
}

// The same for leases that are released after Close: with no other call.
func TestLeasesReleasedAfterCloseBehindAnUnregisterThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	dst := g.Device(1)
	leases := []Lease{get(t, p, 3*mib), get(t, p, 4*mib), get(t, p, 5*mib), get(t, p, 6*mib)}
	require.ErrorIs(t, p.Close(), errLeased)
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	require.NoError(t, leases[0].Release())
	g.AwaitBlocked("cudaHostUnregister", 1)
	require.ErrorIs(t, p.CloseContext(timeout(t, 5*time.Millisecond)), context.DeadlineExceeded)
	queueCopy(t, leases[1], g.Stream, dst, 1)
	for _, l := range leases[1:] {
		require.NoError(t, l.Release())
	}
	eventually(t, "the others are unmapped", func() bool { return g.Registrations() == 1 })
	unblock()
	atRest(t, p)
	requireEmpty(t, p)
}

// Leases that are released while a goroutine unmaps others are unmapped after them.
func TestLeasesReleasedAfterCloseWhileOthersAreUnmapped(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	first, second := get(t, p, 3*mib), get(t, p, 4*mib)
	require.ErrorIs(t, p.Close(), errLeased)
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	require.NoError(t, first.Release())
	g.AwaitBlocked("cudaHostUnregister", 1)
	require.NoError(t, second.Release())
	unblock()
	atRest(t, p)
	requireEmpty(t, p)
}

// Release while another goroutine's copy blocks in CUDA, because its stream is full,
// returns at once; the block returns to the pool when the copy does.
func TestReleaseDuringACopyThatBlocks(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{QueueDepth: 4})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 4 * mib})
	dst := g.Device(4096)
	l := get(t, p, 4*mib)
	full := g.NewStream()
	open := g.Stall(full)
	copied := make(chan error)
	go func() {
		for range 3 {
			if err := full.Memset(dst, 0, 1); err != nil {
				copied <- err
				return
			}
		}
		copied <- l.CopyToDevice(full, dst, 0, 4096)
	}()
	g.AwaitBlocked("cudaMemcpyAsync", 1)
	within(t, "Release", func() { assert.NoError(t, l.Release()) })
	assert.Nil(t, l.Bytes())
	assert.ErrorIs(t, l.Release(), errReleased)
	_, err := p.Get(timeout(t, 5*time.Millisecond), 4*mib)
	require.ErrorIs(t, err, context.DeadlineExceeded, "the copy uses the block")
	result := waiting(t, p, t.Context(), 4*mib)
	require.ErrorIs(t, p.Close(), errLeased, "nor is it unmapped")
	require.ErrorIs(t, (<-result).err, cudart.ErrClosed)
	assert.Equal(t, 1, g.Registrations())
	open()
	require.NoError(t, <-copied)
	eventually(t, "the block is unmapped", func() bool { return g.Registrations() == 0 })
}

// However many leases are released while the device as a whole has to be queried, and
// one Get waits, one thread queries it.
func TestReleasesStartNoThreads(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 64 * mib})
	dst := g.Device(1)
	var streams []*cudart.Stream
	for range 4 {
		streams = append(streams, g.NewStream())
	}
	g.Hold()
	g.Sim.Fail("cudaEventRecord", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	var leases []Lease
	for range 1000 {
		leases = append(leases, get(t, p, 60*kib))
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := waiting(t, p, ctx, 64*mib)
	for i, l := range leases {
		queueCopy(t, l, streams[i%len(streams)], dst, 1)
		require.NoError(t, l.Release())
	}
	eventually(t, "the device is asked", func() bool { return g.Sim.Calls("cudaDeviceSynchronize") > 0 })
	assert.LessOrEqual(t, g.Sim.Calls("cudaDeviceSynchronize"), 1, "the first has not returned")
	cancel()
	require.ErrorIs(t, (<-result).err, context.Canceled)
	g.Sim.Release()
	within(t, "Get", func() { require.NoError(t, get(t, p, 64*mib).Release()) })
}

// Releases are cheap while a Get waits that none of them can serve: it does not go
// through all that is idle each time. What it does shows in the memory that it
// allocates for it: going through the idle blocks at each of 80,000 releases would take
// 25 GB. Not parallel, because that is the process's.
func TestReleasesAreCheapWhileAGetWaits(t *testing.T) {
	const releases = 80_000
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 8 * mib})
	var leases []Lease
	for range releases {
		leases = append(leases, get(t, p, 64))
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := waiting(t, p, ctx, 4*mib)
	perRun := runSize(classOf(64)) / 64
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i, l := range leases {
		if i%perRun != 0 { // a block of each run stays, so that no arena can be unmapped
			require.NoError(t, l.Release())
		}
	}
	runtime.ReadMemStats(&after)
	cancel()
	require.ErrorIs(t, (<-result).err, context.Canceled)
	allocated := after.TotalAlloc - before.TotalAlloc
	t.Logf("%d bytes allocated during %d releases", allocated, releases)
	assert.Less(t, allocated, uint64(1<<30))
	for i := 0; i < len(leases); i += perRun {
		require.NoError(t, leases[i].Release())
	}
}
