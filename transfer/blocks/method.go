package blocks

import "unsafe"

// When engines are quicker than the kernel (H200, PCIe 5.0 x16, 2026-11-29): the kernel takes 11 µs and copies up at 51 and
// down at 52 GB/s. Engines take at least 1 µs a copy, and copy at 53 GB/s.
const (
	engineBlocks = 2         // at most
	engineBytes  = 512 << 10 // of a block, at least
	// engineSingleBytes is engineBytes for blocks that the kernel copies byte by byte: up at 4 and down at 8 GB/s.
	engineSingleBytes = 8 << 10
)

// quickest returns the method that takes less time.
func (c *Copy) quickest() Method {
	least := engineBytes
	if !c.aligned(4) {
		least = engineSingleBytes
	}
	if c.Count <= engineBlocks || c.Size >= least || c.contiguous() {
		return ByEngine
	}
	return ByKernel
}

// contiguous reports whether the blocks are one block on both sides.
func (c *Copy) contiguous() bool {
	return c.HostIndex == nil && c.DeviceIndex == nil && !c.listsOnDevice() && c.HostStride == c.Size && c.DeviceStride == c.Size
}

// aligned reports whether the kernel copies n bytes at a time or more, as in internal/gpukernels/src/blocks.cu.
func (c *Copy) aligned(n int) bool {
	return (int(uintptr(unsafe.Pointer(unsafe.SliceData(c.Host))))|int(c.Device)|c.HostStride|c.DeviceStride|c.Size)%n == 0
}

// The multiprocessors of a kernel by default. Four copy blocks of 4 KiB at 49 of 51 GB/s. Blocks of 4,100 bytes take eight:
// 50 instead of 34 GB/s up (H200, 2026-11-29). Four of a C program's kernels slowed down work beside them about as
// much as a copy engine does; these kernels were not measured so.
const (
	defaultProcessors   = 4
	unalignedProcessors = 8
)

// processorsOf returns the number of multiprocessors for a copy.
func (b *Copier) processorsOf(c *Copy) int {
	switch {
	case b.processors != 0:
		return b.processors
	case !c.aligned(16):
		return unalignedProcessors
	}
	return defaultProcessors
}
