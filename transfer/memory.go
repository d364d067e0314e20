package transfer

import (
	"context"
	"errors"
	"fmt"

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
			copyPieces(to, src[off:off+n])
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
	return c.downloadBy(ctx, dst, src, copyIn)
}

// downloadBy is Download that puts bytes in place by the given means.
func (c *Copier) downloadBy(ctx context.Context, dst []byte, src cudart.DevPtr, place func(to, from []byte)) error {
	_, err := c.do(ctx, len(dst), func() (int, error) {
		if done, ok, err := c.downloadDirect(ctx, dst, src); ok {
			return done, err
		}
		return c.newJob(len(dst), down).downloadFrom(ctx, src, func(from []byte, off int) error {
			place(dst[off:off+len(from)], from)
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("transfer: download %d bytes: %w", len(dst), err)
	}
	return nil
}

// DownloadNew copies n bytes from the device into memory that it allocates:
// ordinary memory, but in huge pages, which takes half the time that a new Go
// slice does. Close it.
func (c *Copier) DownloadNew(ctx context.Context, src cudart.DevPtr, n int) (*hostmem.Pageable, error) {
	mem, err := hostmem.AllocPageable(n)
	if err != nil {
		return nil, fmt.Errorf("transfer: download: %w", err)
	}
	if err := c.downloadBy(ctx, mem.Bytes(), src, copyPieces); err != nil {
		return nil, errors.Join(err, mem.Close())
	}
	return mem, nil
}
