package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// DownloadTo copies n bytes from the device to offset off of w. It returns the number of
// bytes, from the first on, that were written. Several goroutines write at once, as
// io.WriterAt allows; after an error, bytes behind the count may have been written too. When ctx ends, no further WriteAt begins, and one that runs
// may outlast the call.
//
// The kernel lets only one thread at a time write to a file. So a file that is open for
// reading and writing is mapped if it is in memory: one of tmpfs (such as /dev/shm) or a
// memfd, which is extended, or one that has all n bytes in the page cache. After an error
// the file is extended only by bytes that were written. A new file in memory of 16 MiB or more
// gets huge pages (MADV_COLLAPSE, since Linux 6.1) where memory has some.
func (c *Copier) DownloadTo(ctx context.Context, w io.WriterAt, off int64, src cudart.DevPtr, n int) (int, error) {
	p := c.get().at(n, src)
	done, err := p.doWith(ctx, w, off, n, func() (int, error) { return p.downloadAt(ctx, w, off, n) })
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to offset %d of %s: %w", n, off, nameOf(w), err)
	}
	return done, nil
}

const (
	// maxWriters is the number of goroutines that write at once: they wait most of the time.
	maxWriters = 8
	// fileWriters is that number for a file in the page cache: the kernel lets one at a
	// time write.
	fileWriters = 1
)

// downloadAt copies to an offset of w, in the quickest way that it offers.
func (p target) downloadAt(ctx context.Context, w io.WriterAt, off int64, n int) (int, error) {
	writers, write := maxWriters, writeAt(w, off)
	if f, ok := w.(*os.File); ok {
		if done, ok, err := p.downloadMapped(ctx, f, off, n); ok {
			return done, err
		}
		writers = fileWriters
		if d := p.call.reopenDirect(f, os.O_WRONLY); d != nil {
			defer d.Close()
			writers, write = maxWriters, writeDirect(f, d, off)
		}
	}
	return p.stage(ctx, stage.Copy{N: n, Down: true, Host: newWriteBehind(writers, write)})
}

// DownloadWriter copies n bytes from the device to w. It returns the number of bytes that
// w's Write has reported; a Write that panics or reports an impossible count adds 0. Writing is one goroutine's work, and overlaps with the copies.
// After an error Write is not called again; when ctx ends, one that runs may
// outlast the call.
//
// A file is written as DownloadTo does, from its offset on. The offset then moves by the
// number of bytes that were written.
func (c *Copier) DownloadWriter(ctx context.Context, w io.Writer, src cudart.DevPtr, n int) (int, error) {
	p := c.get().at(n, src)
	done, err := p.doWith(ctx, w, 0, n, func() (int, error) {
		if b, ok := w.(*bytes.Buffer); ok {
			if err := bounded.Guard(func() error { b.Grow(n); return nil }); err != nil {
				return 0, err // n bytes are more than a slice can have
			}
			mem := b.AvailableBuffer()[:n]
			done, err := p.copyMemory(ctx, src, mem, true)
			b.Write(mem[:done])
			return done, err
		}
		if f, ok := w.(*os.File); ok && writesAtOffset(f) {
			return atPosition(f, n, func(off int64) (int, error) { return p.downloadAt(ctx, f, off, n) })
		}
		return p.stage(ctx, stage.Copy{N: n, Down: true, Host: newWriteBehind(1, write(w))})
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to %s: %w", n, nameOf(w), err)
	}
	return done, nil
}
