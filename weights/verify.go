package weights

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
)

// A ChecksumError reports bytes that do not have the checksum that was saved with them.
type ChecksumError struct {
	File   string
	Tensor string // "" for the header of the file
	Offset int64  // in the file, of the first byte of the block
	Size   int    // bytes of the block: at least one of them is wrong
	// InMemory is set if the bytes of the file are right: they changed in host memory, while they were loaded.
	InMemory bool
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
	if e.InMemory {
		where = " after they were read (those of the file are right)"
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
	var errs []error
	for _, f := range m.Files() {
		errs = append(errs, f.verify(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("weights: verify %s: %w", path, err)
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
	ctx, cancel := context.WithCancelCause(caller)
	defer cancel(nil)
	var running sync.WaitGroup
	var next atomic.Int64
	var mu sync.Mutex
	for range min(runtime.GOMAXPROCS(0), len(blocks)) {
		running.Go(func() {
			var mem []byte
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(blocks) {
					return
				}
				b := c.blocks[blocks[i]]
				if cap(mem) < b.n {
					mem = make([]byte, b.n)
				}
				if err := f.read(mem[:b.n], b.off); err != nil {
					cancel(err)
					return
				}
				if crc32.Checksum(mem[:b.n], castagnoli) != c.sums[blocks[i]] {
					mu.Lock()
					if wrong = append(wrong, blocks[i]); len(wrong) >= maxChecksumErrors {
						cancel(errEnough)
					}
					mu.Unlock()
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
