package arrowmem

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
)

const defaultWait = time.Second

// Options shape an allocator. The zero value suits programs that copy with package transfer.
type Options struct {
	// Streams are the streams on which copies of the memory are queued by other means than
	// package transfer. Freed memory is reused when they have passed all work that
	// was queued until Free. They may be of any device, and may be closed.
	Streams []*cudart.Stream
	// Wait is the time for which an allocation waits for memory when the pool has reached a
	// limit, in addition to a second per GB for pinning. 0 means a second. After a
	// wait in vain, allocations of that size and larger ones wait a millisecond
	// only, until the pool has memory for one of them.
	Wait time.Duration
}

// An Allocator allocates pinned memory of a pool, by the interface of arrow-go's
// memory.Allocator. Its methods may be called from any goroutine.
//
// The interface has no errors, and arrow-go's own allocators panic, or end the process,
// when there is no memory. An Allocator takes memory of the Go heap if the pool has none:
// because a limit was reached for longer than Options.Wait, CUDA refuses, or the pool is
// closed. That memory is not pinned: copy it with package transfer, which is slower, and
// never with asynchronous copies of package cudart, which refuse it in debug mode
// (PINNED_DEBUG=1) only. [Allocator.Stats] counts it, and
// [Allocator.Err] returns the reason. If the Go heap cannot grow either, the process ends,
// as any Go program does.
//
// The zero Allocator and nil have no pool: the zero one allocates in the Go heap, and nil
// allocates nothing.
type Allocator struct {
	pool *pool.Pool
	o    Options

	mu          sync.Mutex
	blocks      map[*byte]block // by the address of the first byte
	minTimedOut int             // smallest size in bytes that has waited in vain, 0 for none
	stats       Stats
	err         error
}

// A block is memory that was allocated and not freed.
type block struct {
	lease pool.Lease // unless heap is set
	heap  []byte     // of the Go heap
	n     int        // size in bytes as requested
}

// bytes returns the whole memory. It has more than n bytes after a Reallocate for
// fewer.
func (b *block) bytes() []byte {
	if b.heap != nil {
		return b.heap
	}
	return b.lease.Bytes()
}

var errNil = errors.New("arrowmem: the allocator is nil")

// New makes an allocator of a pool's memory. It does not block. It has nothing to close: the pool's Close
// reports memory that was not freed, and leaves it in use until Free. A nil pool or stream
// is an error, and so is a negative Wait.
func New(p *pool.Pool, o Options) (*Allocator, error) {
	switch {
	case p == nil:
		return nil, errors.New("arrowmem: new: the pool is nil")
	case slices.Contains(o.Streams, nil):
		return nil, errors.New("arrowmem: new: Options.Streams: a stream is nil")
	case o.Wait < 0:
		return nil, fmt.Errorf("arrowmem: new: Options.Wait of %v: it is negative", o.Wait)
	case o.Wait == 0:
		o.Wait = defaultWait
	}
	o.Streams = slices.Clone(o.Streams)
	return &Allocator{pool: p, o: o}, nil
}

const (
	// alignment in bytes is recommended by Arrow. A pool's blocks have it.
	alignment = 64
	// maxSize is a pool's largest request. make would panic for sizes a little larger.
	maxSize = 1 << 46
	// retryWait is the wait after another allocation has waited in vain. It is enough
	// to find memory that is idle.
	retryWait = time.Millisecond
)

// Allocate returns size bytes, all 0, at an address that is a multiple of 64. For 0 bytes
// that is an empty slice, which need not be freed; for sizes below 0 and above 64 TiB it is
// nil, which Arrow cannot slice and panics.
func (a *Allocator) Allocate(size int) []byte {
	switch {
	case a == nil:
		return nil
	case size == 0:
		return []byte{}
	case size < 0 || size > maxSize:
		a.failed(fmt.Errorf("arrowmem: allocate %d bytes: no host has them", size))
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.timeout(size))
	defer cancel()
	b := block{n: size}
	var err error
	if b.lease, err = a.pool.Get(ctx, size); err == nil {
		clear(b.lease.Bytes())
	} else {
		b.heap = allocateHeap(size)
	}
	mem := b.bytes()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil:
		a.err = fmt.Errorf("arrowmem: allocate %d bytes, which now are of the Go heap: %w", size, err)
		a.stats.Fallbacks++
		if ctx.Err() != nil && (a.minTimedOut == 0 || size < a.minTimedOut) {
			a.minTimedOut = size
		}
	case size >= a.minTimedOut:
		a.minTimedOut = 0
	}
	if a.blocks == nil {
		a.blocks = make(map[*byte]block)
	}
	a.blocks[unsafe.SliceData(mem)] = b
	a.count(&b, 1, size)
	return mem
}

