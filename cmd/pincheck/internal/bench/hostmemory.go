// Kinds of host memory, as the label memory names them, with their allocation and their copies.

package bench

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/transfer"
)

// A hostKind is a kind of host memory, and how it is copied.
type hostKind struct {
	name       string // value of the label memory
	wall       bool   // the calling thread copies or stages, so that its clock counts, and not the device's events
	moves      bool   // nothing is copied: the memory itself moves to the device and back
	pinned     bool   // open allocates pinned memory
	slowToRead bool   // reading by the CPU takes many times as long as writing

	// open allocates n bytes, which w releases.
	open func(ctx context.Context, w *resources, n int) (hostkind.Memory, error)
}

// copyMemory copies in a direction, between n bytes of m from off on and device memory.
func copyMemory(ctx context.Context, direction string, m hostkind.Memory, s *cudart.Stream, dev cudart.DevPtr, off, n int) error {
	if direction == result.HostToDevice {
		return m.CopyToDevice(ctx, s, dev, off, n)
	}
	return m.CopyFromDevice(ctx, s, dev, off, n)
}

// The names of the kinds.
const (
	memoryRegistered    = "registered"
	memoryHostAlloc     = "cuda_host_alloc"
	memoryWriteCombined = "write_combined"
	memoryPageable      = "pageable"
	memoryStaged        = "staged"
	memoryManaged       = "managed"
)

var (
	registered = hostKind{name: memoryRegistered, pinned: true, open: openRegistered}
	// unpinned is copied by cudaMemcpy, unpinnedAsync by cudaMemcpyAsync, as far as that is
	// asynchronous for such memory.
	unpinned      = hostKind{name: memoryPageable, wall: true, open: openUnpinned}
	unpinnedAsync = hostKind{name: memoryPageable, open: func(_ context.Context, w *resources, n int) (hostkind.Memory, error) { return w.pageable(n) }}
)

// hostKinds returns all kinds that copies can be measured with, registered memory first.
func hostKinds() []hostKind {
	return []hostKind{
		registered,
		{name: memoryHostAlloc, pinned: true, open: openHostAlloc(0)},
		{name: memoryWriteCombined, pinned: true, slowToRead: true, open: openHostAlloc(writeCombined)},
		unpinned,
		{name: memoryStaged, wall: true, open: openStaged},
		{name: memoryManaged, moves: true, open: openManaged},
	}
}

// writeCombined is cudaHostAllocWriteCombined. Package cudart does not offer it: no host is
// known where it is faster.
const writeCombined cudart.HostAllocFlags = 4

func openRegistered(ctx context.Context, w *resources, n int) (hostkind.Memory, error) {
	b, err := w.pinned(ctx, n)
	return hostkind.Pinned(b), err
}

func openHostAlloc(flags cudart.HostAllocFlags) func(context.Context, *resources, int) (hostkind.Memory, error) {
	return func(_ context.Context, w *resources, n int) (hostkind.Memory, error) {
		m, free, err := hostkind.HostAlloc(w.dev, n, flags)
		if err == nil {
			w.undo.PushClose(free)
		}
		return m, err
	}
}

func openUnpinned(_ context.Context, w *resources, n int) (hostkind.Memory, error) {
	m, err := w.pageable(n)
	return hostkind.Pageable{Direct: m, Dev: w.dev}, err
}

// stagedMemory is pageable memory that package transfer copies.
type stagedMemory struct {
	hostkind.Direct
	copier *transfer.Copier
}

func openStaged(ctx context.Context, w *resources, n int) (hostkind.Memory, error) {
	m, err := w.pageable(n)
	if err != nil {
		return nil, err
	}
	c, err := w.copier(ctx)
	return stagedMemory{m, c}, err
}

func (m stagedMemory) CopyToDevice(ctx context.Context, _ *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return m.copier.Upload(ctx, dst, m.Direct[off:][:n])
}

func (m stagedMemory) CopyFromDevice(ctx context.Context, _ *cudart.Stream, src cudart.DevPtr, off, n int) error {
	return m.copier.Download(ctx, m.Direct[off:][:n], src)
}

// prefetchedMemory is managed memory, of which a copy is a prefetch (cudaMemPrefetchAsync).
type prefetchedMemory struct {
	hostkind.Direct
	dev *cudart.Device
}

func openManaged(_ context.Context, w *resources, n int) (hostkind.Memory, error) {
	for _, footprint := range []struct {
		attribute cudart.Attr
		what      string
	}{
		{cudart.AttrManagedMemory, "has no managed memory"},
		{cudart.AttrConcurrentManagedAccess, "does not move managed memory on demand, so there is nothing to prefetch"},
	} {
		v, err := w.dev.Attribute(footprint.attribute)
		if err != nil {
			return nil, err
		}
		if v == 0 {
			return nil, fmt.Errorf("%v %s: %w", w.dev, footprint.what, errors.ErrUnsupported)
		}
	}
	m, free, err := hostkind.Managed(w.dev, n)
	if err == nil {
		w.undo.PushClose(free)
	}
	return prefetchedMemory{m, w.dev}, err
}

func (m prefetchedMemory) prefetch(s *cudart.Stream, off, n int, to cudart.Location) error {
	return s.Prefetch(cudart.DevPtr(uintptr(unsafe.Pointer(&m.Direct[off]))), n, to)
}

func (m prefetchedMemory) CopyToDevice(_ context.Context, s *cudart.Stream, _ cudart.DevPtr, off, n int) error {
	return m.prefetch(s, off, n, m.dev.Location())
}

func (m prefetchedMemory) CopyFromDevice(_ context.Context, s *cudart.Stream, _ cudart.DevPtr, off, n int) error {
	return m.prefetch(s, off, n, cudart.Location{Kind: cudart.LocationHost})
}

// A locker maps n bytes that the kernel keeps resident in one of two ways. Where RLIMIT_MEMLOCK forbids it, the
// error wraps errors.ErrUnsupported.
type locker func(n int, way string) (b []byte, unmap func() error, err error)

// The ways of a locker, named as the calls are.
const (
	byMlock     = "mlock"
	byMapLocked = "mmap with MAP_LOCKED"
)
