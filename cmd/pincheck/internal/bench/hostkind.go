package bench

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer"
)

// A hostKind is a kind of host memory, and how it is copied.
type hostKind struct {
	name string // as the value of the label memory
	// wall: the calling thread does some of the work, so that its clock counts. Others
	// are timed by the device's events.
	wall bool
	// moves: nothing is copied. The memory itself moves to the device and back.
	moves bool
	// pinned: what is allocated is pinned memory.
	pinned bool
	open   func(ctx context.Context, dev *cudart.Device, n int) (*hostMemory, error)
}

// hostMemory is memory of a kind. The copies are from its first byte on. Those of kinds
// with wall are complete when they return, the others are queued.
type hostMemory struct {
	bytes    []byte
	toDevice func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, n int) error
	toHost   func(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, n int) error
	close    func() error
	// slowToRead: reading by the CPU takes many times as long as writing.
	slowToRead bool
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
	unpinned   = hostKind{name: memoryPageable, wall: true, open: openPageable}
)

// hostKinds returns all kinds that copies can be measured with, registered memory first.
func hostKinds() []hostKind {
	return []hostKind{
		registered,
		{name: memoryHostAlloc, pinned: true, open: openHostAlloc(cudart.HostAllocDefault)},
		{name: memoryWriteCombined, pinned: true, open: openHostAlloc(writeCombined)},
		unpinned,
		{name: memoryStaged, wall: true, open: openStaged},
		{name: memoryManaged, moves: true, open: openManaged},
	}
}

// writeCombined is cudaHostAllocWriteCombined. Package cudart does not offer it: no host is
// known where it is faster.
const writeCombined cudart.HostAllocFlags = 4

func openRegistered(ctx context.Context, dev *cudart.Device, n int) (*hostMemory, error) {
	b, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{Label: "bench"})
	if err != nil {
		return nil, err
	}
	return registeredMemory(b), nil
}

func registeredMemory(b *hostmem.Buffer) *hostMemory {
	return &hostMemory{bytes: b.Bytes(), close: b.Close,
		toDevice: func(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, n int) error {
			return b.CopyToDevice(s, dst, 0, n)
		},
		toHost: func(_ context.Context, s *cudart.Stream, src cudart.DevPtr, n int) error {
			return b.CopyToHost(s, 0, src, n)
		},
	}
}

func openHostAlloc(flags cudart.HostAllocFlags) func(context.Context, *cudart.Device, int) (*hostMemory, error) {
	return func(_ context.Context, dev *cudart.Device, n int) (*hostMemory, error) {
		p, err := dev.HostAlloc(n, flags)
		if err != nil {
			return nil, err
		}
		return &hostMemory{
			bytes: unsafe.Slice((*byte)(p), n), slowToRead: flags == writeCombined,
			close: func() error { return dev.FreeHost(p) },
			toDevice: func(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, n int) error {
				return s.CopyToDevice(dst, p, n)
			},
			toHost: func(_ context.Context, s *cudart.Stream, src cudart.DevPtr, n int) error {
				return s.CopyToHost(p, src, n)
			},
		}, nil
	}
}

func openPageable(_ context.Context, dev *cudart.Device, n int) (*hostMemory, error) {
	m, err := hostmem.AllocPageable(n)
	if err != nil {
		return nil, err
	}
	p := unsafe.Pointer(unsafe.SliceData(m.Bytes()))
	return &hostMemory{bytes: m.Bytes(), close: m.Close,
		// Streams that do not block do not wait for the end of a cudaMemcpy to the device.
		toDevice: func(_ context.Context, s *cudart.Stream, dst cudart.DevPtr, n int) error {
			return s.CopyPageableToDevice(dst, p, n)
		},
		toHost: func(_ context.Context, _ *cudart.Stream, src cudart.DevPtr, n int) error {
			return dev.CopyToHost(p, src, n)
		},
	}, nil
}

func openStaged(ctx context.Context, dev *cudart.Device, n int) (*hostMemory, error) {
	m, err := hostmem.AllocPageable(n)
	if err != nil {
		return nil, err
	}
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return &hostMemory{bytes: m.Bytes(),
		close: func() error { return errors.Join(c.CloseContext(context.Background()), m.Close()) },
		toDevice: func(ctx context.Context, _ *cudart.Stream, dst cudart.DevPtr, n int) error {
			return c.Upload(ctx, dst, m.Bytes()[:n])
		},
		toHost: func(ctx context.Context, _ *cudart.Stream, src cudart.DevPtr, n int) error {
			return c.Download(ctx, m.Bytes()[:n], src)
		},
	}, nil
}

// openManaged allocates managed memory, of which a copy is a prefetch.
func openManaged(_ context.Context, dev *cudart.Device, n int) (*hostMemory, error) {
	for _, need := range []struct {
		attribute cudart.Attr
		what      string
	}{
		{cudart.AttrManagedMemory, "has no managed memory"},
		{cudart.AttrConcurrentManagedAccess, "does not move managed memory on demand, so there is nothing to prefetch"},
	} {
		v, err := dev.Attribute(need.attribute)
		if err != nil {
			return nil, err
		}
		if v == 0 {
			return nil, fmt.Errorf("%v %s: %w", dev, need.what, errors.ErrUnsupported)
		}
	}
	p, err := dev.MallocManaged(n, cudart.ManagedGlobal)
	if err != nil {
		return nil, err
	}
	at := cudart.DevPtr(uintptr(p))
	return &hostMemory{bytes: unsafe.Slice((*byte)(p), n), close: func() error { return dev.Free(at) },
		toDevice: func(_ context.Context, s *cudart.Stream, _ cudart.DevPtr, n int) error {
			return s.Prefetch(at, n, dev.Location())
		},
		toHost: func(_ context.Context, s *cudart.Stream, _ cudart.DevPtr, n int) error {
			return s.Prefetch(at, n, cudart.Location{Kind: cudart.LocationHost})
		},
	}, nil
}
