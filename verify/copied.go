package verify

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// The ends of paths through a transfer.Copier. All have Go heap memory, and
// differ in the methods by which it comes to the device and back.

func newCopied(c *transfer.Copier, path Path, n int) (end, error) {
	base := copied{c, make([]byte, n)}
	switch path {
	case PathCopierFile:
		f, err := memoryFile(n)
		if err != nil {
			return nil, err
		}
		return copiedFile{base, f}, nil
	case PathCopierIO:
		return copiedIO{base}, nil
	case PathCopierParts:
		return copiedParts{base}, nil
	case PathCopierNew:
		return copiedNew{base}, nil
	default:
		return base, nil
	}
}

// copied goes by Upload and Download.
type copied struct {
	c   *transfer.Copier
	mem []byte
}

// on is the copier that works in the order of s, or on its own streams.
func (e copied) on(s *cudart.Stream) *transfer.View {
	if s == nil {
		return &e.c.View
	}
	return e.c.With(transfer.Call{Stream: s})
}

func (e copied) memory() []byte { return e.mem }

func (e copied) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return e.on(s).Upload(ctx, dst, e.mem[off:off+n])
}

func (e copied) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return e.on(s).Download(ctx, e.mem[off:off+n], src)
}

func (e copied) release(context.Context) error { return nil }

// copiedNew goes by DownloadNew, into memory that no poison can be put into.
type copiedNew struct{ copied }

func (e copiedNew) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	p, err := e.on(s).DownloadNew(ctx, src, n)
	if err != nil {
		return err
	}
	if got := copy(e.mem[off:off+n], p.Bytes()); got != n || len(p.Bytes()) != n {
		err = fmt.Errorf("download of %d bytes gave %d", n, len(p.Bytes()))
	}
	return errors.Join(err, p.Close())
}

// copiedFile goes by UploadFrom and DownloadTo, from and to a file in memory.
type copiedFile struct {
	copied
	f *os.File
}

func (e copiedFile) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	if _, err := e.f.WriteAt(e.mem[off:off+n], int64(off)); err != nil {
		return err
	}
	return all(n)(e.on(s).UploadFrom(ctx, dst, e.f, int64(off), n))
}

// download has the poison and the guards in the file.
func (e copiedFile) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	guarded, start := e.mem[off-guardBytes:off+n+guardBytes], int64(off-guardBytes)
	if _, err := e.f.WriteAt(guarded, start); err != nil {
		return err
	}
	if err := all(n)(e.on(s).DownloadTo(ctx, e.f, int64(off), src, n)); err != nil {
		return err
	}
	_, err := e.f.ReadAt(guarded, start)
	return err
}

func (e copiedFile) release(context.Context) error { return e.f.Close() }

// copiedIO goes by UploadReader and DownloadWriter.
type copiedIO struct{ copied }

// mostIO is what the reader gives at a time, so that a chunk is several reads.
const mostIO = 100_003

func (e copiedIO) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	r := bytes.NewReader(e.mem[off : off+n])
	return all(n)(e.on(s).UploadReader(ctx, dst, readerFunc(func(p []byte) (int, error) {
		return r.Read(p[:min(len(p), mostIO)])
	}), n))
}

func (e copiedIO) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	to := e.mem[off : off+n]
	return all(n)(e.on(s).DownloadWriter(ctx, writerFunc(func(p []byte) (int, error) {
		took := copy(to, p)
		to = to[took:]
		if took < len(p) {
			return took, io.ErrShortWrite
		}
		return took, nil
	}), src, n))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// copiedParts goes by UploadAll and DownloadAll.
type copiedParts struct{ copied }

func (e copiedParts) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return e.on(s).UploadAll(ctx, e.parts(dst, off, n))
}

func (e copiedParts) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return e.on(s).DownloadAll(ctx, e.parts(src, off, n))
}

// partSizes are those of parts, in turn: of every kind of alignment, and larger
// than the slots for small copies.
var partSizes = [...]int{1, 3, 64, 1000, 4097, 31, 65537, 8192}

// parts splits n bytes into parts: first those that follow on each other by
// twos, then the others, so that some can be merged and some cannot.
func (e copiedParts) parts(dev cudart.DevPtr, off, n int) []transfer.Part {
	var lists [2][]transfer.Part
	for i, at := 0, 0; at < n; i++ {
		size := min(partSizes[i%len(partSizes)], n-at)
		part := transfer.Part{Device: dev + cudart.DevPtr(at), Host: e.mem[off+at:][:size]}
		lists[i/2%2] = append(lists[i/2%2], part)
		at += size
	}
	return append(lists[1], lists[0]...)
}

// all returns an error unless n bytes were copied.
func all(n int) func(int, error) error {
	return func(done int, err error) error {
		if err == nil && done != n {
			err = fmt.Errorf("%d of %d bytes copied, without an error", done, n)
		}
		return err
	}
}
