package pool

import (
	"slices"
	"sync"
	"sync/atomic"
)

// cache holds the idle blocks, and counts the leases.
type cache struct {
	shards []shard
	local  sync.Pool // of *shard, finds the local shard: that of this processor, mostly
	next   atomic.Uint32

	peakInUse int // bytes; written under the locks of all shards, read under any
}

// A shard holds idle blocks. There is one for each processor that Go uses. Goroutines mostly
// use the one of their processor, so that its lock is free and its memory in that processor's
// cache. A block moves to the shard where it is requested.
type shard struct {
	mu   sync.Mutex
	free [classes][]*block // by class, in the order of release

	leases, requested int // number of leases made here, and their bytes
	inUse, slack      int // bytes of their blocks; bytes of the peak: see raisePeak
	cached            int // bytes in free
	hits, misses      int

	_ [128]byte // shards do not share a cache line
}

// popFree takes an idle block that holds n bytes. Only large blocks of a class
// differ in size.
func (s *shard) popFree(class, n int) *block {
	list := s.free[class]
	for i := len(list) - 1; i >= 0; i-- {
		b := list[i]
		if b.Size < n {
			continue
		}
		if i == len(list)-1 { // nearly always
			list[i] = nil
			s.free[class] = list[:i]
		} else {
			s.free[class] = slices.Delete(list, i, i+1)
		}
		s.cached -= b.Size
		return b
	}
	return nil
}

func (s *shard) pushFree(b *block) {
	list := s.free[b.Class]
	if list == nil {
		list = make([]*block, 0, 16) // 128 bytes, so that lists of two shards share no cache line
	}
	s.free[b.Class] = append(list, b)
	s.cached += b.Size
}

// put takes a block whose work is done.
func (s *shard) put(b *block) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pushFree(b)
}

// acquire counts a lease, with s locked. If it returns false, the caller must call
// cache.raisePeak with the block's bytes once s is unlocked.
func (s *shard) acquire(b *block, n int) (inPeak bool) {
	b.home, b.requested = s, n
	s.leases++
	s.requested += n
	s.inUse += b.Size
	if s.slack < b.Size {
		return false
	}
	s.slack -= b.Size
	return true
}

// release undoes acquire, with b's home locked.
func (s *shard) release(b *block) {
	s.leases--
	s.requested -= b.requested
	s.inUse -= b.Size
	s.slack += b.Size
	b.requested = 0
}

// raisePeak counts bytes that go into use, so that the peak is the true one of all
// shards though each counts alone: one counter for all would cost more, when every
// processor writes to it, than the rest of Get and Release.
//
// Slack is the bytes that were in use at the peak and are not now. Each shard holds a part of
// it. A lease uses slack of its own shard first, then of others. If all of them together have
// too little, there is a new peak.
func (p *cache) raisePeak(bytes int) {
	take := func(s *shard) {
		took := min(s.slack, bytes)
		s.slack -= took
		bytes -= took
	}
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		take(s)
		s.mu.Unlock()
		if bytes == 0 {
			return
		}
	}
	// A shard that was passed may have slack by now: here all are locked at once.
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		defer s.mu.Unlock()
		take(s)
	}
	p.peakInUse += bytes
}

// shard returns a shard that probably no other goroutine uses just now.
func (p *cache) shard() *shard {
	s := p.local.Get().(*shard)
	p.local.Put(s)
	return s
}

// maxSteal is the number of small blocks that move to the local shard at once, so that
// goroutines which only get blocks do not search all shards each time.
const maxSteal = 8

// steal takes an idle block from any shard.
func (p *cache) steal(class, n int) *block {
	local := p.shard()
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		b := s.popFree(class, n)
		var buf [maxSteal - 1]*block
		more := buf[:0]
		for b != nil && s != local && isSmall(class) && len(more) < len(buf) && len(s.free[class]) > 0 {
			more = append(more, s.popFree(class, n))
		}
		s.mu.Unlock()
		if len(more) > 0 {
			local.mu.Lock()
			for _, m := range slices.Backward(more) {
				local.pushFree(m)
			}
			local.mu.Unlock()
		}
		if b != nil {
			return b
		}
	}
	return nil
}
