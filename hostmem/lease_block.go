package hostmem

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// A block is a piece of a pool's memory. It is, at any time, leased, or in a
// list of a shard, or in the hands of the one goroutine that moves it.
type block struct {
	pool  *poolCore
	base  unsafe.Pointer
	size  int // bytes that it can hold
	class int
	slab  *slab   // that it was carved from, or
	buf   *Buffer // that it is all of
	spans []Span  // of buf, where it has several

	// state is a generation, which every release raises, and, in its low bits,
	// the calls that use the block just now. A lease of another generation than
	// the block's is over.
	state atomic.Uint64
	used  useList // of the lease's own copies
	trace atomic.Pointer[leaseTrace]

	// What follows belongs to whoever has the block alone.
	home  *shard // that it was lent from, and goes back to
	next  *block // in a list
	epoch uint32 // when it became idle
	marks []mark // the first live are not known to be done; others keep their event
	live  int
}

// A mark is a point in a stream that work on a block ends before.
type mark struct {
	stream *cudart.Stream
	event  *cudart.Event
	lost   bool // the event cannot tell: only the device can
}

const (
	generation = 1 << 16 // one generation in block.state
	usersMask  = generation - 1
)

func (b *block) generation() uint64 { return b.state.Load() / generation }

// is tells whether a lease of that generation is not over.
func (b *block) is(gen uint64) bool { return b.generation() == gen }

// enter starts a call that uses the block; false means that the lease is over.
func (b *block) enter(gen uint64) bool {
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

func (b *block) leave() { b.state.Add(^uint64(0)) }

// retire ends a lease once, and waits for the calls that use the block: they
// queue copies and do not wait for these.
func (b *block) retire(gen uint64) bool {
	for {
		s := b.state.Load()
		if s/generation != gen {
			return false
		}
		if b.state.CompareAndSwap(s, s+generation) {
			break
		}
	}
	for b.state.Load()&usersMask != 0 {
		runtime.Gosched()
	}
	return true
}

// record marks the end of what is queued on the streams. A stream that takes
// no mark leaves one that only the whole device can settle.
func (b *block) record(streams []*cudart.Stream) error {
	if len(streams) == 1 && b.used.empty() {
		return b.recordOne(streams[0])
	}
	for _, s := range streams {
		b.used.add(s)
	}
	var errs []error
	for _, s := range b.used.all {
		if err := b.recordOne(s); err != nil {
			errs = append(errs, err)
		}
	}
	b.used.reset()
	return errors.Join(errs...)
}

func (b *block) recordOne(s *cudart.Stream) error {
	if b.live == len(b.marks) {
		b.marks = append(b.marks, mark{})
	}
	m := &b.marks[b.live]
	b.live++
	if m.event != nil && m.event.Device() != s.Device() {
		b.pool.giveEvent(m.event)
		m.event = nil
	}
	var err error
	if m.event == nil {
		m.event, err = b.pool.takeEvent(s.Device())
	}
	if err == nil {
		err = s.Record(m.event)
	}
	m.stream, m.lost = s, err != nil
	if err != nil {
		return fmt.Errorf("the block stays unused until %v is idle: %w", s.Device(), err)
	}
	return nil
}

// settled asks whether the work that was queued before Release is done.
func (b *block) settled() bool {
	for b.live > 0 {
		m := &b.marks[b.live-1]
		if m.lost {
			return false
		}
		done, err := m.event.Query()
		if err != nil {
			// An error is no proof that the memory is not used any more.
			m.lost = true
			return false
		}
		if !done {
			return false
		}
		m.stream = nil
		b.live--
	}
	return true
}

// A useList remembers the streams of a lease's copies. It keeps its room from
// lease to lease.
type useList struct {
	last atomic.Pointer[cudart.Stream]
	mu   sync.Mutex
	all  []*cudart.Stream
}

func (u *useList) add(s *cudart.Stream) {
	if u.last.Load() == s {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !slices.Contains(u.all, s) {
		u.all = append(u.all, s)
	}
	u.last.Store(s)
}

// empty tells whether no stream was added. It and reset are for whoever has
// the block alone.
func (u *useList) empty() bool { return u.last.Load() == nil }

func (u *useList) reset() {
	clear(u.all)
	u.all = u.all[:0]
	u.last.Store(nil)
}
