package hostmem

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// A Buffer is pinned host memory of exactly the size requested. Its methods may be
// called from any goroutine; the callers order what they do to its bytes.
type Buffer struct{ pinnedMem }

// Alloc maps n bytes, makes them resident and registers them for all devices
// (cudaHostRegister, on dev). The memory is zero. It reserves n bytes rounded up to a
// page. n must be positive.
//
// Errors are of arguments that cannot be, naming the option; [ErrLimit] for what the
// host has no room for or [SetLimits] forbids; [cudart.ErrClosed] for a Runtime that
// was closed; those of the system and of CUDA. After an error nothing is mapped or
// registered, unless unregistering failed as well: the error says so then, and the
// memory stays (Stats.LeakedBytes).
//
// When ctx ends while Alloc waits for a limit or makes pages resident, it undoes its
// work and returns ctx's error. When ctx ends while a call into CUDA does not return,
// Alloc returns within a second, and its work is undone when the call returns.
func Alloc(ctx context.Context, dev *cudart.Device, n int, o Options) (*Buffer, error) {
	b, err := alloc(ctx, dev, n, o)
	if err != nil {
		process.failures.Add(1)
		return nil, fmt.Errorf("hostmem: allocate %d bytes: %w", n, err)
	}
	return b, nil
}

func alloc(ctx context.Context, dev *cudart.Device, n int, o Options) (*Buffer, error) {
	start := time.Now()
	if err := checkArguments(ctx, dev); err != nil {
		return nil, err
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	stack := callerStack(dev)
	return bounded(ctx, func() (*Buffer, error) {
		b := &Buffer{}
		how, note := o.pages(ctx, dev)
		r, err := pages.Map(ctx, n, how)
		if err != nil {
			return nil, err
		}
		if err := b.pin(ctx, dev, r, "buffer", 0, o); err != nil {
			return nil, err
		}
		if note != "" {
			b.notes = []string{note}
		}
		b.addToLedger(&process.buffers, r.Mapped(), start, stack)
		return b, nil
	}, func(b *Buffer) { _ = b.Close() }) // what stays is in the ledger
}

// Slice returns memory as a slice of T, as many as fit whole: a buffer's, a
// lease's, a registration's or a file's. It is nil after Close, where none fits, and
// for a T of size 0. T must not hold Go pointers, because the garbage collector does
// not look here. The memory must be aligned for T, as that of buffers and leases is.
func Slice[T any](m interface{ Bytes() []byte }) []T {
	size := int(unsafe.Sizeof(*(*T)(nil)))
	mem := m.Bytes()
	if size == 0 || len(mem) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/size)
}

// Reserved returns the bytes that the buffer has mapped, resident and pinned: Len
// rounded up to a page. It stays the same after Close.
func (b *Buffer) Reserved() int { return b.region.Mapped() }
