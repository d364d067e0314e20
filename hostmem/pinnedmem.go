package hostmem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrClosed is returned by methods of a buffer, registration or file that
	// was closed. errors.Is reports that it is [os.ErrClosed].
	ErrClosed = sentinel.New("already closed", os.ErrClosed)

	// ErrReadOnly is returned by copies into memory that the GPU may only read.
	ErrReadOnly = errors.New("registered read-only")

	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil")
	errNilStream  = errors.New("the stream is nil")
)

// checkArguments checks what every function that pins memory needs.
func checkArguments(ctx context.Context, dev *cudart.Device) error {
	switch {
	case ctx == nil:
		return errNilContext
	case dev == nil:
		return errNilDevice
	case dev.Runtime().Closed():
		return fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	}
	return nil
}

// pinnedMem is what a buffer, a registration and a mapped file have in common:
// pinned memory that copies use until it is closed. Mapping and unmapping it is
// theirs.
type pinnedMem struct {
	dev      *cudart.Device
	region   *pages.Region
	regs     *registrations
	spans    []Span // sorted
	n        int    // bytes that copies may touch
	kind     string // "buffer", in messages
	label    string
	readOnly bool
	notes    []string

	grant   *budget.Grant
	entry   entry // in the ledger
	cleanup runtime.Cleanup

	use     usage         // by copies that are being queued
	fence   fence.Fence   // of the copies that were queued here
	closing chan struct{} // holds the turn of the Close at work
	gone    bool          // unregistered and unmapped; belongs to the one with the turn
}

// pin makes a region resident and registers it, within the limits. After an error
// it is neither registered nor mapped, unless the error says so.
func (m *pinnedMem) pin(ctx context.Context, dev *cudart.Device, r *pages.Region, kind string, flags cudart.HostRegisterFlags, o Options) error {
	h, err := hostOf(dev)
	if err == nil {
		err = m.acquire(ctx, needOf(r))
	}
	if err != nil {
		return errors.Join(err, r.Unmap())
	}
	if err := m.register(ctx, h, dev, r, flags, o); err != nil {
		return m.abort(explain(err))
	}
	m.opened(kind, o)
	return nil
}

// needOf returns what a region that is not pinned takes of the limits.
func needOf(r *pages.Region) budget.Need {
	return budget.Need{
		Bytes: r.Mapped(), File: r.Backing() == pages.PageCache, Reserved: r.Backing() == pages.Reserved, InUse: r.InUse,
	}
}

// acquire waits for the limits. Address space costs nothing; what follows does.
func (m *pinnedMem) acquire(ctx context.Context, need budget.Need) (err error) {
	m.grant, err = limits.Acquire(ctx, need)
	return err
}

func (m *pinnedMem) register(ctx context.Context, h *host, dev *cudart.Device, r *pages.Region, flags cudart.HostRegisterFlags, o Options) error {
	m.dev, m.region = dev, r
	m.readOnly = flags&cudart.HostRegisterReadOnly != 0
	m.regs = &registrations{dev: dev, host: h, base: r.Pointer(), flags: flags, limit: h.limit(pages.SystemOf(ctx).Kernel)}
	return m.regs.populate(ctx, r, o)
}

// opened completes memory that is resident and pinned.
func (m *pinnedMem) opened(kind string, o Options) {
	m.grant.Resident()
	m.n, m.kind, m.label = m.region.Len(), kind, o.Label
	m.notes = append(m.notes, m.regs.notes...)
	if m.spans = m.regs.sorted(); len(m.spans) == 0 {
		m.spans = []Span{{Off: 0, Len: m.n}} // nothing was registered, and copies may run through
	}
	m.closing = make(chan struct{}, 1)
	m.use.init()
}

// abort undoes what opening has done until then.
func (m *pinnedMem) abort(cause error) error {
	if err := m.undo(); err != nil {
		return errors.Join(cause, err)
	}
	if m.grant != nil {
		m.grant.Release()
	}
	return cause
}

