package supportfile

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/gopinned/pinned/internal/units"
)

// The limits of a text. Reports of machines with eight GPUs have some 20 MB, and kernel logs may have more.
const (
	maxText = 512 << 20 // bytes, decompressed
	maxLine = 16 << 10  // bytes of a line; the rest of a longer one is skipped
	// Peeked is the size of the buffer that Read needs.
	Peeked = 64 << 10
)

// ErrArchive is returned by [Collection.Read] for an archive of pincheck capture.
var ErrArchive = errors.New("it is an archive of pincheck capture")

// An UnknownError is that no line of a text has a form that is known.
type UnknownError struct{ begins string }

func (e UnknownError) Error() string {
	return fmt.Sprintf("its form is not known: it begins with %.60q. Want %s, or an archive of pincheck capture", e.begins, Known)
}

// magic are the first bytes of forms that are not read.
var magic = []struct{ bytes, form string }{
	{"\xfd7zXZ\x00", "xz"}, {"PK\x03\x04", "zip"}, {"BZh", "bzip2"}, {"\x28\xb5\x2f\xfd", "zstd"}, {"7z\xbc\xaf", "7-Zip"},
}

// Read reads a text, compressed by gzip or not. It may be a stranger's: of any size, cut off or no text at all. It
// returns ErrArchive, with nothing read of r, for an archive of pincheck capture.
func (c *Collection) Read(r *bufio.Reader) error {
	start, err := r.Peek(Peeked)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
		return err
	}
	for _, m := range magic {
		if bytes.HasPrefix(start, []byte(m.bytes)) {
			return fmt.Errorf("it is compressed (%s): decompress it first", m.form)
		}
	}
	source := io.Reader(r)
	if bytes.HasPrefix(start, []byte("\x1f\x8b")) {
		if isArchive(start) {
			return ErrArchive
		}
		unpacked, err := gzip.NewReader(r) // of several members: nvidia-bug-report.sh writes one a section
		if err != nil {
			return fmt.Errorf("decompress: %w", err)
		}
		source = unpacked
	}
	return c.lines(source)
}

// isArchive reports whether the beginning of a compressed file is that of a tar file.
func isArchive(start []byte) bool {
	unpacked, err := gzip.NewReader(bytes.NewReader(start))
	if err != nil {
		return false
	}
	header := make([]byte, 512)
	n, _ := io.ReadFull(unpacked, header)
	return n == len(header) && string(header[257:262]) == "ustar"
}

// lines reads a text line by line.
func (c *Collection) lines(source io.Reader) error {
	limit := cmp.Or(c.limit, maxText)
	limited := &io.LimitedReader{R: source, N: int64(limit)}
	lines := bufio.NewReaderSize(limited, maxLine)
	t := &text{c: c, parsers: []parser{&smiParser{}, &xmlParser{}, &lspciParser{}, &logParser{}}}
	before, began := slices.Clone(c.kinds), ""
	c.kinds = nil
	for {
		line, err := lines.ReadSlice('\n')
		if began == "" {
			began = string(bytes.TrimSpace(line[:min(len(line), maxLine)]))
		}
		if len(line) > 0 {
			if wrong := t.line(line); wrong != nil {
				return wrong
			}
		}
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = lines.ReadSlice('\n')
		}
		if err != nil {
			c.Cut = c.Cut || !errors.Is(err, io.EOF)
			break // as much as there is: a report that was cut off has most of it
		}
	}
	for _, p := range t.parsers {
		p.end(c)
	}
	if t.report != nil { // whose sections are of other kinds
		c.kinds = []string{BugReport}
	}
	if limited.N <= 0 {
		return fmt.Errorf("more than %s, decompressed", units.ExactBytes(limit))
	}
	if len(c.kinds) == 0 {
		return UnknownError{began}
	}
	for _, kind := range before {
		c.found(kind)
	}
	return nil
}
