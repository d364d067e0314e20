package blocks

import "unsafe"

// When engines are quicker than the kernel (H200, PCIe 5.0 x16, 2026-11-29). With its wait the kernel takes 14 µs, and
// copies at 50 GB/s. Engines take 8.5 µs and for each block 1.2 µs up and 0.5 µs down, or the time of its bytes at 53 GB/s.
const (
	engineUp     = 3         // blocks at most
	engineDown   = 6         // blocks at most, and up for those of engineMiddle
	engineMiddle = 32 << 10  // bytes at least
	engineBytes  = 512 << 10 // of a block, at least, whatever their number
	engineSingle = 2         // blocks at most: a copy each takes 1 to 4 µs less than a batch
)

// quickest returns the method that takes less time.
func (c *Copy) quickest(down bool) Method {
	few := engineUp
	if down || c.Size >= engineMiddle {
		few = engineDown
	}
	if c.Count <= few || c.Size >= engineBytes || c.contiguous() {
		return ByEngine
	}
	return ByKernel
}

// contiguous reports whether the blocks are one block on both sides.
func (c *Copy) contiguous() bool {
	return c.HostIndex == nil && c.DeviceIndex == nil && !c.listsOnDevice() && c.HostStride == c.Size && c.DeviceStride == c.Size
}

// aligned reports whether all blocks begin at multiples of n bytes and their size is one.
func (c *Copy) aligned(n int) bool {
	return (int(uintptr(unsafe.Pointer(unsafe.SliceData(c.Host))))|int(c.Device)|c.HostStride|c.DeviceStride|c.Size)%n == 0
}

// The multiprocessors of a kernel by default. Four copy blocks of 4 KiB at 50 GB/s, those of 4,098 bytes at 48, and those
// of 1,026 bytes up at 36 (H200, 2026-11-29): blocks of less than 4 KiB that are not aligned to 16 bytes take eight. Four of
// a C program's kernels slowed down work beside them about as much as a copy engine does; these kernels were not
// measured so.
const (
	defaultProcessors   = 4
	unalignedProcessors = 8
	unalignedBytes      = 4 << 10 // of a block, below which it takes unalignedProcessors
)

// processorsOf returns the number of multiprocessors for a copy.
func (b *Copier) processorsOf(c *Copy) int {
	switch {
	case b.processors != 0:
		return b.processors
	case c.Size < unalignedBytes && !c.aligned(16):
		return unalignedProcessors
	}
	return defaultProcessors
}
