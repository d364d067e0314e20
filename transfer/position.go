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
		if _, failed := seek(ctx, s, off+int64(done), io.SeekStart); failed != nil {
			err = errors.Join(err, failed)
		}
	}
	return done, err
}

// seek calls s.Seek. When ctx ends, it has [stage.Grace] still.
func seek(ctx context.Context, s io.Seeker, offset int64, whence int) (int64, error) {
	var at int64
	err := isolated(ctx, s, func() (err error) {
		at, err = s.Seek(offset, whence)
		return err
	})
	if err != nil {
		return 0, err
	}
	return at, nil
}

// isolated makes a call of rw. If that is foreign code the call runs on a goroutine of
// its own, which it may end or block: it may outlast ctx.
func isolated(ctx context.Context, rw any, call func() error) error {
	switch rw.(type) {
	case *os.File, *bytes.Reader, *strings.Reader, *io.SectionReader:
		return stage.Guard(call)
	}
	outcome := make(chan error, 1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		outcome <- stage.Foreign(call, func(exited error) { outcome <- exited })
	}()
	if !stage.Linger(ctx, over) {
		return context.Cause(ctx)
	}
	return <-outcome
}
