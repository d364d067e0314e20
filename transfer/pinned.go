package transfer

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// pinnedPiece is how much of a copy of pinned memory is queued at a time: a few
// pieces keep the link full, and a copy that is canceled ends after them.
const pinnedPiece = 64 * mib

// uploadPinned is for memory that is pinned already, and needs no ring; ok is
// false for other memory.
func (v *View) uploadPinned(ctx context.Context, dst cudart.DevPtr, src []byte) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(src); ok {
		done, err = v.direct(ctx, len(src), up, func(s *cudart.Stream, off, n int) error {
			return p.CopyToDevice(s, dst+cudart.DevPtr(off), at+off, n)
		})
		return done, true, err
	}
	if !v.isPinned(src) {
		return 0, false, nil
	}
	done, err = v.direct(ctx, len(src), up, func(s *cudart.Stream, off, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&src[off]), n)
	})
	return done, !atSeam(err), err
}

// downloadPinned is the same the other way.
func (v *View) downloadPinned(ctx context.Context, dst []byte, src cudart.DevPtr) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(dst); ok {
		done, err = v.direct(ctx, len(dst), down, func(s *cudart.Stream, off, n int) error {
			return p.CopyFromDevice(s, at+off, src+cudart.DevPtr(off), n)
		})
		return done, true, err
	}
	if !v.isPinned(dst) {
		return 0, false, nil
	}
	done, err = v.direct(ctx, len(dst), down, func(s *cudart.Stream, off, n int) error {
		return s.CopyToHost(unsafe.Pointer(&dst[off]), src+cudart.DevPtr(off), n)
	})
	return done, !atSeam(err), err
}

// direct copies n bytes, a piece of which queue queues. The memory is the
// caller's: direct returns when the GPU is done with it, also after an error.
func (v *View) direct(ctx context.Context, n int, w way, queue func(s *cudart.Stream, off, n int) error) (int, error) {
	j := v.newJob(n, w)
	j.ring, j.moved, j.stream, j.chunk = nil, &v.stats.directBytes, v.pick(unstaged, w), pinnedPiece
	j.alone().flow(ctx, func(_ *slot, off, n int) error {
		return queue(j.stream, off, n)
	}, func(_ *slot, _, n int) (int, error) { return n, nil })
	return j.result()
}

// isPinned asks CUDA about memory that is not hostmem's, at its ends
// (cudaPointerGetAttributes).
func (v *View) isPinned(mem []byte) bool {
	if len(mem) <= smallCopy {
		return false // asking takes longer than staging
	}
	for _, at := range []*byte{&mem[0], &mem[len(mem)-1]} {
		a, err := v.dev.PointerAttributes(uintptr(unsafe.Pointer(at)))
		if err != nil || a.Type == cudart.MemoryUnregistered {
			return false
		}
	}
	return true
}

// atSeam reports whether a direct copy may have failed because the memory is of
// several registrations, which no copy may cross. What was copied before does
// no harm when it is copied again.
func atSeam(err error) bool { return errors.Is(err, cudart.ErrInvalidValue) }
