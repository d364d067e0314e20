package hostmem

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
)

// Trim gives memory that nobody leased back to the system, the longest unused
// first, until at most keep bytes of it are left, and returns how many bytes it
// gave back. It does not wait: memory that the GPU may still use stays. An
// arena of small blocks is given back when none of them is leased.
func (p *Pool) Trim(keep int) (int, error) {
	c := p.core
	c.reapAll()
	st := c.stats()
	goal := st.KeptBytes - st.InUseBytes - st.PendingBytes - max(keep, 0)
	freed, err := c.trim(func(*block) bool { return true }, func(freed int) bool { return freed >= goal })
	c.wakeFirst()
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("hostmem: trim %v: %w", c, err)
	}
	return freed, err
}

// trim gives idle blocks that pick chooses back to the system until enough
// says so. It takes no lock that a Get which finds memory, or a Release, waits
// for while it unregisters.
func (p *poolCore) trim(pick func(*block) bool, enough func(freed int) bool) (freed int, err error) {
	p.sweep.Lock()
	defer p.sweep.Unlock()
	var errs []error
	count := func(n int, failed error) {
		freed += n
		if failed != nil {
			errs = append(errs, failed)
		}
	}
	count(p.freeStuck())
	if !enough(freed) {
		count(p.freeArenas())
	}
	var back []*block
	var order []*slab
	slabs := make(map[*slab][]*block)
	for _, b := range p.gather(pick) {
		switch {
		case b.slab != nil:
			if slabs[b.slab] == nil {
				order = append(order, b.slab)
			}
			slabs[b.slab] = append(slabs[b.slab], b)
		case enough(freed):
			back = append(back, b)
		default:
			count(p.freeLarge(b))
		}
	}
	for _, s := range order {
		if enough(freed) || !p.dissolve(s, slabs[s]) {
			back = append(back, slabs[s]...)
			continue
		}
		if !enough(freed) {
			count(p.freeArenas())
		}
	}
	p.putBack(back)
	return freed, errors.Join(errs...)
}

// trimAll gives back all that the GPU is done with.
func (p *poolCore) trimAll() (freed int, err error) {
	p.reapAll()
	return p.trim(func(*block) bool { return true }, func(int) bool { return false })
}

// gather takes the idle blocks that pick chooses out of the lists, the longest
// unused and the largest first.
func (p *poolCore) gather(pick func(*block) bool) []*block {
	var found []*block
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		for class := range s.free {
			l := &s.free[class]
			var before *block
			for b := l.first; b != nil; {
				next := b.next
				if pick(b) {
					l.remove(before, b)
					s.cached -= b.size
					found = append(found, b)
				} else {
					before = b
				}
				b = next
			}
		}
		s.mu.Unlock()
	}
	now := p.epoch.Load()
	slices.SortStableFunc(found, func(a, b *block) int {
		return cmp.Or(cmp.Compare(now-b.epoch, now-a.epoch), cmp.Compare(b.size, a.size))
	})
	return found
}

func (p *poolCore) putBack(blocks []*block) {
	s := p.shard()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range blocks {
		s.pushFree(b)
	}
}

// freeLarge gives back a block that is a buffer.
func (p *poolCore) freeLarge(b *block) (freed int, err error) {
	p.mu.Lock()
	delete(p.large, b)
	p.mu.Unlock()
	return p.freeBuffer(b.buf)
}

// freeArenas gives back the arenas that nothing is cut from.
func (p *poolCore) freeArenas() (freed int, err error) {
	var empty []*Buffer
	p.mu.Lock()
	p.arenas = slices.DeleteFunc(p.arenas, func(a *arena) bool {
		if len(a.slabs) > 0 {
			return false
		}
		empty = append(empty, a.buf)
		return true
	})
	p.mu.Unlock()
	return p.freeBuffers(empty)
}

// freeStuck tries again what could not be given back before.
func (p *poolCore) freeStuck() (freed int, err error) {
	p.mu.Lock()
	stuck := p.stuck
	p.stuck = nil
	p.mu.Unlock()
	return p.freeBuffers(stuck)
}

func (p *poolCore) freeBuffers(buffers []*Buffer) (freed int, err error) {
	var errs []error
	for _, b := range buffers {
		n, err := p.freeBuffer(b)
		freed += n
		if err != nil {
			errs = append(errs, err)
		}
	}
	return freed, errors.Join(errs...)
}

// freeBuffer gives a buffer back. One that cannot be unregistered is kept for
// the next try, and stays within the limit's account.
func (p *poolCore) freeBuffer(buf *Buffer) (freed int, err error) {
	size := buf.Len()
	if err := buf.Close(); err != nil {
		p.failures.Add(1)
		p.mu.Lock()
		p.stuck = append(p.stuck, buf)
		p.mu.Unlock()
		return 0, err
	}
	p.limit.release(size)
	p.kept.add(-size)
	p.trimmed.Add(int64(size))
	return size, nil
}

// idleTicks is how many ticks end in any time of IdleTime, and one more.
const idleTicks = 3

// startTicking starts the timer, that runs while there is something idle.
func (p *poolCore) startTicking() {
	if p.ticking.CompareAndSwap(false, true) {
		p.timer.Reset(p.o.IdleTime / (idleTicks - 1))
	}
}

// tick gives back what was idle for IdleTime. It counts time in ticks, because
// reading a clock at each Release would take as long as all the rest of it.
func (p *poolCore) tick() {
	if p.closed() {
		return
	}
	now := p.epoch.Add(1)
	p.reapAll()
	_, _ = p.trim(func(b *block) bool { return now-b.epoch >= idleTicks }, func(int) bool { return false })
	p.wakeFirst()
	p.ticking.Store(false)
	// A Release that saw it ticking put its block into a list before.
	if st := p.stats(); st.KeptBytes > st.InUseBytes {
		p.startTicking()
	}
}
