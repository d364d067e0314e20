//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
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
	case <-time.After(20 * time.Second):
		require.FailNow(t, "does not return", what)
	}
}

// A copy that blocks in CUDA, because its stream is full, keeps no Close longer than its
// context, and no copy from other memory.
func TestACopyThatBlocksKeepsNoOther(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{QueueDepth: 4})
	b, other := g.alloc(4096, Options{}), g.alloc(4096, Options{})
	dst := g.Device(4096)
	full, idle := g.NewStream(), g.NewStream()
	open := g.Stall(full)
	blocked := make(chan error)
	go func() {
		var err error
		for err == nil {
			err = b.CopyToDevice(full, dst, 0, 4096)
		}
		blocked <- err
	}()
	g.AwaitBlocked("cudaMemcpyAsync", 1)
	within(t, "a copy from the same memory on another stream", func() {
		assert.NoError(t, b.CopyToDevice(idle, dst, 0, 4096))
	})
	within(t, "Close with a context", func() {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		assert.ErrorIs(t, b.CloseContext(ctx), context.DeadlineExceeded)
	})
	within(t, "a copy from other memory", func() {
		assert.NoError(t, other.CopyToDevice(idle, dst, 0, 4096))
		assert.NoError(t, idle.Synchronize(t.Context()))
	})
	assert.Equal(t, 2, g.Registrations())
	open()
	require.ErrorIs(t, <-blocked, cudart.ErrClosed, "the next copy")
	require.NoError(t, b.Close())
	assert.Equal(t, 1, g.Registrations())
	assert.Empty(t, g.Sim.Misuses())
}

