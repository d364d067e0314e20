package hostmem

import (
	"slices"
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// A shard keeps idle blocks. There is one for each processor that Go uses, and
// goroutines mostly meet the one of the processor they run on, so that its
// lock is free and its memory in that processor's cache. Blocks wander to
// where they are asked for.
type shard struct {
	mu      sync.Mutex
	free    [classes]blockList // the last released is lent first, the others grow old
	pending [classes]blockList // released while work is queued; the oldest is first
	events  []*cudart.Event

	leases, asked   int // of blocks that were lent from here and are out
	inUse, slack    int // bytes of these blocks; of the peak, see poolCore.reserve
	cached, waiting int // bytes in free, in pending
	hits, misses    int

	_ [128]byte // shards do not share a cache line
}

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

// remove takes b out, which comes behind before, or first if that is nil.
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

// popFree takes an idle block that holds n bytes. Only large blocks of a class
// differ in size.
func (s *shard) popFree(class, n int) *block {
	var before *block
	for b := s.free[class].first; b != nil; before, b = b, b.next {
		if b.size >= n {
			s.free[class].remove(before, b)
			s.cached -= b.size
			return b
		}
	}
	return nil
}

func (s *shard) pushFree(b *block) {
	// A block has events while they are in use, not while it is idle.
	for _, m := range b.marks {
		if m.event != nil {
			s.events = append(s.events, m.event)
		}
	}
	clear(b.marks)
	b.marks = b.marks[:0]
	s.free[b.class].pushFront(b)
	s.cached += b.size
}

// lookAhead bounds how far a Get looks for work of another stream that may be
// done, behind work that is not.
const lookAhead = 16

// popPending takes the oldest pending block that holds n bytes and does not
// wait for a stream of busy.
func (s *shard) popPending(class, n int, busy []*cudart.Stream) *block {
	var before *block
	b := s.pending[class].first
	for i := 0; b != nil && i < lookAhead; i++ {
		if b.size >= n && !b.waitsFor(busy) {
			s.pending[class].remove(before, b)
			s.waiting -= b.size
			return b
		}
		before, b = b, b.next
	}
	return nil
}

func (s *shard) pushPending(b *block) {
	s.pending[b.class].pushBack(b)
	s.waiting += b.size
}

// unpop undoes popPending.
func (s *shard) unpop(b *block) {
	s.pending[b.class].pushFront(b)
	s.waiting += b.size
}

func (b *block) waitsFor(streams []*cudart.Stream) bool {
	for _, m := range b.marks[:b.live] {
		if slices.Contains(streams, m.stream) {
			return true
		}
	}
	return false
}

// lend counts a block that goes out, with s locked. If it returns false, the
// caller must reserve the block's bytes once s is unlocked.
func (s *shard) lend(b *block, n int) (reserved bool) {
	b.home = s
	s.leases++
	s.asked += n
	s.inUse += b.size
	if s.slack < b.size {
		return false
	}
	s.slack -= b.size
	return true
}

// takeBack undoes lend, with b's home locked.
func (s *shard) takeBack(b *block, n int) {
	s.leases--
	s.asked -= n
	s.inUse -= b.size
	s.slack += b.size
}

// reserve accounts for bytes that go into use, so that the peak is the true
// one of all shards though each counts alone: one counter for all would cost
// more, when every processor writes to it, than the rest of Get and Release.
//
// What was in use at the peak and is not now is slack, which the shards hold
// in parts. Whoever lends uses slack of its own shard up, or of others. Only
// if all of them together have too little, this is a new peak.
func (p *poolCore) reserve(bytes int) {
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		took := min(s.slack, bytes)
		s.slack -= took
		s.mu.Unlock()
		if bytes -= took; bytes == 0 {
			return
		}
	}
	// Slack may have come up behind: the answer takes all shards at once.
	for i := range p.shards {
		p.shards[i].mu.Lock()
	}
	for i := range p.shards {
		s := &p.shards[i]
		took := min(s.slack, bytes)
		s.slack -= took
		bytes -= took
	}
	p.peakInUse += bytes
	for i := range p.shards {
		p.shards[i].mu.Unlock()
	}
}

// shard returns one that probably nobody else uses just now.
func (p *poolCore) shard() *shard {
	s := p.local.Get().(*shard)
	p.local.Put(s)
	return s
}

func (p *poolCore) takeEvent(dev *cudart.Device) (*cudart.Event, error) {
	s := p.shard()
	s.mu.Lock()
	for i := len(s.events) - 1; i >= 0; i-- {
		if e := s.events[i]; e.Device() == dev {
			s.events = slices.Delete(s.events, i, i+1)
			s.mu.Unlock()
			return e, nil
		}
	}
	s.mu.Unlock()
	return dev.NewEvent(cudart.EventOptions{})
}

func (p *poolCore) giveEvent(e *cudart.Event) {
	s := p.shard()
	s.mu.Lock()
	s.events = append(s.events, e)
	s.mu.Unlock()
}
