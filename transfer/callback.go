package transfer

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/sentinel"
)

// maxEmptyReads is the number of reads in a row that may return neither bytes nor an
// error, as in package bufio.
const maxEmptyReads = 100

// readFull fills to from r.
func readFull(ctx context.Context, r io.Reader, to []byte) (got int, err error) {
	for empty := 0; got < len(to); {
		if ctx.Err() != nil {
			return got, bounded.Ended(ctx)
		}
		n, err := r.Read(to[got:])
		if err := checkCount(r, "Read", n, len(to)-got); err != nil {
			return got, err
		}
		got += n
		if empty++; n > 0 {
			empty = 0
		}
		switch {
		case got == len(to):
		case err != nil:
			return got, early(err)
		case empty == maxEmptyReads:
			return got, io.ErrNoProgress
		}
	}
	return got, nil
}

// readAt reads from r, from base on.
func readAt(r io.ReaderAt, base int64) readFunc {
	return func(to []byte, off, n int) (skip, got int, err error) {
		got, err = r.ReadAt(to[:n], base+int64(off))
		if err := checkCount(r, "ReadAt", got, n); err != nil {
			return 0, 0, err
		}
		switch {
		case got == n:
			return 0, got, nil
		case err == nil: // which io.ReaderAt forbids
			err = io.ErrNoProgress
		}
		return 0, got, early(err)
	}
}

// errSourceEnded is io.ErrUnexpectedEOF of a source that ended. A source may return
// io.ErrUnexpectedEOF itself: then it has failed, and has no end here.
var errSourceEnded = sentinel.New(io.ErrUnexpectedEOF.Error(), io.ErrUnexpectedEOF)

// early returns the error of a reader that returned fewer bytes than requested.
func early(err error) error {
	if err == io.EOF { // as readers return it: see io.EOF
		return errSourceEnded
	}
	return err
}

// writeAt writes to w from base on.
func writeAt(w io.WriterAt, base int64) writeFunc {
	return func(from []byte, off int) (int, error) {
		n, err := w.WriteAt(from, base+int64(off))
		return wrote(w, "WriteAt", n, len(from), err)
	}
}

// write writes to w, in order.
func write(w io.Writer) writeFunc {
	return func(from []byte, _ int) (int, error) {
		n, err := w.Write(from)
		return wrote(w, "Write", n, len(from), err)
	}
}

// wrote returns the count and the error of a write of `of` bytes that returned n and err.
func wrote(w any, method string, n, of int, err error) (int, error) {
	if err := checkCount(w, method, n, of); err != nil {
		return 0, err
	}
	if err == nil && n < of {
		err = io.ErrShortWrite
	}
	return n, err
}

// checkCount returns an error for a count that a reader or writer must not
// return.
func checkCount(rw any, method string, n, of int) error {
	if n < 0 || n > of {
		return fmt.Errorf("%T.%s returned the count %d for %d bytes", rw, method, n, of)
	}
	return nil
}

// nameOf returns a file's name, and the type of other readers and writers.
func nameOf(rw any) string {
	if f, ok := rw.(*os.File); ok && !isNil(f) {
		return f.Name()
	}
	return fmt.Sprintf("%T", rw)
}
