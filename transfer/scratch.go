package transfer

import (
	"sync"
	"unsafe"
)

const (
	// block is what O_DIRECT wants offsets, lengths and memory to be multiples of.
	// Devices ask for 512 or 4096.
	block = 4 * kib
	// scratchBytes is how much readers and writers are given at a time. One block
	// more at both ends is for reading whole blocks.
	scratchBytes = mib
)

// A scratch is ordinary memory of a copy that may block: readers and writers have
// no memory of the ring.
type scratch []byte // from a block's start, scratchBytes and two blocks

var scratches = sync.Pool{New: func() any {
	mem := make([]byte, scratchBytes+3*block)
	skip := -int(uintptr(unsafe.Pointer(&mem[0]))) & (block - 1)
	s := scratch(mem[skip : skip+scratchBytes+2*block])
	return &s
}}

func newScratch() *scratch { return scratches.Get().(*scratch) }

func (s *scratch) release() { scratches.Put(s) }
