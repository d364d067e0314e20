package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// UploadFrom copies n bytes from offset off of r to the device. It returns the number of bytes,
// from the first on, that arrived. r is read by several goroutines at once, as io.ReaderAt allows;
// a file is read with pread, and one of tmpfs also from a mapping. Of a file on a network or in
// user space (NFS, SMB, Ceph, Lustre, FUSE and others) each goroutine reads a long section of 8 MiB
// to 256 MiB from its start to its end, by a descriptor that it opens through /proc/self/fd; 8 MiB
// or less are read by one goroutine, in order. A [RangeOpener] is read so too, each section, of up
// to 1 GiB, by a range of its own. If r ends early, the error is io.ErrUnexpectedEOF, and its bytes are on the
// device. When ctx ends, no further ReadAt begins, and one that runs may outlast the call.
func (c *Copier) UploadFrom(ctx context.Context, dst cudart.DevPtr, r io.ReaderAt, off int64, n int) (int, error) {
	return c.get().at(n, dst).uploadFrom(ctx, r, off, n)
}

func (p target) uploadFrom(ctx context.Context, r io.ReaderAt, off int64, n int) (int, error) {
	done, err := p.doWith(ctx, r, off, n, func() (int, error) { return p.uploadAt(ctx, r, off, n) })
	if err != nil {
		return done, fmt.Errorf("transfer: upload %s from offset %d of %s%s: %w", p.what(n), off, nameOf(r), p.onto(), err)
	}
	return done, nil
}

// uploadAt copies what r has at an offset, in the quickest way that it offers.
func (p target) uploadAt(ctx context.Context, r io.ReaderAt, off int64, n int) (int, error) {
	if s, ok := r.(*io.SectionReader); ok {
		if outer, _, _ := s.Outer(); isNil(outer) {
			return 0, errNilReadWriter
		}
		if outer, at, ok := outerOf(s, off, off+int64(n)); ok {
			return p.uploadAt(ctx, outer, at, n)
		}
	}
	if mem, ok := memoryAt(r, off, n); ok {
		return p.uploadMemory(ctx, mem, n)
	}
	ranges, ok := r.(*Ranges)
	if !ok {
		ranges, off = rangesOf(r, off, n), 0
	}
	return p.uploadRanges(ctx, ranges, off, n)
}

// rangesOf returns n bytes of a reader as ranges.
func rangesOf(r io.ReaderAt, off int64, n int) *Ranges {
	return &Ranges{list: []Range{{Reader: r, Off: off, N: n}}, ends: []int{n}}
}

// readers is the number of goroutines that read at once: they wait most of the time.
const readers = 8

// uploadMemory copies the memory of a reader that should have n bytes.
func (p target) uploadMemory(ctx context.Context, mem []byte, n int) (done int, err error) {
	if len(mem) > 0 {
		done, err = p.memory(ctx, mem)
	}
	if err == nil && len(mem) < n {
		err = fmt.Errorf("at byte %d of %d: %w", len(mem), n, errSourceEnded)
	}
	return done, err
}

// inMemory reports whether a reader has its bytes in memory.
func inMemory(r io.ReaderAt) bool {
	switch r.(type) {
	case *bytes.Reader, *strings.Reader:
		return true
	}
	return false
}

// memoryAt returns up to n bytes at an offset of a reader that has them in memory.
func memoryAt(r io.ReaderAt, off int64, n int) (mem []byte, ok bool) {
	var at interface {
		io.Seeker
		io.WriterTo
	}
	switch r := r.(type) {
	case *bytes.Reader:
		other := *r
		at = &other
	case *strings.Reader:
		other := *r
		at = &other
	default:
		return nil, false
	}
	// It writes all that it has in one piece.
	var c capture
	_, err := at.Seek(off, io.SeekStart)
	if err == nil {
		_, err = at.WriteTo(&c)
	}
	return c.mem[:min(n, len(c.mem))], err == nil
}

// A capture keeps the memory that it is written.
type capture struct{ mem []byte }

func (c *capture) Write(p []byte) (int, error) {
	c.mem = p
	return len(p), nil
}

// WriteString keeps a string's memory, which is only read.
func (c *capture) WriteString(s string) (int, error) {
	c.mem = unsafe.Slice(unsafe.StringData(s), len(s))
	return len(s), nil
}