// undo unregisters and unmaps. Memory that stays registered stays mapped, because the
// GPU can still access it.
func (m *pinnedMem) undo() error {
	if m.regs == nil {
		return nil
	}
	if err := twice(m.regs.release); err != nil {
		process.leaked.Add(int64(m.region.Mapped()))
		return fmt.Errorf("%d bytes at %p could not be unregistered and stay mapped: %w", m.region.Mapped(), m.regs.base, err)
	}
	if err := twice(m.region.Unmap); err != nil {
		process.leaked.Add(int64(m.region.Mapped()))
		return err
	}
	return nil
}

// twice tries again what no caller can: see unregister.
func twice(try func() error) error {
	if try() == nil {
		return nil
	}
	return try()
}

// explain adds what a refusal of cudaHostRegister means here.
func explain(err error) error {
	switch {
	case errors.Is(err, cudart.ErrHostMemoryAlreadyRegistered):
		return fmt.Errorf("some of it is registered already, by Register, as a Buffer or by other code: %w", err)
	case errors.Is(err, cudart.ErrInvalidValue):
		return fmt.Errorf("CUDA cannot pin such memory, or memory is short (%s): %w", headroom(), err)
	}
	return err
}

// Len returns the bytes requested.
func (m *pinnedMem) Len() int { return m.n }

// Bytes returns the memory, exactly as long as requested, and nil after Close. The
// slice must not be used after Close.
func (m *pinnedMem) Bytes() []byte { return m.region.Bytes() }

// Pointer returns the address of the first byte, nil after Close.
func (m *pinnedMem) Pointer() unsafe.Pointer {
	if m.use.closed() {
		return nil
	}
	return m.regs.base
}

// Device returns the device on which the memory was registered.
func (m *pinnedMem) Device() *cudart.Device { return m.dev }

// Label returns the Label of the options.
func (m *pinnedMem) Label() string { return m.label }

// Spans returns the registrations in order. There is one, unless the memory is
// larger than what can be registered at once or the Chunk of the options asked
// for more. CopyToDevice and CopyToHost split copies at their ends. Memory that is not
// registered (see [Method]) is one span.
func (m *pinnedMem) Spans() []Span { return slices.Clone(m.spans) }

// Notes returns, in words, what the host refused and costs speed, such as huge
// pages or registering, options that do not apply, and what the device does
// differently.
func (m *pinnedMem) Notes() []string { return slices.Concat(m.notes, m.region.Notes()) }

// Misplaced returns, in words, why pages may lie on another NUMA node than Options.Node chose:
// the host refused to bind them (mbind), or they were found elsewhere. It is nil if nothing
// of that kind was seen. Notes has the same, beside others.
func (m *pinnedMem) Misplaced() []string { return m.region.Misplaced() }

// String names the memory in messages.
func (m *pinnedMem) String() string {
	if m.label != "" {
		return fmt.Sprintf("%s %q of %d bytes", m.kind, m.label, m.n)
	}
	return fmt.Sprintf("%s of %d bytes", m.kind, m.n)
}

// CopyToDevice queues a copy of n bytes at offset off to the device
// (cudaMemcpyAsync, once for each span that it touches). The bytes must not change
// before the stream has passed the copy. n may be 0.
//
// Errors are of a range that is not within the memory, a nil stream, [ErrClosed],
// and CUDA's; after one of CUDA's a part of the copy may be queued, for which Close
// waits.
func (m *pinnedMem) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return m.copy(s, "to device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyToHost queues a copy of n bytes from the device to offset off
// (cudaMemcpyAsync, once for each span that it touches). Until the stream has
// passed the copy the memory holds old bytes, or some of each: synchronise before
// reading. Errors are those of CopyToDevice, and [ErrReadOnly] for memory that was
// registered read-only.
func (m *pinnedMem) CopyToHost(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	if m.readOnly {
		return fmt.Errorf("hostmem: copy to host: %v: %w", m, ErrReadOnly)
	}
	return m.copy(s, "to host", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToHost(at, src+cudart.DevPtr(skip), n)
	})
}

