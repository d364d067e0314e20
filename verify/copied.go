package verify

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// copied returns what allocates Go heap memory at an end of a path through a transfer.Copier.
// The paths differ in the methods by which it comes to the device and back.
func copied(up func(v *transfer.View, ctx context.Context, dst cudart.DevPtr, b []byte) error,
	down func(v *transfer.View, ctx context.Context, b []byte, src cudart.DevPtr) error) func(context.Context, *trip) (*end, error) {
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

// on is the copier that works in the order of s, or on its own streams.
func (t *trip) on(s *cudart.Stream) *transfer.View { return t.copier.With(transfer.Call{Stream: s}) }

var newCopied = copied((*transfer.View).Upload, (*transfer.View).Download)

// downloadNew is DownloadNew, into memory that no poison can be put into.
func downloadNew(v *transfer.View, ctx context.Context, b []byte, src cudart.DevPtr) error {
	p, err := v.DownloadNew(ctx, src, len(b))
	if err != nil {
		return err
	}
	if n := len(p.Bytes()); copy(b, p.Bytes()) != n || n != len(b) {
		err = fmt.Errorf("download of %d bytes gave %d", len(b), n)
	}
	return errors.Join(err, p.Close())
}

// maxRead is what the reader gives at a time, so that a chunk is several reads.
const maxRead = 100_003

func uploadReader(v *transfer.View, ctx context.Context, dst cudart.DevPtr, b []byte) error {
	var reads []io.Reader
	for read := range slices.Chunk(b, maxRead) {
		reads = append(reads, bytes.NewReader(read))
	}
	return all(len(b))(v.UploadReader(ctx, dst, io.MultiReader(reads...), len(b)))
}

func downloadWriter(v *transfer.View, ctx context.Context, b []byte, src cudart.DevPtr) error {
	w := bytes.NewBuffer(b[:0:len(b)]) // which allocates when more is written
	return all(len(b))(v.DownloadWriter(ctx, w, src, len(b)))
}

func uploadParts(v *transfer.View, ctx context.Context, dst cudart.DevPtr, b []byte) error {
	return v.UploadAll(ctx, parts(dst, b))
}

func downloadParts(v *transfer.View, ctx context.Context, b []byte, src cudart.DevPtr) error {
	return v.DownloadAll(ctx, parts(src, b))
}

// partSizes are those of parts, in turn: of every kind of alignment, and larger
// than the slots for small copies.
var partSizes = [...]int{1, 3, 64, 1000, 4097, 31, 65537, 8192}

// parts splits memory into parts: first those that follow on each other by
// twos, then the others, so that some can be merged and some cannot.
func parts(dev cudart.DevPtr, b []byte) []transfer.Part {
	var lists [2][]transfer.Part
	for i, at := 0, 0; at < len(b); i++ {
		size := min(partSizes[i%len(partSizes)], len(b)-at)
		lists[i/2%2] = append(lists[i/2%2], transfer.Part{Device: dev + cudart.DevPtr(at), Host: b[at:][:size]})
		at += size
	}
	return append(lists[1], lists[0]...)
}

// newCopiedFile is UploadFrom and DownloadTo, from and to a file in memory.
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
		// The poison and the guards are in the file.
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

// newFanned goes to both devices by a Fanout.
func newFanned(ctx context.Context, t *trip) (*end, error) {
	e, err := newCopied(ctx, t)
	e.upload = func(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		there := t.targets[1].p + (dst - t.targets[0].p)
		return t.fanout.With(transfer.Call{Stream: s}).Upload(ctx, []cudart.DevPtr{dst, there}, e.mem[off:off+n])
	}
	return e, err
}