// A copy that blocks in CUDA when the last of the work queued before is done must
// still be waited for.
func TestCloseWaitsForACopyThatIsBeingQueued(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
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
	for name, pin := range map[string]func(g *fixture, ctx context.Context) error{
		"alloc": func(g *fixture, ctx context.Context) error {
			_, err := Alloc(ctx, g.Dev, 3*mib, Options{})
			return err
		},
		"register": func(g *fixture, ctx context.Context) error {
			_, err := Register(ctx, g.Dev, mapped(g, -1, 4096, readWrite, private), RegisterOptions{})
			return err
		},
		"map file": func(g *fixture, ctx context.Context) error {
			_, err := MapFile(ctx, g.Dev, path, FileOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
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
				assert.ErrorIs(t, err, bounded.ErrStuck)
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

// The same where cudaHostAlloc does not return.
func TestHostAllocThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	unblock := g.Sim.Block("cudaHostAlloc", cudasim.Fault{Late: true})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { _, err := Alloc(ctx, g.Dev, mib, Options{}); failed <- err }()
	g.AwaitBlocked("cudaHostAlloc", 1)
	cancel()
	within(t, "Alloc", func() {
		err := <-failed
		assert.ErrorIs(t, err, context.Canceled)
		assert.ErrorIs(t, err, bounded.ErrStuck)
	})
	require.Equal(t, 1, g.Sim.Outstanding().HostAllocs)
	unblock()
	eventually(t, "the work is undone", func() bool { return g.Sim.Outstanding().HostAllocs == 0 })
}

// threads returns the number of threads of this process.
func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	return len(tasks)
}

// twoDevices returns two devices of one simulated library.
func twoDevices(t *testing.T) (first, second *fixture) {
	t.Helper()
	first = newSimFixture(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := first.Dev.Runtime().Device(1)
	require.NoError(t, err)
	return first, first.on(dev)
}

// However many goroutines pin memory while cudaHostRegister does not return, few threads
// are inside it, all calls return soon after their contexts end, and what they did is undone
// when the calls into CUDA return. Other devices are not concerned. Not parallel, because it
// counts the process's threads.
func TestAllocsThatNeverReturnTakeFewThreads(t *testing.T) {
	const calls = 200
	g, other := twoDevices(t)
	sys := g.watch()
	require.NoError(t, g.alloc(4096, Options{}).Close()) // queries the device, for which the others would wait
	unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{Times: bounded.MaxInside})
	before := threads(t)
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(g.Context())
	failed, stuck := make(chan error, calls), 0
	for range calls {
		go func() { _, err := Alloc(ctx, g.Dev, 4096, Options{}); failed <- err }()
	}
	g.AwaitBlocked("cudaHostRegister", bounded.MaxInside)
	eventually(t, "the others wait", func() bool { return sys.Mapped.Load() == calls*4096 })
	assert.LessOrEqual(t, threads(t), before+2*bounded.MaxInside)
	require.NoError(t, other.alloc(4096, Options{}).Close())
	cancel(cause)
	within(t, "Alloc", func() {
		for range calls {
			err := <-failed
			assert.ErrorIs(t, err, context.Canceled)
			assert.ErrorIs(t, err, cause)
			if errors.Is(err, bounded.ErrStuck) {
				stuck++ // the others may have been populating
			}
		}
	})
	assert.GreaterOrEqual(t, stuck, bounded.MaxInside)
	assert.Equal(t, bounded.MaxInside, g.Sim.Blocked()["cudaHostRegister"])
	assert.EqualValues(t, bounded.MaxInside*4096, sys.Mapped.Load(), "what has not begun is undone")
	unblock()
	eventually(t, "all is undone", func() bool {
		return sys.Mapped.Load() == 0 && g.Registrations() == 0
	})
	require.NoError(t, g.alloc(4096, Options{}).Close())
}

// The same while cudaHostUnregister does not return. The memory stays, and can be closed
// again.
func TestClosesThatNeverReturnTakeFewThreads(t *testing.T) {
	const calls = 200
	g, other := twoDevices(t)
	sys := g.watch()
	all := make([]*Buffer, calls)
	for i := range all {
		all[i] = g.alloc(4096, Options{})
	}
	chunks := g.alloc(8*mib, Options{Chunk: 2 * mib})
	unblock := g.Sim.Block("cudaHostUnregister", cudasim.Fault{Times: bounded.MaxInside})
	before := threads(t)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, calls)
	for _, b := range all {
		go func() { failed <- b.CloseContext(ctx) }()
	}
	g.AwaitBlocked("cudaHostUnregister", bounded.MaxInside)
	assert.LessOrEqual(t, threads(t), before+2*bounded.MaxInside)
	require.NoError(t, other.alloc(4096, Options{}).Close())
	g.alloc(4096, Options{}) // registering is another kind of call
	err := chunks.CloseContext(hostmemtest.Ended())
	require.ErrorIs(t, err, bounded.ErrStuck)
	assert.Equal(t, 1, strings.Count(err.Error(), "goroutines wait"), "of four registrations: %v", err)
	require.Len(t, slices.Collect(chunks.Spans(0, chunks.Len())), 4)
	cancel()
	within(t, "CloseContext", func() {
		for range calls {
			err := <-failed
			assert.ErrorIs(t, err, bounded.ErrStuck)
			assert.ErrorIs(t, err, context.Canceled)
		}
	})
	assert.Equal(t, calls+5, g.Registrations())
	unblock()
	eventually(t, "what was being unregistered is", func() bool { return g.Registrations() == calls+5-bounded.MaxInside })
	require.NoError(t, chunks.Close())
	for _, b := range all {
		require.NoError(t, b.Close())
	}
	assert.Equal(t, 1, g.Registrations())
	assert.Equal(t, int64(4096), sys.Mapped.Load())
}

// A query of the device that does not return keeps no Alloc longer than its context.
func TestQueriesThatDoNotReturn(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	unblock := g.Sim.Block("cudaDeviceGetAttribute", cudasim.Fault{Times: -1})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { _, err := Alloc(ctx, g.Dev, 4096, Options{}); failed <- err }()
	g.AwaitBlocked("cudaDeviceGetAttribute", 1)
	cancel()
	within(t, "Alloc", func() { assert.ErrorIs(t, <-failed, bounded.ErrStuck) })
	unblock()
	require.NoError(t, g.alloc(4096, Options{}).Close())
}

// A call that does not return keeps no CloseContext longer than its context. The memory is
// closed when the call returns; until then another Close waits, and the memory is refused to
// all others.
func TestCloseContextEndsAlthoughACallDoesNotReturn(t *testing.T) {
	t.Parallel()
	path, _ := diskFile(t, 10_000)
	type closer interface {
		CloseContext(ctx context.Context) error
		Close() error
		Pointer() unsafe.Pointer
		Bytes() []byte
		CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	}
	for _, tc := range []struct {
		name, fn string
		cfg      cudasim.Config
		open     func(g *fixture) (closer, error)
	}{
		{"buffer", "cudaHostUnregister", cudasim.Config{}, func(g *fixture) (closer, error) { return Alloc(g.Context(), g.Dev, 4096, Options{}) }},
		{"buffer of cudaHostAlloc", "cudaFreeHost", cudasim.ConfidentialComputing(), func(g *fixture) (closer, error) { return Alloc(g.Context(), g.Dev, 4096, Options{}) }},
		{"registration", "cudaHostUnregister", cudasim.Config{}, func(g *fixture) (closer, error) {
			return Register(g.Context(), g.Dev, mapped(g, -1, 4096, readWrite, private), RegisterOptions{})
		}},
		{"file", "cudaHostUnregister", cudasim.Config{}, func(g *fixture) (closer, error) { return MapFile(g.Context(), g.Dev, path, FileOptions{}) }},
		{"buffer that munmap blocks", "", cudasim.Config{}, func(g *fixture) (closer, error) { return Alloc(g.Context(), g.Dev, 4096, Options{}) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, tc.cfg)
			sys := g.watch()
			opened := ReadStats().Closed
			blocked, block := make(chan struct{}), make(chan struct{})
			unblock := func() { close(block) }
			if tc.fn == "" {
				sys.Calls = sys.Calls.Before(func(call string) error {
					if call == "Unmap" {
						close(blocked)
						<-block
					}
					return nil
				})
			}
			c, err := tc.open(g)
			require.NoError(t, err)
			mem := c.Bytes()
			if tc.fn != "" {
				unblock = g.Sim.Block(tc.fn, cudasim.Fault{})
			}
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error)
			go func() { failed <- c.CloseContext(ctx) }()
			if tc.fn != "" {
				g.AwaitBlocked(tc.fn, 1)
			} else {
				<-blocked
			}
			cancel()
			within(t, "CloseContext", func() {
				err := <-failed
				assert.ErrorIs(t, err, context.Canceled)
				assert.ErrorIs(t, err, bounded.ErrStuck)
				assert.ErrorContains(t, err, "hostmem: close "+strings.Fields(tc.name)[0])
				err = c.CloseContext(ctx)
				assert.ErrorIs(t, err, context.Canceled)
				assert.ErrorContains(t, err, "another Close is in progress")
			})
			assert.Nil(t, c.Pointer())
			assert.Nil(t, c.Bytes())
			assert.ErrorIs(t, c.CopyToDevice(g.Stream, 0, 0, 1), cudart.ErrClosed)
			_, _, ok := Find(mem)
			assert.False(t, ok)
			closed := make(chan error)
			go func() { closed <- c.Close() }()
			unblock()
			require.NoError(t, <-closed)
			require.NoError(t, c.CloseContext(hostmemtest.Ended()), "all is done")
			o := g.Sim.Outstanding()
			assert.Zero(t, o.Registrations+o.HostAllocs)
			assert.Zero(t, sys.Mapped.Load())
			assert.Greater(t, ReadStats().Closed, opened)
		})
	}
}

