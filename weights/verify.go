package weights

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer"
)

// A ChecksumError reports bytes that do not have the checksum that was saved with them.
type ChecksumError struct {
	File   string
	Tensor string // "" for the header of the file
	Offset int64  // in the file, of the first byte of the block
	Size   int    // bytes of the block: at least one of them is wrong
	// InCopy is set if the bytes of the file are right, for a load, or those of the device, for a save: they changed
	// in the copy, in a host's memory or on the link. A save that other work of the device disturbs does so too.
	InCopy bool
}

// Error names the file, the tensor and the bytes.
func (e *ChecksumError) Error() string {
	if e == nil {
		return "<nil>"
	}
	what, where := "the header", ""
	if e.Tensor != "" {
		what = "tensor " + quote(e.Tensor)
	}
	if e.InCopy {
		where = ": they changed between the file and the device"
	}
	return fmt.Sprintf("%s: %s: wrong checksum of %d bytes from offset %d on%s", e.File, what, e.Size, e.Offset, where)
}

// maxChecksumErrors is the number of blocks that one error lists.
const maxChecksumErrors = 100

var errEnough = errors.New("enough blocks are wrong")

// Verify reads the model at a path, a file or several as [OpenModel] finds them, and compares all bytes with the
// checksums that [Save] has written. It reads on all cores, and takes 1 MiB of memory for each. The error wraps a
// *[ChecksumError] for each block that is wrong, a hundred at most, or [ErrNoChecksums], and else is that of
// OpenModel or of reading. When ctx ends, Verify returns its error as soon as reads that have begun return.
func Verify(ctx context.Context, path string) error {
	if ctx == nil {
		return fmt.Errorf("weights: verify %s: the context is nil", path)
	}
	m, err := OpenModel(path)
	if err != nil {
		return err
	}
	defer m.Close() // which was only read
	if err := m.verify(ctx); err != nil {
		return fmt.Errorf("weights: verify %s: %w", path, err)
	}
	return nil
}

// Verify is as the function [Verify], of a model that is open, for instance by [OpenModelFS]. Files that have an OpenRange
// are read in ranges of 64 MiB, which [transfer.RangeOpener] describes.
func (m *Model) Verify(ctx context.Context) error {
	if ctx == nil {
		return errors.New("weights: verify: the context is nil")
	}
	if err := m.verify(ctx); err != nil {
		return fmt.Errorf("weights: verify: %w", err)
	}
	return nil
}

func (m *Model) verify(ctx context.Context) error {
	var errs []error
	for _, f := range m.orEmpty().files {
		errs = append(errs, f.verify(ctx))
	}
	return errors.Join(errs...)
}

// verify compares all bytes of a file with its checksums.
func (f *File) verify(ctx context.Context) error {
	c, err := f.checksums()
	if err != nil {
		return err
	}
	if err := f.verifyHeader(c); err != nil {
		return err
	}
	all := make([]int, len(c.blocks))
	for i := range all {
		all[i] = i
	}
	wrong, err := f.wrongBlocks(ctx, c, all)
	for _, i := range wrong {
		err = errors.Join(err, f.wrongBlock(c, i))
	}
	return err
}

func (f *File) verifyHeader(c *checksums) error {
	header := make([]byte, 8)
	if err := f.read(header, 0); err != nil {
		return err
	}
	n := int(min(binary.LittleEndian.Uint64(header), maxHeader)) // as Parse has checked
	header = make([]byte, 8+n)
	if err := f.read(header, 0); err != nil {
		return err
	}
	if sum, ok := headerSum(header); !ok || sum != c.header {
		return &ChecksumError{File: f.name, Size: len(header)}
	}
	return nil
}

// wrongBlock returns the error of a block that is wrong.
func (f *File) wrongBlock(c *checksums, i int) *ChecksumError {
	b := c.blocks[i]
	at, _ := slices.BinarySearchFunc(f.tensors, b.off, func(t *Tensor, off int64) int { return cmp.Compare(t.Offset+int64(t.Size), off+1) })
	return &ChecksumError{File: f.name, Tensor: f.tensors[at].Name, Offset: b.off, Size: b.n}
}

// wrongBlocks reads blocks of a file on all cores, and returns those that are wrong, in order, maxChecksumErrors at
// most.
func (f *File) wrongBlocks(caller context.Context, c *checksums, blocks []int) (wrong []int, err error) {
	ctx, cancel := context.WithCancelCause(caller)
	defer cancel(nil)
	var running sync.WaitGroup
	var next atomic.Int64
	var mu sync.Mutex
	report := func(block int) {
		mu.Lock()
		defer mu.Unlock()
		if wrong = append(wrong, block); len(wrong) >= maxChecksumErrors {
			cancel(errEnough)
		}
	}
	atOnce := 1
	if _, ok := f.r.(transfer.RangeOpener); ok {
		atOnce = rangeBlocks
	}
	for range min(runtime.GOMAXPROCS(0), (len(blocks)+atOnce-1)/atOnce) {
		running.Go(func() {
			r := blockReader{f: f, c: c}
			defer r.close()
			for ctx.Err() == nil {
				i := int(next.Add(int64(atOnce))) - atOnce
				if i >= len(blocks) {
					return
				}
				if err := r.compare(ctx, blocks[i:min(i+atOnce, len(blocks))], report); err != nil {
					cancel(err)
				}
			}
		})
	}
	running.Wait()
	slices.Sort(wrong)
	if err = context.Cause(ctx); caller.Err() != nil {
		err = bounded.Ended(caller)
	} else if err == errEnough {
		wrong, err = wrong[:maxChecksumErrors], nil
	}
	return wrong, err
}

// rangeBlocks is the number of blocks that are read by one range of a file that opens ranges.
const rangeBlocks = 64

// A blockReader reads blocks of a file, one behind the other.
type blockReader struct {
	f   *File
	c   *checksums
	mem []byte
	// Of a file that opens ranges: the one that is open, nil if none is, and the offset of its next byte.
	open io.ReadCloser
	at   int64
}

// compare reports the blocks that are wrong.
func (r *blockReader) compare(ctx context.Context, blocks []int, report func(int)) error {
	for i, block := range blocks {
		if ctx.Err() != nil {
			return nil
		}
		b := r.c.blocks[block]
		if cap(r.mem) < b.n {
			r.mem = make([]byte, b.n)
		}
		end := b.end()
		for _, next := range blocks[i+1:] {
			if r.c.blocks[next].off == end {
				end = r.c.blocks[next].end()
			}
		}
		if err := r.read(ctx, r.mem[:b.n], b.off, end); err != nil {
			return err
		}
		if crc32.Checksum(r.mem[:b.n], castagnoli) != r.c.sums[block] {
			report(block)
		}
	}
	return nil
}

// read reads bytes at an offset, and has those up to end sent.
func (r *blockReader) read(ctx context.Context, p []byte, off, end int64) error {
	opener, ok := r.f.r.(transfer.RangeOpener)
	if !ok {
		return r.f.read(p, off)
	}
	err := bounded.Guard(func() (err error) {
		if r.open == nil || r.at != off {
			r.close()
			if r.open, err = opener.OpenRange(ctx, off, end-off); err != nil {
				return err
			}
			r.at = off
		}
		n, err := io.ReadFull(r.open, p)
		r.at += int64(n)
		return err
	})
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("weights: read %s: %w", r.f.name, err)
	}
	return nil
}

func (r *blockReader) close() {
	if r.open != nil {
		_ = r.open.Close() // its bytes are here, or it is read no further
		r.open = nil
	}
}
