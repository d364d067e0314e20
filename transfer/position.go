package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A readSeekerAt can be read at any offset, and has a position of its own.
type readSeekerAt interface {
	io.ReaderAt
	io.Seeker
}

// hasPosition returns a reader that can be read by several goroutines, from its
// position on. Pipes and devices, which are files too, cannot.
func hasPosition(r io.Reader) (readSeekerAt, bool) {
	if f, ok := r.(*os.File); ok {
		info, err := f.Stat()
		return f, err == nil && info.Mode().IsRegular()
	}
	s, ok := r.(readSeekerAt)
	return s, ok
}

// atPosition calls copies with the position of s, and moves it by what they return.
func atPosition(ctx context.Context, s io.Seeker, n int, copies func(off int64) (int, error)) (int, error) {
	off, err := seek(ctx, s, 0, io.SeekCurrent)
	if err == nil {
		err = checkOffset(off, n)
	}
	if err != nil {
		return 0, err
	}
	done, err := copies(off)
	if done > 0 {
		_, failed := seek(ctx, s, off+int64(done), io.SeekStart)
		err = errors.Join(err, failed)
	}
	return done, err
}

// seek calls s.Seek. If that is foreign code it runs on a goroutine of its own, which
// it may end or block. When ctx ends, it has [stage.Grace] still.
func seek(ctx context.Context, s io.Seeker, offset int64, whence int) (int64, error) {
	var at int64
	var failed error
	call := func() (err error) {
		at, err = s.Seek(offset, whence)
		return err
	}
	switch s.(type) {
	case *os.File, *bytes.Reader, *strings.Reader, *io.SectionReader:
		err := stage.Guard(call)
		return at, err
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		if err := stage.Foreign(call, func(exited error) { failed = exited }); err != nil {
			failed = err
		}
	}()
	if !stage.Linger(ctx, over) {
		return 0, context.Cause(ctx)
	}
	return at, failed
}