// From the first Close on copies are refused, so that a Close ends however many
// goroutines copy.
func TestCloseEndsAlthoughOthersCopy(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	b := g.alloc(4096, Options{})
	dst := g.Device(8 * 4096)
	var group sync.WaitGroup
	var copies atomic.Int64
	for i := range 8 {
		s := g.NewStream()
		group.Go(func() {
			var err error
			for err == nil {
				err = b.CopyToDevice(s, dst+cudart.DevPtr(i*4096), 0, 4096)
				copies.Add(1)
			}
			assert.ErrorIs(t, err, cudart.ErrClosed)
		})
	}
	eventually(t, "they copy", func() bool { return copies.Load() > 1000 })
	within(t, "Close", func() { assert.NoError(t, b.Close()) })
	group.Wait()
	assert.Zero(t, g.Registrations())
	assert.Empty(t, g.Sim.Misuses())
}

// A Close that fails leaves the memory registered, mapped and refused to copies, until
// another Close succeeds.
func TestAClosedBufferStaysClosedAfterAnError(t *testing.T) {
	t.Parallel()
	for _, fail := range []string{"the copies are not done", "cudaHostUnregister fails"} {
		t.Run(fail, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			sys := g.watch()
			b := g.alloc(4096, Options{})
			dst := g.Device(4096)
			ctx, open := t.Context(), func() {}
			if fail == "the copies are not done" {
				ctx, open = hostmemtest.Ended(), g.Stall(g.Stream)
				require.NoError(t, b.CopyToDevice(g.Stream, dst, 0, 4096))
			} else {
				g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrUnknown})
			}
			require.ErrorContains(t, b.CloseContext(ctx), "its memory stays registered and mapped")
			for range 2 {
				require.ErrorIs(t, b.CopyToDevice(g.Stream, dst, 0, 1), cudart.ErrClosed)
				require.Nil(t, b.Bytes())
				require.Nil(t, b.Pointer())
				require.Equal(t, 1, g.Registrations())
				require.Equal(t, int64(4096), sys.Mapped.Load())
			}
			open()
			require.NoError(t, b.Close())
			require.Zero(t, g.Registrations())
			require.Zero(t, sys.Mapped.Load())
			require.ErrorIs(t, b.CopyToDevice(g.Stream, dst, 0, 1), cudart.ErrClosed)
		})
	}
}

