//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

func TestABufferIsTheMemoryAskedFor(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	for _, n := range []int{1, 7, 4096, 4097, 64 * kib, mib + 3, 2 * mib, 5*mib + 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			b, err := Alloc(t.Context(), g.Dev, n, Options{Label: "a test's"})
			require.NoError(t, err)
			mem := b.Bytes()
			require.Len(t, mem, n)
			assert.Equal(t, n, cap(mem), "appending must not write past the end")
			assert.Equal(t, make([]byte, n), mem, "zero at first")
			assert.Equal(t, n, b.Len())
			assert.Equal(t, unsafe.Pointer(unsafe.SliceData(mem)), b.Pointer())
			assert.Equal(t, []Span{{Len: n}}, slices.Collect(b.Spans(0, b.Len())))
			assert.Equal(t, fmt.Sprintf(`buffer "a test's" of %d bytes`, n), b.String())
			fill(mem, 1)

			kind, err := g.Dev.PointerAttributes(uintptr(b.Pointer()) + uintptr(n-1))
			require.NoError(t, err)
			assert.Equal(t, cudart.MemoryHost, kind.Type, "the last byte is pinned")

			require.NoError(t, b.Close())
			assert.Nil(t, b.Bytes())
			assert.Nil(t, b.Pointer())
			assert.Equal(t, n, b.Len())
		})
	}
}

func TestSlice(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	b := g.alloc(4099, Options{})
	for i := range b.Bytes() {
		b.Bytes()[i] = byte(i)
	}
	words := Slice[uint32](b.Bytes())
	require.Len(t, words, 1024, "as many as fit whole")
	assert.Equal(t, uint32(0x07060504), words[1])
	words[1023] = 0
	assert.Equal(t, []byte{0, 0, 0, 0, 0, 1, 2}, b.Bytes()[4092:])

	type sample struct {
		_ float32
		_ [3]int16
	}
	samples, err := SliceOf[sample](b.Bytes())
	require.NoError(t, err)
	assert.Len(t, samples, 4099/int(unsafe.Sizeof(sample{})))
	back, err := BytesOf(samples)
	require.NoError(t, err)
	assert.Equal(t, b.Bytes()[:len(back)], back)
	assert.Equal(t, b.Bytes()[:4096], Bytes(words))
	assert.Len(t, Slice[byte](b.Bytes()), 4099)
	whole, err := SliceOf[[4099]byte](b.Bytes())
	require.NoError(t, err)
	assert.Len(t, whole, 1)
	none, err := SliceOf[[4100]byte](b.Bytes())
	require.NoError(t, err)
	assert.Nil(t, none, "none fits")
	for _, of := range []func() error{
		func() error { _, err := SliceOf[struct{}](b.Bytes()); return err },
		func() error { _, err := BytesOf([]struct{}{{}}); return err },
	} {
		assert.ErrorContains(t, of(), "no bytes")
	}
	_, err = SliceOf[*int](b.Bytes())
	assert.ErrorContains(t, err, "holds pointers")
	_, err = BytesOf([]struct{ ok bool }{{true}})
	assert.ErrorContains(t, err, "field ok: a bool")
	assert.Empty(t, Bytes([]int(nil)))
	require.NoError(t, b.Close())
	assert.Nil(t, Slice[uint32](b.Bytes()), "closed")
}

