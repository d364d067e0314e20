package hostmem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// RegisterOptions shape a Buffer of [Register]. The zero value suits programs that copy by its
// methods.
type RegisterOptions struct {
	// Label is shown by Outstanding and in messages.
	Label string
	// Chunk is as Options.Chunk.
	Chunk int
	// Workers is as Options.Workers.
	Workers int
	// Background has Register return before the memory is registered. It is then made resident and
	// registered in pieces of 1 GiB, or of Chunk, the last one first, while the program uses it:
	//
	//   - package transfer copies the registered pieces directly and stages the others;
	//   - [Find] and [Buffer.Spans] find the registered pieces only;
	//   - CopyToDevice and CopyFromDevice wait until their bytes are registered, and Use until all are;
	//   - [Buffer.Registered] waits for all, and returns the error if there is one;
	//   - Close ends it.
	//
	// The GPU stands still while a piece is registered. So pieces are registered while package transfer copies nothing
	// that is not registered, unless it has copied the memory 16 times.
	Background bool
	// File is the file that the memory maps shared, from Offset on, if there is one and it stays open as long as the
	// Buffer: what is not registered in the background yet is copied by reading and writing the file, which is faster
	// than to fault its pages in.
	File *os.File
	// Offset of the memory in File.
	Offset int64
}

// Register pins memory that other code mapped: a slice, at any offset and of any
// length but 0, of mapped memory, a memfd or shared memory. It makes the pages
// resident and registers exactly these bytes for all devices (cudaHostRegister, on
// dev). Pages at its ends may be shared with other registrations. Where the GPU uses the
// host's page tables, nothing is registered: see [Method].
//
// The memory must stay mapped until Close has returned nil. CUDA does not detect an unmap: the GPU
// would still read and write pages that the process no longer has.
//
// Unlike memory of Alloc, privately mapped memory is copied into forked children, which makes forks
// slow: use MADV_DONTFORK if that matters.
//
// Memory that cannot be written is registered read-only if it is mapped
// shared: CopyFromDevice then returns [ErrReadOnly].
//
// Before it calls CUDA, Register refuses memory of the Go heap ([ErrGoMemory]), ranges that are not
// fully mapped or cannot be read, private mappings that cannot be written, on which the driver
// hangs, and devices and hosts that cannot register memory, or not read-only
// ([errors.ErrUnsupported]). If part of the memory is registered already, the error wraps
// [cudart.ErrHostMemoryAlreadyRegistered]. Other errors are those of [Alloc], but Register never
// moves the memory. The guard of the host's memory never refuses resident memory.
//
// When ctx ends, Register does what Alloc does. If a call into CUDA has not returned by then, the
// memory must stay mapped until it has.
func Register(ctx context.Context, dev *cudart.Device, mem []byte, o RegisterOptions) (*Buffer, error) {
	b := &Buffer{}
	pin := Options{Label: o.Label, Chunk: o.Chunk, Workers: o.Workers}
	if err := b.open(ctx, dev, "registration", pin, func() error { return b.register(ctx, mem, pin, o) }); err != nil {
		return nil, fmt.Errorf("hostmem: register %d bytes at %p: %w", len(mem), unsafe.SliceData(mem), err)
	}
	return b, nil
}

func (b *Buffer) register(ctx context.Context, mem []byte, pin Options, o RegisterOptions) error {
	if len(mem) == 0 {
		return errors.New("there are no bytes")
	}
	system := pages.SystemOf(ctx)
	covered, memory, err := inspect(mem, system)
	if err != nil {
		return err
	}
	region, err := pages.Borrow(system, memory)
	if err != nil {
		return err
	}
	flags, err := b.host.registering(ctx, b.dev, memory.ReadOnly)
	if err == nil && o.Background && !b.host.shared() {
		b.background = newBackground(ctx, b, memory, o)
	}
	if err == nil {
		err = explain(b.pin(ctx, region, flags, pin))
	}
	if m, ok := writesThrough(covered); ok && errors.Is(err, cudart.ErrInvalidValue) {
		return fmt.Errorf("%v writes through to a file: on most file systems Linux (6.5 and later) refuses to pin such pages, as it could not detect changes (%w); map it for reading only, privately, or keep it in /dev/shm or a memfd: %w", m, errors.ErrUnsupported, err)
	}
	return copyInstead(err)
}

// copyInstead adds advice where memory cannot be registered at its addresses.
func copyInstead(err error) error {
	var final *refusal
	if !errors.As(err, &final) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return fmt.Errorf("%w; copy it by package transfer, or keep it in memory from Alloc, which has other methods", err)
}

// registering returns how a device registers memory that Alloc has not mapped, or why
// it cannot.
func (h *host) registering(ctx context.Context, dev *cudart.Device, readOnly bool) (cudart.HostRegisterFlags, error) {
	if err := h.refused(); errors.Is(err, errors.ErrUnsupported) {
		return 0, err // before pages are made resident
	}
	if !readOnly {
		return 0, nil
	}
	can, err := h.attribute(ctx, dev, cudart.AttrHostRegisterReadOnlySupported)
	if err == nil && can == 0 && !h.shared() {
		err = cannotRegister(dev, cudart.AttrHostRegisterReadOnlySupported, "memory that is mapped for reading only")
	}
	return cudart.HostRegisterReadOnly, err
}
