package hostmem

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// RegisterOptions shape a registration. The zero value is what most programs
// want.
type RegisterOptions struct {
	// Label is shown where memory is accounted for.
	Label string
	// Chunk is as Options.Chunk.
	Chunk int
	// Workers is as Options.Workers.
	Workers int

	system *pages.System // of tests
}

// A Registration is pinned memory that somebody else mapped, and will unmap
// after Close. Its methods may be called from any goroutine; what they do to
// its bytes is the callers' to order.
type Registration struct{ foreign }

// Register pins memory that somebody else mapped: a slice, at any offset and
// of any length, of what mmap, a memfd or shared memory gave. It makes the
// pages resident and registers exactly these bytes for all devices
// (cudaHostRegister, on dev). Pages at its ends may be shared with other
// registrations.
//
// The memory must stay mapped until Close has returned nil. Nothing tells when
// it did not: to CUDA all is well then, and the GPU goes on reading and writing
// pages that the process has lost.
//
// Unlike a Buffer's, the memory is copied into forked children when it is mapped
// privately, which makes forks slow: advise MADV_DONTFORK where that matters.
//
// Memory that cannot be written is registered read-only if it is mapped
// shared: CopyFromDevice then gives [ErrReadOnly]. A device that cannot do that
// gives an error that wraps [errors.ErrUnsupported]. Refused before CUDA sees
// it are: memory of the Go heap ([ErrGoMemory]); a range that is not mapped as a
// whole, or cannot be read; private mappings that cannot be written, on which
// the driver hangs. Memory of which some is registered already, as a [Buffer]
// is, gives [cudart.ErrHostMemoryAlreadyRegistered]. After an error nothing is
// registered; only if unregistering fails on the way back something is, and
// the error says so. What the host cannot spare, or [SetLimits] forbids, is
// [ErrLimit].
//
// When ctx ends while Register waits for a limit or makes pages resident, it
// undoes its work and returns ctx's error.
func Register(ctx context.Context, dev *cudart.Device, mem []byte, o RegisterOptions) (*Registration, error) {
	r, err := register(ctx, dev, mem, o)
	if err != nil {
		account.failures.Add(1)
		return nil, fmt.Errorf("hostmem: register %d bytes at %p: %w", len(mem), unsafe.SliceData(mem), err)
	}
	return r, nil
}

func register(ctx context.Context, dev *cudart.Device, mem []byte, o RegisterOptions) (*Registration, error) {
	began := time.Now()
	if err := checkArguments(ctx, dev); err != nil {
		return nil, err
	}
	if len(mem) == 0 {
		return nil, errors.New("there are no bytes")
	}
	pin := Options{Label: o.Label, Chunk: o.Chunk, Workers: o.Workers, system: o.system}
	if err := pin.Validate(); err != nil {
		return nil, err
	}
	maps, readOnly, err := inspect(mem)
	if err != nil {
		return nil, err
	}
	region, err := pages.Borrow(pin.host(), mem, readOnly)
	if err != nil {
		return nil, err
	}
	flags, notes, err := askDevice(dev, readOnly)
	if err != nil {
		return nil, err
	}
	r := &Registration{foreign{region: region, notes: notes}}
	if err := r.pin(ctx, dev, region, "registration", flags, pin); err != nil {
		if m, ok := writesThrough(maps); ok && errors.Is(err, cudart.ErrInvalidValue) {
			err = fmt.Errorf("%v writes through to a file: on most file systems Linux (6.5 and later) lets nobody pin such pages, as it could not tell when they change (%w); map it for reading only, privately, or keep it in /dev/shm or a memfd: %w", m, errors.ErrUnsupported, err)
		}
		return nil, err
	}
	r.enter(&account.foreign, r.n, began)
	return r, nil
}

// inspect looks mem up among the mappings of the process. It returns those that
// mem lies in and how CUDA can register it, or why it cannot.
func inspect(mem []byte) (covered []linux.Mapping, readOnly bool, err error) {
	maps, err := openMaps()
	if err != nil {
		return nil, false, fmt.Errorf("see what is mapped: %w", err)
	}
	defer maps.Close()
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	end := start + uintptr(len(mem))
	if covered, err = maps.Within(start, end); err != nil {
		return nil, false, fmt.Errorf("see what is mapped: %w", err)
	}
	heap, err := goMemory(maps, covered, mem)
	if err != nil {
		return nil, false, fmt.Errorf("see what is mapped: %w", err)
	}
	if heap {
		return nil, false, ErrGoMemory
	}
	readOnly, err = access(covered, start, end)
	return covered, readOnly, err
}
