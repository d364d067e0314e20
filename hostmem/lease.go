package hostmem

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

var (
	// ErrReleased is returned by methods of a lease that was released.
	ErrReleased = errors.New("hostmem: lease already released")

	errNoLease  = errors.New("hostmem: not a lease: the zero Lease")
	errNoStream = errors.New("hostmem: the stream is nil")
)

// A Lease is pinned memory lent by a [Pool], until Release. It is a handle:
// copies of it are the same lease, and none of them can reach the memory once
// one was released. What the memory holds at first is left from others.
//
// Blocks are aligned to 64 bytes, those of 32 KiB and more to 4 KiB.
//
// Its methods may be called from any goroutine.
type Lease struct {
	b     *block
	gen   uint64
	n     int
	token *leaseToken // in debug mode
}

// Len returns the bytes asked for.
func (l Lease) Len() int { return l.n }

// Bytes returns the memory, exactly as long as asked for, and nil after
// Release. The slice must not be used after Release: the memory is lent to
// others then.
func (l Lease) Bytes() []byte {
	if l.b == nil || !l.b.is(l.gen) {
		return nil
	}
	return unsafe.Slice((*byte)(l.b.base), l.n)
}

// Pointer returns the address of the first byte, nil after Release.
func (l Lease) Pointer() unsafe.Pointer {
	if l.b == nil || !l.b.is(l.gen) {
		return nil
	}
	return l.b.base
}

// CopyToDevice queues a copy of n bytes at offset off to the device
// (cudaMemcpyAsync). The bytes must not change before the stream has passed
// the copy. The lease may be released at once: it remembers the stream.
func (l Lease) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return l.copy("to device", s, off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyFromDevice queues a copy of n bytes from the device to offset off
// (cudaMemcpyAsync). Until the stream has passed the copy the memory holds old
// bytes, or some of each: synchronise before reading. The lease remembers the
// stream.
func (l Lease) CopyFromDevice(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return l.copy("from device", s, off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToHost(at, src+cudart.DevPtr(skip), n)
	})
}

func (l Lease) copy(what string, s *cudart.Stream, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if err := l.start(what, s, off, n); err != nil {
		return err
	}
	defer l.b.leave()
	var err error
	if l.b.spans == nil {
		err = one(unsafe.Add(l.b.base, off), 0, n)
	} else {
		err = pieces(l.b.spans, off, n, func(at, n int) error {
			return one(unsafe.Add(l.b.base, at), at-off, n)
		})
	}
	if err != nil {
		return fmt.Errorf("hostmem: copy %s: %v: %w", what, l, err)
	}
	return nil
}

// start checks a copy, keeps the lease from ending until leave, and remembers
// the stream.
func (l Lease) start(what string, s *cudart.Stream, off, n int) error {
	switch {
	case l.b == nil:
		return fmt.Errorf("copy %s: %w", what, errNoLease)
	case s == nil:
		return fmt.Errorf("copy %s: %w", what, errNoStream)
	case off < 0 || n < 0 || off > l.n-n:
		return fmt.Errorf("hostmem: copy %s: bytes %d to %d are not all within %v", what, off, off+n, l)
	case !l.b.enter(l.gen):
		return fmt.Errorf("copy %s: %v: %w", what, l, ErrReleased)
	}
	l.b.used.add(s)
	return nil
}

// Release gives the memory back to its pool. Work that the lease's own copies
// queued, and all that was queued so far on the streams given, keeps it from
// being lent again until the device has done it (cudaEventRecord on each). So
// streams need to be given only for work that was queued by other means. They
// may be of any device.
//
// A second Release gives [ErrReleased]. Any other error leaves the lease
// released, and its memory unused until it is safe.
//
// After the pool's Close, Release frees the memory and waits for its work to
// do so.
func (l Lease) Release(streams ...*cudart.Stream) error {
	if l.b == nil {
		return fmt.Errorf("release: %w", errNoLease)
	}
	for _, s := range streams {
		if s == nil {
			return fmt.Errorf("release: %v: %w", l, errNoStream)
		}
	}
	if !l.b.retire(l.gen) {
		return fmt.Errorf("release: %v: %w", l, ErrReleased)
	}
	b, p := l.b, l.b.pool
	if l.token != nil {
		b.trace.Store(nil)
	}
	if len(streams) == 0 && b.used.empty() {
		return p.put(b, l.n)
	}
	return p.putMarked(b, l.n, b.record(streams))
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

// A leaseTrace tells of a lease, in debug mode.
type leaseTrace struct {
	since time.Time
	stack string
	lost  atomic.Bool
}

// watch makes a lease tell where it was made, and when it is lost.
func (l *Lease) watch() {
	trace := &leaseTrace{since: time.Now(), stack: string(debug.Stack())}
	l.b.trace.Store(trace)
	l.token = &leaseToken{of: l.b}
	runtime.AddCleanup(l.token, func(lost Lease) {
		if lost.b.is(lost.gen) {
			trace.lost.Store(true)
			lost.b.pool.lost.Add(1)
		}
	}, Lease{b: l.b, gen: l.gen})
}
