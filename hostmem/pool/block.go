package pool

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/pending"
)

// A block is a piece of a pool's memory. It is, at any time, leased, or idle in
// a shard, or pending, or belongs to the one goroutine that moves it.
type block struct {
	pending.Block[block] // its fence is of the lease's work
	pool                 *core
	base                 unsafe.Pointer
	slab                 *slab           // that it was cut from, or
	buf                  *hostmem.Buffer // that it is all of
	spans                []hostmem.Span  // of buf, where it has several

	// state is a generation and, in its low bits, the users of the block: the
	// lease, or what else has it, and the calls that use it just now. A lease
	// of another generation than the block's is over.
	state atomic.Uint64
	trace atomic.Pointer[leaseTrace]

	// What follows belongs to the one goroutine that has the block; home and
	// requested are written under home's lock.
	home      *shard // that counts the lease, and to which the block returns
	requested int    // bytes, of the lease, 0 for none
	next      *block // in a list
	epoch     uint32 // when it became idle
}

const (
	usersMask  = 1<<16 - 1
	generation = 1 << 16 // one generation in block.state
)

func (p *core) newBlock(base unsafe.Pointer, size, class int) *block {
	b := &block{pool: p, base: base, home: p.shard()}
	b.Of, b.Size, b.Class = b, size, class
	b.state.Store(1)
	return b
}

// is reports whether a lease of that generation is not over.
func (b *block) is(gen uint64) bool { return b.state.Load()/generation == gen }

// generation returns that of the lease that begins now.
func (b *block) generation() uint64 { return b.state.Load() / generation }

// begin starts a call that uses the block; false means that the lease is over.
func (b *block) begin(gen uint64) bool {
	for {
		s := b.state.Load()
		switch {
		case s/generation != gen:
			return false
		case s&usersMask == usersMask:
			runtime.Gosched()
		case b.state.CompareAndSwap(s, s+1):
			return true
		}
	}
}

// retire ends a lease once. The last of its users returns the block to the pool:
// the caller, unless a call uses the block just now.
func (b *block) retire(gen uint64) bool {
	for {
		s := b.state.Load()
		if s/generation != gen {
			return false
		}
		after := s + generation
		last := s&usersMask == 1
		if !last {
			after--
		}
		if !b.state.CompareAndSwap(s, after) {
			continue
		}
		if last {
			b.pool.put(b)
		}
		return true
	}
}

// end ends a call that uses the block.
func (b *block) end() {
	if b.state.Add(^uint64(0))&usersMask == 0 {
		b.state.Add(1)
		b.pool.put(b)
	}
}

// copy calls one for each part of [off, off+n) that lies within one
// registration.
func (b *block) copy(off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if b.spans == nil {
		return one(unsafe.Add(b.base, off), 0, n)
	}
	return hostmem.Pieces(b.spans, off, n, func(at, n int) error {
		return one(unsafe.Add(b.base, at), at-off, n)
	})
}

// A blockList is a list of blocks, linked by next.
type blockList struct{ first, last *block }

func (l *blockList) pushFront(b *block) {
	b.next = l.first
	l.first = b
	if l.last == nil {
		l.last = b
	}
}

func (l *blockList) pushBack(b *block) {
	b.next = nil
	if l.last == nil {
		l.first = b
	} else {
		l.last.next = b
	}
	l.last = b
}

// pop takes the first block, nil if there is none.
func (l *blockList) pop() *block {
	b := l.first
	if b != nil {
		l.remove(nil, b)
	}
	return b
}

// remove takes b out, which comes after before, or first if that is nil.
func (l *blockList) remove(before, b *block) {
	if before == nil {
		l.first = b.next
	} else {
		before.next = b.next
	}
	if l.last == b {
		l.last = before
	}
	b.next = nil
}
