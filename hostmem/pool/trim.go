package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
)

// lookPatience is how long calls into CUDA that block may keep a look for memory.
const lookPatience = bounded.Search

// Trim unmaps idle memory, the longest unused first, until at most keep bytes
// of it are left, and returns how many bytes it has unmapped. A negative keep counts as
// 0. Trim does not wait for the GPU: memory that may be in use stays. An arena of small
// blocks is unmapped when none of them is leased. An error says that memory could not
// be unregistered or unmapped: it counts as reserved, and the next Trim tries again.
func (p *Pool) Trim(keep int) (int, error) {
	c := p.core
	c.moving.begin()
	defer c.moving.end()
	// With a context that ends no stream can keep it.
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	c.pending.Reclaim(ctx)
	st := c.stats()
	goal := st.ReservedBytes - st.InUseBytes - st.PendingBytes - max(keep, 0)
	freed, err := c.trim(context.Background(), everything, func(freed int) bool { return freed >= goal })
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("pool: trim %v: %w", c, err)
	}
	return freed, err
}

func everything(*block) bool { return true }

func never(int) bool { return false }

// trim unmaps idle blocks that pick chooses until enough returns true, and waits for
// that, or until ctx ends. An error is that of unmapping, or ctx's.
func (p *core) trim(ctx context.Context, pick func(*block) bool, enough func(freed int) bool) (freed int, err error) {
	chosen, _ := p.plan(pick, enough)
	return p.unmap(ctx, chosen)
}

// relieve unmaps idle memory because other requests of the process need as much. A Get
// that waits here unmaps what it cannot use itself.
func (p *core) relieve(ctx context.Context, need int) (freed int) {
	p.moving.begin()
	defer p.moving.end()
	if p.gate.Load() > 0 {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	p.pending.Reclaim(ctx)
	if p.idle() > 0 {
		freed, _ = p.trim(ctx, everything, func(freed int) bool { return freed >= need }) // Trim and Close try again, and report
	}
	return freed
}

// plan takes memory out of the lists that is to be unmapped: what could not be before,
// arenas that nothing is cut from, and idle blocks that pick chooses until enough
// returns true. It makes no calls into CUDA. left is how many idle blocks stay.
func (p *core) plan(pick func(*block) bool, enough func(freed int) bool) (chosen []*hostmem.Buffer, left int) {
	p.planning.Lock()
	defer p.planning.Unlock()
	p.mu.Lock()
	chosen = p.failed
	p.failed = nil
	p.mu.Unlock()
	freed := 0
	for _, buf := range chosen {
		freed += buf.Reserved()
	}
	choose := func(buffers ...*hostmem.Buffer) {
		chosen = append(chosen, buffers...)
		for _, buf := range buffers {
			freed += buf.Reserved()
		}
	}
	if !enough(freed) {
		choose(p.emptyArenas()...)
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
			choose(p.forget(b))
		}
	}
	for _, s := range order {
		if enough(freed) || !p.dissolve(s, slabs[s]) {
			back = append(back, slabs[s]...)
			continue
		}
		if !enough(freed) {
			choose(p.emptyArenas()...)
		}
	}
	for _, b := range back {
		b.home.put(b)
	}
	if len(back) > 0 {
		p.wakeUp() // a Get that waits may have missed them
	}
	return chosen, len(back)
}

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
					s.cached -= b.Size
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
		return cmp.Or(cmp.Compare(now-b.epoch, now-a.epoch), cmp.Compare(b.Size, a.Size))
	})
	return found
}

// forget returns the memory of a large block, which is no block from then on.
func (p *core) forget(b *block) *hostmem.Buffer {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.large, b)
	return b.buf
}

// emptyArenas takes the arenas that nothing is cut from.
func (p *core) emptyArenas() (empty []*hostmem.Buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arenas = slices.DeleteFunc(p.arenas, func(a *arena) bool {
		if len(a.slabs) > 0 {
			return false
		}
		empty = append(empty, a.buf)
		return true
	})
	return empty
}