func TestAllocRefuses(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	for _, tc := range []struct {
		name string
		n    int
		o    Options
		want string
	}{
		{"nothing", 0, Options{}, "allocate 0 bytes"},
		{"less than nothing", -1, Options{}, "allocate -1 bytes"},
		{"more than there are addresses", 1<<63 - 1, Options{}, "allocate 9223372036854775807 bytes"},
		{"a crooked alignment", 10, Options{Align: 3000}, "allocate 10 bytes: Options.Align of 3000 bytes: must be a power of two"},
		{"a chunk below the unit", 10, Options{Chunk: 4096}, "Options.Chunk of 4096 bytes: must be a multiple of 2 MiB"},
		{"a negative chunk", 10, Options{Chunk: -2 * mib}, "Options.Chunk of -2097152 bytes"},
		{"a negative alignment", 10, Options{Align: math.MinInt}, "Options.Align of -9223372036854775808 bytes: must be a power of two"},
		{"fewer workers than none", 10, Options{Workers: -1}, "Options.Workers of -1: must be from 0 to 1024"},
		{"too many workers", 10, Options{Workers: math.MaxInt}, "Options.Workers of 9223372036854775807: must be from 0 to 1024"},
		{"a node below 0", 10, Options{Node: OnNode(-1)}, "Options.Node: Linux numbers nodes from 0 to 1023"},
		{"a node that AnyNode stands for", 10, Options{Node: OnNode(-2)}, "Options.Node: "},
		{"a node that Linux cannot have", 10, Options{Node: OnNode(1024)}, "Options.Node: "},
		{"the largest node", 10, Options{Node: OnNode(math.MaxInt)}, "Options.Node: "},
		{"a node that is no constant", 10, Options{Node: -2}, "Options.Node: "},
		{"pages that there are none of", 10, Options{HugePages: 17}, "Options.HugePages of 17: no such value"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Alloc(g.Context(), g.Dev, tc.n, tc.o)
			require.ErrorContains(t, err, tc.want)
			assert.ErrorContains(t, err, "hostmem: allocate ")
			assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
			assert.Zero(t, sys.Mapped.Load())
		})
	}
}

func TestCloseTwiceAndUseAfterClose(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	p := g.Device(4096)
	b := g.alloc(4096, Options{Label: "weights"})
	require.NoError(t, b.CopyToDevice(g.Stream, p, 0, 4096))
	require.NoError(t, b.Close())
	require.NoError(t, b.Close(), "a second time")
	require.NoError(t, b.CloseContext(t.Context()))
	err := b.CopyToDevice(g.Stream, p, 0, 4096)
	require.ErrorIs(t, err, cudart.ErrClosed)
	assert.ErrorContains(t, err, `copy to device: buffer "weights" of 4096 bytes`)
	require.ErrorIs(t, b.CopyFromDevice(g.Stream, p, 0, 4096), cudart.ErrClosed)
	if g.Sim != nil {
		assert.Equal(t, 1, g.Sim.Calls("cudaHostUnregister"))
		assert.Equal(t, 1, g.Sim.Calls("cudaMemcpyAsync"))
	}
}

// While a copy is in progress the memory stays registered and mapped. The simulated GPU reports it
// if not.
func TestCloseWaitsForCopies(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{}, {Chunk: 2 * mib}} {
		for _, way := range []string{"to device", "to host"} {
			t.Run(fmt.Sprintf("%s chunk=%d", way, o.Chunk), func(t *testing.T) {
				t.Parallel()
				const n = 5*mib + 1
				g := newSimFixture(t, cudasim.Config{})
				other := g.NewStream()
				p := g.Device(n)
				content := filled(n, 3)
				g.Upload(p, content[:n])
				b := g.alloc(n, o)
				mem := b.Bytes()
				registered := g.Registrations()
				g.Hold()
				if way == "to device" {
					fill(b.Bytes(), 4)
					require.NoError(t, b.CopyToDevice(other, p, 0, n))
				} else {
					require.NoError(t, b.CopyFromDevice(other, p, 0, n))
				}

				err := b.CloseContext(hostmemtest.Ended())
				require.ErrorIs(t, err, context.Canceled)
				assert.ErrorContains(t, err, "hostmem: close buffer of ")
				short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				require.ErrorIs(t, b.CloseContext(short), context.DeadlineExceeded)
				assert.Equal(t, registered, g.Registrations())
				if way == "to host" {
					assert.Equal(t, n, bytes.Count(mem, []byte{0}), "the copy did not run yet")
				}
				require.ErrorIs(t, b.CopyToDevice(g.Stream, p, 0, 100), cudart.ErrClosed)

				closed := make(chan error)
				go func() { closed <- b.Close() }()
				g.Sim.Release()
				require.NoError(t, <-closed)
				assert.Zero(t, g.Registrations())
				assert.Nil(t, b.Bytes())
				assert.Empty(t, g.Sim.Misuses())
				g.Synchronize()
				if way == "to device" {
					assert.True(t, bytes.Equal(filled(n, 4), g.Download(p, n)), "what the copy was to bring")
				}
			})
		}
	}
}

