package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A Reader reads device memory. It is an [io.Reader], [io.ReaderAt] and
// [io.WriterTo], so that io.Copy takes the way of [Copier.DownloadWriter]. Reads of less
// than some MiB take most of their time to begin: read into large buffers.
//
// Its methods may be called from any goroutine. Read and WriteTo take turns: one that is
// called by the other, through its writer or Progress, waits until the context ends.
type Reader memory

// A Writer writes device memory. It is an [io.Writer] and [io.ReaderFrom], so that
// io.Copy takes the way of [Copier.UploadReader]. Writes of less than some MiB take most
// of their time to begin: write large buffers.
//
// Its methods may be called from any goroutine. Write and ReadFrom take turns: one that is
// called by the other, through its reader or Progress, waits until the context ends.
type Writer memory

// memory is device memory that is read or written from start to end.
type memory struct {
	copier *Copier
	ctx    context.Context
	addr   cudart.DevPtr
	n      int           // bytes
	lock   chan struct{} // a mutex: it holds the method that copies
	at     atomic.Int64  // bytes that were copied
}

// NewReader returns a Reader of n bytes of device memory. It does not block. ctx ends the
// Reader's copies. A nil ctx and a negative n are errors of the first use.
func (c *Copier) NewReader(ctx context.Context, src cudart.DevPtr, n int) *Reader {
	return &Reader{copier: c, ctx: ctx, addr: src, n: n, lock: make(chan struct{}, 1)}
}

// NewWriter returns a Writer of n bytes of device memory. It does not block. ctx ends the
// Writer's copies. A nil ctx and a negative n are errors of the first use.
func (c *Copier) NewWriter(ctx context.Context, dst cudart.DevPtr, n int) *Writer {
	return &Writer{copier: c, ctx: ctx, addr: dst, n: n, lock: make(chan struct{}, 1)}
}

var errNoMemory = errors.New("the Reader or Writer is nil, or was not made by a Copier")

func (m *memory) check(off int64) error {
	switch {
	case m == nil || m.lock == nil:
		return errNoMemory
	case m.ctx == nil:
		return errNilContext
	case m.n < 0:
		return fmt.Errorf("%d bytes: must not be negative", m.n)
	}
	return checkOffset(off, 0)
}

// next calls copies with the address and the size of the remaining memory, and counts the
// bytes that copies returns.
func (m *memory) next(what string, copies func(at cudart.DevPtr, remaining int) (int, error)) (int, error) {
	err := m.check(0)
	if err == nil {
		select {
		case m.lock <- struct{}{}:
			defer func() { <-m.lock }()
			n, err := copies(m.addr+cudart.DevPtr(m.at.Load()), m.remaining())
			m.at.Add(int64(n))
			return n, err
		case <-m.ctx.Done():
			err = bounded.Ended(m.ctx)
		}
	}
	return 0, fmt.Errorf("transfer: %s device memory: %w", what, err)
}

// remaining returns the number of bytes that are not copied. It does not wait for a copy,
// which may be calling it.
func (m *memory) remaining() int {
	if m == nil {
		return 0
	}
	return max(m.n-int(m.at.Load()), 0)
}

// Read copies the next bytes into p, as many as fit, or returns io.EOF at the end. Errors
// are those of [Copier.Download]; no byte counts as read then.
func (r *Reader) Read(p []byte) (int, error) {
	return (*memory)(r).next("read", func(at cudart.DevPtr, remaining int) (int, error) {
		n := min(len(p), remaining)
		if n == 0 && len(p) > 0 {
			return 0, io.EOF
		}
		if err := r.copier.Download(r.ctx, p[:n], at); err != nil {
			return 0, err
		}
		return n, nil
	})
}

// ReadAt copies bytes at an offset into p. It returns io.EOF if there are fewer than p
// holds. Other errors are those of [Copier.Download], with a count of 0.
func (r *Reader) ReadAt(p []byte, off int64) (int, error) {
	if err := (*memory)(r).check(off); err != nil {
		return 0, fmt.Errorf("transfer: read device memory: %w", err)
	}
	n := int(min(int64(len(p)), max(int64(r.n)-off, 0)))
	if err := r.copier.Download(r.ctx, p[:n], r.addr+cudart.DevPtr(off)); err != nil {
		return 0, err
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteTo copies the rest to w. Count and errors are those of [Copier.DownloadWriter].
func (r *Reader) WriteTo(w io.Writer) (int64, error) {
	n, err := (*memory)(r).next("read", func(at cudart.DevPtr, remaining int) (int, error) {
		return r.copier.DownloadWriter(r.ctx, w, at, remaining)
	})
	return int64(n), err
}

// Len returns the number of bytes that can still be read. A copy that runs does not count
// yet. It does not block.
func (r *Reader) Len() int { return (*memory)(r).remaining() }

// Write copies p to the device, after what was written before. If p is longer than
// the rest, it copies what fits and returns io.ErrShortWrite. After
// an error of [Copier.Upload] nothing was written.
func (w *Writer) Write(p []byte) (int, error) {
	return (*memory)(w).next("write", func(at cudart.DevPtr, remaining int) (int, error) {
		n := min(len(p), remaining)
		if err := w.copier.Upload(w.ctx, at, p[:n]); err != nil {
			return 0, err
		}
		if n < len(p) {
			return n, io.ErrShortWrite
		}
		return n, nil
	})
}

// ReadFrom copies r to the device until it ends. It returns the number of bytes that arrived.
// A reader that has more than fits is io.ErrShortWrite: one byte more
// was read from it. Other errors are those of [Copier.UploadReader].
func (w *Writer) ReadFrom(r io.Reader) (int64, error) {
	n, err := (*memory)(w).next("write", func(at cudart.DevPtr, remaining int) (int, error) {
		p := w.copier.get().at(remaining, at)
		done, err := p.doWith(w.ctx, r, 0, remaining, func() (int, error) { return p.uploadNext(w.ctx, r, remaining) })
		switch {
		case err == nil:
			err = w.ended(p, r)
		case errors.Unwrap(err) == errSourceEnded: // "at byte …" of r itself, not of what r copies from
			err = nil
		default:
			err = p.errUploadReader(r, remaining, err)
		}
		return done, err
	})
	return int64(n), err
}

// ended returns an error unless r has ended.
func (w *Writer) ended(p target, r io.Reader) error {
	n, err := bounded.Callback(w.ctx, func() (int, error) { return readFull(w.ctx, r, make([]byte, 1)) })
	switch {
	case n > 0:
		return fmt.Errorf("transfer: %s has more than the %d bytes that fit: %w", nameOf(r), w.n, io.ErrShortWrite)
	case err == errSourceEnded:
		return nil
	}
	return p.errUploadReader(r, 1, err)
}

// Len returns the number of bytes that can still be written. A copy that runs does not count
// yet. It does not block.
func (w *Writer) Len() int { return (*memory)(w).remaining() }
