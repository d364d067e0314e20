//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// within requires that f returns, although calls into CUDA do not. The time is for
// tests that fail only.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		require.FailNow(t, "does not return", what)
	}
}

// A copy that blocks in CUDA, because its stream is full, keeps neither copies on
// other streams nor a Close whose context ends.
func TestACopyThatBlocksKeepsNoOther(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{QueueDepth: 4})
	b := g.alloc(4096, Options{})
	dst := g.Device(4096)
	full, other := g.NewStream(), g.NewStream()
	open := g.Stall(full)
	blocked := make(chan error)
	go func() {
		for range 4 {
			if err := b.CopyToDevice(full, dst, 0, 4096); err != nil {
				blocked <- err
				return
			}
		}
		blocked <- nil
	}()
	g.AwaitBlocked("cudaMemcpyAsync", 1)
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	within(t, "Close with a context", func() {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		assert.ErrorIs(t, b.CloseContext(ctx), context.DeadlineExceeded)
	})
	within(t, "a copy on another stream", func() {
		assert.NoError(t, b.CopyToDevice(other, dst, 0, 4096))
		assert.NoError(t, other.Synchronize(t.Context()))
	})
	assert.NotNil(t, b.Pointer(), "it is not closed yet")
	assert.Equal(t, 1, g.Registrations())
	open()
	require.NoError(t, <-blocked)
	require.NoError(t, <-closed)
	assert.Zero(t, g.Registrations())
	assert.Empty(t, g.Sim.Misuses())
}

// A copy that blocks in CUDA when the last of the work queued before is done must
// still be waited for.
func TestCloseWaitsForACopyThatIsBeingQueued(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	b := g.alloc(4096, Options{})
	dst := g.Device(4096)
	unblock := g.Sim.Block("cudaMemcpyAsync", cudasim.Fault{})
	copied := make(chan error)
	go func() { copied <- b.CopyToDevice(g.Stream, dst, 0, 4096) }()
	g.AwaitBlocked("cudaMemcpyAsync", 1)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, b.CloseContext(ctx), context.DeadlineExceeded)
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	unblock()
	require.NoError(t, <-copied)
	require.NoError(t, <-closed)
	assert.Empty(t, g.Sim.Misuses())
}

// When CUDA does not return, a function whose context ends does, and its work is
// undone whenever CUDA returns.
func TestCallsThatDoNotReturn(t *testing.T) {
	t.Parallel()
	path, _ := diskFile(t, 10_000)
	for name, pin := range map[string]func(g *rig, ctx context.Context) error{
		"alloc": func(g *rig, ctx context.Context) error {
			_, err := Alloc(ctx, g.Dev, 3*mib, Options{})
			return err
		},
		"register": func(g *rig, ctx context.Context) error {
			_, err := Register(ctx, g.Dev, mapped(g, -1, 4096, readWrite, private), RegisterOptions{})
			return err
		},
		"map file": func(g *rig, ctx context.Context) error {
			_, err := MapFile(ctx, g.Dev, path, MapFileOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimRig(t, cudasim.Config{})
			sys := g.watch()
			unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{})
			ctx, cancel := context.WithCancel(g.Context())
			failed := make(chan error)
			go func() { failed <- pin(g, ctx) }()
			g.AwaitBlocked("cudaHostRegister", 1)
			cancel()
			within(t, name, func() {
				err := <-failed
				assert.ErrorIs(t, err, context.Canceled)
				assert.ErrorIs(t, err, errStuck)
				assert.ErrorContains(t, err, "hostmem: "+name)
			})
			assert.Zero(t, g.Registrations())
			unblock()
			eventually(t, "the work is undone", func() bool {
				return g.Sim.Calls("cudaHostUnregister") == 1 && sys.Mapped.Load() == 0 && g.Registrations() == 0
			})
		})
	}
}