// Others must not wait longer than they want to, just because one does.
func TestClosesAndCopiesDoNotWaitForAWaitingClose(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.Device(4096)
	b := g.alloc(4096, Options{})
	g.Hold()
	require.NoError(t, b.CopyToDevice(g.Stream, p, 0, 4096))
	queries := g.Sim.Calls("cudaEventQuery")
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	eventually(t, "Close waits for the copy", func() bool { return g.Sim.Calls("cudaEventQuery") > queries })

	second := make(chan error)
	go func() { second <- b.CloseContext(hostmemtest.Ended()) }()
	select {
	case err := <-second:
		assert.ErrorIs(t, err, context.Canceled)
		g.Sim.Release()
	case <-time.After(time.Minute):
		t.Error("CloseContext with a context that has ended waits for another Close")
		g.Sim.Release()
		<-second
	}
	assert.NoError(t, <-closed)
}

func TestCloseAfterTheStreamWasClosed(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.Device(mib)
	b := g.alloc(mib, Options{})
	fill(b.Bytes(), 5)
	s := g.NewStream()
	g.Hold()
	require.NoError(t, b.CopyToDevice(s, p, 0, mib))
	require.NoError(t, s.Close(), "its work goes on")
	require.ErrorIs(t, b.CloseContext(hostmemtest.Ended()), context.Canceled)
	queries := g.Sim.Calls("cudaEventQuery")
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	// The stream's end was recorded when it was closed.
	eventually(t, "Close waits for the copy", func() bool { return g.Sim.Calls("cudaEventQuery") > queries })
	assert.Equal(t, 1, g.Registrations())
	g.Sim.Release()
	require.NoError(t, <-closed)
	assert.Empty(t, g.Sim.Misuses())
	assert.True(t, bytes.Equal(filled(mib, 5), g.Download(p, mib)))
}

// A copy whose end cannot be known may still run: the memory has to stay. (No wait depends on
// cudaStreamQuery any more: events answer for places in a stream.)
func TestCloseKeepsMemoryWhenItCannotWait(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.Device(4096)
			b := g.alloc(4096, Options{})
			fill(b.Bytes(), 6)
			g.Hold()
			require.NoError(t, b.CopyToDevice(g.Stream, p, 0, 4096))
			g.Sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
			g.Sim.Fail("cudaDeviceSynchronize", cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
			err := b.Close()
			assert.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			assert.Equal(t, 1, g.Registrations())
			g.Sim.ResetFaults()
			g.Sim.Release()
			require.NoError(t, b.Close())
			assert.Zero(t, g.Registrations())
			for _, m := range g.Sim.Misuses() {
				t.Error(m)
			}
			assert.True(t, bytes.Equal(filled(4096, 6), g.Download(p, 4096)))
		})
	}
}

func TestAFailedUnregisterKeepsTheMapping(t *testing.T) {
	for _, o := range []Options{{}, {Chunk: 2 * mib}} {
		t.Run(fmt.Sprintf("chunk=%d", o.Chunk), func(t *testing.T) {
			const n = 5 * mib
			g := newSimFixture(t, cudasim.Config{})
			sys := g.watch()
			before := ReadStats()
			b := g.alloc(n, o)
			mem := b.Bytes()
			fill(mem, 7)
			registered := g.Registrations()
			g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrUnknown})
			for range 2 {
				err := b.Close()
				require.ErrorIs(t, err, cudart.ErrUnknown)
				require.ErrorContains(t, err, "hostmem: close buffer of 5242880 bytes: its memory stays registered and mapped, Close may be tried again")
				g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrUnknown})
			}
			assert.Equal(t, 1, g.Registrations(), "of %d, those that could be were undone", registered)
			assert.Equal(t, int64(n), sys.Mapped.Load())
			assert.True(t, bytes.Equal(filled(n, 7), mem))
			now := ReadStats()
			assert.Equal(t, before.Buffers+1, now.Buffers)
			assert.Equal(t, before.ReservedBytes+n, now.ReservedBytes)
			assert.Equal(t, before.Failures+2, now.Failures)

			g.Sim.ResetFaults()
			require.NoError(t, b.Close(), "the next try")
			assert.Zero(t, g.Registrations())
			assert.Zero(t, sys.Mapped.Load())
			requireIdle(t, before)
		})
	}
}

