//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// When Close returns nil, no Get has returned a lease that is not released, none does
// later, and all is unmapped, with Gets, Releases and Trims running beside it.
func TestCloseBesideGets(t *testing.T) {
	t.Parallel()
	rounds := 400
	if testgpu.Race || hostmemtest.Emulated(t) {
		rounds = 60
	}
	g := newSimFixture(t, cudasim.Config{})
	dst := g.Device(64)
	sys := hostmemtest.NewSystem()
	sys.Unpopulated()
	ctx := sys.Context(t)
	for round := range rounds {
		o := Options{IdleTime: time.Duration(round%3 - 1)}
		if round%2 == 0 {
			o.MaxBytes = 6 * mib
		}
		p, err := New(g.Dev, o)
		require.NoError(t, err)
		var closed atomic.Bool
		var leased atomic.Int32
		var group sync.WaitGroup
		for i := range 4 {
			group.Go(func() {
				for k := range 30 {
					after := closed.Load()
					l, err := p.Get(ctx, []int{100, 3 * mib, 70 * kib}[(i+k)%3])
					if err != nil {
						assert.ErrorIs(t, err, cudart.ErrClosed)
						return
					}
					leased.Add(1)
					assert.False(t, after, "a lease of a pool whose Close has returned nil")
					if k%2 == 0 {
						assert.NoError(t, l.CopyFromDevice(g.Stream, dst, 0, 64))
					}
					if k%5 == 0 {
						_, err := p.Trim(context.Background(), 0)
						assert.NoError(t, err)
					}
					leased.Add(-1)
					assert.NoError(t, l.Release())
				}
			})
		}
		for err := p.Close(); err != nil; err = p.Close() {
			require.ErrorIs(t, err, errLeased)
		}
		assert.Zero(t, leased.Load(), "leases when Close has returned nil")
		requireEmpty(t, p)
		assert.Zero(t, g.Registrations())
		closed.Store(true)
		group.Wait()
		atRest(t, p)
		requireEmpty(t, p)
	}
	assert.Empty(t, g.Sim.Misuses())
}

// Several Closes at once: all return nil, when all is unmapped.
func TestClosesAtOnce(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	open := g.Stall(g.Stream)
	for range 5 {
		l := get(t, p, 3*mib)
		queueCopy(t, l, g.Stream, g.Device(1), 1)
		require.NoError(t, l.Release())
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			assert.NoError(t, p.Close())
			assert.Zero(t, g.Registrations())
		})
	}
	eventually(t, "they wait", func() bool { return p.core.closed() })
	open()
	group.Wait()
}

// After Runtime.Close a pool can be closed, in any order that programs defer, and
// nothing spins where it cannot.
func TestCloseAfterTheRuntime(t *testing.T) {
	t.Parallel()
	for _, done := range []bool{true, false} {
		t.Run(fmt.Sprintf("the copies are done: %v", done), func(t *testing.T) {
			t.Parallel()
			g := &fixture{hostmemtest.Loose(t, cudasim.Config{})}
			p, err := New(g.Dev, Options{})
			require.NoError(t, err)
			dst, err := g.Dev.Malloc(1)
			require.NoError(t, err)
			idle, used, held := get(t, p, 3*mib), get(t, p, 4*mib), get(t, p, 5*mib)
			require.NoError(t, idle.Release())
			if !done {
				g.Hold()
			}
			queueCopy(t, used, g.Stream, dst, 1)
			require.NoError(t, used.Release())
			if done {
				eventually(t, "the copy is done", func() bool { return g.Sim.Outstanding().PendingOps == 0 })
			}
			require.NoError(t, g.Dev.Runtime().Close())
			_, err = p.Get(t.Context(), 100)
			require.ErrorIs(t, err, cudart.ErrClosed)
			_, err = p.Get(t.Context(), 3*mib)
			require.ErrorIs(t, err, os.ErrClosed, "also where there is an idle block")
			_, err = New(g.Dev, Options{})
			require.ErrorIs(t, err, cudart.ErrClosed)
			require.NoError(t, held.Release())
			calls := g.Sim.TotalCalls()
			err = p.CloseContext(timeout(t, 10*time.Second))
			if done {
				require.NoError(t, err)
				assert.Zero(t, g.Registrations())
			} else {
				require.Error(t, err, "it cannot be known whether the copy is done")
				assert.Equal(t, 1, g.Registrations())
				assert.Equal(t, 4*mib, p.Stats().ReservedBytes)
				atRest(t, p)
			}
			assert.Less(t, g.Sim.TotalCalls()-calls, 2000, "nothing asks again and again")
		})
	}
}

