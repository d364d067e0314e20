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
	m, err := OpenModel(path)
	if err != nil {
		return err
	}
	defer m.Close() // which was only read
	return m.Verify(ctx)
}

// Verify is as the function [Verify], of a model that is open, for instance by [OpenModelFS]. Files that have an OpenRange
// are read in ranges of 64 MiB, which [transfer.RangeOpener] describes.
func (m *Model) Verify(ctx context.Context) error {
	if ctx == nil {
		return errors.New("weights: verify: the context is nil")
	}
	var errs []error
	for _, f := range m.orEmpty().files {
		errs = append(errs, f.verify(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("weights: verify: %w", err)
	}
	return nil
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
	units := f.units(c, blocks)
	found := make([][]int, len(units))
	var n atomic.Int64 // of wrong blocks
	buffers := sync.Pool{New: func() any { return new([]byte) }}
	err = bounded.ForEach(caller, len(units), 1, runtime.GOMAXPROCS(0), func(ctx context.Context, i, _ int) (err error) {
		mem := buffers.Get().(*[]byte)
		defer buffers.Put(mem)
		found[i], err = f.compare(ctx, c, units[i], mem)
		if err == nil && n.Add(int64(len(found[i]))) >= maxChecksumErrors {
			return errEnough
		}
		return err
	})
	wrong = slices.Concat(found...)
	if slices.Sort(wrong); err == errEnough {
		wrong, err = wrong[:maxChecksumErrors], nil
	}
	return wrong, err
}

// rangeBlocks is the number of blocks that are read by one range of a file that opens ranges.
const rangeBlocks = 64

// units returns blocks that are neighbours in the file, and are read by one range where the file opens ranges.
func (f *File) units(c *checksums, blocks []int) (units [][]int) {
	_, ranges := f.r.(transfer.RangeOpener)
	for first, n := 0, 0; first < len(blocks); first = n {
		for n = first + 1; ranges && n < len(blocks) && n-first < rangeBlocks && c.blocks[blocks[n]].off == c.blocks[blocks[n-1]].end(); {
			n++
		}
		units = append(units, blocks[first:n])
	}
	return units
}

// compare reads the blocks of a unit, and returns those that are wrong.
func (f *File) compare(ctx context.Context, c *checksums, unit []int, mem *[]byte) (wrong []int, err error) {
	read := f.read
	if opener, ok := f.r.(transfer.RangeOpener); ok {
		first, last := c.blocks[unit[0]], c.blocks[unit[len(unit)-1]]
		var r io.ReadCloser
		err := bounded.Guard(func() (err error) {
			if r, err = opener.OpenRange(ctx, first.off, last.end()-first.off); r == nil && err == nil {
				err = errors.New("OpenRange returned a nil reader")
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", f.name, err)
		}
		defer func() { _ = bounded.Guard(r.Close) }() // it was only read
		read = func(p []byte, off int64) error { return source{r: inOrder{r}, size: f.size, name: f.name}.read(p, off) }
	}
	for _, i := range unit {
		b := c.blocks[i]
		if cap(*mem) < b.n {
			*mem = make([]byte, b.n)
		}
		if ctx.Err() != nil {
			break
		}
		if err := read((*mem)[:b.n], b.off); err != nil {
			return wrong, err
		}
		if crc32.Checksum((*mem)[:b.n], castagnoli) != c.sums[i] {
			wrong = append(wrong, i)
		}
	}
	return wrong, nil
}

// inOrder is an [io.ReaderAt] of a reader whose bytes are read in order.
type inOrder struct{ io.Reader }

// maxEmptyReads is the number of reads in a row that may return no bytes, as in package bufio.
const maxEmptyReads = 100

func (r inOrder) ReadAt(p []byte, _ int64) (n int, err error) {
	for empty := 0; n < len(p) && err == nil; empty++ {
		if empty == maxEmptyReads {
			return n, io.ErrNoProgress
		}
		got := 0
		if got, err = r.Read(p[n:]); got != 0 {
			n, empty = n+got, 0
		}
	}
	return n, err
}