func TestAFailedUnmapMayBeTriedAgain(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	var refuse atomic.Bool
	sys.Calls = sys.Calls.Before(func(call string) error {
		if refuse.Load() && call == "Unmap" {
			return unix.ENOMEM
		}
		return nil
	})
	before := ReadStats()
	b := g.alloc(mib, Options{})
	refuse.Store(true)
	require.ErrorIs(t, b.Close(), unix.ENOMEM)
	assert.Zero(t, g.Registrations())
	assert.Equal(t, int64(mib), sys.Mapped.Load())
	assert.Equal(t, before.ReservedBytes+mib, ReadStats().ReservedBytes, "it still counts")
	refuse.Store(false)
	require.NoError(t, b.Close())
	assert.Zero(t, sys.Mapped.Load())
	requireIdle(t, before)
}

// requireIdle requires that the process pins what it did before. Objects that other tests lost
// on purpose may be found at any time.
func requireIdle(t testing.TB, before Stats) {
	t.Helper()
	now := ReadStats()
	require.Equal(t, before.RequestedBytes, now.RequestedBytes, "bytes requested")
	require.Equal(t, before.ReservedBytes, now.ReservedBytes, "bytes reserved")
	require.Equal(t, before.Buffers, now.Buffers, "buffers")
	require.Equal(t, before.LeakedBytes, now.LeakedBytes, "leaked")
}

// What a device that fell off the bus was doing cannot be known, so the memory stays.
func TestCloseOnABrokenDevice(t *testing.T) {
	t.Parallel()
	g := &fixture{Fixture: hostmemtest.Loose(t, cudasim.Config{})}
	p, err := g.Dev.Malloc(4096)
	require.NoError(t, err)
	b, err := Alloc(t.Context(), g.Dev, 4096, Options{})
	require.NoError(t, err)
	mem := b.Bytes()
	g.Hold()
	require.NoError(t, b.CopyToDevice(g.Stream, p, 0, 4096))
	require.NoError(t, g.Sim.LoseDevice(0))
	g.Sim.Release()
	for range 2 {
		err = b.Close()
		require.ErrorIs(t, err, cudart.ErrLaunchFailure)
		require.ErrorContains(t, err, "stays registered and mapped")
	}
	assert.Equal(t, 1, g.Registrations())
	assert.Equal(t, 4096, bytes.Count(mem, []byte{0}), "it is mapped")
}

// The same where registering was refused, and cudaHostAlloc would be next.
func TestARefusedRegistrationThatCannotBeRolledBackIsLeaked(t *testing.T) {
	const n = 200 * mib
	g := &fixture{Fixture: hostmemtest.Loose(t, cudasim.Config{})}
	sys := g.watch()
	sys.Unpopulated()
	before := ReadStats()
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 3, Code: cudart.ErrNotSupported})
	g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Times: -1, Code: cudart.ErrLaunchFailure})
	_, err := Alloc(g.Context(), g.Dev, n, Options{})
	require.ErrorIs(t, err, cudart.ErrNotSupported)
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	assert.Equal(t, [2]int{3, 0}, g.tried(), "nothing else was tried")
	assert.Equal(t, int64(n), sys.Mapped.Load())
	assert.Equal(t, 1, g.Registrations())
	assert.Equal(t, before.LeakedBytes+n, ReadStats().LeakedBytes)
	assert.Equal(t, before.PinnedBytes+n, ReadStats().PinnedBytes, "it counts for the limits")
}