// Calls that never return occupy a bounded number of threads.
func TestCallsThatNeverReturnAreFew(t *testing.T) {
	g := newSimRig(t, cudasim.Config{})
	eventually(t, "no call of other tests is stuck", func() bool { return stuck.Load() == 0 })
	unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{Times: -1})
	sys := g.watch()
	const calls = mostStuck + 10
	ctx, cancel := context.WithCancel(g.Context())
	failed := make(chan error, calls)
	for range mostStuck {
		go func() { _, err := Alloc(ctx, g.Dev, 4096, Options{}); failed <- err }()
	}
	g.AwaitBlocked("cudaHostRegister", mostStuck)
	cancel()
	within(t, "Alloc", func() {
		for range mostStuck {
			assert.ErrorIs(t, <-failed, errStuck)
		}
	})
	fresh, cancel := context.WithCancel(g.Context())
	defer cancel()
	for range calls - mostStuck {
		_, err := Alloc(fresh, g.Dev, 4096, Options{})
		require.ErrorContains(t, err, "hostmem: allocate 4096 bytes: 16 calls into CUDA have not returned")
	}
	assert.Equal(t, mostStuck, g.Sim.Blocked()["cudaHostRegister"])
	unblock()
	eventually(t, "all is undone", func() bool { return stuck.Load() == 0 && sys.Mapped.Load() == 0 })
	b, err := Alloc(fresh, g.Dev, 4096, Options{})
	require.NoError(t, err)
	require.NoError(t, b.Close())
}

// cudaHostUnregister that does not return keeps the Close that has called it, and no
// other whose context ends.
func TestCloseWhenUnregisteringDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	b, other := g.alloc(4096, Options{}), g.alloc(4096, Options{})
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{})
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	g.AwaitBlocked("cudaHostUnregister", 1)
	within(t, "others", func() {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		err := b.CloseContext(ctx)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "another Close is in progress")
		assert.ErrorIs(t, b.CopyToDevice(g.Stream, 0, 0, 1), ErrClosed)
		assert.Nil(t, b.Pointer())
		assert.NoError(t, other.Close())
	})
	unblock()
	require.NoError(t, <-closed)
	require.NoError(t, b.CloseContext(hostmemtest.Ended()), "all is done")
}

// cudaHostUnregister may have worked although it returns an error of earlier
// asynchronous work. The next try gets "not registered": then the memory is unmapped.
func TestUnregisteringThatWorkedAndReturnedAnError(t *testing.T) {
	for name, o := range map[string]Options{"one": {}, "chunks": {Chunk: 2 * mib, Workers: 1}} {
		t.Run(name, func(t *testing.T) {
			g := newSimRig(t, cudasim.Config{})
			sys := g.watch()
			before := ReadStats()
			b := g.alloc(4*mib, o)
			g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrIllegalAddress, Late: true})
			err := b.Close()
			require.ErrorIs(t, err, cudart.ErrIllegalAddress)
			assert.Equal(t, int64(4*mib), sys.Mapped.Load(), "it is not known yet")
			require.NoError(t, b.Close())
			assert.Zero(t, sys.Mapped.Load())
			requireSettled(t, before)

			// Memory that another has unregistered is an error once.
			b = g.alloc(4096, Options{})
			require.NoError(t, g.Dev.HostUnregister(b.Pointer()))
			require.ErrorIs(t, b.Close(), cudart.ErrHostMemoryNotRegistered)
			require.NoError(t, b.Close())
			requireSettled(t, before)
		})
	}
}

// When Alloc undoes its work there is no next try by the caller.
func TestRollingBackWhenUnregisteringReturnsAnErrorLate(t *testing.T) {
	g := newSimRig(t, cudasim.Config{})
	sys := g.watch()
	before := ReadStats()
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidValue})
	g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrIllegalAddress, Late: true})
	_, err := Alloc(g.Context(), g.Dev, 4*mib, Options{Chunk: 2 * mib, Workers: 1})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.NotErrorIs(t, err, cudart.ErrIllegalAddress, "it was unregistered all the same")
	assert.Zero(t, sys.Mapped.Load())
	requireSettled(t, before)
	assert.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
}

