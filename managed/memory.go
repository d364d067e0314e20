package managed

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/lifetime"
)

// Memory is managed memory of an [Allocator], with the requested size. Any goroutine may call its
// methods. The callers must order accesses to its bytes.
type Memory struct {
	a      *Allocator
	p      unsafe.Pointer
	n      int
	label  string
	onHost bool // beyond the capacity of the device memory: see Options.Oversubscribe
	life   lifetime.Lifetime

	// Guarded by ledger.mu.
	counts *Counts
	used   uint64 // ledger.uses at its Alloc, or its last prefetch to a device
}

// made reports whether an Allocator has made the memory.
func (m *Memory) made() bool { return m != nil && m.a != nil }

// Len returns the size in bytes.
func (m *Memory) Len() int {
	if !m.made() {
		return 0
	}
	return m.n
}

// OnHost reports whether the device memory had no capacity for the memory when it was allocated, so
// that it stays on the host until it is prefetched: see Options.Oversubscribe.
func (m *Memory) OnHost() bool { return m.made() && m.onHost }

// Bytes returns the bytes for the CPU, and nil after Close. "Coherence" in the package's
// documentation defines when the CPU may access them. The slice must not be used after Close: the
// process crashes.
func (m *Memory) Bytes() []byte {
	if !m.made() || m.life.Sealed() {
		return nil
	}
	return unsafe.Slice((*byte)(m.p), m.n)
}

// HostBytes returns the bytes when the CPU may access them: at once if CPU and GPU may do so at the
// same time, otherwise when all work of the device is complete ([cudart.Device.Synchronize]). In
// that case no work may be queued on the device until the access is over. It does not wait for
// results: synchronise the stream that writes the memory. Errors are [cudart.ErrClosed], ctx's error and
// cause if ctx ends first, and those of CUDA.
func (m *Memory) HostBytes(ctx context.Context) ([]byte, error) {
	err := m.with(ctx, "host view", func() error {
		if m.a.concurrent {
			return nil
		}
		return m.a.dev.Synchronize(ctx)
	})
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(m.p), m.n), nil
}

// Ptr returns the device address of the first byte, which is its address on the CPU, too. It
// returns 0 after Close.
func (m *Memory) Ptr() cudart.DevPtr {
	if !m.made() || m.life.Sealed() {
		return 0
	}
	return m.ptr()
}

func (m *Memory) ptr() cudart.DevPtr { return cudart.DevPtr(uintptr(m.p)) }

// String names the memory in messages.
func (m *Memory) String() string {
	if !m.made() {
		return "no managed memory"
	}
	return fmt.Sprintf("%d bytes of managed memory (%q) of %v", m.n, m.label, m.a.dev)
}

// with makes a call that uses the memory, which is not freed before the call returns: with may
// return earlier, some time after the end of ctx. what names the call.
func (m *Memory) with(ctx context.Context, what string, call func() error) error {
	err := errNotMade
	if m.made() {
		err = runBounded(ctx, func() error {
			if !m.life.Begin() {
				return cudart.ErrClosed
			}
			defer m.life.End()
			return call()
		})
	}
	if err != nil {
		return fmt.Errorf("managed: %s: %v: %w", what, m, err)
	}
	return nil
}

// Close is [Memory.CloseContext] without an end.
func (m *Memory) Close() error { return m.CloseContext(context.Background()) }

// CloseContext waits for the device's work and frees the memory (cudaFree). Methods that run
// on other goroutines end first, all others return [cudart.ErrClosed]. After an error, of CUDA or
// ctx's if that ends first, the memory stays allocated until a cudaFree in progress returns,
// and Close may be called again; once it has returned nil it does nothing. Do not call it from
// within a function that a method of the memory calls.
func (m *Memory) CloseContext(ctx context.Context) error {
	var err error
	switch {
	case !m.made():
		err = errNotMade
	case ctx == nil:
		err = errNilContext
	default:
		err = m.life.Close(ctx, func(ctx context.Context) error {
			err := m.free(ctx)
			if err == nil {
				m.a.remove(m)
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("managed: close: %v: %w", m, err)
	}
	return nil
}

func (m *Memory) free(ctx context.Context) error {
	return m.a.mem.calls.Inside(ctx, func() error { return m.a.dev.Free(m.ptr()) })
}
