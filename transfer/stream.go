package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A Reader reads device memory. It is an [io.Reader], [io.ReaderAt] and
// [io.WriterTo], so that io.Copy takes the way of [View.DownloadWriter]. Reads of less
// than some MiB take most of their time to begin: read into large buffers.
//
// Its methods may be called from any goroutine.
type Reader struct {
	v   *View
	ctx context.Context
	src cudart.DevPtr
	n   int

	mu sync.Mutex // held during Read and WriteTo
	at int
}

// NewReader returns a Reader of n bytes of device memory. ctx ends its copies. A nil
// ctx and a negative n are errors of the first use.
func (v *View) NewReader(ctx context.Context, src cudart.DevPtr, n int) *Reader {
	return &Reader{v: v, ctx: ctx, src: src, n: n}
}

// Read copies what comes next into p, as much as that holds, or returns io.EOF at the
// end. Errors are those of [View.Download], and nothing is read then.
func (r *Reader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, err := r.ReadAt(p[:min(len(p), max(r.n-r.at, 0))], int64(r.at))
	if n == 0 && err == nil && len(p) > 0 {
		err = io.EOF
	}
	r.at += n
	return n, err
}

// ReadAt copies what is at an offset into p. It returns io.EOF if there is less, and
// else errors of [View.Download], with nothing read.
func (r *Reader) ReadAt(p []byte, off int64) (int, error) {
	if r.n < 0 || off < 0 {
		return 0, fmt.Errorf("transfer: read offset %d of %d bytes of device memory: must not be negative", off, r.n)
	}
	n := int(min(int64(len(p)), max(int64(r.n)-off, 0)))
	if err := r.v.Download(r.ctx, p[:n], r.src+cudart.DevPtr(off)); err != nil {
		return 0, err
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteTo copies the rest to w. Count and errors are those of [View.DownloadWriter].
func (r *Reader) WriteTo(w io.Writer) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	done, err := r.v.DownloadWriter(r.ctx, w, r.src+cudart.DevPtr(r.at), r.n-r.at)
	r.at += done
	return int64(done), err
}

// Len returns how many bytes are left to Read.
func (r *Reader) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n - r.at
}

// A Writer writes device memory. It is an [io.Writer] and [io.ReaderFrom], so that
// io.Copy takes the way of [View.UploadReader]. Writes of less than some MiB take most
// of their time to begin: write large buffers.
//
// Its methods may be called from any goroutine.
type Writer struct {
	v   *View
	ctx context.Context
	dst cudart.DevPtr
	n   int

	mu sync.Mutex // held during Write and ReadFrom
	at int
}

// NewWriter returns a Writer of n bytes of device memory. ctx ends its copies. A nil
// ctx and a negative n are errors of the first use.
func (v *View) NewWriter(ctx context.Context, dst cudart.DevPtr, n int) *Writer {
	return &Writer{v: v, ctx: ctx, dst: dst, n: n}
}

// Write copies p to the device, after what was written before. If p is longer than
// what is left, it copies what there is room for and returns io.ErrShortWrite. After
// an error of [View.Upload] nothing was written.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n < 0 {
		return 0, fmt.Errorf("transfer: write %d bytes of device memory: must not be negative", w.n)
	}
	n := min(len(p), w.n-w.at)
	if err := w.v.Upload(w.ctx, w.dst+cudart.DevPtr(w.at), p[:n]); err != nil {
		return 0, err
	}
	w.at += n
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

// ReadFrom copies r to the device until it ends, and returns how many bytes are there.
// A reader that has more than there is room for is io.ErrShortWrite: one byte more
// was read from it. Other errors are those of [View.UploadReader].
func (w *Writer) ReadFrom(r io.Reader) (int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left := w.n - w.at
	done, err := w.v.uploadReader(w.ctx, w.dst+cudart.DevPtr(w.at), r, left)
	w.at += done
	switch {
	case err == nil:
		err = w.ended(r)
	case errors.Unwrap(err) == errSourceEnded: // "at byte …" of r itself, not of what r copies from
		err = nil
	default:
		err = errUploadReader(r, left, err)
	}
	return int64(done), err
}

// ended returns an error unless r has ended.
func (w *Writer) ended(r io.Reader) error {
	n, err := bounded.Callback(w.ctx, func() (int, error) { return readFull(w.ctx, r, make([]byte, 1)) })
	switch {
	case n > 0:
		return fmt.Errorf("transfer: %s has more than the %d bytes that there is room for: %w", nameOf(r), w.n, io.ErrShortWrite)
	case err == nil, err == errSourceEnded:
		return nil
	}
	return errUploadReader(r, 1, err)
}

// Len returns how many bytes may still be written.
func (w *Writer) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n - w.at
}