// timeout returns the time for an allocation: to wait at a limit, and to pin memory.
func (a *Allocator) timeout(size int) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	wait := a.o.Wait
	if a.minTimedOut > 0 && size >= a.minTimedOut {
		wait = min(wait, retryWait)
	}
	pinning := time.Duration(size) * time.Nanosecond // a second per GB
	return min(wait, math.MaxInt64-pinning) + pinning
}

// allocateHeap returns memory of the Go heap at a multiple of 64 bytes.
func allocateHeap(size int) []byte {
	mem := make([]byte, size+alignment-1)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % alignment
	return mem[skip:][:size:size]
}

// Reallocate returns size bytes that begin with those of mem, and are 0 after them. It
// frees mem, which must not be used any more, unless the result is nil. mem is a slice of
// Allocate or Reallocate, or a shorter one with the same start, or empty. The content of
// any other slice is copied, and the slice is not freed. The requirements of Allocate apply
// to size. The memory stays where it is if it is large enough, and at most twice as large
// as needed.
func (a *Allocator) Reallocate(size int, mem []byte) []byte {
	switch {
	case a == nil:
		return nil
	case size == 0:
		a.Free(mem)
		return []byte{}
	}
	if same := a.resize(size, mem); same != nil {
		return same
	}
	fresh := a.Allocate(size)
	if fresh != nil {
		copy(fresh, mem)
		a.Free(mem)
	}
	return fresh
}

// resize makes a block longer or shorter where it is. It returns nil if the block is too
// small or much too large.
func (a *Allocator) resize(size int, mem []byte) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := unsafe.SliceData(mem)
	b, ok := a.blocks[at]
	all := b.bytes()
	if !ok || size < len(all)/2 || size > len(all) {
		return nil
	}
	clear(all[min(len(mem), size):size])
	a.count(&b, 0, size-b.n)
	b.n = size
	a.blocks[at] = b
	return all[:size:size]
}

// Free ends the use of memory of Allocate or Reallocate. The pool reuses it when the
// streams of Options.Streams have passed what is queued there; Free does not wait for that.
// mem may be a shorter slice with the same start. Slices without capacity are ignored.
// Other memory is ignored and counted in Stats.Unknown, and so is memory that was freed
// before, unless another allocation has it already.
func (a *Allocator) Free(mem []byte) {
	if a == nil || cap(mem) == 0 {
		return
	}
	b, ok := a.forget(mem)
	if !ok || b.heap != nil {
		return
	}
	if err := b.lease.Release(a.o.Streams...); err != nil {
		a.failed(fmt.Errorf("arrowmem: free %d bytes: %w", len(mem), err))
	}
}

// forget removes the block of mem, if there is one.
func (a *Allocator) forget(mem []byte) (b block, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := unsafe.SliceData(mem)
	if b, ok = a.blocks[at]; ok {
		delete(a.blocks, at)
		a.count(&b, -1, -b.n)
	} else {
		a.stats.Unknown++
		a.err = fmt.Errorf("arrowmem: free %d bytes at %p: not memory of this allocator, or freed before", len(mem), at)
	}
	return b, ok
}

func (a *Allocator) failed(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

// Stats are the figures of memory that was allocated and not freed, and counts since New.
type Stats struct {
	Allocations     int // allocations that were not freed
	Bytes           int // bytes of Allocations, as requested
	PeakBytes       int // maximum of Bytes
	HeapAllocations int // allocations among these in the Go heap
	HeapBytes       int // bytes of HeapAllocations
	Fallbacks       int // allocations in the Go heap since New
	Unknown         int // ignored calls of Free since New
}

// Stats returns the present numbers. The pinned bytes are in the pool's Stats.
func (a *Allocator) Stats() Stats {
	if a == nil {
		return Stats{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stats
}

// count adds a number of allocations and of bytes, of the kind of b. It needs a.mu.
func (a *Allocator) count(b *block, allocations, bytes int) {
	st := &a.stats
	st.Allocations += allocations
	st.Bytes += bytes
	st.PeakBytes = max(st.PeakBytes, st.Bytes)
	if b.heap != nil {
		st.HeapAllocations += allocations
		st.HeapBytes += bytes
	}
}

// Err returns the last error, nil if there was none: the reason for memory of the Go heap,
// such as [cudart.ErrClosed], [hostmem.ErrTooLarge], or [context.DeadlineExceeded] for a limit,
// which it wraps, or a call that was ignored.
func (a *Allocator) Err() error {
	if a == nil {
		return errNil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}
