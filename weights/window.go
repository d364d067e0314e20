package weights

import (
	"fmt"
	"io"

	"github.com/gopinned/pinned/internal/bounded"
)

// A source is what a header is read from.
type source struct {
	r    io.ReaderAt
	size int64
	name string
}

// read fills p with the bytes at off.
func (s source) read(p []byte, off int64) error {
	var n int
	err := bounded.Guard(func() (err error) {
		n, err = s.r.ReadAt(p, off)
		return err
	})
	switch {
	case n == len(p):
		return nil
	case n < 0 || n > len(p):
		return fmt.Errorf("weights: read %s: the reader returned %d bytes where %d were asked for", s.name, n, len(p))
	case err == nil || err == io.EOF:
		return fmt.Errorf("weights: read %s: %w: %d bytes at offset %d, want %d of a file of %d", s.name, io.ErrUnexpectedEOF, n, off, len(p), s.size)
	}
	return fmt.Errorf("weights: read %s: %w", s.name, err)
}

// refuse makes the error for a file that is not as it should be.
func (s source) refuse(tensor, reason string, args ...any) error {
	return &FormatError{File: s.name, Tensor: tensor, Reason: fmt.Sprintf(reason, args...)}
}

// A window reads a header from front to back, through a buffer. So what is allocated for a
// header grows with what was read of it, and not with what its file claims.
type window struct {
	source
	pos   int64  // offset of the next byte
	limit int64  // offset of the end of the header, or of the largest one
	buf   []byte // for reading ahead
	ahead []byte // the bytes from pos on that have been read
	err   error  // the first failure: nothing is read after it
}

// newWindow returns a window with a buffer of at most size bytes.
func newWindow(s source, pos, limit, size int64) window {
	return window{source: s, pos: pos, limit: limit, buf: make([]byte, min(size, limit-pos))}
}

// left returns the largest number of bytes that the rest of the header has.
func (w *window) left() int64 { return w.limit - w.pos }

// stop keeps the first failure.
func (w *window) stop(err error) {
	if w.err == nil {
		w.err = err
	}
	w.ahead = nil
}

// fill reads ahead from pos on.
func (w *window) fill() {
	if w.err != nil {
		return
	}
	w.ahead = w.buf[:min(int64(len(w.buf)), w.left())]
	if err := w.read(w.ahead, w.pos); err != nil {
		w.stop(err)
	}
}

// more reads ahead if no byte is ahead. It returns false at the end and after a failure.
func (w *window) more() bool {
	if len(w.ahead) == 0 && w.left() > 0 {
		w.fill()
	}
	return len(w.ahead) > 0
}

// advance returns the next n bytes of those ahead, and goes on behind them.
func (w *window) advance(n int) []byte {
	b := w.ahead[:n]
	w.ahead = w.ahead[n:]
	w.pos += int64(n)
	return b
}
