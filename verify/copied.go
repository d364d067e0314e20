package verify

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// copied returns the open function of a path through a transfer.Copier, whose ends are Go
// heap memory. The paths differ in the Copier's methods for upload and download.
func copied(up func(v *transfer.Copier, ctx context.Context, dst cudart.DevPtr, b []byte) error,
	down func(v *transfer.Copier, ctx context.Context, b []byte, src cudart.DevPtr) error) func(context.Context, *trip) (*end, error) {
	return func(ctx context.Context, t *trip) (*end, error) {
		e, err := newPageable(ctx, t)
		e.upload = func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
			return up(t.on(s), ctx, dst, e.mem[off:off+n])
		}
		e.download = func(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
			return down(t.on(s), ctx, e.mem[off:off+n], src)
		}
		return e, err
	}
}

// on returns the copier in the order of s, or on its own streams if s is nil.
func (t *trip) on(s *cudart.Stream) *transfer.Copier { return t.copier.With(transfer.Call{Stream: s}) }

var newCopied = copied((*transfer.Copier).Upload, (*transfer.Copier).Download)

// maxRead is the size of the reader's reads, so that a chunk takes several.
const maxRead = 100_003

func uploadReader(v *transfer.Copier, ctx context.Context, dst cudart.DevPtr, b []byte) error {
	var reads []io.Reader
	for read := range slices.Chunk(b, maxRead) {
		reads = append(reads, bytes.NewReader(read))
	}
	return all(len(b))(v.UploadReader(ctx, dst, io.MultiReader(reads...), len(b)))
}

func downloadWriter(v *transfer.Copier, ctx context.Context, b []byte, src cudart.DevPtr) error {
	w := bytes.NewBuffer(b[:0:len(b)]) // which allocates when more is written
	return all(len(b))(v.DownloadWriter(ctx, w, src, len(b)))
}

func uploadParts(v *transfer.Copier, ctx context.Context, dst cudart.DevPtr, b []byte) error {
	return v.UploadAll(ctx, parts(dst, b))
}

func downloadParts(v *transfer.Copier, ctx context.Context, b []byte, src cudart.DevPtr) error {
	return v.DownloadAll(ctx, parts(src, b))
}

// partSizes are the sizes of successive parts: with every kind of alignment, and also larger
// than transfer's small copies.
var partSizes = [...]int{1, 3, 64, 1000, 4097, 31, 65537, 8192}

// parts splits memory into parts. Of each four neighbours it lists two first and the other
// two at the end, so that some neighbours can be copied as one, and some cannot.
func parts(dev cudart.DevPtr, b []byte) []transfer.Part {
	var lists [2][]transfer.Part
	for i, at := 0, 0; at < len(b); i++ {
		size := min(partSizes[i%len(partSizes)], len(b)-at)
		lists[i/2%2] = append(lists[i/2%2], transfer.Part{Device: dev + cudart.DevPtr(at), Host: b[at:][:size]})
		at += size
	}
	return append(lists[1], lists[0]...)
}

// newCopiedFile allocates a file in memory, copied by UploadFrom and DownloadTo.
func newCopiedFile(ctx context.Context, t *trip) (*end, error) {
	f, err := memoryFile(t.bytes)
	if err != nil {
		return nil, err
	}
	e, err := newPageable(ctx, t)
	e.release = func(context.Context) error { return f.Close() }
	e.upload = func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		if _, err := f.WriteAt(e.mem[off:off+n], int64(off)); err != nil {
			return err
		}
		return all(n)(t.on(s).UploadFrom(ctx, dst, f, int64(off), n))
	}
	e.download = func(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
		// The file needs the poison and the guards.
		guarded, start := e.mem[off-guardBytes:off+n+guardBytes], int64(off-guardBytes)
		if _, err := f.WriteAt(guarded, start); err != nil {
			return err
		}
		if err := all(n)(t.on(s).DownloadTo(ctx, f, int64(off), src, n)); err != nil {
			return err
		}
		_, err := f.ReadAt(guarded, start)
		return err
	}
	return e, err
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

// newFanned allocates Go heap memory that a Fanout uploads to both devices.
func newFanned(ctx context.Context, t *trip) (*end, error) {
	e, err := newCopied(ctx, t)
	e.upload = func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		there := t.targets[1].p + (dst - t.targets[0].p)
		return t.fanout.With(transfer.Call{Stream: s}).Upload(ctx, []cudart.DevPtr{dst, there}, e.mem[off:off+n])
	}
	return e, err
}
