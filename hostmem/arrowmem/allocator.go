package arrowmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
)

// DefaultWait is the Options.Wait of allocators that set none.
const DefaultWait = time.Second

// Options shape an allocator. The zero value is what most programs want.
type Options struct {
	// Streams are those on which copies of the memory are queued by other means than
	// package transfer. Memory that was freed is not reused before they have passed
	// all that was queued until then. They may be of any device.
	Streams []*cudart.Stream
	// Wait is how long an allocation waits for memory when the pool has reached a
	// limit. 0 means DefaultWait.
	Wait time.Duration
}

// An Allocator allocates pinned memory of a pool, by the interface of arrow-go's
// memory.Allocator. Its methods may be called from any goroutine.
//
// The interface has no errors, and arrow-go's own allocators panic, or end the process,
// when there is no memory. An Allocator takes memory of the Go heap instead if the pool
// has none: because a limit was reached for Options.Wait, or the pool is closed. That
// memory is not pinned, so copies of it are slower, and must not be asynchronous ones of
// package cudart. [Allocator.Stats] counts it, and [Allocator.Err] returns the reason. If
// the Go heap cannot grow either, the process ends, as any Go program does.
type Allocator struct {
	pool *pool.Pool
	o    Options

	mu     sync.Mutex
	blocks map[*byte]block // by the first byte
	stats  Stats
	err    error
}

// A block is memory that was allocated and not freed.
type block struct {
	lease pool.Lease // unless heap is set
	heap  []byte     // from the Go heap
	n     int        // bytes that Arrow has of it
}

// bytes returns all of the memory, which may be more than n after it was made shorter.
func (b *block) bytes() []byte {
	if b.heap != nil {
		return b.heap
	}
	return b.lease.Bytes()
}

// New makes an allocator in a pool. It has nothing to close: the pool's Close reports
// memory that was not freed. A nil pool or stream is an error, and so is a negative Wait.
func New(p *pool.Pool, o Options) (*Allocator, error) {
	switch {
	case p == nil:
		return nil, errors.New("arrowmem: new: the pool is nil")
	case slices.Contains(o.Streams, nil):
		return nil, errors.New("arrowmem: new: Options.Streams: a stream is nil")
	case o.Wait < 0:
		return nil, fmt.Errorf("arrowmem: new: Options.Wait of %v: must not be negative", o.Wait)
	case o.Wait == 0:
		o.Wait = DefaultWait
	}
	o.Streams = slices.Clone(o.Streams)
	return &Allocator{pool: p, o: o, blocks: make(map[*byte]block)}, nil
}

const (
	// alignment is what Arrow requires, and what a pool has.
	alignment = 64
	// maxSize is more than any host has, and less than what make panics on.
	maxSize = 1 << 46
)

// Allocate returns size bytes, all 0, at a multiple of 64 bytes. For 0 bytes that is an
// empty slice, which need not be freed; for sizes below 0 and above 64 TiB it is nil, on
// which Arrow panics.
func (a *Allocator) Allocate(size int) []byte {
	switch {
	case size == 0:
		return []byte{}
	case size < 0 || size > maxSize:
		a.failed(fmt.Errorf("arrowmem: allocate %d bytes: no host has them", size))
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.o.Wait)
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
	if err != nil {
		a.err = fmt.Errorf("arrowmem: allocate %d bytes, which now are of the Go heap: %w", size, err)
		a.stats.Fallbacks++
	}
	a.blocks[unsafe.SliceData(mem)] = b
	a.count(&b, 1, size)
	return mem
}

// allocateHeap returns memory of the Go heap at a multiple of 64 bytes.
func allocateHeap(size int) []byte {
	mem := make([]byte, size+alignment-1)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % alignment
	return mem[skip:][:size:size]
}

// Reallocate returns size bytes that begin with those of mem, and are 0 after them. mem
// is freed, and must not be used any more, if the result is not nil. It is a slice of
// Allocate or Reallocate, or empty; the content of any other is copied, and the slice left
// alone. The rules of Allocate apply to size. Memory stays where it is if it is large
// enough, and not more than twice as large as needed.
func (a *Allocator) Reallocate(size int, mem []byte) []byte {
	if size == 0 {
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

// resize makes a block longer or shorter where it is. It returns nil if it cannot.
func (a *Allocator) resize(size int, mem []byte) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := unsafe.SliceData(mem)
	b, ok := a.blocks[at]
	all := b.bytes()
	if !ok || size < len(all)/2 || size > len(all) {
		return nil
	}
	clear(all[min(b.n, size):size])
	a.count(&b, 0, size-b.n)
	b.n = size
	a.blocks[at] = b
	return all[:size:size]
}

// Free ends the use of memory of Allocate or Reallocate: the pool reuses it when the
// streams of Options.Streams have passed what is queued there. Free does not wait. Empty
// slices without memory are ignored. Other memory, or memory that was freed before, is
// ignored too: Stats counts these calls.
func (a *Allocator) Free(mem []byte) {
	if cap(mem) == 0 {
		return
	}
	a.mu.Lock()
	at := unsafe.SliceData(mem)
	b, ok := a.blocks[at]
	if ok {
		delete(a.blocks, at)
		a.count(&b, -1, -b.n)
	} else {
		a.stats.Unknown++
		a.err = fmt.Errorf("arrowmem: free %d bytes at %p: not memory of this allocator, or freed before", len(mem), at)
	}
	a.mu.Unlock()
	if !ok || b.heap != nil {
		return
	}
	if err := b.lease.Release(a.o.Streams...); err != nil {
		a.failed(fmt.Errorf("arrowmem: free %d bytes: %w", len(mem), err))
	}
}

func (a *Allocator) failed(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

// Stats are what an allocator has allocated and not freed, and what it did so far.
type Stats struct {
	Allocations     int // not freed
	Bytes           int // of these, as requested
	PeakBytes       int // the most that Bytes ever was
	HeapAllocations int // of Allocations, in the Go heap
	HeapBytes       int // of these
	Fallbacks       int // allocations in the Go heap so far
	Unknown         int // calls of Free with memory that was not allocated, or was freed before
}

// Stats returns the present account. The pool's Stats have what the memory takes.
func (a *Allocator) Stats() Stats {
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

// Err returns the last problem, nil if there was none: why memory came from the Go heap,
// for example with an error that wraps [pool.ErrClosed], [pool.ErrTooLarge] or
// [context.DeadlineExceeded], or which call was ignored.
func (a *Allocator) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}
