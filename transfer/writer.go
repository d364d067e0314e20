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
// once, as io.WriterAt allows; after an error some bytes beyond those may have
// been written too.
//
// A file in memory (tmpfs, such as /dev/shm, and memfd) that is open for reading
// and writing is extended and mapped instead of written, because the kernel lets
// only one thread at a time write to it. After an error it is no longer than
// before, or than what was written.
func (v *View) DownloadTo(ctx context.Context, w io.WriterAt, off int64, src cudart.DevPtr, n int) (int, error) {
	done, err := v.doWith(ctx, w, off, n, func() (int, error) {
		j := v.newJob(n, down)
		if f, ok := w.(*os.File); ok {
			m, err := mapShared(f, off, n)
			switch {
			case err == nil:
				return j.downloadShared(ctx, m, src)
			case !errors.Is(err, errors.ErrUnsupported):
				return 0, err
			}
		}
		if f, d := j.openDirect(w, os.O_WRONLY); d != nil {
			defer d.Close()
			return j.downloadFrom(ctx, src, writeDirect(f, d, off))
		}
		return j.downloadFrom(ctx, src, writeAt(w, off))
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to offset %d of %s: %w", n, off, nameOf(w), err)
	}
	return done, nil
}

// DownloadWriter copies n bytes from the device to w, and returns how many w
// took, as its Write methods reported: 0 for one that panics, or reports a count
// that cannot be. Writing is one goroutine's work, and overlaps with the copies.
// After an error Write is not called again.
//
// With [Call].DirectIO a file is written from its offset on, which then moves by
// what was written.
func (v *View) DownloadWriter(ctx context.Context, w io.Writer, src cudart.DevPtr, n int) (int, error) {
	done, err := v.doWith(ctx, w, 0, n, func() (int, error) {
		j := v.newJob(n, down).alone()
		if f, d := j.openDirect(w, os.O_WRONLY); d != nil {
			defer d.Close()
			return j.atOffset(f, func(off int64) (int, error) {
				return j.downloadFrom(ctx, src, writeDirect(f, d, off))
			})
		}
		return j.downloadFrom(ctx, src, write(w))
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to %s: %w", n, nameOf(w), err)
	}
	return done, nil
}
