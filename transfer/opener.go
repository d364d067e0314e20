package transfer

import (
	"context"
	"errors"
	"io"
	"reflect"

	"github.com/gopinned/pinned/internal/bounded"
)

// A RangeOpener is an [io.ReaderAt] that opens ranges of its bytes, such as a file behind HTTP or an object of a
// store. [Copier.UploadFrom] and [Fanout.UploadPieces] read it as they read a file of a network: each goroutine opens
// a long range, and reads it from its start to its end.
type RangeOpener interface {
	io.ReaderAt
	// OpenRange returns a reader of n bytes from off on; one that returns fewer has ended early. When ctx ends, reads
	// return an error. It is called from several goroutines at once, and only one of them uses the reader.
	OpenRange(ctx context.Context, off, n int64) (io.ReadCloser, error)
}

// maxGap is the size of the largest gap in a file that is read and dropped, instead of opening a range behind it.
const maxGap = mib

// maxRange is the size of the largest section of a reader that opens ranges. A server that takes 200 ms for a request leaves
// a lane idle for as long: 0.2 of 0.26 s with sections of 256 MiB at 4 GB/s.
const maxRange = 1024 * mib

// An openRange is a range that one lane reads.
type openRange struct {
	of      RangeOpener
	body    io.ReadCloser
	at, end int64
}

// isSame reports whether two readers are one. Of a type that cannot be compared, none is.
func isSame(r, s io.ReaderAt) bool { return reflect.ValueOf(r).Comparable() && r == s }

// has reports whether bytes are in the range, and not far behind the last ones that were read.
func (o *openRange) has(r RangeOpener, off, end int64) bool {
	return o != nil && isSame(o.of, r) && off >= o.at && off-o.at < maxGap && end <= o.end
}

func (o *openRange) read(ctx context.Context, to []byte, off int64) (got int, err error) {
	for o.at < off {
		s := newScratch(scratchBytes)
		n, err := readFull(ctx, o.body, (*s)[:min(off-o.at, scratchBytes)])
		s.release()
		if o.at += int64(n); err != nil {
			return 0, err
		}
	}
	got, err = readFull(ctx, o.body, to)
	o.at += int64(got)
	return got, err
}

func (o *openRange) close() error {
	if o == nil {
		return nil
	}
	return o.body.Close()
}

// readRange reads bytes of a reader by the range that the lane has open, or else by a new one.
func (o *ownFiles) readRange(ctx context.Context, r RangeOpener, to []byte, off int64) (got int, err error) {
	if ctx.Err() != nil {
		return 0, bounded.Ended(ctx)
	}
	end := off + int64(len(to))
	open := o.takeRange()
	if !open.has(r, off, end) {
		_ = open.close() // of a range that is read no further
		end = max(end, o.endOf(r, off))
		open = &openRange{of: r, at: off, end: end}
		if open.body, err = r.OpenRange(ctx, off, end-off); err != nil {
			return 0, err
		}
		if isNil(open.body) {
			return 0, errors.New("OpenRange returned a nil reader")
		}
	}
	got, err = open.read(ctx, to, off)
	if err != nil || open.at == open.end {
		_ = open.close() // its bytes are here
		return got, err
	}
	o.putRange(open)
	return got, nil
}

func (o *ownFiles) takeRange() (open *openRange) {
	o.mu.Lock()
	defer o.mu.Unlock()
	open, o.open = o.open, nil
	return open
}

// putRange keeps a range for the next read, unless the copy was abandoned meanwhile.
func (o *ownFiles) putRange(open *openRange) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		_ = open.close()
		return
	}
	o.open = open
}

// endOf returns the end of the bytes of a reader that the lane reads from an offset on without a large gap.
func (o *ownFiles) endOf(r io.ReaderAt, off int64) (end int64) {
	done := errors.New("done")
	_ = o.ranges.parts(o.next, o.end-o.next, func(p rangePart) error {
		switch {
		case p.reader == nil: // zeros
		case !isSame(p.reader, r) || end > 0 && (p.off < end || p.off-end >= maxGap):
			if end > 0 {
				return done
			}
		case end > 0 || p.off <= off && off < p.off+int64(p.n):
			end = p.off + int64(p.n)
		}
		return nil
	})
	return end
}
