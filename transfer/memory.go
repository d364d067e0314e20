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
func (c *Copier) Upload(ctx context.Context, dst cudart.DevPtr, src []byte) error {
	_, err := c.do(ctx, len(src), func() (int, error) {
		if done, ok, err := c.uploadDirect(ctx, dst, src); ok {
			return done, err
		}
		return c.newJob(len(src), up).uploadTo(ctx, dst, func(_ context.Context, to []byte, off, n int) (int, int, error) {
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
func (c *Copier) Download(ctx context.Context, dst []byte, src cudart.DevPtr) error {
	_, err := c.do(ctx, len(dst), func() (int, error) {
		if done, ok, err := c.downloadDirect(ctx, dst, src); ok {
			return done, err
		}
		return c.newJob(len(dst), down).downloadFrom(ctx, src, func(from []byte, off int) error {
			copyIn(dst[off:off+len(from)], from)
			return nil
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
// are used.
func (c *Copier) DownloadNew(ctx context.Context, src cudart.DevPtr, n int) (*hostmem.Pageable, error) {
	mem, err := hostmem.AllocPageable(n)
	if err != nil {
		return nil, fmt.Errorf("transfer: download: %w", err)
	}
	dst := mem.Bytes()
	_, err = c.do(ctx, n, func() (int, error) {
		j := c.newJob(n, down)
		j.wholePages(runtime.GOMAXPROCS(0))
		return j.downloadFrom(ctx, src, func(from []byte, off int) error {
			copy(dst[off:off+len(from)], from)
			return nil
		})
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("transfer: download %d bytes: %w", n, err), mem.Close())
	}
	return mem, nil
}

const (
	// hugePage is what the kernel clears at a time, on amd64 and most of arm64.
	hugePage = 2 * mib
	// newChunk is as much as caches hold of a few pages that were just cleared.
	newChunk = 2 * hugePage
)

// wholePages makes chunks of whole huge pages: who touches a page first has it
// cleared, in its caches, and should be the one that writes it.
func (j *job) wholePages(workers int) {
	if j.chunk < hugePage {
		return
	}
	j.unit, j.least, j.chunk = hugePage, hugePage, min(j.chunk/hugePage*hugePage, newChunk)
	j.workers = min(workers, cap(j.ring.free), (j.n+hugePage-1)/hugePage)
}