// A victim is memory to be unmapped, and for whom.
type victim struct {
	buf *hostmem.Buffer
	of  *batch
}

// A batch is memory that one goroutine waits for. It is guarded by core.mu.
type batch struct {
	left, freed int
	errs        []error
	done        chan struct{}
}

// mostUnmappers bounds the threads on which cudaHostUnregister may be stuck.
const mostUnmappers = 4

// unmap unmaps memory that is in no list, and waits for that, or until ctx ends. It is
// done on other goroutines, whose calls into CUDA may never return: then the caller is
// stuck, unless its ctx ends, and what is left is done with the next memory to be
// unmapped.
func (p *core) unmap(ctx context.Context, buffers []*hostmem.Buffer) (freed int, err error) {
	if len(buffers) == 0 {
		return 0, nil
	}
	b := &batch{left: len(buffers), done: make(chan struct{})}
	p.mu.Lock()
	for _, buf := range buffers {
		p.victims = append(p.victims, victim{buf, b})
	}
	p.mu.Unlock()
	p.unmapper()
	select {
	case <-b.done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return b.freed, errors.Join(append(b.errs, err)...)
}

// unmapSoon is unmap for a Get, which does not wait for a call into CUDA that blocks.
// What it has begun goes on, and wakes the Gets that wait.
func (p *core) unmapSoon(ctx context.Context, buffers []*hostmem.Buffer) (freed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	freed, err = p.unmap(ctx, buffers)
	if ctx.Err() != nil {
		err = nil
	}
	return freed, err
}

// unmapper starts a goroutine that unmaps victims, if there are any.
func (p *core) unmapper() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.victims) == 0 || p.unmappers == mostUnmappers {
		return
	}
	p.unmappers++
	p.moving.begin()
	go func() {
		defer p.moving.end()
		for v, ok := p.nextVictim(); ok; v, ok = p.nextVictim() {
			size := v.buf.Reserved()
			p.unmapped(v, size, v.buf.Close())
		}
	}()
}

func (p *core) nextVictim() (v victim, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.victims) == 0 {
		p.victims = nil
		p.unmappers--
		return v, false
	}
	v = p.victims[0]
	p.victims = p.victims[1:]
	return v, true
}

// unmapped counts a victim. One that could not be unregistered is kept for the
// next try, and counts as reserved.
func (p *core) unmapped(v victim, size int, err error) {
	if err == nil {
		p.trimmed.Add(int64(size))
		p.unreserve(size)
	} else {
		p.failures.Add(1)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		v.of.freed += size
	} else {
		v.of.errs = append(v.of.errs, err)
		p.failed = append(p.failed, v.buf)
	}
	if v.of.left--; v.of.left == 0 {
		close(v.of.done)
	}
}

// idleTicks is how many ticks end in any time of IdleTime, and one more.
const idleTicks = 3

// startTicking starts the timer, which runs while there is idle memory.
func (p *core) startTicking() {
	if p.o.IdleTime > 0 && p.ticking.CompareAndSwap(false, true) {
		p.timer.Reset(p.o.IdleTime / (idleTicks - 1))
	}
}

// tick unmaps what was idle for IdleTime. It counts time in ticks, because
// reading a clock at each Release would take as long as all the rest of it.
func (p *core) tick() {
	p.moving.begin()
	defer p.moving.end()
	if p.closed() {
		return
	}
	now := p.epoch.Add(1)
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	p.pending.Reclaim(ctx)
	_, _ = p.trim(ctx, func(b *block) bool { return now-b.epoch >= idleTicks }, never) // Trim and Close try again, and report
	p.ticking.Store(false)
	// A Release that saw it ticking put its block into a list before.
	if st := p.stats(); st.ReservedBytes > st.InUseBytes {
		p.startTicking()
	}
}
