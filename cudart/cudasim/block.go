package cudasim

import "slices"

// blockKind is the kind of memory of a range of addresses.
type blockKind uint8

const (
	deviceBlock blockKind = iota
	managedBlock
	hostBlock       // cudaHostAlloc
	registeredBlock // cudaHostRegister
)

// A block is one allocation or registration.
type block struct {
	addr  uintptr
	size  int
	kind  blockKind
	dev   *device // that holds it, or that was current when it was made
	flags uint32
	mem   []byte // the bytes, nil for registered memory

	uses    int         // operations enqueued that touch it
	gone    bool        // freed while in use
	freeing bool        // cudaFreeAsync was called
	pages   []pageState // of managed memory
}

func (b *block) end() uintptr { return b.addr + uintptr(b.size) }

// bytes returns n bytes of the block, as memory that the process can access.
func (b *block) bytes(addr uintptr, n int) []byte {
	if b.kind == registeredBlock {
		return bytesAt(addr, n)
	}
	off := int(addr - b.addr)
	return b.mem[off : off+n]
}

// Device addresses lie above those that a process can map on amd64 and arm64, so
// that the CPU faults on them.
const (
	deviceAddresses  = 1 << 48
	addressSpaceSize = 1 << 44 // for one Sim
	deviceAlignment  = 512
)

// addressSpace is the first address of the nth Sim of the process.
func addressSpace(n uint64) uintptr {
	return uintptr(deviceAddresses + n%4000*addressSpaceSize)
}

// heapBlock is the size up to which a device block lies in Go's heap: the number
// of mappings is limited.
const heapBlock = 64 << 10

// blocks are all blocks of a Sim by address.
type blocks struct {
	list        []*block // sorted, disjoint
	next, limit uintptr  // of device addresses
}

// search returns the index of the first block that ends above addr.
func (bs *blocks) search(addr uintptr) int {
	i, _ := slices.BinarySearchFunc(bs.list, addr, func(b *block, addr uintptr) int {
		if b.end() <= addr {
			return -1
		}
		return 1
	})
	return i
}

// find returns the block that contains addr, or nil.
func (bs *blocks) find(addr uintptr) *block {
	if i := bs.search(addr); i < len(bs.list) && bs.list[i].addr <= addr {
		return bs.list[i]
	}
	return nil
}

// overlap returns a block that shares bytes with the range, or nil.
func (bs *blocks) overlap(addr uintptr, n int) *block {
	if i := bs.search(addr); i < len(bs.list) && bs.list[i].addr < addr+uintptr(n) {
		return bs.list[i]
	}
	return nil
}

func (bs *blocks) insert(b *block) {
	bs.list = slices.Insert(bs.list, bs.search(b.addr), b)
}

// newDevice makes a device block at an address that has been unused for long.
func (bs *blocks) newDevice(s *Sim, size int, d *device) (*block, error) {
	b := &block{size: size, kind: deviceBlock, dev: d}
	if size <= heapBlock {
		b.mem = make([]byte, size, (size+15)&^15) // aligned as values of up to 8 bytes are
	} else {
		m, err := mapMemory(size)
		if err != nil {
			return nil, err
		}
		b.mem = m
	}
	reserved := (size + 2*deviceAlignment - 1) &^ (deviceAlignment - 1) // with a gap after it
	if bs.next+uintptr(reserved) > bs.limit {
		bs.next = s.base
	}
	for o := bs.overlap(bs.next, reserved); o != nil; o = bs.overlap(bs.next, reserved) {
		bs.next = (o.end() + 2*deviceAlignment - 1) &^ (deviceAlignment - 1)
	}
	b.addr = bs.next
	bs.next += uintptr(reserved)
	bs.insert(b)
	d.used += size
	return b, nil
}

// newHost makes a block of memory that the process can access.
func (bs *blocks) newHost(kind blockKind, size int, d *device, flags uint32) (*block, error) {
	m, err := mapMemory(size)
	if err != nil {
		return nil, err
	}
	b := &block{addr: address(&m[0]), size: size, kind: kind, dev: d, flags: flags, mem: m}
	bs.insert(b)
	return b, nil
}

// release removes a block. Its bytes are freed once no operation uses them.
func (bs *blocks) release(b *block) {
	if i := bs.search(b.addr); i < len(bs.list) && bs.list[i] == b {
		bs.list = slices.Delete(bs.list, i, i+1)
	}
	if b.kind == deviceBlock {
		b.dev.used -= b.size
	}
	b.dropPages()
	b.gone = true
	bs.unmap(b)
}

// unmap frees the bytes of a block that is gone and unused.
func (bs *blocks) unmap(b *block) {
	if !b.gone || b.uses > 0 || b.mem == nil {
		return
	}
	if b.kind != deviceBlock || b.size > heapBlock {
		_ = unmapMemory(b.mem) // it was mapped so: this cannot fail
	}
	b.mem = nil
}

// drop frees device memory that was never freed. Host memory stays mapped,
// without its pages: the process may still have the address.
func (bs *blocks) drop() {
	for _, b := range bs.list {
		switch {
		case b.kind == deviceBlock:
			b.gone, b.uses = true, 0
			bs.unmap(b)
		case b.mem != nil:
			_ = dropMemory(b.mem)
		}
	}
	bs.list = nil
}
