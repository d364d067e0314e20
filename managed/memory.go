package managed

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/lifetime"
)

// Memory is managed memory of an [Allocator], exactly as long as requested. Its methods may
// be called from any goroutine; the callers order what they do to its bytes.
type Memory struct {
	a      *Allocator
	p      unsafe.Pointer
	n      int
	label  string
	onHost bool    // beyond the card: see Options.Oversubscribe
	counts *counts // guarded by a.mu
	used   uint64  // number of the last Alloc or Prefetch to a device, guarded by a.mu

	prev, next *Memory // in a.live, guarded by a.mu

	life lifetime.Lifetime
}

// A memoryList is memory that is open, linked, which costs less than a map.
type memoryList struct{ first *Memory }

func (l *memoryList) add(m *Memory) {
	m.next = l.first
	if m.next != nil {
		m.next.prev = m
	}
	l.first = m
}

func (l *memoryList) remove(m *Memory) {
	if m.prev != nil {
		m.prev.next = m.next
	} else {
		l.first = m.next
	}
	if m.next != nil {
		m.next.prev = m.prev
	}
	m.prev, m.next = nil, nil
}

// Len returns the bytes requested.
func (m *Memory) Len() int { return m.n }

// Label returns the label under which the bytes are counted.
func (m *Memory) Label() string { return m.label }

// OnHost reports that the card had no room for the memory when it was allocated, so that
// it stays on the host until it is prefetched: see Options.Oversubscribe.
func (m *Memory) OnHost() bool { return m.onHost }

// Bytes returns the CPU's view, nil after Close. When the CPU may access it says
// "Coherence" in the package's documentation. The slice must not be used after Close: the
// process crashes.
func (m *Memory) Bytes() []byte {
	if m.life.Sealed() {
		return nil
	}
	return unsafe.Slice((*byte)(m.p), m.n)
}

// HostBytes returns the CPU's view when the CPU may access it: at once where CPU and GPU
// may do so at the same time, else when all work of the device is done
// ([cudart.Device.Synchronize]); nothing may be queued there until the access is over. It
// waits for no results: synchronise the stream that writes the memory. Errors are
// [ErrClosed], ctx's, if that ends first, and those of CUDA.
func (m *Memory) HostBytes(ctx context.Context) ([]byte, error) {
	var b []byte
	err := m.with("host view", func() error {
		if ctx == nil {
			return errNilContext
		}
		b = unsafe.Slice((*byte)(m.p), m.n)
		if m.a.concurrent {
			return ctx.Err()
		}
		return m.a.dev.Synchronize(ctx)
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Pointer returns the address of the first byte for the CPU, nil after Close.
func (m *Memory) Pointer() unsafe.Pointer {
	if m.life.Sealed() {
		return nil
	}
	return m.p
}

// DevPtr returns the address of the first byte for devices, 0 after Close. It is the same
// as the CPU's.
func (m *Memory) DevPtr() cudart.DevPtr {
	if m.life.Sealed() {
		return 0
	}
	return m.ptr()
}

func (m *Memory) ptr() cudart.DevPtr { return cudart.DevPtr(uintptr(m.p)) }

// String names the memory in messages.
func (m *Memory) String() string {
	return fmt.Sprintf("%d bytes of managed memory (%q) of %v", m.n, m.label, m.a.dev)
}

// with makes a call that uses the memory, which is not freed meanwhile. what names it.
func (m *Memory) with(what string, call func() error) error {
	err := ErrClosed
	if m.life.Begin() {
		err = call()
		m.life.End()
	}
	if err != nil {
		return fmt.Errorf("managed: %s: %v: %w", what, m, err)
	}
	return nil
}

// Close waits for the device's work and frees the memory (cudaFree). Methods that run on
// other goroutines end first, all others return [ErrClosed]. After an error the memory
// stays allocated, and Close may be called again; once it has returned nil it does
// nothing. Do not call it from within a function that a method of the memory calls.
func (m *Memory) Close() error {
	err := m.life.Close(context.Background(), func(context.Context) error {
		if err := m.a.dev.Free(m.ptr()); err != nil {
			return err
		}
		m.a.freed(m)
		return nil
	})
	if err != nil {
		return fmt.Errorf("managed: close: %v: %w", m, err)
	}
	return nil
}
