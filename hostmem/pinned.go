package hostmem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/raw"
)

var (
	// ErrReadOnly is returned by copies into memory that the GPU may only read.
	ErrReadOnly = errors.New("registered read-only")

	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil")
	errNilStream  = errors.New("the stream is nil")
	errZero       = errors.New("the zero value (open it with Alloc, Register or MapFile)")
)

// checkArguments checks what every function that pins memory needs.
func checkArguments(ctx context.Context, dev *cudart.Device) error {
	switch {
	case ctx == nil:
		return errNilContext
	case dev == nil:
		return errNilDevice
	case raw.Closed(dev.Runtime()):
		return fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	}
	return nil
}

// A Buffer is pinned host memory of exactly the size requested, from [Alloc], [Register] or
// [MapFile]. Its methods may be called from any goroutine; the callers order what they do to its
// bytes.
//
//	state   entered by       | who has the memory       | Bytes, copies
//	opening open             | its goroutine            | –
//	open    open returns     | all calls                | the memory, queued
//	sealed  the first Close  | calls in progress and    | nil, cudart.ErrClosed
//	        or CloseContext  | the GPU, then one Close  |
//	closed  a release that   | nobody                   | nil, cudart.ErrClosed
//	        succeeded        |                          |
type Buffer struct {
	registrations
	region   *pages.Region
	pieces   atomic.Pointer[[]Span] // spans within which copies must be, sorted
	n        int                    // size in bytes as requested
	kind     string                 // "buffer", in messages
	label    string
	readOnly bool

	reservation *budget.Reservation
	entry       *holding // in the ledger
	cleanup     runtime.Cleanup
	background  *background // registers the memory, nil for memory that was registered when it was opened

	life  lifetime.Lifetime // counts copies that are being queued
	fence fence.Fence       // has the streams of these copies
}

// open opens memory: pin maps and pins it. After an error nothing is registered or
// mapped, unless the error says so. When ctx ends while a call into CUDA does not
// return, open does, and the memory is closed when the call returns.
func (m *Buffer) open(ctx context.Context, dev *cudart.Device, kind string, o Options, pin func() error) error {
	start := time.Now()
	err := checkArguments(ctx, dev)
	if err == nil {
		err = o.check()
	}
	if err == nil && ctx.Err() != nil {
		err = bounded.Ended(ctx)
	}
	if err == nil {
		m.dev, m.host, m.kind, m.label = dev, hosts.Of(dev), kind, o.Label
		stack := callerStack(dev)
		_, err = bounded.Do(ctx, bounded.Call[struct{}]{
			Run: func() (none struct{}, err error) {
				if err = m.host.query(ctx, dev); err == nil {
					err = pin()
				}
				if err != nil {
					return none, m.abort(ctx, err)
				}
				m.opened(start, stack)
				m.background.start()
				return none, nil
			},
			Late: func(_ struct{}, err error) {
				if err == nil {
					_ = m.Close() // what stays is in the ledger
				}
			},
		})
	}
	if err != nil {
		process.change(func(s *Stats) { s.Failures++ })
	}
	return err
}

// acquire waits for the limits. A second call is for other memory, which takes the place of
// the first.
func (m *Buffer) acquire(ctx context.Context, request budget.Request) (err error) {
	if m.reservation != nil {
		return m.reservation.Change(ctx, request)
	}
	m.reservation, err = limits.Acquire(ctx, request)
	return err
}

// pin makes a region resident and registers it, within the limits.
func (m *Buffer) pin(ctx context.Context, r *pages.Region, flags cudart.HostRegisterFlags, o Options) error {
	m.region, m.base, m.flags = r, unsafe.Pointer(unsafe.SliceData(r.Bytes())), flags
	m.readOnly = flags&cudart.HostRegisterReadOnly != 0
	m.limit = m.host.limit(pages.SystemOf(ctx).Kernel)
	if m.reservation == nil {
		err := m.acquire(ctx, budget.Request{
			Bytes: r.Mapped(), File: r.Backing() == pages.PageCache, Reserved: r.Backing() == pages.Reserved, InUse: r.InUse,
		})
		if err != nil {
			return err
		}
	}
	if m.background != nil {
		return nil
	}
	return m.populate(ctx, r, o)
}

// opened completes memory that is resident and pinned, and adds it to the ledger. start is
// when opening began; stack is the caller's, in debug mode.
func (m *Buffer) opened(start time.Time, stack string) {
	m.n = m.region.Len()
	if m.background == nil {
		m.reservation.MarkResident()
		m.publish()
	}
	h := Holding{Kind: m.kind, Label: m.label, Bytes: m.n, Stack: stack}
	if m.kind == "buffer" {
		h.Bytes = m.region.Mapped()
	}
	m.entry = process.add(m, h, time.Since(start))
	m.cleanup = runtime.AddCleanup(m, process.lose, m.entry)
}

// publish makes the registrations the spans of copies.
func (m *Buffer) publish() {
	pieces := make([]Span, 0, len(m.spans))
	for _, s := range m.spans {
		pieces = append(pieces, s.Span)
	}
	if len(pieces) == 0 {
		pieces = append(pieces, Span{Off: 0, Len: m.n}) // nothing was registered, and copies may run through
	}
	slices.SortFunc(pieces, func(a, b Span) int { return cmp.Compare(a.Off, b.Off) })
	m.pieces.Store(&pieces)
}

