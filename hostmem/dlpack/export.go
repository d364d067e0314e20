package dlpack

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
)

// A Versioned is the address of a DLManagedTensorVersioned, of DLPack 1.0 or later.
type Versioned uintptr

// An Unversioned is the address of a DLManagedTensor, of DLPack before 1.0.
type Unversioned uintptr

// Export makes a tensor of pinned memory for another library, which owns it then, and
// calls its deleter once. mem is memory of a hostmem.Buffer, Registration or File, or of a
// pool's lease, from the first element on. Until the deleter is called the memory must be
// neither closed nor released.
//
// release is called after the deleter was, on a goroutine of its own, so that it may
// block: it releases the memory. The GPU may still work on copies that the consumer has
// queued. Name the streams of these copies, or wait for the device, which covers all:
//
//	func() { lease.Release(stream) } // see cudart.Device.StreamFromHandle
//	func() { dev.Synchronize(ctx); buf.Close() }
//
// A nil release does nothing, for memory that is never released. A tensor that no
// consumer takes is released with [Versioned.Delete].
//
// The address in the tensor is that of mem, with a byte_offset of 0, because consumers
// ignore the offset. DLPack wants multiples of 256 bytes, on which its header advises not
// to rely: a Buffer has them, and leases of 32 KiB and more; smaller leases have multiples
// of 64. A tensor without elements needs no memory, and has no address.
//
// Export returns an error, and calls nothing later, if mem is not pinned memory of
// hostmem, lies in several registrations (hostmem's Options.Chunk), which no copy may
// cross, is shorter than the tensor or not aligned to its elements; and if the Tensor's
// Device is neither CUDAHost nor CPU. It wraps [errors.ErrUnsupported] on platforms other
// than Linux on amd64 and arm64.
func Export(mem []byte, t Tensor, release func()) (Versioned, error) {
	address, err := export(mem, t, release, func(c *cell, entry uintptr, tensor cTensor) uintptr {
		v := &c.versioned
		*v = cVersioned{major: majorVersion, deleter: entry, tensor: tensor}
		if t.ReadOnly {
			v.flags = flagReadOnly
		}
		return addressOf(v)
	})
	return Versioned(address), err
}

// ExportUnversioned is [Export] for consumers of DLPack before 1.0. Those have no
// read-only tensors, which are an error here.
func ExportUnversioned(mem []byte, t Tensor, release func()) (Unversioned, error) {
	if t.ReadOnly {
		return 0, fmt.Errorf("dlpack: export %d bytes: Tensor.ReadOnly: a DLManagedTensor cannot say so: use Export", len(mem))
	}
	address, err := export(mem, t, release, func(c *cell, entry uintptr, tensor cTensor) uintptr {
		u := &c.unversioned
		*u = cUnversioned{deleter: entry, tensor: tensor}
		return addressOf(u)
	})
	return Unversioned(address), err
}

// export checks a tensor and lets fill write one of the structs.
func export(mem []byte, t Tensor, release func(), fill func(c *cell, entry uintptr, tensor cTensor) (address uintptr)) (uintptr, error) {
	owner, err := check(mem, &t)
	if err != nil {
		return 0, fmt.Errorf("dlpack: export %d bytes: %w", len(mem), err)
	}
	entry, err := deleter()
	if err != nil {
		return 0, fmt.Errorf("dlpack: export %d bytes: %w", len(mem), err)
	}
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
	strides, _ := t.strides() // checked
	for i := range t.Shape {
		c.shape[i], c.strides[i] = int64(t.Shape[i]), int64(strides[i])
	}
	address := fill(c, entry, tensor)
	exports.mu.Lock()
	defer exports.mu.Unlock()
	exports.live[address] = exported{cell: c, owner: owner, release: release}
	return address, nil
}

// check returns the pinned memory in which mem lies, nil for a tensor without elements.
// It replaces the zero values of t.
func check(mem []byte, t *Tensor) (owner hostmem.Pinned, err error) {
	t.Type.Lanes = max(1, t.Type.Lanes)
	switch t.Device {
	case 0:
		t.Device = CUDAHost
	case CPU, CUDAHost:
	default:
		return nil, fmt.Errorf("Tensor.Device of %d: want CUDAHost or CPU", t.Device)
	}
	n, err := t.extent()
	if err != nil || n == 0 {
		return nil, err
	}
	if n > len(mem) {
		return nil, fmt.Errorf("the tensor needs %d", n)
	}
	owner, off, ok := hostmem.Find(mem[:n])
	if !ok {
		return nil, errors.New("not pinned memory of package hostmem")
	}
	for _, s := range owner.Spans() {
		if seam := s.Off + s.Len; off < seam && seam < off+n {
			return nil, fmt.Errorf("byte %d begins another registration, and no copy may cross from one to the next: allocate without Options.Chunk", seam-off)
		}
	}
	if align := t.Type.align(); addressOf(&mem[0])%align != 0 {
		return nil, fmt.Errorf("address %p is not a multiple of %d, the alignment of %v", &mem[0], align, t.Type)
	}
	return owner, nil
}

// exports are the tensors whose deleters were not called, by the address that C has.
var exports = struct {
	mu   sync.Mutex
	live map[uintptr]exported
}{live: make(map[uintptr]exported)}

// An exported tensor refers to its memory, so that it is not lost.
type exported struct {
	cell    *cell
	owner   hostmem.Pinned
	release func()
}

// deleted is called by C, on any thread. It does not block.
func deleted(address uintptr) {
	exports.mu.Lock()
	e, ok := exports.live[address]
	delete(exports.live, address)
	exports.mu.Unlock()
	if !ok {
		return // called twice
	}
	putCell(e.cell)
	if e.release != nil {
		go e.release()
	}
}

func addressOf[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
