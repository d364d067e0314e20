package arrowmem

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
)

// arrow is arrow-go's memory.Allocator.
type arrow interface {
	Allocate(size int) []byte
	Reallocate(size int, b []byte) []byte
	Free(b []byte)
}

var _ arrow = (*Allocator)(nil)

func newPool(t *testing.T, dev *cudart.Device, o pool.Options) *pool.Pool {
	t.Helper()
	p, err := pool.New(dev, o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, p.Close()) })
	return p
}

func newAllocator(t *testing.T, p *pool.Pool, o Options) *Allocator {
	t.Helper()
	a, err := New(p, o)
	require.NoError(t, err)
	return a
}

func isPinned(mem []byte) bool {
	_, _, ok := hostmem.Find(mem)
	return ok
}

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

func TestAllocate(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	a := newAllocator(t, p, Options{})
	total := 0
	var all [][]byte
	for _, n := range []int{1, 2, 63, 64, 65, 511, 513, 4096, 100_003, 5 << 20} {
		for range 3 {
			mem := a.Allocate(n)
			require.Len(t, mem, n)
			assert.Equal(t, n, cap(mem), "append must not reach other memory")
			assert.Zero(t, address(mem)%64, "%d bytes", n)
			assert.True(t, isPinned(mem))
			assert.Equal(t, make([]byte, n), mem)
			copy(mem, bytes.Repeat([]byte{byte(len(all) + 1)}, n))
			all = append(all, mem)
			total += n
		}
	}
	assert.Equal(t, Stats{Allocations: len(all), Bytes: total, PeakBytes: total}, a.Stats())
	assert.Equal(t, len(all), p.Stats().Leases)
	for i, mem := range all {
		require.Equal(t, len(mem), bytes.Count(mem, []byte{byte(i + 1)}), "no two allocations share memory")
		a.Free(mem)
	}
	assert.Equal(t, Stats{PeakBytes: total}, a.Stats())
	assert.Zero(t, p.Stats().Leases)
	again := a.Allocate(100_003)
	assert.Equal(t, make([]byte, 100_003), again, "memory that is reused is 0 too")
	a.Free(again)
	assert.NoError(t, a.Err())

	nothing := a.Allocate(0)
	assert.NotNil(t, nothing)
	assert.Empty(t, nothing)
	a.Free(nothing)
	a.Free(nil)
	assert.Equal(t, Stats{PeakBytes: total}, a.Stats())
	assert.NoError(t, a.Err())
}

// Small allocations do not pin a page each.
func TestSmallAllocationsShareARegistration(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	a := newAllocator(t, p, Options{})
	var all [][]byte
	for range 1000 {
		all = append(all, a.Allocate(64))
	}
	assert.LessOrEqual(t, p.Stats().InUseBytes, 1000*128)
	assert.LessOrEqual(t, p.Stats().ReservedBytes, 2<<20)
	for _, mem := range all {
		a.Free(mem)
	}
	assert.Zero(t, p.Stats().Leases)
}

// Sizes that cannot be do not panic here.
func TestAllocateOfAbsurdSizes(t *testing.T) {
	t.Parallel()
	a := newAllocator(t, newPool(t, testgpu.Device(t), pool.Options{}), Options{})
	mem := a.Allocate(10)
	copy(mem, "kept")
	for _, n := range []int{-1, -1 << 63, 1<<46 + 1, 1<<63 - 1} {
		assert.Nil(t, a.Allocate(n), n)
		assert.ErrorContains(t, a.Err(), "no host has them")
		assert.Nil(t, a.Reallocate(n, mem), n)
	}
	assert.Equal(t, "kept", string(mem[:4]), "and is not freed")
	a.Free(mem)
	assert.Equal(t, Stats{PeakBytes: 10}, a.Stats())
}

