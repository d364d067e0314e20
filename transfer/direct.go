package transfer

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// directPiece is how much of a direct copy is queued at a time: a few of them
// keep the link full, and a copy that is cancelled ends after them.
const directPiece = 64 * mib

// uploadDirect is for memory that is pinned already, and needs no ring; ok is
// false for other memory.
func (c *Copier) uploadDirect(ctx context.Context, dst cudart.DevPtr, src []byte) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(src); ok {
		done, err = c.direct(ctx, len(src), up, func(s *cudart.Stream, off, n int) error {
			return p.CopyToDevice(s, dst+cudart.DevPtr(off), at+off, n)
		})
		return done, true, err
	}
	if !c.isPinned(src) {
		return 0, false, nil
	}
	done, err = c.direct(ctx, len(src), up, func(s *cudart.Stream, off, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&src[off]), n)
	})
	return done, !atSeam(err), err
}

// downloadDirect is the same the other way.
func (c *Copier) downloadDirect(ctx context.Context, dst []byte, src cudart.DevPtr) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(dst); ok {
		done, err = c.direct(ctx, len(dst), down, func(s *cudart.Stream, off, n int) error {
			return p.CopyFromDevice(s, at+off, src+cudart.DevPtr(off), n)
		})
		return done, true, err
	}
	if !c.isPinned(dst) {
		return 0, false, nil
	}
	done, err = c.direct(ctx, len(dst), down, func(s *cudart.Stream, off, n int) error {
		return s.CopyToHost(unsafe.Pointer(&dst[off]), src+cudart.DevPtr(off), n)
	})
	return done, !atSeam(err), err
}

// direct copies n bytes, which queue queues a piece of.
func (c *Copier) direct(ctx context.Context, n int, w way, queue func(s *cudart.Stream, off, n int) error) (int, error) {
	j := c.newJob(n, w)
	j.ring, j.moved, j.stream, j.chunk = c.small, &c.stats.directBytes, c.pick(unstaged, w), directPiece
	j.alone().flow(ctx, func(slot *slot, off, n int) error { // whose event serves, not its memory
		if err := queue(j.stream, off, n); err != nil {
			return err
		}
		return slot.mark(j.stream)
	}, func(*slot, int, int) error { return nil })
	if j.err != nil {
		j.settle()
	}
	return j.result()
}

// isPinned asks CUDA about memory that is not hostmem's, at its ends.
func (c *Copier) isPinned(mem []byte) bool {
	if len(mem) <= smallCopy {
		return false // asking takes longer than staging
	}
	for _, at := range []*byte{&mem[0], &mem[len(mem)-1]} {
		a, err := c.dev.PointerAttributes(uintptr(unsafe.Pointer(at)))
		if err != nil || a.Type == cudart.MemoryUnregistered {
			return false
		}
	}
	return true
}

// atSeam tells whether a direct copy may have failed because the memory is of
// several registrations, which no copy may cross. What was copied before does
// no harm when it is copied again.
func atSeam(err error) bool { return errors.Is(err, cudart.ErrInvalidValue) }
