package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
)

// memory is the pinned memory of the pool, guarded by mu.
type memory struct {
	making chan struct{} // sent to by the Get that makes an arena; without mu

	mu       sync.Mutex
	arenas   []*arena
	partial  [classes]*slab // slab of each class that is not full
	large    map[*block]struct{}
	unwanted []*hostmem.Buffer // to be unmapped at the next occasion

	reserved, peakReserved int // bytes, counted for Options.MaxBytes
}

// searching returns a context for queries and unmapping, which may not return from CUDA:
// when it ends, the caller goes on without their results.
func searching(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, bounded.SearchTimeout)
}

// Trim unmaps idle memory, the longest unused first, until at most keep bytes of it are left, and
// returns the number of unmapped bytes. A negative keep counts as 0. Trim does not wait for the
// GPU: memory that may be in use stays. An arena of small blocks is unmapped when none of them is
// leased. The error reports memory that could not be unregistered or unmapped (cudaHostUnregister,
// munmap), which counts as reserved until the next Trim tries again, or is ctx's.
func (p *Pool) Trim(ctx context.Context, keep int) (freed int, err error) {
	c := p.impl()
	switch {
	case c == nil:
		err = errNoPool
	case ctx == nil:
		err = errNilContext
	default:
		freed, err = c.trimTo(ctx, keep)
	}
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("pool: trim %v: %w", c, err)
	}
	return freed, err
}

func (p *core) trimTo(ctx context.Context, keep int) (freed int, err error) {
	p.life.Hold()
	defer p.life.End()
	querying, cancel := searching(ctx)
	defer cancel()
	p.pending.Reclaim(querying)
	st := p.stats()
	goal := st.ReservedBytes - st.InUseBytes - st.PendingBytes - max(keep, 0)
	return p.trim(ctx, everything, func(freed int) bool { return freed >= goal })
}

func everything(*block) bool { return true }

func never(int) bool { return false }

// trim unmaps idle blocks that pick chooses, until enough returns true, and waits for the
// calls, or until ctx ends. An error is that of unmapping, or ctx's.
func (p *core) trim(ctx context.Context, pick func(*block) bool, enough func(freed int) bool) (freed int, err error) {
	p.life.Hold()
	defer p.life.End()
	chosen, _ := p.plan(pick, enough)
	return p.unmap(ctx, chosen)
}

// trimEach is trim in the background. A call into CUDA that does not return delays the other
// memory by bounded.SearchTimeout at most. The caller is counted by life.
func (p *core) trimEach(pick func(*block) bool) {
	chosen, _ := p.plan(pick, never)
	for one := range slices.Chunk(chosen, 1) {
		_, _ = p.unmapSoon(context.Background(), one) // Trim and Close try again, and report
	}
}

// reclaim unmaps idle memory for other requests of the process, at least so many bytes if it
// can. Blocks that serve a waiting Get of this pool stay.
func (p *core) reclaim(ctx context.Context, bytes int) (freed int) {
	p.life.Hold()
	defer p.life.End()
	ctx, cancel := searching(ctx)
	defer cancel()
	p.pending.Reclaim(ctx)
	pick := everything
	if w := p.first.Load(); w != nil {
		pick = w.cannotUse
	}
	freed, _ = p.trim(ctx, pick, func(freed int) bool { return freed >= bytes }) // Trim and Close try again, and report
	return freed
}

// plan takes memory to be unmapped out of the lists: unwanted buffers, arenas without slabs,
// and idle blocks that pick chooses, until enough returns true. left is the number of chosen
// blocks that stay.
func (p *core) plan(pick func(*block) bool, enough func(freed int) bool) (chosen []*hostmem.Buffer, remaining int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	freed := 0
	choose := func(buffers ...*hostmem.Buffer) {
		chosen = append(chosen, buffers...)
		for _, buf := range buffers {
			freed += buf.Info().Reserved
		}
	}
	choose(p.unwanted...)
	p.unwanted = nil
	if !enough(freed) {
		choose(p.emptyArenas()...)
	}
	var unchosen []*block
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
			unchosen = append(unchosen, b)
		default:
			delete(p.large, b)
			choose(b.buf)
		}
	}
	for _, s := range order {
		if enough(freed) || !p.dissolve(s, slabs[s]) {
			unchosen = append(unchosen, slabs[s]...)
			continue
		}
		if !enough(freed) {
			choose(p.emptyArenas()...)
		}
	}
	for _, b := range unchosen {
		b.home.put(b)
	}
	if len(unchosen) > 0 {
		p.wakeUp() // a Get that waits may have missed them
	}
	return chosen, len(unchosen)
}