func TestReallocate(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	a := newAllocator(t, p, Options{})
	var mem []byte
	random := rand.New(rand.NewPCG(3, 4))
	var want []byte
	sizes := []int{1, 64, 65, 64, 200, 100, 99, 100, 50, 49, 300_000, 3 << 20, 2 << 20, 3 << 20, 17, 0, 5}
	for range 300 {
		sizes = append(sizes, random.IntN(10_000))
	}
	for _, n := range sizes {
		mem = a.Reallocate(n, mem)
		require.NotNil(t, mem)
		require.Len(t, mem, n)
		require.Equal(t, n, cap(mem))
		want = append(want[:min(n, len(want))], make([]byte, max(0, n-len(want)))...)
		require.True(t, bytes.Equal(want, mem), "the content is kept, and what is new is 0: %d bytes", n)
		require.True(t, n == 0 || address(mem)%64 == 0)
		for i := range mem {
			mem[i] = byte(random.Uint32() | 1)
		}
		copy(want, mem)
		st := a.Stats()
		require.Equal(t, n, st.Bytes)
		require.Equal(t, min(n, 1), st.Allocations)
		require.Equal(t, min(n, 1), p.Stats().Leases, "the old memory is freed")
		require.Less(t, p.Stats().RequestedBytes, max(1, 2*n+2))
	}
	a.Free(mem)
	assert.NoError(t, a.Err())
	assert.Zero(t, p.Stats().Leases)

	mem = a.Allocate(1000)
	copy(mem, bytes.Repeat([]byte{1}, 1000))
	mem = a.Reallocate(900, mem[:300]) // what follows the slice is not part of it
	assert.Equal(t, append(bytes.Repeat([]byte{1}, 300), make([]byte, 600)...), mem)
	mem = a.Reallocate(1000, mem[:0])
	assert.Equal(t, make([]byte, 1000), mem)
	assert.Equal(t, 1, a.Stats().Allocations)
	shorter := a.Reallocate(500, mem)
	assert.Equal(t, address(mem), address(shorter), "half of it stays where it is")
	longer := a.Reallocate(1000, shorter)
	assert.Equal(t, address(mem), address(longer))
	less := a.Reallocate(499, longer)
	assert.NotEqual(t, address(mem), address(less))
	assert.Equal(t, 499, a.Stats().Bytes)
	a.Free(less)
}

// Without memory in the pool Arrow gets ordinary memory, and a reason is kept.
func TestFallbackToTheGoHeap(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	p, err := pool.New(dev, pool.Options{MaxBytes: 4 << 20})
	require.NoError(t, err)
	a := newAllocator(t, p, Options{Wait: time.Hour})
	first := a.Allocate(3 << 20)
	require.True(t, isPinned(first))
	a.o.Wait = time.Millisecond
	assert.Zero(t, a.Stats().HeapAllocations)

	second := a.Allocate(3<<20 + 1)
	require.False(t, isPinned(second))
	require.ErrorIs(t, a.Err(), context.DeadlineExceeded)
	assert.ErrorContains(t, a.Err(), "arrowmem: allocate 3145729 bytes, which now are of the Go heap")
	third := a.Allocate(5 << 20)
	require.ErrorIs(t, a.Err(), hostmem.ErrTooLarge)
	for _, mem := range [][]byte{second, third} {
		assert.Zero(t, address(mem)%64)
		assert.Equal(t, len(mem), cap(mem))
		assert.Equal(t, make([]byte, len(mem)), mem)
	}
	assert.Equal(t, Stats{Allocations: 3, Bytes: 11<<20 + 1, PeakBytes: 11<<20 + 1,
		HeapAllocations: 2, HeapBytes: 8<<20 + 1, Fallbacks: 2}, a.Stats())

	a.Free(first)
	a.o.Wait = time.Hour // until the pool has unmapped the memory of first
	copy(second, "moves")
	second = a.Reallocate(1<<20, second)
	assert.True(t, isPinned(second), "there is pinned memory again")
	assert.Equal(t, "moves", string(second[:5]))
	assert.Equal(t, 5<<20, a.Stats().HeapBytes)
	a.Free(third)
	assert.Zero(t, a.Stats().HeapAllocations)

	err = p.Close()
	require.ErrorIs(t, err, cudart.ErrInUse)
	late := a.Allocate(100)
	require.Len(t, late, 100)
	require.ErrorIs(t, a.Err(), cudart.ErrClosed)
	a.Free(late)
	a.Free(second)
	assert.Zero(t, a.Stats().Bytes)
	require.NoError(t, p.Close())
}