// When even rolling back fails, the memory is leaked on purpose: it is counted and stays
// mapped, and counts for the limits.
func TestAnAllocationThatCannotBeRolledBackIsLeaked(t *testing.T) {
	g := &fixture{Fixture: hostmemtest.Loose(t, cudasim.Config{})}
	sys := g.watch()
	var base unsafe.Pointer
	watched := sys.Calls.Map
	sys.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		p, err := watched(n, hugetlb)
		base = p
		return p, err
	}
	before := ReadStats()
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 2, Times: -1, Code: cudart.ErrInvalidValue})
	g.Sim.Fail("cudaHostUnregister", cudasim.Fault{Times: -1, Code: cudart.ErrLaunchFailure})
	_, err := Alloc(g.Context(), g.Dev, 4*mib, Options{Chunk: 2 * mib, Align: 4096, Workers: 1})
	require.ErrorIs(t, err, cudart.ErrInvalidValue, "what went wrong")
	require.ErrorIs(t, err, cudart.ErrLaunchFailure, "and what went wrong with undoing it")
	require.ErrorContains(t, err, fmt.Sprintf("4194304 bytes at %p could not be unregistered or unmapped, and stay mapped", base))
	assert.Equal(t, int64(4*mib), sys.Mapped.Load())
	assert.Equal(t, 1, g.Registrations())
	now := ReadStats()
	assert.Equal(t, before.LeakedBytes+4*mib, now.LeakedBytes)
	assert.Equal(t, before.PinnedBytes+4*mib, now.PinnedBytes)
	assert.Equal(t, before.Failures+1, now.Failures)
	assert.Equal(t, before.Buffers, now.Buffers)

	g.Sim.ResetFaults()
	require.NoError(t, g.Dev.HostUnregister(base))
	require.NoError(t, unix.MunmapPtr(base, 4*mib))
}

// A buffer that was garbage collected is counted, and stays registered and mapped: slices of it
// may be in use.
func TestALostBufferIsCountedAndStays(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	before := ReadStats()
	mem := lose(t, g)
	require.Eventually(t, func() bool {
		runtime.GC()
		return ReadStats().LostObjects == before.LostObjects+1
	}, 10*time.Second, time.Millisecond)
	now := ReadStats()
	assert.Equal(t, before.LostBytes+3*os.Getpagesize(), now.LostBytes)
	assert.Zero(t, g.Sim.Calls("cudaHostUnregister"))
	assert.Equal(t, 1, g.Registrations())
	assert.True(t, bytes.Equal(filled(len(mem), 8), mem), "it can be read, so it is mapped")

	base := unsafe.Pointer(unsafe.SliceData(mem))
	require.NoError(t, g.Dev.HostUnregister(base))
	require.NoError(t, unix.MunmapPtr(base, 3*uintptr(os.Getpagesize())))
}

//go:noinline
func lose(t *testing.T, g *fixture) []byte {
	b, err := Alloc(t.Context(), g.Dev, 2*os.Getpagesize()+1, Options{Label: "lost on purpose"})
	require.NoError(t, err)
	fill(b.Bytes(), 8)
	return b.Bytes()
}

func TestAllocEndsWithItsContext(t *testing.T) {
	cause := errors.New("the request is over")
	for _, o := range []Options{{Workers: 1}, {Workers: 2}, {Chunk: 2 * mib, Workers: 2}, {HugePages: HugePagesNever, Workers: 1}} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{})
			before := ReadStats()
			for nth := range int64(12) { // 0: before anything happens
				ctx, cancel := context.WithCancelCause(t.Context())
				sys := g.watch()
				var calls atomic.Int64
				sys.Calls = sys.Calls.Before(func(string) error {
					if calls.Add(1) == nth {
						cancel(cause)
					}
					return nil
				})
				if nth == 0 {
					cancel(cause)
				}
				b, err := Alloc(sys.With(ctx), g.Dev, 24*mib+1, o)
				if !assert.Error(t, err, "cancelled at call %d", nth) {
					require.NoError(t, b.Close())
					continue
				}
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, cause)
				require.ErrorContains(t, err, "hostmem: allocate 25165825 bytes")
				if nth == 0 {
					assert.Zero(t, calls.Load())
				}
				assert.Zero(t, sys.Mapped.Load(), "call %d", nth)
				assert.Zero(t, g.Registrations())
				requireIdle(t, before)
			}
		})
	}
}

