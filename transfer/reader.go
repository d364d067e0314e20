package transfer

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
)

// UploadFrom copies n bytes from offset off of r to the device, and returns how
// many are there. r is read by several goroutines at once, as io.ReaderAt
// allows; a file is read with pread. A reader that ends early is
// io.ErrUnexpectedEOF, with what it had on the device.
func (v *View) UploadFrom(ctx context.Context, dst cudart.DevPtr, r io.ReaderAt, off int64, n int) (int, error) {
	done, err := v.doWith(ctx, r, off, n, func() (int, error) {
		j := v.newJob(n, up)
		if f, d := j.openDirect(r, os.O_RDONLY); d != nil {
			defer d.Close()
			return j.uploadTo(ctx, dst, j.readDirect(f, d, off))
		}
		return j.uploadTo(ctx, dst, readAt(r, off))
	})
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from offset %d of %s: %w", n, off, nameOf(r), err)
	}
	return done, nil
}

// UploadReader copies the next n bytes of r to the device, and returns how many
// are there. A reader that ends early is io.ErrUnexpectedEOF, with what it
// had on the device; one that returns nothing 100 times in a row
// io.ErrNoProgress. After another error more may have been read from r than
// that. Reading is one goroutine's work, and overlaps with the copies; when ctx
// ends, no further Read begins.
//
// With [Call].DirectIO a file is read by several goroutines, from its offset
// on, which then moves by what is on the device.
func (v *View) UploadReader(ctx context.Context, dst cudart.DevPtr, r io.Reader, n int) (int, error) {
	done, err := v.doWith(ctx, r, 0, n, func() (int, error) {
		j := v.newJob(n, up)
		if f, d := j.openDirect(r, os.O_RDONLY); d != nil {
			defer d.Close()
			return j.atOffset(f, func(off int64) (int, error) {
				return j.uploadTo(ctx, dst, j.readDirect(f, d, off))
			})
		}
		return j.alone().uploadTo(ctx, dst, func(ctx context.Context, to []byte, _, n int) (skip, got int, err error) {
			got, err = readFull(ctx, r, to[:n])
			return 0, got, err
		})
	})
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from %s: %w", n, nameOf(r), err)
	}
	return done, nil
}