// abort undoes the steps of opening.
func (m *Buffer) abort(ctx context.Context, cause error) error {
	if err := m.undo(ctx); err != nil {
		return errors.Join(cause, err)
	}
	if m.reservation != nil {
		m.reservation.Release()
	}
	return cause
}

// undo unregisters and unmaps. Memory that stays registered stays mapped, because the
// GPU can still access it, and counts as pinned.
func (m *Buffer) undo(ctx context.Context) error {
	r := m.region
	if r == nil {
		return nil
	}
	m.region = nil
	err := lifetime.Undo(ctx, func(ctx context.Context) error { return m.unpin(ctx, r) })
	m.allocated = nil
	if err != nil {
		m.reservation = nil
		process.change(func(s *Stats) { s.LeakedBytes += r.Mapped() })
		return fmt.Errorf("%d bytes at %p could not be unregistered or unmapped, and stay mapped: %w", r.Mapped(), m.base, err)
	}
	return nil
}

// unpin unregisters and unmaps. It can be called again after an error.
func (m *Buffer) unpin(ctx context.Context, r *pages.Region) error {
	if err := m.release(ctx); err != nil {
		return err
	}
	return r.Unmap()
}

// explain adds the meaning of an error of cudaHostRegister here.
func explain(err error) error {
	switch {
	case errors.Is(err, cudart.ErrHostMemoryAlreadyRegistered):
		return fmt.Errorf("some of it is registered already, by Register, as a Buffer or by other code: %w", err)
	case errors.Is(err, syscall.ENOMEM):
		return fmt.Errorf("memory or address space is short (%s): %w", headroom(), err)
	case errors.Is(err, cudart.ErrInvalidValue):
		return fmt.Errorf("CUDA cannot pin such memory, or memory is short (%s): %w", headroom(), err)
	}
	return err
}

// mapped returns the region, for the zero value an empty one.
func (m *Buffer) mapped() *pages.Region {
	if m.region == nil {
		return new(pages.Region)
	}
	return m.region
}

// Len returns the size in bytes as requested. It stays the same after Close.
func (m *Buffer) Len() int { return m.n }

// Bytes returns the memory, Len bytes, and nil once Close was called. The slice must not be
// used after Close.
func (m *Buffer) Bytes() []byte {
	if m.life.Sealed() {
		return nil
	}
	return m.mapped().Bytes()
}

// Pointer returns the address of the first byte, nil once Close was called.
func (m *Buffer) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(m.Bytes())) }

// A Span is a range of a Buffer. A copy by other means than a Buffer's own must be within one span.
type Span struct {
	Off, Len int // bytes
}

// Spans yields the parts of n bytes at offset off that are within one registration each, in order.
// There is one, unless the memory is larger than one registration can be, or Options.Chunk has
// requested more. CopyToDevice and CopyFromDevice split copies in this way. Memory that is
// not registered (see [Method]) is one span. Bytes beyond the memory are in none, and bytes that are
// still to be registered in the background.
func (m *Buffer) Spans(off, n int) iter.Seq[Span] {
	return func(yield func(Span) bool) { yieldPieces(m.registered(), off, n, yield) }
}

// registered returns the spans within which copies must be, sorted.
func (m *Buffer) registered() []Span {
	if pieces := m.pieces.Load(); pieces != nil {
		return *pieces
	}
	return nil
}

// yieldPieces yields each part of [off, off+n) that is within one of spans, which are sorted and do
// not overlap.
func yieldPieces(spans []Span, off, n int, yield func(Span) bool) {
	if off < 0 || n < 0 {
		return
	}
	n = min(n, math.MaxInt-off)
	// The first span that ends after off, by binary search.
	first, _ := slices.BinarySearchFunc(spans, off, func(s Span, off int) int {
		return cmp.Compare(s.Off+s.Len, off+1)
	})
	for _, s := range spans[first:] {
		from, to := max(off, s.Off), min(off+n, s.Off+s.Len)
		if from >= to || !yield(Span{from, to - from}) {
			return
		}
	}
}

// Info describes how memory was pinned.
type Info struct {
	Method   Method // how the GPU was given access
	Reserved int    // bytes mapped, resident and pinned: of Alloc, Len rounded up to a page, and with HostAllocated up to Options.Align more
	ReadOnly bool   // the GPU may only read it

	// Notes lists requests that the host refused and that cost speed, such as huge pages or
	// registering, options that do not apply, and peculiarities of the device.
	Notes []string
	// Misplaced lists the reasons why pages may reside on another NUMA node than Options.Node: the
	// host refused to bind them (mbind), or they were found elsewhere (move_pages). Notes contains
	// these too.
	Misplaced []string
}

// Info returns how the memory was pinned. It stays the same after Close.
func (m *Buffer) Info() Info {
	r := m.mapped()
	return Info{Method: m.method(), Reserved: r.Mapped(), ReadOnly: m.readOnly, Notes: slices.Concat(m.allNotes(), r.Notes()), Misplaced: r.Misplaced()}
}

