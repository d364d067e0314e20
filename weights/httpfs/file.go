package httpfs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// headBytes is the size of the start of a file that opening it reads: most headers of models are shorter.
const headBytes = 128 << 10

// A file is a file of the server, as it was when it was opened.
type file struct {
	fs       *FS
	name     string
	url      *url.URL
	size     int64 // -1 before it is known
	etag     string
	modified string // Last-Modified
	head     []byte // the first bytes

	told *http.Response // the first one, with Options.Checksums
	sums *sums          // of the bytes that have come; nil without checksums to compare them with
}

// open reads the head of a file, which has its size.
func (f *file) open() error {
	b := &body{ctx: f.fs.ctx, file: f, end: headBytes}
	defer b.Close()
	head := make([]byte, headBytes)
	n, err := io.ReadFull(b, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	if int64(n) != min(f.size, headBytes) {
		return fmt.Errorf("read %s: %w", shown(f.url), io.ErrUnexpectedEOF)
	}
	f.head = bytes.Clone(head[:n]) // a short file takes no more memory than it has bytes
	if f.told == nil {
		return nil
	}
	if f.sums, err = f.findSums(); err != nil {
		return err
	}
	f.told = nil
	if err := f.sums.add(0, f.head); err != nil {
		return fmt.Errorf("read %s: %w", shown(f.url), err)
	}
	return nil
}

// ReadAt reads bytes of the head, or makes a request.
func (f *file) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("httpfs: read %s at offset %d: must not be negative", shown(f.url), off)
	}
	if off < int64(len(f.head)) {
		n = copy(p, f.head[off:])
	}
	if n == len(p) {
		return n, nil
	}
	if at := off + int64(n); at < f.size {
		r, err := f.OpenRange(f.fs.ctx, at, min(int64(len(p)-n), f.size-at))
		if err != nil {
			return n, err
		}
		defer r.Close()
		more, err := io.ReadFull(r, p[n:][:min(int64(len(p)-n), f.size-at)])
		if n += more; err != nil {
			return n, err
		}
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// OpenRange returns a reader of n bytes from off on, or of fewer where the file ends. The first Read makes the request.
func (f *file) OpenRange(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	switch {
	case ctx == nil:
		return nil, errors.New("httpfs: the context is nil")
	case off < 0 || n < 0:
		return nil, fmt.Errorf("httpfs: read %s: %d bytes at offset %d: must not be negative", shown(f.url), n, off)
	}
	off = min(off, f.size)
	return &body{ctx: ctx, file: f, at: off, end: off + min(n, f.size-off)}, nil
}

// A handle is an open file.
type handle struct {
	*file
	closed atomic.Bool
	mu     sync.Mutex
	next   *bufio.Reader // nil before the first Read; guarded by mu
}

// check returns an error if the handle is closed.
func (h *handle) check(op string) error {
	if h.closed.Load() {
		return &fs.PathError{Op: op, Path: h.name, Err: fs.ErrClosed}
	}
	return nil
}

// Read makes a request for each 128 KiB.
func (h *handle) Read(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.check("read"); err != nil {
		return 0, err
	}
	if h.next == nil {
		h.next = bufio.NewReaderSize(io.NewSectionReader(h.file, 0, h.size), headBytes)
	}
	return h.next.Read(p)
}

// ReadAt returns an error when the handle is closed.
func (h *handle) ReadAt(p []byte, off int64) (int, error) {
	if err := h.check("read"); err != nil {
		return 0, err
	}
	return h.file.ReadAt(p, off)
}

// OpenRange returns an error when the handle is closed.
func (h *handle) OpenRange(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	if err := h.check("read"); err != nil {
		return nil, err
	}
	return h.file.OpenRange(ctx, off, n)
}

func (h *handle) Stat() (fs.FileInfo, error) { return info{h.file}, nil }

// Close does not wait for reads that have begun.
func (h *handle) Close() error {
	if !h.closed.CompareAndSwap(false, true) {
		return h.check("close")
	}
	return nil
}

// info is the FileInfo of a file.
type info struct{ *file }

func (i info) Name() string    { return i.name }
func (i info) Size() int64     { return i.size }
func (info) Mode() fs.FileMode { return 0o444 }
func (info) IsDir() bool       { return false }
func (info) Sys() any          { return nil }
func (i info) ModTime() time.Time {
	t, _ := http.ParseTime(i.modified) // the zero time if the server does not tell
	return t
}
