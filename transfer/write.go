package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// DownloadTo copies n bytes from the device to offset off of w, and returns how
// many, from the first on, were written. w is written by several goroutines at
// once, as io.WriterAt allows; after an error some bytes beyond those may have
// been written too. When ctx ends, no further WriteAt begins, and one that runs
// may outlast the call.
//
// A file that is open for reading and writing is mapped instead of written, where
// it is in memory: a file in the page cache that is as long already, or one of
// tmpfs (such as /dev/shm) and memfd, which is extended. The kernel lets only
// one thread at a time write to a file. After an error it is no longer than
// before, or than what was written.
func (v *View) DownloadTo(ctx context.Context, w io.WriterAt, off int64, src cudart.DevPtr, n int) (int, error) {
	done, err := v.get().doWith(ctx, w, off, n, nil, func() (int, error) { return v.downloadAt(ctx, w, off, src, n) })
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to offset %d of %s: %w", n, off, nameOf(w), err)
	}
	return done, nil
}

// downloadAt copies to an offset of w, in the quickest way that it offers.
func (v view) downloadAt(ctx context.Context, w io.WriterAt, off int64, src cudart.DevPtr, n int) (int, error) {
	if f, ok := w.(*os.File); ok {
		m, err := mapShared(f, off, n, !v.call.DirectIO)
		switch {
		case err == nil:
			return v.downloadMapped(ctx, m, src)
		case !errors.Is(err, errors.ErrUnsupported):
			return 0, err
		}
		if d := v.call.reopenDirect(f, os.O_WRONLY); d != nil {
			defer d.Close()
			return v.stageDown(ctx, src, stage.Copy{N: n, Host: newWriteBehind(writers, writeDirect(f, d, off))})
		}
		return v.stageDown(ctx, src, stage.Copy{N: n, Host: newWriteBehind(fileWriters, writeAt(f, off))})
	}
	return v.stageDown(ctx, src, stage.Copy{N: n, Host: newWriteBehind(writers, writeAt(w, off))})
}

const (
	// writers is how many goroutines write at once: mostly they wait.
	writers = 8
	// fileWriters is the same for a file in the page cache: the kernel lets one at
	// a time go on.
	fileWriters = 1
	// freshWorkers is how many copy into a file whose pages are allocated meanwhile:
	// ten are no quicker, at twice the cost.
	freshWorkers = 4
)

// downloadMapped copies into a mapped file, and unmaps it.
func (v view) downloadMapped(ctx context.Context, m *sharedFile, src cudart.DevPtr) (done int, err error) {
	write := writeAt(m.file, m.off)
	host := memoryHost(len(m.mem), func(from []byte, off int) error {
		to := m.mem[off : off+len(from)]
		fault := bounded.Guard(func() error {
			m.put(to, from)
			return nil
		})
		if fault != nil { // no page is there: writing allocates one, or reports why not
			_, err := write(from, off)
			return err
		}
		forget(to)
		return nil
	})
	// Workers that populate parts of one page table, 2 MiB, wait for one another.
	c := stage.Copy{N: len(m.mem), Host: host, Slow: m.slow, Kernel: true, Piece: hugePage, MaxChunk: 2 * hugePage}
	if m.grows {
		c.Workers = freshWorkers
	}
	done, err = v.stageDown(ctx, src, c)
	return done, errors.Join(err, m.close(done))
}

// DownloadWriter copies n bytes from the device to w, and returns how many w
// took, as its Write methods reported: 0 for one that panics, or reports a count
// that cannot be. Writing is one goroutine's work, and overlaps with the copies.
// After an error Write is not called again; when ctx ends, one that runs may
// outlast the call.
//
// A file is written as DownloadTo does, from its offset on, which then moves by
// what was written.
func (v *View) DownloadWriter(ctx context.Context, w io.Writer, src cudart.DevPtr, n int) (int, error) {
	done, err := v.get().doWith(ctx, w, 0, n, nil, func() (int, error) {
		if b, ok := w.(*bytes.Buffer); ok {
			if err := bounded.Guard(func() error { b.Grow(n); return nil }); err != nil {
				return 0, err // n bytes are more than a slice can have
			}
			mem := b.AvailableBuffer()[:n]
			done, err := v.copyMemory(ctx, src, mem, true)
			b.Write(mem[:done])
			return done, err
		}
		if f, ok := w.(*os.File); ok && writesAtOffset(f) {
			return atPosition(f, n, func(off int64) (int, error) { return v.downloadAt(ctx, f, off, src, n) })
		}
		return v.stageDown(ctx, src, stage.Copy{N: n, Host: newWriteBehind(1, write(w))})
	})
	if err != nil {
		return done, fmt.Errorf("transfer: download %d bytes to %s: %w", n, nameOf(w), err)
	}
	return done, nil
}