// Allocations at a limit do not all wait: after one that did in vain, others as large do
// not, until the pool has memory for one of them. Smaller ones may find memory.
func TestAllocationsDoNotAllWaitAtALimit(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{MaxBytes: 4 << 20})
	a := newAllocator(t, p, Options{Wait: time.Hour})
	full := a.Allocate(4 << 20)
	require.True(t, isPinned(full))
	a.o.Wait = time.Millisecond
	a.Free(a.Allocate(3 << 20))
	require.ErrorIs(t, a.Err(), context.DeadlineExceeded)

	a.o.Wait = time.Hour
	a.Free(a.Allocate(3 << 20))
	a.Free(a.Allocate(4 << 20))
	require.Equal(t, 3, a.Stats().Fallbacks)
	smaller := make(chan []byte)
	go func() { smaller <- a.Allocate(3<<20 - 1) }()
	require.Eventually(t, func() bool { return p.Stats().Waiting == 1 }, 20*time.Second, time.Millisecond)
	a.Free(full)
	mem := <-smaller
	require.True(t, isPinned(mem))
	a.Free(mem)

	require.Eventually(t, func() bool { // the short wait may end before memory is unmapped
		mem := a.Allocate(3 << 20)
		defer a.Free(mem)
		return isPinned(mem)
	}, 20*time.Second, time.Millisecond)
	assert.Zero(t, a.minTimedOut, "and others as large wait again")
}

// The time for pinning is added, and a wait that is as long as can be does not overflow.
func TestTimeoutOfAllocations(t *testing.T) {
	t.Parallel()
	a := newAllocator(t, newPool(t, testgpu.Device(t), pool.Options{}), Options{})
	assert.Equal(t, defaultWait+4096, a.timeout(4096))
	assert.Equal(t, defaultWait+100*time.Second, a.timeout(100e9))
	a.minTimedOut = 100
	assert.Equal(t, defaultWait+99, a.timeout(99))
	assert.Equal(t, time.Millisecond+100, a.timeout(100))
	a.o.Wait = 1
	assert.EqualValues(t, 101, a.timeout(100))
	a.o.Wait = math.MaxInt64
	assert.EqualValues(t, math.MaxInt64, a.timeout(99))
}

