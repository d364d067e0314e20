package hostmem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
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

// checkArguments refuses what every function here needs.
func checkArguments(ctx context.Context, dev *cudart.Device) error {
	switch {
	case ctx == nil:
		return errNilContext
	case dev == nil:
		return errNilDevice
	}
	return nil
}

// pinnedMem is what a buffer, a registration and a mapped file have in common:
// pinned memory that copies use until it is closed. Who mapped it, and who
// unmaps it, is theirs to know.
type pinnedMem struct {
	dev      *cudart.Device
	pinned   *pinning
	spans    []Span // sorted
	n        int    // bytes that copies may touch
	kind     string // "buffer", in messages
	label    string
	readOnly bool

	// How it is accounted for, from record to unrecord.
	grant   *budget.Grant
	tally   *tally
	held    int // bytes
	id      uint64
	cleanup runtime.Cleanup

	use    sync.RWMutex // copies are issued under it shared, close has it alone
	closed atomic.Bool  // to use; set under use
	gone   bool         // unregistered and unmapped
	fence  fence.Fence  // of the copies that were queued here
}

// pin makes a region resident and registers it, within the limits. After an
// error it is neither registered nor mapped.
func (m *pinnedMem) pin(ctx context.Context, dev *cudart.Device, r *pages.Region, kind string, flags cudart.HostRegisterFlags, o Options) error {
	// Address space costs nothing. What follows does, and is bounded.
	grant, err := limits.Acquire(ctx, r.Mapped(), kind == "file")
	if err != nil {
		return errors.Join(err, r.Unmap())
	}
	p := &pinning{dev: dev, base: r.Pointer(), flags: flags, limit: spanLimit(o.host().Kernel)}
	if err := p.populateAndPin(ctx, r, o); err != nil {
		return giveUp(p, r, grant, explain(err))
	}
	grant.Resident()
	m.grant = grant
	slices.SortFunc(p.spans, func(a, b Span) int { return a.Off - b.Off })
	m.dev, m.pinned, m.spans, m.n = dev, p, slices.Clone(p.spans), r.Len()
	m.kind, m.label, m.readOnly = kind, o.Label, flags&cudart.HostRegisterReadOnly != 0
	return nil
}

// giveUp undoes what an attempt that failed has done. Memory that is still
// registered must stay mapped: the GPU could still reach it.
func giveUp(p *pinning, r *pages.Region, grant *budget.Grant, cause error) error {
	if err := p.undo(); err != nil {
		account.strand(r.Mapped())
		return errors.Join(cause, fmt.Errorf("%d bytes at %p could not be unregistered and stay mapped: %w", r.Mapped(), p.base, err))
	}
	grant.Release()
	if err := r.Unmap(); err != nil {
		account.strand(r.Mapped())
		return errors.Join(cause, err)
	}
	return cause
}

// explain says what a refusal of cudaHostRegister means here.
func explain(err error) error {
	switch {
	case errors.Is(err, cudart.ErrHostMemoryAlreadyRegistered):
		return fmt.Errorf("some of it is registered already, by Register, as a Buffer or by other code: %w", err)
	case errors.Is(err, cudart.ErrNotSupported):
		return fmt.Errorf("registering is %w here (confidential computing refuses it, for one): %w", errors.ErrUnsupported, err)
	}
	return err
}

// Len returns the bytes asked for.
func (m *pinnedMem) Len() int { return m.n }

// Pointer returns the address of the first byte, nil after Close.
func (m *pinnedMem) Pointer() unsafe.Pointer {
	if m.closed.Load() {
		return nil
	}
	return m.pinned.base
}

// Device returns the device on which the memory was registered.
func (m *pinnedMem) Device() *cudart.Device { return m.dev }

// Label returns the Label of the options.
func (m *pinnedMem) Label() string { return m.label }

