package pool

import (
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/pending"
)

// A block is a piece of a pool's memory. See core for its states.
type block struct {
	pending.Block[block] // with the fence of the lease's work
	pool                 *core
	base                 unsafe.Pointer
	slab                 *slab           // nil for a large block
	buf                  *hostmem.Buffer // of a large block, whole
	split                bool            // buf has several registrations

	users lifetime.Users // each generation is one lease, and the calls that use it
	trace atomic.Pointer[leaseTrace]

	// These fields belong to the goroutine that has the block; home and requested are
	// written under home's lock.
	home      *shard // counts the lease, and takes the block back; nil before the first lease
	requested int    // bytes of the lease, 0 for none
	epoch     uint32 // tick in which it became idle
}

func (p *core) newBlock(base unsafe.Pointer, size, class int) *block {
	b := &block{pool: p, base: base}
	b.Outer, b.Size, b.Class = b, size, class
	return b
}

// copy calls one for each part of [off, off+n) that lies within one
// registration.
func (b *block) copy(off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if !b.split {
		return one(unsafe.Add(b.base, off), 0, n)
	}
	for s := range b.buf.Spans(off, n) {
		if err := one(unsafe.Add(b.base, s.Off), s.Off-off, s.Len); err != nil {
			return err
		}
	}
	return nil
}
