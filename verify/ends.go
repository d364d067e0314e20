package verify

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/units"
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

// pinned is a hostmem buffer, whose own copies split at the seams of
// registrations.
type pinned struct{ buf *hostmem.Buffer }

func newPinned(ctx context.Context, t *trip) (end, error) {
	buf, err := hostmem.Alloc(ctx, t.dev, t.bytes, hostmem.Options{Label: "verify"})
	return pinned{buf}, err
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
	mem  []byte
	free func() error
}

func (d direct) memory() []byte { return d.mem }

func (d direct) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyToDevice(dst, unsafe.Pointer(&d.mem[off]), n)
}

func (d direct) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyToHost(unsafe.Pointer(&d.mem[off]), src, n)
}

func (d direct) release(context.Context) error { return d.free() }

func hostAlloc(t *trip, flags cudart.HostAllocFlags) (direct, error) {
	p, err := t.dev.HostAlloc(t.bytes, flags)
	if err != nil {
		return direct{}, err
	}
	return direct{unsafe.Slice((*byte)(p), t.bytes), func() error { return t.dev.FreeHost(p) }}, nil
}

func newHostAlloc(_ context.Context, t *trip) (end, error) {
	return hostAlloc(t, cudart.HostAllocDefault)
}

// newRegistered maps memory, as a caller does who brings memory, and registers it.
func newRegistered(_ context.Context, t *trip) (end, error) {
	mem, unmap, err := mapMemory(t.bytes)
	if err != nil {
		return nil, err
	}
	p := unsafe.Pointer(&mem[0])
	if err := t.dev.HostRegister(p, t.bytes, cudart.HostRegisterDefault); err != nil {
		return nil, errors.Join(err, unmap())
	}
	registered := true
	return direct{mem, func() error {
		if registered {
			if err := t.dev.HostUnregister(p); err != nil {
				return err // memory that is registered must stay mapped
			}
			registered = false
		}
		return unmap()
	}}, nil
}

func mallocManaged(t *trip) (direct, cudart.DevPtr, error) {
	p, err := t.dev.MallocManaged(t.bytes, cudart.ManagedGlobal)
	if err != nil {
		return direct{}, 0, err
	}
	at := cudart.DevPtr(uintptr(p))
	return direct{unsafe.Slice((*byte)(p), t.bytes), func() error { return t.dev.Free(at) }}, at, nil
}

func newManaged(_ context.Context, t *trip) (end, error) {
	d, _, err := mallocManaged(t)
	return d, err
}

// viewed is memory that the device copies from and to by its own address of it.
type viewed struct {
	direct
	view cudart.DevPtr
}

func newMapped(_ context.Context, t *trip) (end, error) {
	d, err := hostAlloc(t, cudart.HostAllocMapped)
	if err != nil {
		return nil, err
	}
	view, err := t.dev.HostDevicePointer(unsafe.Pointer(&d.mem[0]))
	if err != nil {
		return nil, errors.Join(err, releaseStep{units.ExactBytes(t.bytes) + " of host memory", d.release}.run(context.Background()))
	}
	return viewed{d, view}, nil
}

func (v viewed) upload(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return s.CopyOnDevice(dst, v.view+cudart.DevPtr(off), n)
}

func (v viewed) download(_ context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return s.CopyOnDevice(v.view+cudart.DevPtr(off), src, n)
}

// moved is managed memory that moves to the device before the device accesses it, and back
// to the host before the CPU does. Pages move whole, so that the guards move, too.
type moved struct {
	viewed
	dev *cudart.Device
}

func newMoved(_ context.Context, t *trip) (end, error) {
	d, at, err := mallocManaged(t)
	return moved{viewed{d, at}, t.dev}, err
}

func (m moved) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	if err := s.Prefetch(m.view+cudart.DevPtr(off), n, m.dev.Location()); err != nil {
		return err
	}
	return m.viewed.upload(ctx, s, dst, off, n)
}

func (m moved) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	at := m.view + cudart.DevPtr(off)
	if err := s.Prefetch(at, n, m.dev.Location()); err != nil {
		return err
	}
	if err := m.viewed.download(ctx, s, off, src, n); err != nil {
		return err
	}
	return s.Prefetch(at, n, cudart.Location{Kind: cudart.LocationHost})
}

// pageable is Go heap memory: its copies are synchronous.
type pageable struct {
	direct
	dev *cudart.Device
}

func newPageable(_ context.Context, t *trip) (end, error) {
	return pageable{direct{make([]byte, t.bytes), func() error { return nil }}, t.dev}, nil
}

func (p pageable) upload(_ context.Context, _ *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return p.dev.CopyToDevice(dst, unsafe.Pointer(&p.mem[off]), n)
}

func (p pageable) download(_ context.Context, _ *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return p.dev.CopyToHost(unsafe.Pointer(&p.mem[off]), src, n)
}