// gather takes the idle blocks that pick chooses out of the lists. It returns the longest
// unused first, and of these the largest.
func (p *core) gather(pick func(*block) bool) []*block {
	var found []*block
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		for class, list := range &s.free {
			s.free[class] = slices.DeleteFunc(list, func(b *block) bool {
				if !pick(b) {
					return false
				}
				s.cached -= b.Size
				found = append(found, b)
				return true
			})
		}
		s.mu.Unlock()
	}
	now := p.epoch.Load()
	slices.SortStableFunc(found, func(a, b *block) int {
		return cmp.Or(cmp.Compare(now-b.epoch, now-a.epoch), cmp.Compare(b.Size, a.Size))
	})
	return found
}

// emptyArenas takes the arenas without slabs. It needs mu.
func (p *memory) emptyArenas() (empty []*hostmem.Buffer) {
	p.arenas = slices.DeleteFunc(p.arenas, func(a *arena) bool {
		if len(a.slabs) > 0 {
			return false
		}
		empty = append(empty, a.buf)
		return true
	})
	return empty
}

// queueUnmap keeps memory to be unmapped with what the next plan chooses.
func (p *memory) queueUnmap(buffers ...*hostmem.Buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unwanted = append(p.unwanted, buffers...)
}

// unmap unmaps memory that is in no list, and waits for the calls, or until ctx ends. Buffers
// that it has not begun then are queued. A call that returns later counts then, and wakes
// the waiting Get.
func (p *core) unmap(ctx context.Context, buffers []*hostmem.Buffer) (freed int, err error) {
	var errs []error
	for i, buf := range buffers {
		if ctx.Err() != nil {
			p.queueUnmap(buffers[i:]...)
			errs = append(errs, bounded.Ended(ctx))
			break
		}
		p.life.Hold()
		size, err := bounded.Do(ctx, bounded.Call[int]{Grace: bounded.NoGrace, Run: func() (int, error) {
			defer p.life.End()
			return p.unmapOne(buf)
		}})
		freed += size
		errs = append(errs, err)
	}
	return freed, errors.Join(errs...)
}

func (p *core) unmapOne(buf *hostmem.Buffer) (freed int, err error) {
	if err := buf.Close(); err != nil {
		p.failures.Add(1)
		p.queueUnmap(buf)
		return 0, err
	}
	p.trimmed.Add(int64(buf.Info().Reserved))
	p.unreserve(buf.Info().Reserved)
	return buf.Info().Reserved, nil
}

// unmapSoon is unmap for a Get, which does not wait for a call into CUDA that blocks.
func (p *core) unmapSoon(ctx context.Context, buffers []*hostmem.Buffer) (freed int, err error) {
	ctx, cancel := searching(ctx)
	defer cancel()
	freed, err = p.unmap(ctx, buffers)
	if ctx.Err() != nil {
		err = nil
	}
	return freed, err
}

// idleTime counts how long blocks are idle, in ticks, because reading a clock would double
// the time of Release. The timer runs while there is idle memory.
type idleTime struct {
	epoch   atomic.Uint32 // number of ticks
	ticking atomic.Bool
	timer   *time.Timer
}

// A block is unmapped idleTicks ticks after its release. A tick lasts IdleTime/2 and the
// first one is partial, so that is 1 to 1.5 times IdleTime.
const idleTicks = 3

func (p *core) startTicking() {
	if p.o.IdleTime > 0 && p.ticking.CompareAndSwap(false, true) {
		p.timer.Reset(p.o.IdleTime / (idleTicks - 1))
	}
}

// tick unmaps blocks that were idle for IdleTime.
func (p *core) tick() {
	p.life.Hold()
	defer p.life.End()
	if p.closed() {
		return
	}
	now := p.epoch.Add(1)
	ctx, cancel := searching(context.Background())
	defer cancel()
	p.pending.Reclaim(ctx)
	p.trimEach(func(b *block) bool { return now-b.epoch >= idleTicks })
	p.ticking.Store(false)
	// A Release that saw it ticking put its block into a list before.
	if st := p.stats(); st.ReservedBytes > st.InUseBytes {
		p.startTicking()
	}
}
