package gpukernels

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
)

// A Blocks has the kernels that copy many blocks and check lists of their indices, loaded on a device.
type Blocks struct {
	*kernel.Module
	copying, searching *kernel.Kernel
}

// NewBlocks loads the kernels. Close it. The errors are those of [kernel.Load] and [kernel.Module.Kernel].
func NewBlocks(ctx context.Context, dev *cudart.Device) (*Blocks, error) {
	b := &Blocks{}
	m, err := load(ctx, dev, "blocks", map[string]**kernel.Kernel{"pinned_blocks": &b.copying, "pinned_first_beyond": &b.searching}, nil)
	if err != nil {
		return nil, err
	}
	b.Module = m
	return b, nil
}

// A BlockList says where blocks lie: block i at Base + i*Stride or, with a list, at
// Base + list[i]*Stride. Addresses are of memory that the device can access.
type BlockList struct {
	Base   cudart.DevPtr
	Stride int           // bytes
	Index  cudart.DevPtr // of as many uint32 as there are blocks, or 0 for none
}

const (
	blocksThreads       = 1024    // of a block of src/blocks.cu
	maxBlocksProcessors = 1 << 16 // more than any device has: the kernel numbers its threads with 32 bits
)

// maxBlocks are the blocks of a launch: indices and their numbers are 32 bits.
const maxBlocks = 1 << 30

// Copy queues copies of count blocks of size bytes on a stream, by processors blocks of 1024
// threads: as many multiprocessors. Blocks may have any size and address. The words of 16 bytes that
// have the first and the last byte of a block are read as a whole, and only the block's bytes are written. toHost is
// set if dst is on the other side of the link, and not if src is. No two blocks of dst may overlap,
// nor one of dst and one of src. The lists are read when the copies run. Copies of nothing are
// ignored. Errors are those of [kernel.Kernel.Launch], and [cudart.ErrInvalidValue] for negative numbers.
func (b *Blocks) Copy(s *cudart.Stream, dst, src BlockList, size, count, processors int, toHost bool) error {
	switch {
	case b == nil:
		return fmt.Errorf("kernel: copy blocks: %w", errZero)
	case size < 0 || count < 0 || processors < 1 || dst.Stride < 0 || src.Stride < 0:
		return fmt.Errorf("kernel: copy %d blocks of %d bytes, strides of %d and %d, by %d multiprocessors: %w",
			count, size, dst.Stride, src.Stride, processors, cudart.ErrInvalidValue)
	case size == 0 || count == 0:
		return nil
	}
	host := uint32(0)
	if toHost {
		host = 1
	}
	shape := kernel.Config{Grid: kernel.Dim{X: min(processors, maxBlocksProcessors)}, Block: kernel.Dim{X: blocksThreads}}
	for count > 0 {
		n := min(count, maxBlocks)
		err := b.copying.Launch(s, shape,
			kernel.Arg(dst.Base), kernel.Arg(dst.Index), kernel.Arg(dst.Stride), kernel.Arg(src.Base), kernel.Arg(src.Index), kernel.Arg(src.Stride),
			kernel.Arg(uint32(n)), kernel.Arg(size), kernel.Arg(host))
		if err != nil {
			return err
		}
		dst, src, count = dst.After(n), src.After(n), count-n
	}
	return nil
}

// After returns where the blocks after the first n lie.
func (l BlockList) After(n int) BlockList {
	if l.Index != 0 {
		l.Index += cudart.DevPtr(4 * n)
	} else {
		l.Base += cudart.DevPtr(n) * cudart.DevPtr(l.Stride)
	}
	return l
}

// FirstBeyond queues a search for the first of count indices that is limit or more, in a list of
// uint32. Two uint64 at result, memory that the device can access, become its place in the list and
// the index: count and 0 if there is none. One multiprocessor searches. Errors are those of
// [kernel.Kernel.Launch], and [cudart.ErrInvalidValue] for negative numbers.
func (b *Blocks) FirstBeyond(s *cudart.Stream, list cudart.DevPtr, count, limit int, result cudart.DevPtr) error {
	switch {
	case b == nil:
		return fmt.Errorf("kernel: check indices: %w", errZero)
	case count < 0 || limit < 0:
		return fmt.Errorf("kernel: check %d indices, below %d: %w", count, limit, cudart.ErrInvalidValue)
	}
	return b.searching.Launch(s, kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: blocksThreads}}, kernel.Arg(list), kernel.Arg(count), kernel.Arg(limit), kernel.Arg(result))
}
