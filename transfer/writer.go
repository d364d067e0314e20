package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
)

// DownloadTo copies n bytes from the device to offset off of w, and returns how
// many, from the first on, were written. w is written by several goroutines at
// once, as io.WriterAt allows. A file in memory (tmpfs, such as /dev/shm, and
// memfd) that is open for reading and writing is extended and mapped instead of
// written: the kernel lets only one at a time write to it.
func (c *Copier) DownloadTo(ctx context.Context, w io.WriterAt, off int64, src cudart.DevPtr, n int) (int, error) {
	done, err := c.do(ctx, n, func() (int, error) {
		j := c.newJob(n, down)
		write := writeAt(w, off)
		if f, ok := w.(*os.File); ok {
			mem, unmap, err := mapInMemory(f, off, n)
			switch {
			case err == nil:
				done, err := j.downloadFrom(ctx, src, func(from []byte, at int) error {
					copyFresh(mem[at:at+len(from)], from)
					forget(mem[at : at+len(from)])
					return nil
				})
				return done, errors.Join(err, unmap())
			case !errors.Is(err, errors.ErrUnsupported):
				return 0, err
			}
			if c.call.DirectIO {
				if d, ok := openDirect(f, os.O_WRONLY); ok {
					defer d.Close()
					write = writeDirect(d, off, write)
				}
			}
		}
		return j.downloadFrom(ctx, src, write)
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to offset %d of %s: %w", n, off, nameOf(w), err)
	}
	return done, nil
}

// DownloadWriter copies n bytes from the device to w, and returns how many w
// took. Writing is one goroutine's work, and overlaps with the copies.
func (c *Copier) DownloadWriter(ctx context.Context, w io.Writer, src cudart.DevPtr, n int) (int, error) {
	done, err := c.do(ctx, n, func() (int, error) {
		return c.newJob(n, down).alone().downloadFrom(ctx, src, func(from []byte, _ int) error {
			return took(len(from))(w.Write(from))
		})
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to %s: %w", n, nameOf(w), err)
	}
	return done, nil
}

// writeAt is a sink that writes to w from base on.
func writeAt(w io.WriterAt, base int64) sink {
	return func(from []byte, off int) error {
		return took(len(from))(w.WriteAt(from, base+int64(off)))
	}
}

// took makes an error of a write of fewer than n bytes.
func took(n int) func(int, error) error {
	return func(wrote int, err error) error {
		if err == nil && wrote < n {
			return io.ErrShortWrite
		}
		return err
	}
}
