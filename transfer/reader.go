package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
)

// UploadFrom copies n bytes from offset off of r to the device, and returns how
// many are there. r is read by several goroutines at once, as io.ReaderAt
// allows; a file is read with pread. A reader that ends early gives
// io.ErrUnexpectedEOF, with what it had on the device.
func (c *Copier) UploadFrom(ctx context.Context, dst cudart.DevPtr, r io.ReaderAt, off int64, n int) (int, error) {
	done, err := c.do(ctx, n, func() (int, error) {
		j := c.newJob(n, up)
		read := readAt(r, off)
		if f, ok := r.(*os.File); ok && c.call.DirectIO {
			if d, ok := openDirect(f, os.O_RDONLY); ok {
				defer d.Close()
				read = readDirect(d, off, read)
				j.chunk = roomForBlocks(j.chunk)
			}
		}
		return j.uploadTo(ctx, dst, read)
	})
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from offset %d of %s: %w", n, off, nameOf(r), err)
	}
	return done, nil
}

// UploadReader copies the next n bytes of r to the device, and returns how many
// are there. A reader that ends early gives io.ErrUnexpectedEOF, with what it
// had on the device. After another error more may have been read from r than
// that. Reading is one goroutine's work, and overlaps with the copies.
func (c *Copier) UploadReader(ctx context.Context, dst cudart.DevPtr, r io.Reader, n int) (int, error) {
	done, err := c.do(ctx, n, func() (int, error) {
		return c.newJob(n, up).alone().uploadTo(ctx, dst, func(_ context.Context, to []byte, _, n int) (int, int, error) {
			got, err := io.ReadFull(r, to[:n])
			return 0, got, early(err)
		})
	})
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from %s: %w", n, nameOf(r), err)
	}
	return done, nil
}

// readAt is a source of what r has from base on.
func readAt(r io.ReaderAt, base int64) source {
	return func(_ context.Context, to []byte, off, n int) (int, int, error) {
		got, err := r.ReadAt(to[:n], base+int64(off))
		if got == n {
			return 0, got, nil
		}
		if err == nil {
			err = io.ErrNoProgress // against io.ReaderAt's rules
		}
		return 0, got, early(err)
	}
}

// early is the error of a reader that had fewer bytes than it was asked for.
func early(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// nameOf is a file's name, and for the rest the type.
func nameOf(rw any) string {
	if f, ok := rw.(interface{ Name() string }); ok {
		return f.Name()
	}
	return fmt.Sprintf("%T", rw)
}