// cudaHostUnregister may have worked although it returns an error of earlier
// asynchronous work. The next try gets "not registered": then the memory is unmapped.
func TestUnregisteringThatWorkedAndReturnedAnError(t *testing.T) {
	for name, o := range map[string]Options{"one": {}, "chunks": {Chunk: 2 * mib, Workers: 1}} {
		t.Run(name, func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{})
			sys := g.watch()
			before := ReadStats()
			b := g.alloc(4*mib, o)
			g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrIllegalAddress, Late: true})
			err := b.Close()
			require.ErrorIs(t, err, cudart.ErrIllegalAddress)
			assert.Equal(t, int64(4*mib), sys.Mapped.Load(), "it is not known yet")
			require.NoError(t, b.Close())
			assert.Zero(t, sys.Mapped.Load())
			requireIdle(t, before)

			// Memory that another has unregistered is an error once.
			b = g.alloc(4096, Options{})
			require.NoError(t, g.Dev.HostUnregister(b.Pointer()))
			require.ErrorIs(t, b.Close(), cudart.ErrHostMemoryNotRegistered)
			require.NoError(t, b.Close())
			requireIdle(t, before)
		})
	}
}

// When Alloc undoes its work there is no next try by the caller.
func TestRollingBackWhenUnregisteringReturnsAnErrorLate(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	before := ReadStats()
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidValue})
	g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrIllegalAddress, Late: true})
	_, err := Alloc(g.Context(), g.Dev, 4*mib, Options{Chunk: 2 * mib, Workers: 1})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.NotErrorIs(t, err, cudart.ErrIllegalAddress, "it was unregistered all the same")
	assert.Zero(t, sys.Mapped.Load())
	requireIdle(t, before)
	assert.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
}

// A panic in a worker of Alloc leaves nothing behind: it is an error.
func TestAPanicWhilePopulating(t *testing.T) {
	for _, workers := range []int{1, 3} {
		g := newSimFixture(t, cudasim.Config{})
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
		requireIdle(t, before)
		assert.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
	}
}

// After Runtime.Close nothing new is pinned, before anything is mapped; what there is
// can be closed.
func TestAfterTheRuntimeWasClosed(t *testing.T) {
	t.Parallel()
	g := &fixture{Fixture: hostmemtest.Loose(t, cudasim.Config{})}
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
	_, err = MapFile(g.Context(), g.Dev, path, FileOptions{})
	require.ErrorIs(t, err, cudart.ErrClosed)
	assert.Zero(t, sys.Mapped.Load())
	assert.Equal(t, 2, g.Sim.Calls("cudaHostRegister"))
	require.NoError(t, idle.Close())
	require.NoError(t, used.Close())
	assert.Zero(t, g.Registrations())
}

func TestArgumentsThatAreNil(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	mem := mapped(t, -1, 4096, readWrite, private)
	var none context.Context
	for want, err := range map[string]error{
		"hostmem: allocate 5 bytes: the context is nil": second(Alloc(none, g.Dev, 5, Options{})),
		"hostmem: allocate 5 bytes: the device is nil":  second(Alloc(t.Context(), nil, 5, Options{})),
		"hostmem: map file /x: the context is nil":      second(MapFile(none, g.Dev, "/x", FileOptions{})),
		"hostmem: map file /x: the device is nil":       second(MapFile(t.Context(), nil, "/x", FileOptions{})),
	} {
		require.EqualError(t, err, want)
	}
	require.ErrorContains(t, second(Register(none, g.Dev, mem, RegisterOptions{})), "the context is nil")
	require.ErrorContains(t, second(Register(t.Context(), nil, mem, RegisterOptions{})), "the device is nil")
	b := g.alloc(4096, Options{})
	require.EqualError(t, b.CloseContext(none), "hostmem: close buffer of 4096 bytes: the context is nil")
	_, ok := NodeOf(t.Context(), nil)
	assert.False(t, ok)
}

func second[T any](_ T, err error) error { return err }
