package transfer

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A sender queues a copy of n bytes at off of pinned memory, to or from the device.
type sender func(s *cudart.Stream, at cudart.DevPtr, off, n int) error

// pinned returns the sender for mem, nil if that is not pinned. If hostmem does not know the
// memory, a copy may fail: see atSeam. The error is of a call that does not return.
func pinned(ctx context.Context, dev *cudart.Device, mem []byte, down bool) (send sender, known bool, err error) {
	p, start, isKnown := hostmem.Find(mem)
	if !isKnown {
		if ok, err := isPinned(ctx, dev, mem); !ok {
			return nil, false, err
		}
	}
	return func(s *cudart.Stream, at cudart.DevPtr, off, n int) error {
		switch {
		case isKnown && down:
			return p.CopyToHost(s, start+off, at, n)
		case isKnown:
			return p.CopyToDevice(s, at, start+off, n)
		case down:
			return s.CopyToHost(unsafe.Pointer(&mem[off]), at, n)
		}
		return s.CopyToDevice(at, unsafe.Pointer(&mem[off]), n)
	}, isKnown, nil
}

// isPinned asks CUDA about memory that is not hostmem's, at its ends
// (cudaPointerGetAttributes). The error is of a call that does not return.
func isPinned(ctx context.Context, dev *cudart.Device, mem []byte) (bool, error) {
	if len(mem) <= stage.MaxSmall {
		return false, nil // a query takes longer than staging
	}
	first, last := uintptr(unsafe.Pointer(&mem[0])), uintptr(unsafe.Pointer(&mem[len(mem)-1]))
	registered := func(at uintptr) bool {
		a, err := dev.PointerAttributes(at)
		return err == nil && a.Type != cudart.MemoryUnregistered
	}
	return bounded.Do(ctx, bounded.Call[bool]{
		Run:   func() (bool, error) { return registered(first) && registered(last), nil },
		Grace: bounded.CallbackGrace,
	})
}

// atSeam reports whether a direct copy may have failed because the memory is of
// several registrations, which no copy may cross. What was copied before does
// no harm when it is copied again.
func atSeam(err error) bool { return errors.Is(err, cudart.ErrInvalidValue) }

const (
	// directPiece is how much of a copy of pinned memory is queued at a time: a
	// few pieces keep the link full, and a copy that is canceled ends after them.
	directPiece  = 64 * mib
	directPieces = 4
	// The same for several devices, for each of them.
	fanPiece  = 16 * mib
	fanPieces = 4
)
