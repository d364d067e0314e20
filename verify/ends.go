package verify

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer"
)

// end is host memory at one end of a path.
type end interface {
	// memory is the memory as the CPU sees it. It must not be touched while
	// copies that use it are under way.
	memory() []byte
	// upload copies n bytes from off to the device, download n bytes from the
	// device to off: queued on the stream, or done on return if s is nil. Around
	// the n bytes at off there is room for guards.
	upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error
	// release may be called again after an error. No copy uses the memory.
	release(ctx context.Context) error
}

// newEnd allocates n bytes of the path's kind of host memory. c is the copier of
// paths that use one.
func newEnd(ctx context.Context, dev *cudart.Device, c *transfer.Copier, path Path, n int) (end, error) {
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
	case PathMapped, PathKernel:
		return newMapped(dev, n)
	case PathManaged:
		d, err := newManaged(dev, n)
		if err != nil {
			return nil, err
		}
		return d, nil
	case PathManagedMoved:
		return newMoved(dev, n)
	case PathPinned, PathHop, PathPeer:
		return newPinned(ctx, dev, n)
	default:
		return newCopied(c, path, n)
	}
}

// pinned is a hostmem buffer, whose own copies split at the seams of
// registrations.
type pinned struct{ buf *hostmem.Buffer }

func newPinned(ctx context.Context, dev *cudart.Device, n int) (end, error) {
	buf, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{Label: "verify"})
	if err != nil {
		return nil, err
	}
	return pinned{buf}, nil
}

func (p pinned) memory() []byte { return p.buf.Bytes() }

func (p pinned) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return p.buf.CopyToDevice(s, dst, off, n)
}

func (p pinned) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return p.buf.CopyToHost(s, off, src, n)
}

func (p pinned) release(ctx context.Context) error { return p.buf.CloseContext(ctx) }

// direct is memory that streams copy from and to by its host address.
type direct struct {
	p    unsafe.Pointer
	n    int
	free func() error
}

func (d direct) memory() []byte { return unsafe.Slice((*byte)(d.p), d.n) }

func (d direct) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyToDevice(dst, unsafe.Add(d.p, off), n)
}

func (d direct) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyToHost(unsafe.Add(d.p, off), src, n)
}

func (d direct) release(context.Context) error { return d.free() }

func newHostAlloc(dev *cudart.Device, n int, flags cudart.HostAllocFlags) (direct, error) {
	p, err := dev.HostAlloc(n, flags)
	if err != nil {
		return direct{}, err
	}
	return direct{p, n, func() error { return dev.FreeHost(p) }}, nil
}

// newRegistered maps memory, as a caller does who brings memory, and registers it.
func newRegistered(dev *cudart.Device, n int) (end, error) {
	p, unmap, err := mapMemory(n)
	if err != nil {
		return nil, err
	}
	if err := dev.HostRegister(p, n, cudart.HostRegisterDefault); err != nil {
		return nil, errors.Join(err, unmap())
	}
	registered := true
	return direct{p, n, func() error {
		if registered {
			if err := dev.HostUnregister(p); err != nil {
				return err // memory that is registered must stay mapped
			}
			registered = false
		}
		return unmap()
	}}, nil
}

func newManaged(dev *cudart.Device, n int) (direct, error) {
	p, err := dev.MallocManaged(n, cudart.ManagedGlobal)
	if err != nil {
		return direct{}, err
	}
	return direct{p, n, func() error { return dev.Free(cudart.DevPtr(uintptr(p))) }}, nil
}

// moved is managed memory that moves to the device before the device accesses it, and back
// to the host before the CPU does. Pages move whole, so that the guards move, too.
type moved struct {
	direct
	here cudart.Location
}

func newMoved(dev *cudart.Device, n int) (end, error) {
	d, err := newManaged(dev, n)
	if err != nil {
		return nil, err
	}
	return moved{d, dev.Location()}, nil
}

func (m moved) at(off int) cudart.DevPtr { return cudart.DevPtr(uintptr(m.p)) + cudart.DevPtr(off) }

func (m moved) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	if err := s.Prefetch(m.at(off), n, m.here); err != nil {
		return err
	}
	return s.CopyOnDevice(dst, m.at(off), n)
}

func (m moved) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	if err := s.Prefetch(m.at(off), n, m.here); err != nil {
		return err
	}
	if err := s.CopyOnDevice(m.at(off), src, n); err != nil {
		return err
	}
	return s.Prefetch(m.at(off), n, cudart.Location{Kind: cudart.LocationHost})
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
		return nil, errors.Join(err, releaseStep{fmt.Sprintf("%d bytes of host memory", n), d.free}.run())
	}
	return mapped{d, view}, nil
}

func (m mapped) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyOnDevice(dst, m.view+cudart.DevPtr(off), n)
}

func (m mapped) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyOnDevice(m.view+cudart.DevPtr(off), src, n)
}

// pageable is Go heap memory: its copies are synchronous.
type pageable struct {
	dev *cudart.Device
	mem []byte
}

func (p pageable) memory() []byte { return p.mem }

func (p pageable) upload(_ context.Context, _ *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return p.dev.CopyToDevice(dst, unsafe.Pointer(&p.mem[off]), n)
}

func (p pageable) download(_ context.Context, _ *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return p.dev.CopyToHost(unsafe.Pointer(&p.mem[off]), src, n)
}

func (p pageable) release(context.Context) error { return nil }