// A panic in a worker of Alloc leaves nothing behind: it is an error.
func TestAPanicWhilePopulating(t *testing.T) {
	for _, workers := range []int{1, 3} {
		g := newSimRig(t, cudasim.Config{})
		sys := g.watch()
		before := ReadStats()
		var touches atomic.Int32
		sys.Calls = sys.Calls.Before(func(call string) error {
			if call == "Advise populate" {
				if touches.Add(1) == 1 {
					panic("in a worker")
				}
			}
			return nil
		})
		_, err := Alloc(g.Context(), g.Dev, 12*mib, Options{Workers: workers})
		require.ErrorContains(t, err, "panic: in a worker")
		assert.Zero(t, sys.Mapped.Load())
		requireSettled(t, before)
		assert.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
	}
}

// After Runtime.Close nothing new is pinned, before anything is mapped; what there is
// can be closed.
func TestAfterTheRuntimeWasClosed(t *testing.T) {
	t.Parallel()
	g := &rig{Rig: hostmemtest.Loose(t, cudasim.Config{})}
	idle, err := Alloc(t.Context(), g.Dev, 4096, Options{})
	require.NoError(t, err)
	used, err := Alloc(t.Context(), g.Dev, 4096, Options{})
	require.NoError(t, err)
	dst, err := g.Dev.Malloc(4096)
	require.NoError(t, err)
	require.NoError(t, used.CopyToDevice(g.Stream, dst, 0, 4096))
	require.NoError(t, g.Stream.Synchronize(t.Context()))
	require.NoError(t, g.Dev.Runtime().Close())
	sys := g.watch()
	path, _ := diskFile(t, 100)
	mem := mapped(t, -1, 4096, readWrite, private)
	_, err = Alloc(g.Context(), g.Dev, 4096, Options{})
	require.ErrorIs(t, err, cudart.ErrClosed)
	require.ErrorIs(t, err, os.ErrClosed)
	_, err = Register(g.Context(), g.Dev, mem, RegisterOptions{})
	require.ErrorIs(t, err, cudart.ErrClosed)
	_, err = MapFile(g.Context(), g.Dev, path, MapFileOptions{})
	require.ErrorIs(t, err, cudart.ErrClosed)
	assert.Zero(t, sys.Mapped.Load())
	assert.Equal(t, 2, g.Sim.Calls("cudaHostRegister"))
	require.NoError(t, idle.Close())
	require.NoError(t, used.Close())
	assert.Zero(t, g.Registrations())
}

func TestArgumentsThatAreNil(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	mem := mapped(t, -1, 4096, readWrite, private)
	var none context.Context
	for want, err := range map[string]error{
		"hostmem: allocate 5 bytes: the context is nil": second(Alloc(none, g.Dev, 5, Options{})),
		"hostmem: allocate 5 bytes: the device is nil":  second(Alloc(t.Context(), nil, 5, Options{})),
		"hostmem: map file /x: the context is nil":      second(MapFile(none, g.Dev, "/x", MapFileOptions{})),
		"hostmem: map file /x: the device is nil":       second(MapFile(t.Context(), nil, "/x", MapFileOptions{})),
	} {
		require.EqualError(t, err, want)
	}
	require.ErrorContains(t, second(Register(none, g.Dev, mem, RegisterOptions{})), "the context is nil")
	require.ErrorContains(t, second(Register(t.Context(), nil, mem, RegisterOptions{})), "the device is nil")
	b := g.alloc(4096, Options{})
	require.EqualError(t, b.CloseContext(none), "hostmem: close buffer of 4096 bytes: the context is nil")
	_, ok := NodeOf(nil)
	assert.False(t, ok)
}

func second[T any](_ T, err error) error { return err }