// Chunks are registered while others are populated: those that were are undone.
func TestAllocUndoesTheChunksThatWereRegistered(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 3, After: cancel})
	sys := g.watch()
	_, err := Alloc(sys.With(ctx), g.Dev, 24*mib, Options{Chunk: 2 * mib, Workers: 1})
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, 3, g.Sim.Calls("cudaHostRegister"))
	assert.Equal(t, 3, g.Sim.Calls("cudaHostUnregister"))
	assert.Zero(t, sys.Mapped.Load())
}

func TestStatisticsReturnToZeroAndPeaksAreTrue(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	// Pages need not be there for this, so that sizes can be above all peaks so far.
	sys.Calls.Advise = func(unsafe.Pointer, int, pages.Advice) error { return nil }
	page := os.Getpagesize()
	before := ReadStats()
	slack := before.PeakReservedBytes - before.ReservedBytes
	first := g.alloc(slack+1, Options{HugePages: HugePagesNever})
	second := g.alloc(10*page, Options{})
	now := ReadStats()
	reserved := first.Info().Reserved + 10*page
	assert.Equal(t, before.RequestedBytes+slack+1+10*page, now.RequestedBytes)
	assert.Equal(t, before.ReservedBytes+reserved, now.ReservedBytes)
	assert.Equal(t, now.ReservedBytes, now.PeakReservedBytes)
	assert.Equal(t, before.Buffers+2, now.Buffers)
	assert.Equal(t, before.Opened+2, now.Opened)
	assert.Greater(t, now.PinTime, before.PinTime)

	require.NoError(t, second.Close())
	require.NoError(t, g.alloc(page, Options{}).Close())
	require.NoError(t, g.alloc(page, Options{}).Close())
	require.NoError(t, first.Close())
	after := ReadStats()
	assert.Equal(t, now.PeakReservedBytes, after.PeakReservedBytes, "what was there at the same time, not the sum")
	assert.Equal(t, before.Closed+4, after.Closed)
	assert.Greater(t, after.UnpinTime, before.UnpinTime)
	assert.Equal(t, before.Failures, after.Failures)
	requireIdle(t, before)
}

// Not parallel, so that the statistics at the end are its own.
func TestBuffersServeManyGoroutines(t *testing.T) {
	g := newFixture(t)
	before := ReadStats()
	p := g.Device(64 * mib)
	streams := []*cudart.Stream{g.Stream, g.NewStream(), g.NewStream()}
	shared := g.alloc(3*mib, Options{Chunk: 2 * mib})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(2, uint64(i)))
			mine := p + cudart.DevPtr(i*8*mib)
			for round := range 12 {
				n := 1 + random.IntN(5*mib)
				if round%2 == 0 {
					n = 1 + random.IntN(64*kib)
				}
				b, err := Alloc(context.Background(), g.Dev, n, Options{Chunk: random.IntN(2) * 2 * mib})
				if !assert.NoError(t, err) {
					return
				}
				s := streams[random.IntN(len(streams))]
				fill(b.Bytes(), byte(i))
				assert.NoError(t, b.CopyToDevice(s, mine, 0, n))
				assert.NoError(t, shared.CopyToDevice(s, mine+8*mib-4096, random.IntN(3*mib-4096), 4096))
				assert.NoError(t, s.Synchronize(context.Background()))
				clear(b.Bytes())
				assert.NoError(t, b.CopyFromDevice(s, mine, 0, n))
				// Several close it and look at it at once. One of them does the work.
				var closers sync.WaitGroup
				for range 3 {
					closers.Go(func() {
						_ = b.String()
						b.Pointer()
						b.Spans(0, b.Len())
						b.Info()
						ReadStats()
						if err := b.CopyFromDevice(s, mine, 0, n); err != nil {
							assert.ErrorIs(t, err, cudart.ErrClosed)
						}
						assert.NoError(t, b.Close())
						assert.Nil(t, b.Bytes())
					})
				}
				closers.Wait()
			}
		})
	}
	wg.Wait()
	require.NoError(t, shared.Close())
	requireIdle(t, before)
}
