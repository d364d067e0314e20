package dlpack

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
)

// A Versioned is the address of a DLManagedTensorVersioned, of DLPack 1.0 or later.
type Versioned uintptr

// An Unversioned is the address of a DLManagedTensor, of DLPack before 1.0.
type Unversioned uintptr

// Export makes a DLManagedTensorVersioned of pinned memory for another library. That
// library owns it from then on, and calls its deleter once. Export does not block. mem is memory of a
// hostmem.Buffer, or of a pool's lease, from the first element on.
// The memory must be neither closed nor released until release is called.
//
// release is called once, after the deleter, on a goroutine of its own, so that it may
// block: it releases the memory. The GPU may still run copies that the consumer has
// queued. Name the streams of these copies, or wait for the device, which covers all streams:
//
//	func() { lease.Release(stream) } // see cudart.Device.StreamFromHandle
//	func() { dev.Synchronize(ctx); buf.Close() }
//
// A nil release is for memory that is never released, or that something else releases. A
// tensor that no consumer takes is released with [Versioned.Delete].
//
// The data pointer is the address of mem, and byte_offset is 0, because some consumers
// ignore the offset. DLPack demands multiples of 256 bytes, on which its header advises
// not to rely: buffers have them, and leases of 32 KiB and more; smaller leases have
// multiples of 64. A tensor without elements needs no memory, and its data pointer is 0.
//
// Export returns an error, and does not call release, if t cannot be (see [Tensor]), if
// mem is not pinned memory of package hostmem, is shorter than t or not aligned to its
// elements, and if t would extend over several registrations (hostmem's Options.Chunk),
// because no copy may cross from one to the next. The error wraps [errors.ErrUnsupported] on
// platforms other than Linux on amd64 and arm64.
func Export(mem []byte, t Tensor, release func()) (Versioned, error) {
	address, err := export(mem, t, release, true)
	return Versioned(address), err
}

// ExportUnversioned is [Export] of a DLManagedTensor, for consumers of DLPack before 1.0.
// That has no read-only tensors: Tensor.ReadOnly is an error.
func ExportUnversioned(mem []byte, t Tensor, release func()) (Unversioned, error) {
	if t.ReadOnly {
		return 0, fmt.Errorf("dlpack: export %d bytes: Tensor.ReadOnly: a DLManagedTensor has no such flag (use Export)", len(mem))
	}
	address, err := export(mem, t, release, false)
	return Unversioned(address), err
}

// export checks a tensor, writes the structs, and returns the address of one.
func export(mem []byte, t Tensor, release func(), versioned bool) (address uintptr, err error) {
	owner, strides, err := check(mem, &t)
	if err != nil {
		return 0, fmt.Errorf("dlpack: export %d bytes: %w", len(mem), err)
	}
	entry, err := deleter()
	if err != nil {
		return 0, fmt.Errorf("dlpack: export %d bytes: %w", len(mem), err)
	}
	exports.mu.Lock()
	defer exports.mu.Unlock()
	c, err := takeCell()
	if err != nil {
		return 0, fmt.Errorf("dlpack: export %d bytes: %w", len(mem), err)
	}
	tensor := cTensor{
		deviceType: t.Device, ndim: int32(len(t.Shape)), dtype: t.Type,
		shape: addressOf(&c.shape), strides: addressOf(&c.strides),
	}
	if owner != nil {
		tensor.data = addressOf(&mem[0])
	}
	for i := range t.Shape {
		c.shape[i], c.strides[i] = int64(t.Shape[i]), int64(strides[i])
	}
	c.unversioned = cUnversioned{deleter: entry, tensor: tensor}
	c.versioned = cVersioned{major: majorVersion, deleter: entry, tensor: tensor}
	if t.ReadOnly {
		c.versioned.flags = flagReadOnly
	}
	address = addressOf(&c.unversioned)
	if versioned {
		address = addressOf(&c.versioned)
	}
	exports.live[address] = exported{cell: c, owner: owner, release: release}
	return address, nil
}

// check returns the strides and the pinned memory that contains mem, nil for a tensor
// without elements. It replaces the zero values of t.
func check(mem []byte, t *Tensor) (owner hostmem.Pinned, strides []int, err error) {
	t.Type.Lanes = max(1, t.Type.Lanes)
	switch t.Device {
	case 0:
		t.Device = CUDAHost
	case CPU, CUDAHost:
	default:
		return nil, nil, fmt.Errorf("Tensor.Device of %d: want CUDAHost or CPU", t.Device)
	}
	strides, n, err := t.layout()
	if err != nil || n == 0 {
		return nil, strides, err
	}
	if n > len(mem) {
		return nil, nil, fmt.Errorf("the tensor needs %d", n)
	}
	owner, off, ok := hostmem.Find(mem[:n])
	if !ok {
		return nil, nil, errors.New("not pinned memory of package hostmem (use memory of hostmem.Alloc, Register or a pool)")
	}
	for s := range owner.Spans(0, owner.Len()) {
		if seam := s.Off + s.Len; off < seam && seam < off+n {
			return nil, nil, fmt.Errorf("byte %d begins another registration, and no copy may cross from one to the next (allocate without Options.Chunk)", seam-off)
		}
	}
	if align := t.Type.align(); addressOf(&mem[0])%align != 0 {
		return nil, nil, fmt.Errorf("address %p is not a multiple of %d, the alignment of %v", &mem[0], align, t.Type)
	}
	return owner, strides, nil
}

func addressOf[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
