package gpukernels

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
)

// A Parts has the kernel that copies parts of any size, loaded on a device.
type Parts struct {
	*kernel.Module
	copying *kernel.Kernel
}

// A Part is Size bytes at Src, which go to Dst: offsets from the addresses that [Parts.Copy] is
// given, or addresses if these are 0.
type Part struct {
	Dst, Src cudart.DevPtr
	Size     uint64
}

// PartBytes is the size of a [Part] in memory.
const PartBytes = 24

// NewParts loads the kernel. Close it. The errors are those of [kernel.Load] and [kernel.Module.Kernel].
func NewParts(ctx context.Context, dev *cudart.Device) (*Parts, error) {
	p := &Parts{}
	m, err := load(ctx, dev, "parts", map[string]**kernel.Kernel{"pinned_parts": &p.copying}, nil)
	if err != nil {
		return nil, err
	}
	p.Module = m
	return p, nil
}

// threads of a block of src/parts.cu
const partsThreads = 1024

// Copy queues copies of count parts on a stream, by processors blocks of 1024 threads: as many
// multiprocessors. list is memory that the device can access with as many Parts, which are read
// when the copies run. A warp of 32 threads copies a part: parts of more than some KiB are better
// cut into several. A thread copies 16 bytes at a time if both ends of a part are as far from a multiple of
// 16, else one. No two parts may overlap at dst, nor one at dst and one at src. Copies of nothing are
// ignored. Errors are those of [kernel.Kernel.Launch], and [cudart.ErrInvalidValue] for negative numbers.
func (p *Parts) Copy(s *cudart.Stream, dst, src, list cudart.DevPtr, count, processors int) error {
	switch {
	case p == nil:
		return fmt.Errorf("kernel: copy parts: %w", errZero)
	case count < 0 || processors < 1:
		return fmt.Errorf("kernel: copy %d parts by %d multiprocessors: %w", count, processors, cudart.ErrInvalidValue)
	case count == 0:
		return nil
	}
	return p.copying.Launch(s, kernel.Config{Grid: kernel.Dim{X: processors}, Block: kernel.Dim{X: partsThreads}}, kernel.Arg(dst), kernel.Arg(src), kernel.Arg(list), kernel.Arg(count))
}
