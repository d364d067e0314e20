package cudasim

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// reserve makes a device block for cudaMalloc and cudaMallocAsync and returns its
// address to the caller. Pages of managed memory do not leave the device for it, as
// libraries have seen that allocate beside managed memory.
func (c *call) reserve(d *device, size int) cudart.Code {
	switch {
	case c.ptr(0) == 0:
		return cudart.ErrInvalidValue
	case size == 0:
		return put(c, 0, uintptr(0))
	case size < 0 || size > d.free():
		return cudart.ErrMemoryAllocation
	}
	b, err := c.blocks.newDevice(c.Sim, size, d)
	if err != nil {
		return cudart.ErrMemoryAllocation
	}
	return put(c, 0, b.addr)
}

func (c *call) malloc() cudart.Code { return c.reserve(c.dev, c.num(1)) }

// freeing returns a function that frees memory of one of two kinds, when the device is done with it.
func freeing(what string, kind, or blockKind) func(*call) cudart.Code {
	return func(c *call) cudart.Code {
		if c.ptr(0) == 0 {
			return success
		}
		b, code := c.exact(c.ptr(0), kind, or)
		if code != success {
			return code
		}
		c.on(b.dev, what, b.addr)
		if code := c.drain(b.dev); code != success {
			return code
		}
		if b.gone {
			return cudart.ErrInvalidValue // freed by another thread meanwhile
		}
		c.blocks.release(b)
		return success
	}
}

// exact returns the block of one of two kinds that starts at addr.
func (c *call) exact(addr uintptr, kind, or blockKind) (*block, cudart.Code) {
	b := c.blocks.find(addr)
	switch {
	case b == nil || b.addr != addr || b.kind != kind && b.kind != or:
		return nil, cudart.ErrInvalidValue
	case b.freeing:
		c.misuse(freedMemory, -1, "memory %#x was freed by cudaFreeAsync", addr)
		return nil, cudart.ErrInvalidValue
	}
	return b, success
}

func (c *call) mallocAsync(st *stream) cudart.Code {
	if st.dev.cfg.Attributes[cudart.AttrMemoryPoolsSupported] == 0 {
		return cudart.ErrNotSupported
	}
	if code := c.awaitSlot(st); code != success { // before there is memory to free again
		return code
	}
	if code := c.reserve(st.dev, c.num(1)); code != success {
		return code
	}
	return c.enqueue(st, &operation{})
}

func (c *call) freeAsync(st *stream) cudart.Code {
	if c.ptr(0) == 0 {
		return success
	}
	b, code := c.exact(c.ptr(0), deviceBlock, deviceBlock)
	if code != success {
		return code
	}
	code = c.enqueue(st, &operation{finish: func() {
		if !b.gone {
			c.blocks.release(b)
		}
	}})
	b.freeing = code == success
	return code
}

// hostAllocFlags are portable, mapped and write-combined.
const hostAllocFlags = 0x7

func (c *call) hostAlloc() cudart.Code {
	switch {
	case c.ptr(0) == 0 || c.u32(2)&^hostAllocFlags != 0:
		return cudart.ErrInvalidValue
	case c.num(1) == 0:
		return put(c, 0, uintptr(0))
	case c.num(1) < 0, !c.canPin(c.num(1), c.cfg.HostMemory), !c.canPin(c.num(1), c.cfg.MaxPinned):
		return cudart.ErrMemoryAllocation
	case c.leak(c.num(1)):
		return cudart.ErrInvalidValue
	}
	b, err := c.blocks.newHost(hostBlock, c.num(1), c.dev, c.u32(2))
	if err != nil {
		return cudart.ErrMemoryAllocation
	}
	// CUDA does not promise zeros. Both ends are enough to detect a caller that
	// expects them, and leave large memory unpopulated.
	n := min(4096, len(b.mem))
	set(b.mem[:n], hostJunk)
	set(b.mem[len(b.mem)-n:], hostJunk)
	return put(c, 0, b.addr)
}

// hostJunk fills new memory of cudaHostAlloc.
const hostJunk = 0xa5

func (c *call) hostGetFlags() cudart.Code {
	b := c.pinned(c.ptr(1))
	if b == nil {
		return cudart.ErrInvalidValue
	}
	return put(c, 0, b.flags)
}

func (c *call) hostGetDevicePointer() cudart.Code {
	if c.u32(2) != 0 || c.pinned(c.ptr(1)) == nil {
		return cudart.ErrInvalidValue
	}
	return put(c, 0, c.ptr(1))
}

// pinned returns the block of pinned host memory at an address, or nil.
func (c *call) pinned(addr uintptr) *block {
	if b := c.blocks.find(addr); b != nil && (b.kind == hostBlock || b.kind == registeredBlock) {
		return b
	}
	return nil
}

// invalidDevice is cudaInvalidDeviceId.
const invalidDevice = -2

// pointerAttributes is cudaPointerAttributes. The reserved words are 13.x's.
type pointerAttributes struct {
	kind, device int32
	devicePtr    uintptr
	hostPtr      uintptr
	reserved     [8]int64
}

func (c *call) memGetAddressRange() cudart.Code {
	b := c.blocks.find(c.ptr(2))
	if b == nil || b.kind == registeredBlock {
		return cudart.ErrInvalidValue
	}
	if at := c.ptr(0); at != 0 {
		*pointer[uintptr](at) = b.addr
	}
	if at := c.ptr(1); at != 0 {
		*pointer[uintptr](at) = uintptr(b.size)
	}
	return success
}

func (c *call) pointerGetAttributes() cudart.Code {
	if c.ptr(0) == 0 {
		return cudart.ErrInvalidValue
	}
	p := c.ptr(1)
	a := pointerAttributes{device: invalidDevice, hostPtr: p}
	if b := c.blocks.find(p); b != nil {
		a = pointerAttributes{device: int32(b.dev.ordinal), devicePtr: p, hostPtr: p}
		switch b.kind {
		case deviceBlock:
			a.kind, a.hostPtr = 2, 0
		case managedBlock:
			a.kind = 3
		default:
			a.kind = 1
		}
	}
	n := c.structSize("cudaPointerGetAttributes")
	copy(bytesAt(c.ptr(0), n), unsafe.Slice((*byte)(unsafe.Pointer(&a)), n))
	return success
}
