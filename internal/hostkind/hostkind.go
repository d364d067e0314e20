// Package hostkind opens and releases each kind of host memory, and copies it to and from a device.
package hostkind

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/raw"
)

// A Memory is host memory of a kind. Copies are complete when the stream is synchronized: a call
// may return when they are queued, or staged, or complete.
type Memory interface {
	Bytes() []byte
	CopyToDevice(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	CopyFromDevice(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error
}

// A copier is a hostmem.Buffer or a pool.Lease, whose own copies split at the seams of registrations.
type copier interface {
	Bytes() []byte
	CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	CopyFromDevice(s *cudart.Stream, src cudart.DevPtr, off, n int) error
}

type pinned[M copier] struct{ of M }

// Pinned returns memory that hostmem registered. It is generic so that a Lease is allocated once.
func Pinned[M copier](m M) Memory { return pinned[M]{m} }

func (m pinned[M]) Bytes() []byte { return m.of.Bytes() }

func (m pinned[M]) CopyToDevice(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return m.of.CopyToDevice(s, dst, off, n)
}

func (m pinned[M]) CopyFromDevice(_ context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
	return m.of.CopyFromDevice(s, src, off, n)
}

// Direct is memory that cudaMemcpyAsync copies by its address. Where it is pageable, CUDA
// stages it, and the call blocks.
type Direct []byte

// Bytes returns the memory.
func (m Direct) Bytes() []byte { return m }

// CopyToDevice queues a copy on the stream.
func (m Direct) CopyToDevice(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyToDevice(dst, unsafe.Pointer(&m[off]), n)
}

// CopyFromDevice queues a copy on the stream.
func (m Direct) CopyFromDevice(_ context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
	return s.CopyToHost(unsafe.Pointer(&m[off]), src, n)
}

// Pageable is memory that cudaMemcpy copies.
type Pageable struct {
	Direct
	Dev *cudart.Device
}

// CopyToDevice copies on the stream, if there is one: streams that do not block do not wait for the
// end of a cudaMemcpy to the device, which returns before.
func (m Pageable) CopyToDevice(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	if s == nil {
		return m.Dev.CopyToDevice(dst, unsafe.Pointer(&m.Direct[off]), n)
	}
	return raw.CopyPageable(s, uintptr(dst), unsafe.Pointer(&m.Direct[off]), n)
}

// CopyFromDevice copies on no stream.
func (m Pageable) CopyFromDevice(_ context.Context, _ *cudart.Stream, src cudart.DevPtr, off, n int) error {
	return m.Dev.CopyToHost(unsafe.Pointer(&m.Direct[off]), src, n)
}

// HostAlloc allocates memory by cudaHostAlloc.
func HostAlloc(dev *cudart.Device, n int, flags cudart.HostAllocFlags) (m Memory, release func() error, err error) {
	p, err := dev.HostAlloc(n, flags)
	if err != nil {
		return nil, nil, err
	}
	return Direct(unsafe.Slice((*byte)(p), n)), func() error { return dev.FreeHost(p) }, nil
}

// Managed allocates memory by cudaMallocManaged.
func Managed(dev *cudart.Device, n int) (m Direct, release func() error, err error) {
	p, err := dev.MallocManaged(n)
	if err != nil {
		return nil, nil, err
	}
	return unsafe.Slice((*byte)(p), n), func() error { return dev.Free(cudart.DevPtr(uintptr(p))) }, nil
}

// Register registers mapped memory, as a program does with memory of its own (cudaHostRegister), and
// takes over unmap, also on an error. release may be called again after an error.
func Register(dev *cudart.Device, mem []byte, flags cudart.HostRegisterFlags, unmap func() error) (m Memory, release func() error, err error) {
	p := unsafe.Pointer(&mem[0])
	if err := dev.HostRegister(p, len(mem), flags); err != nil {
		return nil, nil, errors.Join(err, unmap())
	}
	registered := true
	return Direct(mem), func() error {
		if registered {
			if err := dev.HostUnregister(p); err != nil {
				return err // memory that is registered must stay mapped
			}
			registered = false
		}
		return unmap()
	}, nil
}
