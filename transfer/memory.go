package transfer

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// Upload copies src, which may be any memory, to the device.
func (v *View) Upload(ctx context.Context, dst cudart.DevPtr, src []byte) error {
	_, err := v.do(ctx, len(src), func() (int, error) {
		if done, ok, err := v.uploadPinned(ctx, dst, src); ok {
			return done, err
		}
		return v.newJob(len(src), up).uploadTo(ctx, dst, func(_ context.Context, to []byte, off, n int) (int, int, error) {
			copy(to, src[off:off+n])
			return 0, n, nil
		})
	})
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes: %w", len(src), err)
	}
	return nil
}

// Download copies from the device into dst, which may be any memory.
func (v *View) Download(ctx context.Context, dst []byte, src cudart.DevPtr) error {
	_, err := v.do(ctx, len(dst), func() (int, error) {
		if done, ok, err := v.downloadPinned(ctx, dst, src); ok {
			return done, err
		}
		return v.newJob(len(dst), down).downloadFrom(ctx, src, func(from []byte, off int) (int, error) {
			copyIn(dst[off:off+len(from)], from)
			return len(from), nil
		})
	})
	if err != nil {
		return fmt.Errorf("transfer: download %d bytes: %w", len(dst), err)
	}
	return nil
}

// DownloadNew copies n bytes from the device into memory that it allocates:
// ordinary memory, but in huge pages, which takes less time than a new Go slice
// does. Close it. Most of that time the kernel clears pages, so that all cores
// are used. The memory of no bytes is empty.
func (v *View) DownloadNew(ctx context.Context, src cudart.DevPtr, n int) (*hostmem.Pageable, error) {
	mem := new(hostmem.Pageable)
	_, err := v.do(ctx, n, func() (done int, err error) {
		fresh, err := hostmem.AllocPageable(n)
		if err != nil {
			return 0, err
		}
		defer func() { // also if Progress ends this goroutine
			if mem != fresh {
				err = errors.Join(err, fresh.Close())
			}
		}()
		dst := fresh.Bytes()
		j := v.newJob(n, down)
		j.wholePages(runtime.GOMAXPROCS(0))
		done, err = j.downloadFrom(ctx, src, func(from []byte, off int) (int, error) {
			return copy(dst[off:], from), nil
		})
		if err == nil {
			mem = fresh
		}
		return done, err
	})
	if err != nil {
		return nil, fmt.Errorf("transfer: download %d bytes: %w", n, err)
	}
	return mem, nil
}

const (
	// hugePage is what the kernel clears at a time, on amd64 and most of arm64.
	hugePage = 2 * mib
	// newChunk is as much as caches hold of a few pages that were just cleared.
	newChunk = 2 * hugePage
)

// wholePages makes chunks of whole huge pages: the worker that touches a page
// first has it cleared, in its caches, and should be the one that writes it.
func (j *job) wholePages(workers int) {
	if j.chunk < hugePage {
		return
	}
	j.unit, j.least, j.chunk = hugePage, hugePage, min(j.chunk/hugePage*hugePage, newChunk)
	j.workers = min(workers, cap(j.ring.free), (j.n+hugePage-1)/hugePage)
}

// copyIn copies into the caller's memory, which may be resident or not.
func copyIn(to, from []byte) {
	if resident(to) {
		copy(to, from)
	} else {
		copyFresh(to, from)
	}
}

// copyFresh copies into memory that is not resident. It is populated a piece
// ahead: one call for many pages is faster than a fault each, and they are still
// in the cache when they are written.
func copyFresh(to, from []byte) {
	const piece = 256 * kib
	for n := 0; n < len(from); n += piece {
		part := to[n:min(n+piece, len(from))]
		populate(part)
		copy(part, from[n:])
	}
}
