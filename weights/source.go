package weights

import (
	"fmt"
	"io"

	"github.com/gopinned/pinned/internal/bounded"
)

// A source is the reader of a header, with the size and the name of the file.
type source struct {
	r    io.ReaderAt
	size int64
	name string
}

// readHeader is read for those that return its error to users.
func (s source) readHeader(p []byte, off int64) error {
	if err := s.read(p, off); err != nil {
		return fmt.Errorf("weights: %w", err)
	}
	return nil
}

// read fills p with the bytes at offset off. The caller adds the package to the error.
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
		return fmt.Errorf("read %s: the reader returned %d bytes where %d were asked for", s.name, n, len(p))
	case err == nil || err == io.EOF:
		return fmt.Errorf("read %s: %w: %d bytes at offset %d, want %d of a file of %d", s.name, io.ErrUnexpectedEOF, n, off, len(p), s.size)
	}
	return fmt.Errorf("read %s: %w", s.name, err)
}

// invalid returns the error for a file that breaks a rule of its format.
func (s source) invalid(tensor, reason string, args ...any) error {
	return &FormatError{File: s.name, Tensor: tensor, Reason: fmt.Sprintf(reason, args...)}
}
