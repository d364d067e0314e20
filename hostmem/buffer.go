package hostmem

import (
	"context"
	"errors"
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
// (cudaHostRegister, on dev). Where registering is refused it makes smaller
// registrations, or has cudaHostAlloc allocate the memory; where the GPU uses the
// host's page tables it registers nothing: [Method] says when, Buffer.Method what was
// done, and Buffer.Notes why. The memory is zero. It reserves n bytes rounded up to a
// page. n must be positive.
//
// Errors are of invalid arguments, naming the option; [ErrLimit] for what the
// host has no room for or [SetLimits] forbids; [cudart.ErrClosed] for a Runtime that
// was closed; those of the system and of CUDA. An error of CUDA names every attempt, and
// if the host is short of memory, what is available. After an error nothing is mapped or
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
		if err := b.open(ctx, dev, n, o); err != nil {
			return nil, err
		}
		b.addToLedger(&process.buffers, b.region.Mapped(), start, stack)
		return b, nil
	}, func(b *Buffer) { _ = b.Close() }) // what stays is in the ledger
}

// open maps and registers n bytes, or has cudaHostAlloc allocate them.
func (b *Buffer) open(ctx context.Context, dev *cudart.Device, n int, o Options) error {
	h, err := hostOf(dev)
	if err != nil {
		return err
	}
	refused := h.refused()
	if refused == nil {
		how, note := o.pages(ctx, dev)
		r, err := pages.Map(ctx, n, how)
		if err != nil {
			return err
		}
		if note != "" {
			b.notes = []string{note}
		}
		if err := b.acquire(ctx, needOf(r)); err != nil {
			return errors.Join(err, r.Unmap())
		}
		err = b.register(ctx, h, dev, r, 0, o)
		if err == nil {
			b.opened("buffer", o)
			return nil
		}
		var final *refusal
		if !errors.As(err, &final) {
			return b.abort(explain(err))
		}
		if err := b.undo(); err != nil {
			return errors.Join(final, err)
		}
		refused = final
	}
	if err := b.hostAlloc(ctx, h, dev, n, o, refused); err != nil {
		return b.abort(err)
	}
	b.opened("buffer", o)
	return nil
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
// rounded up to a page, and with [HostAllocated] up to Options.Align more if CUDA's
// address was not aligned. It stays the same after Close.
func (b *Buffer) Reserved() int { return b.region.Mapped() }