// UploadReader copies the next n bytes of r to the device. It returns the number of bytes,
// from the first on, that arrived. If r ends early, the error is io.ErrUnexpectedEOF, and
// its bytes are on the device; if r returns neither bytes nor an error 100 times in a row,
// it is io.ErrNoProgress. After another error more bytes may have been read from r than
// arrived. Reading is one goroutine's work, and overlaps with the copies; when ctx
// ends, no further Read begins, and one that runs may outlast the call.
//
// Several goroutines read a regular file, [io.SectionReader], [bytes.Reader] or [strings.Reader]
// from its position on. The position then moves by the number of bytes that arrived. One goroutine
// reads other types, including types that embed one of these, by their Read; pass a reader that can
// read at any offset to [Copier.UploadFrom].
func (c *Copier) UploadReader(ctx context.Context, dst cudart.DevPtr, r io.Reader, n int) (int, error) {
	return c.get().at(n, dst).uploadReader(ctx, r, n)
}

func (p target) uploadReader(ctx context.Context, r io.Reader, n int) (int, error) {
	done, err := p.doWith(ctx, r, 0, n, func() (int, error) { return p.uploadNext(ctx, r, n) })
	if err != nil {
		return done, p.errUploadReader(r, n, err)
	}
	return done, nil
}

func (p target) errUploadReader(r io.Reader, n int, err error) error {
	return fmt.Errorf("transfer: upload %d bytes from %s%s: %w", n, nameOf(r), p.onto(), err)
}

// uploadNext copies the next n bytes of r, in the quickest way that it offers.
func (p target) uploadNext(ctx context.Context, r io.Reader, n int) (int, error) {
	if b, ok := r.(*bytes.Buffer); ok {
		mem := b.Bytes()
		done, err := p.uploadMemory(ctx, mem[:min(n, len(mem))], n)
		b.Next(done)
		return done, err
	}
	if s, ok := positioned(r); ok {
		return atPosition(s, n, func(off int64) (int, error) { return p.uploadAt(ctx, s, off, n) })
	}
	read := func(to []byte, _, n int) (skip, got int, err error) {
		got, err = readFull(ctx, r, to[:n])
		return 0, got, err
	}
	return p.stage(ctx, stage.Copy{N: n, Host: newReadAhead(lanesOf(1, read), sectionOf(n, 4), inOrder(n))})
}

// A readSeekerAt can be read at any offset, and has a position of its own.
type readSeekerAt interface {
	io.ReaderAt
	io.Seeker
}

// positioned returns r if its Read is ReadAt at its position, so that several goroutines can
// read it. That is known of these types only: another type may embed a file, and so have
// its ReadAt and Seek, but a Read of its own. Pipes and devices are files without a position.
func positioned(r io.Reader) (readSeekerAt, bool) {
	if f, ok := fileOf(r); ok {
		info, err := f.Stat()
		return f, err == nil && info.Mode().IsRegular()
	}
	switch r := r.(type) {
	case *bytes.Reader:
		return r, true
	case *strings.Reader:
		return r, true
	case *io.SectionReader:
		return r, true
	}
	return nil, false
}

// fileOf returns the file that r is. io.Copy does not pass a file itself to a
// [Writer]: it calls the file's WriteTo first, which passes the file in a struct of
// package os.
func fileOf(r io.Reader) (*os.File, bool) {
	if f, ok := r.(*os.File); ok {
		return f, true
	}
	if t := reflect.TypeOf(r); t.Kind() != reflect.Struct || t.PkgPath() != "os" {
		return nil, false
	}
	field := reflect.ValueOf(r).FieldByName("File")
	if !field.IsValid() || !field.CanInterface() {
		return nil, false
	}
	f, ok := field.Interface().(*os.File)
	return f, ok
}

// atPosition calls copies with the position of s, and moves the position by the count that
// copies returns.
func atPosition(s io.Seeker, n int, copies func(off int64) (int, error)) (int, error) {
	off, err := s.Seek(0, io.SeekCurrent)
	if err == nil {
		err = checkOffset(off, n)
	}
	if err != nil {
		return 0, err
	}
	done, err := copies(off)
	if done > 0 {
		if _, failed := s.Seek(off+int64(done), io.SeekStart); failed != nil {
			err = errors.Join(err, failed)
		}
	}
	return done, err
}
