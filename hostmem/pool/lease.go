package pool

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	errReleased  = sentinel.New("lease already released", cudart.ErrClosed)
	errNoLease   = errors.New("the zero Lease")
	errNilStream = errors.New("the stream is nil")
)

// A Lease is pinned memory of a [Pool], in use until Release. The memory has the bytes of
// earlier leases at first. Blocks are aligned to 64 bytes, those of 32 KiB and more to 4 KiB.
//
// A Lease is a value and no pointer, because a Get that finds a block does not allocate.
// Copies of it are the same lease: when one is released, all are. The zero Lease has no
// memory, and its methods return errors.
//
// Its methods may be called from any goroutine.
type Lease struct {
	b          *block
	generation uint32
	n          int
	token      *leaseToken // in debug mode
}

// Len returns the size in bytes as requested. It stays the same after Release.
func (l Lease) Len() int { return l.n }

// Bytes returns the memory, exactly as long as requested, and nil after
// Release. The slice must not be used after Release: the memory is another
// lease's then.
func (l Lease) Bytes() []byte {
	if !l.open() {
		return nil
	}
	return unsafe.Slice((*byte)(l.b.base), l.n)
}

// Pointer returns the address of the first byte, nil after Release.
func (l Lease) Pointer() unsafe.Pointer {
	if !l.open() {
		return nil
	}
	return l.b.base
}

func (l Lease) open() bool { return l.b != nil && l.b.users.Open(l.generation) }

// CopyToDevice queues a copy of n bytes at offset off to dst in device memory
// (cudaMemcpyAsync). The bytes must not change before the stream has passed
// the copy. The lease may be released at once. n may be 0.
//
// The error reports a range outside the lease, a nil stream, [cudart.ErrClosed], or a failure of
// CUDA.
func (l Lease) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return l.copy("to device", s, off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyFromDevice queues a copy of n bytes at src in device memory to offset off (cudaMemcpyAsync).
// Until the stream has passed the copy, the memory may contain old bytes: synchronise before
// reading. Errors are those of CopyToDevice.
func (l Lease) CopyFromDevice(s *cudart.Stream, src cudart.DevPtr, off, n int) error {
	return l.copy("from device", s, off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToHost(at, src+cudart.DevPtr(skip), n)
	})
}

func (l Lease) copy(what string, s *cudart.Stream, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	var err error
	switch {
	case l.b == nil:
		err = errNoLease
	case s == nil:
		err = errNilStream
	case off < 0 || n < 0 || off > l.n-n:
		err = fmt.Errorf("%d bytes at offset %d are not all within it", n, off)
	case !l.b.users.Begin(l.generation):
		err = errReleased
	default:
		err = l.b.copy(off, n, one)
		l.b.Fence.Add(s) // when they are queued, the part of them that could be
		l.end()
	}
	if err != nil {
		return fmt.Errorf("pool: copy %s: %v: %w", what, l, err)
	}
	return nil
}

// end ends a call that uses the block.
func (l Lease) end() {
	if l.b.users.End() {
		l.b.users.Renew()
		l.b.pool.put(l.b)
	}
}

// Release returns the memory to its pool. It does not block. The pool reuses the memory when the
// GPU has done the work of the lease's own copies, and all work that was queued so far on the given
// streams (cudaEventRecord on each). So pass only streams on which work was queued by other means.
// They may belong to any device.
//
// A second Release returns [cudart.ErrClosed]. A nil stream is an error, and the lease stays valid:
// release it again. If another goroutine is queueing a copy of the lease, or its call blocks in
// CUDA, the memory returns to the pool when the call ends. Memory of a closed pool is unmapped in
// the background; if that fails, the next Close returns the error.
func (l Lease) Release(streams ...*cudart.Stream) error {
	err := l.release(streams)
	if err != nil {
		return fmt.Errorf("pool: release: %v: %w", l, err)
	}
	return nil
}

func (l Lease) release(streams []*cudart.Stream) error {
	if l.b == nil {
		return errNoLease
	}
	for _, s := range streams {
		if s == nil {
			return errNilStream
		}
	}
	if slices.ContainsFunc(streams, fence.Busy) {
		if !l.b.users.Begin(l.generation) {
			return errReleased
		}
		defer l.end()
		for _, s := range streams {
			l.b.Fence.Add(s)
		}
	}
	if l.token != nil && l.open() {
		l.b.trace.Store(nil)
	}
	retired, idle := l.b.users.RetireAndRenew(l.generation)
	if !retired {
		return errReleased
	}
	if idle {
		l.b.pool.put(l.b)
	}
	return nil
}

// String names the lease in messages.
func (l Lease) String() string {
	if l.b == nil {
		return "no lease"
	}
	return fmt.Sprintf("lease of %d bytes from %v", l.n, l.b.pool)
}

// A leaseToken is reachable as long as a handle of a lease is, in debug mode.
type leaseToken struct{ of *block }

// A leaseTrace records where a lease was made, in debug mode.
type leaseTrace struct {
	since time.Time
	stack string
	lost  atomic.Bool
}

// watch records where a lease is made, and when it is lost.
func (l *Lease) watch() {
	trace := &leaseTrace{since: time.Now(), stack: string(debug.Stack())}
	l.b.trace.Store(trace)
	l.token = &leaseToken{of: l.b}
	runtime.AddCleanup(l.token, func(lost Lease) {
		if lost.open() {
			trace.lost.Store(true)
			lost.b.pool.lost.Add(1)
		}
	}, Lease{b: l.b, generation: l.generation})
}