// CUDA that pins no memory is a reason for memory of the Go heap.
func TestFallbackWhenCUDAFails(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	p := newPool(t, dev, pool.Options{})
	a := newAllocator(t, p, Options{})
	sim.Fail("cudaHostRegister", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	mem := a.Allocate(100)
	require.Len(t, mem, 100)
	assert.False(t, isPinned(mem))
	require.ErrorIs(t, a.Err(), cudart.ErrUnknown)
	sim.ResetFaults()
	moved := a.Reallocate(200, mem)
	assert.True(t, isPinned(moved))
	a.Free(moved)
	assert.Equal(t, Stats{PeakBytes: 300, Fallbacks: 1}, a.Stats())
}

// Streams that were closed are no obstacle: what they have queued is waited for.
func TestFreeAfterTheStreamWasClosed(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	p := newPool(t, dev, pool.Options{})
	a := newAllocator(t, p, Options{Streams: []*cudart.Stream{s}})
	mem := a.Allocate(100)
	require.NoError(t, s.Close())
	a.Free(mem)
	assert.NoError(t, a.Err())
	assert.Zero(t, p.Stats().Leases)
}

// Memory that Arrow has not freed outlives the pool.
func TestMemoryOutlivesThePool(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	a := newAllocator(t, p, Options{})
	mem := a.Allocate(3 << 20)
	copy(mem, "still here")
	require.ErrorIs(t, p.Close(), cudart.ErrInUse)
	assert.Equal(t, "still here", string(mem[:10]))
	mem = a.Reallocate(5<<20, mem)
	assert.Equal(t, "still here", string(mem[:10]))
	assert.False(t, isPinned(mem))
	require.NoError(t, p.Close())
	a.Free(mem)
	assert.Zero(t, a.Stats().Allocations)
}

// Free of memory that is not the allocator's, or twice, does nothing but count.
func TestFreeOfUnknownMemory(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	a, other := newAllocator(t, p, Options{}), newAllocator(t, p, Options{})
	mine, theirs := a.Allocate(1000), other.Allocate(1000)
	a.Free(theirs)
	require.ErrorContains(t, a.Err(), "arrowmem: free 1000 bytes")
	a.Free(make([]byte, 10))
	a.Free(mine[64:])
	assert.Equal(t, 3, a.Stats().Unknown)
	assert.Equal(t, 2, p.Stats().Leases)

	copy(theirs, "copied")
	moved := a.Reallocate(2000, theirs)
	assert.Equal(t, "copied", string(moved[:6]))
	assert.Equal(t, 4, a.Stats().Unknown)
	assert.Equal(t, 3, p.Stats().Leases, "and left alone")

	a.Free(moved)
	a.Free(mine)
	a.Free(mine)
	assert.Equal(t, 5, a.Stats().Unknown)
	assert.Zero(t, a.Stats().Allocations)
	assert.NoError(t, other.Err())
	other.Free(theirs)
	assert.Zero(t, p.Stats().Leases)
}

// Freed memory is reused only when the streams have passed what was queued before Free,
// by this package's user or by another library. Not parallel: on a real GPU
// cudaHostUnregister of another test would wait for the host function here, and keep calls of
// this test waiting.
func TestFreedMemoryIsReusedWhenTheGPUIsDone(t *testing.T) {
	dev := testgpu.Device(t)
	for name, free := range map[string]func(a *Allocator, mem []byte){
		"Free":       func(a *Allocator, mem []byte) { a.Free(mem) },
		"Reallocate": func(a *Allocator, mem []byte) { a.Free(a.Reallocate(10*len(mem), mem)) },
	} {
		t.Run(name, func(t *testing.T) {
			owner, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			defer func() { assert.NoError(t, owner.Close()) }()
			s, err := dev.StreamFromHandle(owner.Handle())
			require.NoError(t, err)
			defer func() { assert.NoError(t, s.Close()) }()
			p := newPool(t, dev, pool.Options{})
			a := newAllocator(t, p, Options{Streams: []*cudart.Stream{s}})
			const n = 70_000
			mem := a.Allocate(n)
			at := address(mem)
			copy(mem, "not overwritten")
			dst, err := dev.Malloc(n)
			require.NoError(t, err)
			gate := make(chan struct{})
			open := sync.OnceFunc(func() { close(gate) })
			defer open()
			require.NoError(t, owner.LaunchHostFunc(func() { <-gate }))
			require.NoError(t, owner.CopyToDevice(dst, unsafe.Pointer(&mem[0]), n))
			free(a, mem)
			for range 5 {
				other := a.Allocate(n)
				require.NotEqual(t, at, address(other), "the copy has not run")
				defer a.Free(other)
			}
			open()
			require.NoError(t, owner.Synchronize(t.Context()))
			same := a.Allocate(n)
			defer a.Free(same)
			require.Equal(t, at, address(same), "and now it has")
			got := make([]byte, 15)
			require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), dst, len(got)))
			assert.Equal(t, "not overwritten", string(got))
			require.NoError(t, dev.Free(dst))
		})
	}
}

func TestManyGoroutines(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{MaxBytes: 6 << 20})
	a := newAllocator(t, p, Options{Wait: time.Millisecond})
	var group sync.WaitGroup
	for g := range 8 {
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 1))
			var mem []byte
			for range 50 {
				old := len(mem)
				mem = a.Reallocate(random.IntN(600_000), mem)
				for i := 0; i < min(old, len(mem)); i += 511 {
					if mem[i] != byte(g) {
						t.Errorf("goroutine %d: byte %d is %d", g, i, mem[i])
						return
					}
				}
				for i := range mem {
					mem[i] = byte(g)
				}
			}
			a.Free(mem)
		})
	}
	group.Wait()
	st := a.Stats()
	assert.Zero(t, st.Allocations)
	assert.Zero(t, st.Bytes)
	assert.Zero(t, st.Unknown)
	assert.Positive(t, st.PeakBytes)
	assert.Zero(t, p.Stats().Leases)
}

func TestOptionsThatAreRefused(t *testing.T) {
	t.Parallel()
	p := newPool(t, testgpu.Device(t), pool.Options{})
	_, err := New(nil, Options{})
	assert.EqualError(t, err, "arrowmem: new: the pool is nil")
	_, err = New(p, Options{Streams: []*cudart.Stream{nil}})
	assert.EqualError(t, err, "arrowmem: new: Options.Streams: a stream is nil")
	_, err = New(p, Options{Wait: -1})
	assert.ErrorContains(t, err, "Options.Wait of -1ns")
}
