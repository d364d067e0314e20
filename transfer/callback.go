package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
)

// errExited is the error of a copy whose reader, writer or Progress function
// did not return.
var errExited = errors.New("a callback ended its goroutine (runtime.Goexit, as testing.T.FailNow does)")

// foreign runs code that is not this package's: a reader, a writer, Progress,
// or a copy of the caller's memory, which may be mapped from a file. It returns
// a panic as an error, with the stack, and a memory fault too: a file that
// shrinks has no bytes past its end, and one on a full file system gets no more.
//
// If f ends the goroutine, foreign does not return. Then it fails the job at a
// byte, and its callers clean up in deferred functions.
func (j *job) foreign(at int, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	returned := false
	defer func() {
		if returned {
			return
		}
		switch p := recover().(type) {
		case nil:
			err = errExited
			j.fail(at, err)
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = fmt.Errorf("no memory at %#x (unmapped, or its file was truncated, or the file system is full): %w", p.Addr(), p)
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	err = f()
	returned = true
	return err
}

// mostEmptyReads is how many reads in a row may return neither bytes nor an
// error, as in package bufio.
const mostEmptyReads = 100

// readFull fills to from r.
func readFull(ctx context.Context, r io.Reader, to []byte) (got int, err error) {
	for empty := 0; got < len(to); {
		if ctx.Err() != nil {
			return got, context.Cause(ctx)
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
		case empty == mostEmptyReads:
			return got, io.ErrNoProgress
		}
	}
	return got, nil
}

// readAt is a source of what r has from base on.
func readAt(r io.ReaderAt, base int64) source {
	return func(_ context.Context, to []byte, off, n int) (skip, got int, err error) {
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

// early is the error of a reader that had fewer bytes than were asked for.
func early(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// writeAt is a sink that writes to w from base on.
func writeAt(w io.WriterAt, base int64) sink {
	return func(from []byte, off int) (int, error) {
		n, err := w.WriteAt(from, base+int64(off))
		return wrote(w, "WriteAt", n, len(from), err)
	}
}

// write is a sink that writes to w.
func write(w io.Writer) sink {
	return func(from []byte, _ int) (int, error) {
		n, err := w.Write(from)
		return wrote(w, "Write", n, len(from), err)
	}
}

// wrote is the outcome of a write of so many bytes that returned n and err.
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

// nameOf is a file's name, and the type of other readers and writers.
func nameOf(rw any) string {
	if f, ok := rw.(*os.File); ok && f != nil {
		return f.Name()
	}
	return fmt.Sprintf("%T", rw)
}