func (m *pinnedMem) copy(s *cudart.Stream, what string, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if off < 0 || n < 0 || off > m.n-n {
		return fmt.Errorf("hostmem: copy %s: %d bytes at offset %d are not all within %v", what, n, off, m)
	}
	if err := m.queue(s, off, n, one); err != nil {
		return fmt.Errorf("hostmem: copy %s: %v: %w", what, m, err)
	}
	return nil
}

func (m *pinnedMem) queue(s *cudart.Stream, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if s == nil {
		return errNilStream
	}
	if !m.use.begin() {
		return ErrClosed
	}
	defer m.use.end()
	defer m.fence.Add(s) // when they are queued, the part of them that could be
	base := m.regs.base
	if len(m.spans) == 1 {
		return one(unsafe.Add(base, off), 0, n)
	}
	return Pieces(m.spans, off, n, func(at, n int) error {
		return one(unsafe.Add(base, at), at-off, n)
	})
}

// register adds what was pinned just now, since start, to the ledger. t counts
// memory of its kind, and stack is the caller's, in debug mode.
func (m *pinnedMem) addToLedger(t *tally, bytes int, start time.Time, stack string) {
	m.entry = process.add(t, Holding{Kind: m.kind, Label: m.label, Bytes: bytes, Stack: stack}, m.n, time.Since(start))
	index.insert(m)
	m.cleanup = runtime.AddCleanup(m, process.lose, lost{entry: m.entry, start: uintptr(m.regs.base)})
}

// Close waits for the copies that were queued by the methods here, unregisters the
// memory (cudaHostUnregister) and unmaps what this package has mapped, or frees it
// (cudaFreeHost): memory of [Register] stays mapped. A second Close does nothing.
//
// After an error Close may be called again. If it cannot be known whether the copies
// are done, the memory is as it was. If unregistering or unmapping failed, it cannot
// be used any more, stays mapped and counts as pinned.
func (m *pinnedMem) Close() error { return m.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting when ctx ends: the memory is then as it
// was, and the error wraps ctx's.
func (m *pinnedMem) CloseContext(ctx context.Context) error {
	if err := m.close(ctx); err != nil {
		return fmt.Errorf("hostmem: close %v: %w", m, err)
	}
	return nil
}

func (m *pinnedMem) close(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	start := time.Now()
	// Of several Closes one works, and the others wait for it.
	select {
	case m.closing <- struct{}{}:
	default:
		select {
		case m.closing <- struct{}{}:
		case <-ctx.Done():
			return fmt.Errorf("another Close is in progress: %w", ctx.Err())
		}
	}
	defer func() { <-m.closing }()
	if m.gone {
		return nil
	}
	if err := m.quiesce(ctx); err != nil {
		if ctx.Err() == nil {
			process.failures.Add(1)
		}
		return fmt.Errorf("its memory stays registered and mapped, copies may be in progress: %w", err)
	}
	if err := m.regs.release(); err != nil {
		process.failures.Add(1)
		return fmt.Errorf("its memory stays registered and mapped, Close may be tried again: %w", err)
	}
	if err := m.region.Unmap(); err != nil {
		process.failures.Add(1)
		return err
	}
	m.gone = true
	m.cleanup.Stop()
	process.remove(m.entry, time.Since(start))
	m.grant.Release()
	return nil
}

// quiesce waits until no copy is being queued and the GPU is done with those that
// were, and refuses copies from then on. Meanwhile others may go on copying.
func (m *pinnedMem) quiesce(ctx context.Context) error {
	for !m.use.closed() {
		if err := m.fence.Wait(ctx); err != nil {
			return err
		}
		seen, err := m.use.wait(ctx)
		if err != nil {
			return err
		}
		if m.fence.Empty() && m.use.close(seen) {
			index.remove(uintptr(m.regs.base), m.entry.id)
		}
	}
	return nil
}