// A pool works, closes and leaves nothing spinning in a process that has no file
// descriptor left. The limit is the process's, so this is done in a child.
func TestWithoutFileDescriptors(t *testing.T) {
	const env = "PINNED_TEST_NO_FILES"
	if os.Getenv(env) == "" {
		if hostmemtest.Emulated(t) {
			t.Skip("an emulator needs file descriptors of its own")
		}
		child := exec.Command(os.Args[0], "-test.run", "^TestWithoutFileDescriptors$", "-test.v", "-test.timeout", "60s")
		child.Env = append(os.Environ(), env+"=1")
		out, err := child.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: TestWithoutFileDescriptors")
		return
	}
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	dst := g.Device(1)
	idle, used := get(t, p, 3*mib), get(t, p, 4*mib)
	require.NoError(t, idle.Release())
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max}))
	_, err := os.Open("/dev/null")
	require.ErrorIs(t, err, unix.EMFILE)
	open := g.Stall(g.Stream)
	queueCopy(t, used, g.Stream, dst, 1)
	require.NoError(t, used.Release())
	require.NoError(t, get(t, p, 3*mib).Release())
	require.ErrorIs(t, p.CloseContext(timeout(t, 20*time.Millisecond)), context.DeadlineExceeded)
	var before, after unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &before))
	time.Sleep(300 * time.Millisecond)
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &after))
	used2 := time.Duration(after.Utime.Nano() - before.Utime.Nano())
	assert.Less(t, used2, 200*time.Millisecond, "something spins")
	open()
	require.NoError(t, p.Close())
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
}

// Outstanding lists leases, not what is idle or pending, the largest first.
func TestOutstandingListsLeasesOnly(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{Buffer: hostmem.Options{Label: "batches"}})
	var leases []Lease
	for range 1000 {
		leases = append(leases, get(t, p, 500))
	}
	large, pending := get(t, p, 4*mib), get(t, p, 3*mib)
	for _, l := range leases[2:] {
		require.NoError(t, l.Release())
	}
	open := g.Stall(g.Stream)
	queueCopy(t, pending, g.Stream, g.Device(1), 1)
	require.NoError(t, pending.Release())
	assert.Equal(t, []hostmem.Holding{
		{ID: 1, Kind: "lease", Label: "batches", Bytes: 4 * mib},
		{ID: 2, Kind: "lease", Label: "batches", Bytes: 512},
		{ID: 3, Kind: "lease", Label: "batches", Bytes: 512},
	}, p.Outstanding())
	open()
	for _, l := range append(leases[:2], large) {
		require.NoError(t, l.Release())
	}
	assert.Empty(t, p.Outstanding())
}

// What could not be unregistered counts as reserved, and is tried again: also if
// cudaHostUnregister had worked, and returned an error of earlier work.
func TestMemoryThatCouldNotBeUnregisteredIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		g := newSimFixture(t, cudasim.Config{})
		p := g.pool(Options{IdleTime: -1})
		small, large := get(t, p, 100), get(t, p, 4*mib)
		require.NoError(t, small.Release())
		require.NoError(t, large.Release())
		g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Times: 2, Code: cudart.ErrUnknown, Late: late})
		freed, err := p.Trim(context.Background(), 0)
		require.ErrorIs(t, err, cudart.ErrUnknown)
		assert.Zero(t, freed)
		st := p.Stats()
		assert.Equal(t, 6*mib, st.ReservedBytes)
		assert.Equal(t, 6*mib, st.SlackBytes)
		assert.Equal(t, 2, st.Failures)
		balanced(t, p)
		freed, err = p.Trim(context.Background(), 0)
		require.NoError(t, err)
		assert.Equal(t, 6*mib, freed)
		requireEmpty(t, p)
	}
}

// The failures that Stats counts are the pool's: not a Get that was canceled,
// nor one of a closed pool.
func TestFailuresAreThePools(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 8 * mib})
	held := get(t, p, 8*mib)
	_, err := p.Get(timeout(t, time.Millisecond), mib)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = p.Get(hostmemtest.Ended(), mib)
	require.ErrorIs(t, err, context.Canceled)
	_, err = p.Get(t.Context(), 9*mib)
	require.ErrorIs(t, err, hostmem.ErrTooLarge)
	assert.Zero(t, p.Stats().Failures)
	require.NoError(t, held.Release())
	_, err = p.Trim(context.Background(), 0)
	require.NoError(t, err)
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Times: 2, Code: cudart.ErrInvalidValue})
	_, err = p.Get(t.Context(), 3*mib)
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	assert.Equal(t, 1, p.Stats().Failures)
	_, err = p.Get(t.Context(), 100)
	require.True(t, errors.Is(err, cudart.ErrInvalidValue))
	assert.Equal(t, 2, p.Stats().Failures)
}
