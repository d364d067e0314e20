package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/gopinned/pinned/hostmem"
)

// Trim unmaps idle memory, the longest unused first, until at most keep bytes
// of it are left, and returns how many bytes it has unmapped. It does not wait
// for the GPU: memory that may be in use stays. An arena of small blocks is
// unmapped when none of them is leased.
func (p *Pool) Trim(keep int) (int, error) {
	c := p.core
	ctx := context.Background()
	c.reclaimAll(ctx)
	st := c.stats()
	goal := st.ReservedBytes - st.InUseBytes - st.PendingBytes - max(keep, 0)
	freed, err := c.trim(everything, func(freed int) bool { return freed >= goal })
	c.wakeUp()
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("pool: trim %v: %w", c, err)
	}
	return freed, err
}

func everything(*block) bool { return true }

func never(int) bool { return false }

// trim unmaps idle blocks that pick chooses until enough returns true. It holds
// no lock that a Get which finds memory, or a Release, waits for while it
// unregisters.
func (p *core) trim(pick func(*block) bool, enough func(freed int) bool) (freed int, err error) {
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
	p.pushBack(back)
	return freed, errors.Join(errs...)
}

// trimAll unmaps all that the GPU is done with.
func (p *core) trimAll(ctx context.Context) (freed int, err error) {
	p.reclaimAll(ctx)
	return p.trim(everything, never)
}

// relieve unmaps idle memory because requests of the process wait for as much.
func (p *core) relieve(need int) {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	p.reclaimAll(ctx)
	if p.idle() > 0 {
		_, _ = p.trim(everything, func(freed int) bool { return freed >= need }) // Trim and Close try again, and report
	}
}

// lookTimeout bounds the looks that no caller waits for.
const lookTimeout = time.Second

// gather takes the idle blocks that pick chooses out of the lists, the longest
// unused and the largest first.
func (p *core) gather(pick func(*block) bool) []*block {
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

// pushBack puts blocks back that gather took, and stay.
func (p *core) pushBack(blocks []*block) {
	s := p.shard()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range blocks {
		s.pushFree(b)
	}
}

// freeLarge unmaps a block that is a buffer.
func (p *core) freeLarge(b *block) (freed int, err error) {
	p.mu.Lock()
	delete(p.large, b)
	p.mu.Unlock()
	return p.freeBuffer(b.buf)
}

// freeArenas unmaps the arenas that nothing is cut from.
func (p *core) freeArenas() (freed int, err error) {
	var empty []*hostmem.Buffer
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

// freeStuck tries again what could not be unmapped before.
func (p *core) freeStuck() (freed int, err error) {
	p.mu.Lock()
	stuck := p.stuck
	p.stuck = nil
	p.mu.Unlock()
	return p.freeBuffers(stuck)
}

func (p *core) freeBuffers(buffers []*hostmem.Buffer) (freed int, err error) {
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

// freeBuffer unmaps a buffer. One that cannot be unregistered is kept for the
// next try, and counts as reserved.
func (p *core) freeBuffer(buf *hostmem.Buffer) (freed int, err error) {
	size := buf.Kept()
	if err := buf.Close(); err != nil {
		p.failures.Add(1)
		p.mu.Lock()
		p.stuck = append(p.stuck, buf)
		p.mu.Unlock()
		return 0, err
	}
	p.reserved.add(-size)
	p.trimmed.Add(int64(size))
	return size, nil
}

// idleTicks is how many ticks end in any time of IdleTime, and one more.
const idleTicks = 3

// startTicking starts the timer, which runs while there is idle memory.
func (p *core) startTicking() {
	if p.ticking.CompareAndSwap(false, true) {
		p.timer.Reset(p.o.IdleTime / (idleTicks - 1))
	}
}

// tick unmaps what was idle for IdleTime. It counts time in ticks, because
// reading a clock at each Release would take as long as all the rest of it.
func (p *core) tick() {
	if p.closed() {
		return
	}
	now := p.epoch.Add(1)
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	p.reclaimAll(ctx)
	_, _ = p.trim(func(b *block) bool { return now-b.epoch >= idleTicks }, never)
	p.wakeUp()
	p.ticking.Store(false)
	// A Release that saw it ticking put its block into a list before.
	if st := p.stats(); st.ReservedBytes > st.InUseBytes {
		p.startTicking()
	}
}
