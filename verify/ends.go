package verify

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/units"
)

// An end is host memory at one end of a path, with its copies.
type end struct {
	mem  []byte        // must not be touched while copies that use it are under way
	view cudart.DevPtr // its address on the device, if the device maps it
	// upload copies to the device, download to mem. Around the bytes of a copy there is
	// space for guards.
	upload, download copyFunc
	// release releases the memory, which no copy uses. It may be called again after an
	// error.
	release func(context.Context) error
}

// A copyFunc copies n bytes between off in host memory and a device: queued on the stream, or
// done on return if s is nil.
type copyFunc func(ctx context.Context, s *cudart.Stream, dev cudart.DevPtr, off, n int) error

// newEnd returns an end with the copies of a kind of memory.
func newEnd(m hostkind.Memory, free func() error) *end {
	return &end{mem: m.Bytes(), upload: m.CopyToDevice, download: m.CopyFromDevice, release: func(context.Context) error { return free() }}
}

func opened(m hostkind.Memory, free func() error, err error) (*end, error) {
	if err != nil {
		return nil, err
	}
	return newEnd(m, free), nil
}

func newPinned(ctx context.Context, t *trip) (*end, error) {
	buf, err := hostmem.Alloc(ctx, t.dev, t.bytes, hostmem.Options{Label: "verify"})
	if err != nil {
		return nil, err
	}
	e := newEnd(hostkind.Pinned(buf), nil)
	e.release = buf.CloseContext
	return e, nil
}

func hostAlloc(flags cudart.HostAllocFlags) func(context.Context, *trip) (*end, error) {
	return func(_ context.Context, t *trip) (*end, error) {
		return opened(hostkind.HostAlloc(t.dev, t.bytes, flags))
	}
}

func newRegistered(_ context.Context, t *trip) (*end, error) {
	mem, unmap, err := hostos.Map(t.bytes, 0)
	if err != nil {
		return nil, err
	}
	return opened(hostkind.Register(t.dev, mem, 0, unmap))
}

func newManaged(_ context.Context, t *trip) (*end, error) {
	e, err := opened(hostkind.Managed(t.dev, t.bytes))
	if err == nil {
		e.view = cudart.DevPtr(uintptr(unsafe.Pointer(&e.mem[0])))
	}
	return e, err
}

// copyByView makes the device copy from and to its own address of the memory.
func (e *end) copyByView() {
	e.upload = func(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		return s.CopyOnDevice(dst, e.view+cudart.DevPtr(off), n)
	}
	e.download = func(_ context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
		return s.CopyOnDevice(e.view+cudart.DevPtr(off), src, n)
	}
}

func newMapped(ctx context.Context, t *trip) (*end, error) {
	e, err := hostAlloc(cudart.HostAllocMapped)(ctx, t)
	if err != nil {
		return nil, err
	}
	if e.view, err = t.dev.HostDevicePointer(unsafe.Pointer(&e.mem[0])); err != nil {
		return nil, errors.Join(err, releasing(units.ExactBytes(t.bytes)+" of host memory", e.release)(ctx))
	}
	e.copyByView()
	return e, nil
}

// newMoved allocates managed memory that moves to the device before the device accesses it,
// and back to the host before the CPU does. Pages move whole, so that the guards move, too.
func newMoved(ctx context.Context, t *trip) (*end, error) {
	e, err := newManaged(ctx, t)
	if err != nil {
		return nil, err
	}
	e.copyByView()
	up, down := e.upload, e.download
	e.upload = func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		if err := s.Prefetch(e.view+cudart.DevPtr(off), n, t.dev.Location()); err != nil {
			return err
		}
		return up(ctx, s, dst, off, n)
	}
	e.download = func(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
		at := e.view + cudart.DevPtr(off)
		if err := s.Prefetch(at, n, t.dev.Location()); err != nil {
			return err
		}
		if err := down(ctx, s, src, off, n); err != nil {
			return err
		}
		return s.Prefetch(at, n, cudart.Location{Kind: cudart.LocationHost})
	}
	return e, nil
}

// newPageable allocates Go heap memory: its copies are synchronous.
func newPageable(_ context.Context, t *trip) (*end, error) {
	return newEnd(hostkind.Pageable{Direct: make([]byte, t.bytes), Dev: t.dev}, func() error { return nil }), nil
}