// Spans returns the registrations in order. There is one, unless the memory is
// larger than what can be registered at once or the Chunk of the options asked
// for more. CopyToDevice and CopyFromDevice take no notice of them.
func (m *pinnedMem) Spans() []Span { return slices.Clone(m.spans) }

// String names the memory in messages.
func (m *pinnedMem) String() string {
	if m.label != "" {
		return fmt.Sprintf("%s %q of %d bytes", m.kind, m.label, m.n)
	}
	return fmt.Sprintf("%s of %d bytes", m.kind, m.n)
}

// CopyToDevice queues a copy of n bytes at offset off to the device
// (cudaMemcpyAsync, once for each span that it touches). The bytes must not
// change before the stream has passed the copy.
func (m *pinnedMem) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return m.copy(s, "to device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyFromDevice queues a copy of n bytes from the device to offset off
// (cudaMemcpyAsync, once for each span that it touches). Until the stream has
// passed the copy the memory holds old bytes, or some of each: synchronise
// before reading. Memory that was registered read-only gives [ErrReadOnly].
func (m *pinnedMem) CopyFromDevice(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	if m.readOnly {
		return fmt.Errorf("hostmem: copy from device: %v: %w", m, ErrReadOnly)
	}
	return m.copy(s, "from device", off, n, func(at unsafe.Pointer, skip, n int) error {
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
	m.use.RLock()
	defer m.use.RUnlock()
	if m.closed.Load() {
		return ErrClosed
	}
	defer m.fence.Add(s) // when they are queued, the part of them that could be
	base := m.pinned.base
	if len(m.spans) == 1 {
		return one(unsafe.Add(base, off), 0, n)
	}
	return Pieces(m.spans, off, n, func(at, n int) error {
		return one(unsafe.Add(base, at), at-off, n)
	})
}

// enter puts on the books what was pinned just now, since start.
func (m *pinnedMem) enter(t *tally, held int, start time.Time) {
	m.tally, m.held = t, held
	t.add(1, held)
	m.id = holdings.add(Holding{Kind: m.kind, Label: m.label, Bytes: held}, m.dev.Runtime().Debug())
	account.open(time.Since(start))
	atlas.add(m)
	m.cleanup = runtime.AddCleanup(m, account.lose, lost{id: m.id, start: uintptr(m.pinned.base), bytes: held})
}

// leave takes it off them.
func (m *pinnedMem) leave(start time.Time) {
	m.cleanup.Stop()
	holdings.remove(m.id)
	m.tally.add(-1, -m.held)
	m.grant.Release()
	account.close(time.Since(start))
}

// close waits for the copies that were queued here, unregisters the memory,
// calls unmap and takes it off the books. A second close does nothing. When ctx
// ends before the copies have, or it cannot be learnt whether they have, the
// memory is as it was. When unregistering or unmapping fails, it can be used no
// more, stays on the books, and close may be tried again.
func (m *pinnedMem) close(ctx context.Context, unmap func() error) error {
	start := time.Now()
	// Others may go on copying, or give up closing, while this waits.
	for {
		if err := m.fence.Wait(ctx); err != nil {
			if ctx.Err() == nil {
				account.failures.Add(1)
			}
			return fmt.Errorf("hostmem: close %v: its memory stays registered and mapped, copies may be under way: %w", m, err)
		}
		m.use.Lock()
		if m.fence.Empty() {
			break
		}
		m.use.Unlock()
	}
	defer m.use.Unlock()
	if m.gone {
		return nil
	}
	if !m.closed.Swap(true) {
		atlas.remove(uintptr(m.pinned.base), m.id)
	}
	if err := m.pinned.undo(); err != nil {
		account.failures.Add(1)
		return fmt.Errorf("hostmem: close %v: its memory stays registered and mapped, Close may be tried again: %w", m, err)
	}
	if err := unmap(); err != nil {
		account.failures.Add(1)
		return fmt.Errorf("hostmem: close %v: %w", m, err)
	}
	m.gone = true
	m.leave(start)
	return nil
}
