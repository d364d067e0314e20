package hostmem

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// RegisterOptions shape a registration. The zero value is what most programs
// want.
type RegisterOptions struct {
	// Label is shown by Outstanding and in messages.
	Label string
	// Chunk is as Options.Chunk.
	Chunk int
	// Workers is as Options.Workers.
	Workers int
}

// A Registration is pinned memory that other code mapped and will unmap after
// Close. Its methods may be called from any goroutine; the callers order what they do
// to its bytes.
type Registration struct{ pinnedMem }

// Register pins memory that other code mapped: a slice, at any offset and of any
// length but 0, of mapped memory, a memfd or shared memory. It makes the pages
// resident and registers exactly these bytes for all devices (cudaHostRegister, on
// dev). Pages at its ends may be shared with other registrations.
//
// The memory must stay mapped until Close has returned nil. CUDA does not detect
// when it was unmapped: the GPU then goes on reading and writing pages that the
// process does not have any more.
//
// Unlike a Buffer's, memory that is mapped privately is copied into forked children,
// which makes forks slow: advise MADV_DONTFORK where that matters.
//
// Memory that cannot be written is registered read-only if it is mapped
// shared: CopyToHost then returns [ErrReadOnly].
//
// Errors, before CUDA sees the memory, are of memory of the Go heap ([ErrGoMemory]);
// of a range that is not mapped as a whole, or cannot be read; of private mappings
// that cannot be written, on which the driver hangs; of devices that cannot register
// memory for reading only ([errors.ErrUnsupported]). Memory that is registered
// already, all or some of it, as a [Buffer] is, returns
// [cudart.ErrHostMemoryAlreadyRegistered]. Otherwise errors, and what they leave, are
// those of [Alloc]. Memory that is resident is never refused for want of room.
//
// When ctx ends while Register waits for a limit or makes pages resident, it undoes
// its work and returns ctx's error. When ctx ends while a call into CUDA does not
// return, Register returns within a second, and its work is undone when the call
// returns: the memory must stay mapped until then.
func Register(ctx context.Context, dev *cudart.Device, mem []byte, o RegisterOptions) (*Registration, error) {
	r, err := register(ctx, dev, mem, o)
	if err != nil {
		process.failures.Add(1)
		return nil, fmt.Errorf("hostmem: register %d bytes at %p: %w", len(mem), unsafe.SliceData(mem), err)
	}
	return r, nil
}

func register(ctx context.Context, dev *cudart.Device, mem []byte, o RegisterOptions) (*Registration, error) {
	start := time.Now()
	if err := checkArguments(ctx, dev); err != nil {
		return nil, err
	}
	if len(mem) == 0 {
		return nil, errors.New("there are no bytes")
	}
	pin := Options{Label: o.Label, Chunk: o.Chunk, Workers: o.Workers}
	if err := pin.Validate(); err != nil {
		return nil, err
	}
	stack := callerStack(dev)
	system := pages.SystemOf(ctx)
	covered, memory, err := inspect(mem, system)
	if err != nil {
		return nil, err
	}
	return bounded(ctx, func() (*Registration, error) {
		region, err := pages.Borrow(system, memory)
		if err != nil {
			return nil, err
		}
		flags, notes, err := registering(dev, memory.ReadOnly)
		if err != nil {
			return nil, err
		}
		r := &Registration{pinnedMem{notes: notes}}
		if err := r.pin(ctx, dev, region, "registration", flags, pin); err != nil {
			if m, ok := writesThrough(covered); ok && errors.Is(err, cudart.ErrInvalidValue) {
				err = fmt.Errorf("%v writes through to a file: on most file systems Linux (6.5 and later) refuses to pin such pages, as it could not detect changes (%w); map it for reading only, privately, or keep it in /dev/shm or a memfd: %w", m, errors.ErrUnsupported, err)
			}
			return nil, err
		}
		r.addToLedger(&process.registrations, r.n, start, stack)
		return r, nil
	}, func(r *Registration) { _ = r.Close() }) // what stays is in the ledger
}

// ReadOnly reports whether the GPU may only read the memory.
func (r *Registration) ReadOnly() bool { return r.readOnly }

// registering returns how a device registers memory that Alloc has not mapped, with
// notes, or why it cannot (cudaDeviceGetAttribute).
func registering(dev *cudart.Device, readOnly bool) (flags cudart.HostRegisterFlags, notes []string, err error) {
	if err := need(dev, cudart.AttrHostRegisterSupported, "host memory"); err != nil {
		return 0, nil, err
	}
	if readOnly {
		if err := need(dev, cudart.AttrHostRegisterReadOnlySupported, "memory that is mapped for reading only"); err != nil {
			return 0, nil, err
		}
		flags = cudart.HostRegisterReadOnly
	}
	tables, err := dev.Attribute(cudart.AttrPageableMemoryAccessUsesHostPageTables)
	if err != nil {
		return 0, nil, err
	}
	if tables == 1 {
		notes = []string{fmt.Sprintf("%v uses the host's page tables (attribute %d): registering does not lock pages there, the kernel may still move them or swap them out",
			dev, cudart.AttrPageableMemoryAccessUsesHostPageTables)}
	}
	return flags, notes, nil
}

func need(dev *cudart.Device, a cudart.Attr, what string) error {
	can, err := dev.Attribute(a)
	if err == nil && can == 0 {
		err = fmt.Errorf("%v cannot register %s (attribute %d is 0): %w", dev, what, a, errors.ErrUnsupported)
	}
	return err
}