// String names the memory in messages.
func (m *Buffer) String() string {
	if m.label != "" {
		return fmt.Sprintf("%s %q of %d bytes", m.kind, m.label, m.n)
	}
	return fmt.Sprintf("%s of %d bytes", m.kind, m.n)
}

// CopyToDevice queues a copy of n bytes at offset off to dst in device memory
// (cudaMemcpyAsync, once for each span that it touches). The bytes must not change
// before the stream has passed the copy. n may be 0.
//
// The error reports a range outside the memory, a nil stream, [cudart.ErrClosed], or a failure of
// CUDA. After a failure of CUDA, part of the copy may be queued; Close waits for it.
func (m *Buffer) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return m.copy(s, "copy to device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyFromDevice queues a copy of n bytes at src in device memory to offset off (cudaMemcpyAsync,
// once for each span that it touches). Until the stream has passed the copy, the memory may contain
// old bytes: synchronise before reading. Errors are those of CopyToDevice, and [ErrReadOnly] if the
// memory was registered read-only.
func (m *Buffer) CopyFromDevice(s *cudart.Stream, src cudart.DevPtr, off, n int) error {
	if m.readOnly {
		return fmt.Errorf("hostmem: copy from device: %v: %w", m, ErrReadOnly)
	}
	return m.copy(s, "copy from device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToHost(at, src+cudart.DevPtr(skip), n)
	})
}

// Use calls queue, which queues work on s that accesses the memory, such as a kernel. Close waits
// for queue, and then for the stream. Set write if the work writes to the memory. Errors are those
// of CopyFromDevice and of queue.
func (m *Buffer) Use(s *cudart.Stream, write bool, queue func() error) error {
	if write && m.readOnly {
		return fmt.Errorf("hostmem: use: %v: %w", m, ErrReadOnly)
	}
	return m.use(s, "use", 0, m.n, queue)
}

// copy has one called with each part of [off, off+n) that is within one span, while Close
// waits, and remembers the stream.
func (m *Buffer) copy(s *cudart.Stream, what string, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if m.region != nil && (off < 0 || n < 0 || off > m.n-n) {
		return fmt.Errorf("hostmem: %s: %d bytes at offset %d are not all within %v", what, n, off, m)
	}
	return m.use(s, what, off, n, func() error {
		for p := range m.Spans(off, n) {
			if err := one(unsafe.Add(m.base, p.Off), p.Off-off, p.Len); err != nil {
				return err
			}
		}
		return nil
	})
}

// use calls queue, for work that accesses n bytes at off, while Close waits, and remembers the stream.
func (m *Buffer) use(s *cudart.Stream, what string, off, n int, queue func() error) error {
	var err error
	switch {
	case m.region == nil:
		return fmt.Errorf("hostmem: %s: %w", what, errZero)
	case s == nil:
		err = errNilStream
	case !m.life.Begin():
		err = cudart.ErrClosed
	default:
		if err = m.background.await(context.Background(), off, n); err == nil {
			err = queue()
			m.fence.Add(s) // after an error of CUDA, too: a part may be queued
		}
		m.life.End()
	}
	if err != nil {
		return fmt.Errorf("hostmem: %s: %v: %w", what, m, err)
	}
	return nil
}

// Close waits for copies that the Buffer's methods queued, unregisters the memory
// (cudaHostUnregister), and unmaps or frees it (munmap, cudaFreeHost); memory of [Register] stays
// mapped. After the first call of Close, copies return [cudart.ErrClosed]. A second Close does
// nothing.
//
// After an error Close may be called again: the memory stays registered and mapped, and
// counts as pinned, because the copies may not be done or unregistering has failed.
func (m *Buffer) Close() error { return m.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting when ctx ends: the error wraps ctx's. It returns about a
// second later even if a call into CUDA does not return: the call completes in the background, and
// other Closes wait for it.
func (m *Buffer) CloseContext(ctx context.Context) error {
	err := errNilContext
	if m.region == nil {
		return fmt.Errorf("hostmem: close: %w", errZero)
	}
	if ctx != nil {
		m.life.Seal()
		m.background.stop()
		process.closing(m.entry)
		err = m.life.Close(ctx, m.close)
	}
	if err != nil {
		return fmt.Errorf("hostmem: close %v: %w", m, err)
	}
	return nil
}

// close waits for the GPU, and releases the memory.
func (m *Buffer) close(ctx context.Context) error {
	start := time.Now()
	state := "copies may be in progress"
	err := m.fence.Wait(ctx)
	if err == nil {
		state = "registering it in the background has not ended"
		err = m.background.wait(ctx)
	}
	if err == nil {
		state = "Close may be tried again"
		err = m.unpin(ctx, m.region)
	}
	if err != nil {
		if ctx.Err() == nil {
			process.change(func(s *Stats) { s.Failures++ })
		}
		return fmt.Errorf("its memory stays registered and mapped, %s: %w", state, err)
	}
	m.cleanup.Stop()
	process.remove(m.entry, time.Since(start))
	m.reservation.Release()
	return nil
}
