package verify

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// end is host memory at one end of a path.
type end interface {
	// memory is the memory as the CPU sees it. It must not be touched while
	// copies that use it are under way.
	memory() []byte
	// upload copies n bytes from off on to the device, download n bytes from the
	// device to off on: on the stream, or at once where the path has none.
	upload(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	download(s *cudart.Stream, off int, src cudart.DevPtr, n int) error
	release() error
}

// newEnd allocates n bytes of the path's kind of host memory.
func newEnd(ctx context.Context, dev *cudart.Device, path Path, n int) (end, error) {
	switch path {
	case PathPageable:
		return pageable{dev, make([]byte, n)}, nil
	case PathRegistered:
		return newRegistered(dev, n)
	case PathHostAlloc:
		d, err := newHostAlloc(dev, n, cudart.HostAllocDefault)
		if err != nil {
			return nil, err
		}
		return d, nil
	case PathMapped:
		return newMapped(dev, n)
	case PathManaged:
		return newManaged(dev, n)
	default:
		return newPinned(ctx, dev, n)
	}
}

// pinned is a hostmem buffer, whose own copies find their way over its seams.
type pinned struct{ buf *hostmem.Buffer }

func newPinned(ctx context.Context, dev *cudart.Device, n int) (end, error) {
	buf, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{Label: "verify"})
	if err != nil {
		return nil, err
	}
	return pinned{buf}, nil
}

func (p pinned) memory() []byte { return p.buf.Bytes() }

func (p pinned) upload(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return p.buf.CopyToDevice(s, dst, off, n)
}

func (p pinned) download(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return p.buf.CopyFromDevice(s, off, src, n)
}

func (p pinned) release() error { return p.buf.Close() }

// direct is memory that streams copy from and to by its host address.
type direct struct {
	p    unsafe.Pointer
	n    int
	free func() error
}

func (d direct) memory() []byte { return unsafe.Slice((*byte)(d.p), d.n) }

func (d direct) upload(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyToDevice(dst, unsafe.Add(d.p, off), n)
}

func (d direct) download(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyToHost(unsafe.Add(d.p, off), src, n)
}

func (d direct) release() error { return d.free() }

func newHostAlloc(dev *cudart.Device, n int, flags cudart.HostAllocFlags) (direct, error) {
	p, err := dev.HostAlloc(n, flags)
	if err != nil {
		return direct{}, err
	}
	return direct{p, n, func() error { return dev.FreeHost(p) }}, nil
}

// newRegistered maps memory, as a caller who brings his own does, and registers it.
func newRegistered(dev *cudart.Device, n int) (end, error) {
	p, unmap, err := mapMemory(n)
	if err != nil {
		return nil, err
	}
	if err := dev.HostRegister(p, n, cudart.HostRegisterDefault); err != nil {
		return nil, errors.Join(err, unmap())
	}
	return direct{p, n, func() error {
		if err := dev.HostUnregister(p); err != nil {
			return fmt.Errorf("%w (its memory stays mapped)", err)
		}
		return unmap()
	}}, nil
}

func newManaged(dev *cudart.Device, n int) (end, error) {
	p, err := dev.MallocManaged(n, cudart.ManagedGlobal)
	if err != nil {
		return nil, err
	}
	return direct{p, n, func() error { return dev.Free(cudart.DevPtr(uintptr(p))) }}, nil
}

// mapped is host memory that the device copies from and to by its own address of it.
type mapped struct {
	direct
	view cudart.DevPtr
}

func newMapped(dev *cudart.Device, n int) (end, error) {
	d, err := newHostAlloc(dev, n, cudart.HostAllocMapped)
	if err != nil {
		return nil, err
	}
	view, err := dev.HostDevicePointer(d.p)
	if err != nil {
		return nil, errors.Join(err, d.release())
	}
	return mapped{d, view}, nil
}

func (m mapped) upload(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyOnDevice(dst, m.view+cudart.DevPtr(off), n)
}

func (m mapped) download(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyOnDevice(m.view+cudart.DevPtr(off), src, n)
}

// pageable is Go heap memory: its copies are synchronous.
type pageable struct {
	dev *cudart.Device
	mem []byte
}

func (p pageable) memory() []byte { return p.mem }

func (p pageable) upload(_ *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return p.dev.CopyToDevice(dst, unsafe.Pointer(&p.mem[off]), n)
}

func (p pageable) download(_ *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return p.dev.CopyToHost(unsafe.Pointer(&p.mem[off]), src, n)
}

func (p pageable) release() error { return nil }
