package pool

import (
	"context"
	"errors"
	"syscall"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
)

// errFull says that a limit does not allow another registration now, or that
// the host has no memory left and some of the pool's will come back.
var errFull = errors.New("limit reached")

// miss is a Get that the nearest shard could not serve.
func (p *core) miss(ctx context.Context, class, n int) (*block, error) {
	if least := p.least(class, n); p.o.MaxBytes > 0 && least > p.o.MaxBytes {
		return nil, tooLarge(least, p.o.MaxBytes)
	}
	var b *block
	var hit bool
	err := errFull
	if p.gate.Load() == 0 {
		b, hit, err = p.find(ctx, class, n)
	}
	if errors.Is(err, errFull) {
		b, hit, err = p.wait(ctx, class, n)
	}
	if err != nil {
		return nil, err
	}
	p.lent(b, n, hit)
	return b, nil
}

// least returns the bytes that a new registration for a request would take at
// least.
func (p *core) least(class, n int) int {
	if isSmall(class) {
		n = runSize(class)
	}
	return p.roundUp(n)
}

func (p *core) roundUp(n int) int { return (n + p.unit - 1) / p.unit * p.unit }

// find looks everywhere before it makes a new block.
func (p *core) find(ctx context.Context, class, n int) (b *block, hit bool, err error) {
	if of, ok := p.pending.front(class); ok {
		if b := p.reclaimLine(ctx, of, class, n); b != nil {
			return b, true, nil
		}
	}
	if b := p.steal(class, n); b != nil {
		return b, true, nil
	}
	if b := p.reclaim(ctx, class, n); b != nil {
		return b, true, nil
	}
	return p.grow(ctx, class, n, nil)
}

// grow makes a new block; errFull if a limit does not allow it. A grant is for
// the least that this takes, and is the caller's.
func (p *core) grow(ctx context.Context, class, n int, grant *budget.Grant) (b *block, hit bool, err error) {
	if p.closed() {
		return nil, false, ErrClosed
	}
	if isSmall(class) {
		b, err = p.growSmall(ctx, class, grant)
		return b, false, err
	}
	return p.growLarge(ctx, class, n, grant)
}

func (p *core) growSmall(ctx context.Context, class int, grant *budget.Grant) (*block, error) {
	for {
		if b := p.cut(class); b != nil {
			return b, nil
		}
		select {
		case p.making <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		// Another may have made an arena meanwhile.
		b := p.cut(class)
		var err error
		if b == nil {
			err = p.addArena(ctx, class, grant)
		}
		<-p.making
		if b != nil || err != nil {
			return b, err
		}
	}
}

// addArena makes room for blocks of a small class: as much as all arenas have,
// so that there are few, or less where limits forbid that.
func (p *core) addArena(ctx context.Context, class int, grant *budget.Grant) error {
	least := p.least(class, 0)
	size := 0
	p.mu.Lock()
	for _, a := range p.arenas {
		size += a.buf.Len()
	}
	p.mu.Unlock()
	size = p.roundUp(min(max(size/minArena*minArena, minArena), maxArena))
	if grant != nil {
		size = least
	}
	for {
		buf, err := p.alloc(ctx, size, grant)
		if err == nil {
			p.mu.Lock()
			p.arenas = append(p.arenas, newArena(buf))
			p.mu.Unlock()
			return nil
		}
		if size == least || !errors.Is(err, errFull) && !shortOfMemory(err) {
			return err
		}
		if size = p.roundUp(size / 2 / minArena * minArena); size < max(least, minArena) {
			size = least
		}
	}
}

// growLarge makes a block of exactly n bytes, to a page. A cached block of the
// class that is smaller goes: with it the pool would have more blocks of the
// class than were ever used at once.
func (p *core) growLarge(ctx context.Context, class, n int, grant *budget.Grant) (b *block, hit bool, err error) {
	if b := p.steal(class, 1); b != nil {
		if b.size >= n {
			return b, true, nil
		}
		_, _ = p.freeLarge(b) // Trim and Close try again, and report
	}
	buf, err := p.alloc(ctx, p.least(class, n), grant)
	if err != nil {
		return nil, false, err
	}
	b = p.newBlock(buf.Pointer(), buf.Len(), class)
	b.buf = buf
	if spans := buf.Spans(); len(spans) > 1 {
		b.spans = spans
	}
	p.mu.Lock()
	p.large[b] = struct{}{}
	p.mu.Unlock()
	return b, false, nil
}

// alloc pins memory under the limits. If the host has no room, it unmaps all
// that is idle here and tries again.
func (p *core) alloc(ctx context.Context, size int, grant *budget.Grant) (*hostmem.Buffer, error) {
	if !p.takeRoom(size) {
		return nil, errFull
	}
	buf, err := p.tryAlloc(ctx, size, grant)
	if err != nil && shortOfMemory(err) && ctx.Err() == nil {
		freed, trimErr := p.trimAll(ctx)
		if freed > 0 {
			buf, err = p.tryAlloc(ctx, size, nil)
		}
		if err != nil && shortOfMemory(err) && p.pending.any() {
			err = errFull // there will be more
		}
		if err != nil {
			err = errors.Join(err, trimErr)
		}
	}
	if err != nil {
		p.reserved.add(-size)
		if ctx.Err() == nil && !errors.Is(err, errFull) {
			p.failures.Add(1)
		}
		return nil, err
	}
	p.reserved.add(buf.Kept() - size)
	return buf, nil
}

// tryAlloc pins memory if the budget of the process grants it at once.
func (p *core) tryAlloc(ctx context.Context, size int, grant *budget.Grant) (*hostmem.Buffer, error) {
	if grant == nil {
		grant = p.budget.Ask(size, false)
		select {
		case <-grant.Done():
		default:
			grant.Release()
			return nil, errFull
		}
	}
	if err := grant.Err(); err != nil {
		return nil, err
	}
	buf, err := hostmem.Alloc(budget.With(ctx, grant), p.dev, size, p.o.Buffer)
	if err != nil {
		grant.Release()
	}
	return buf, err
}

// takeRoom accounts for bytes within the pool's limit.
func (p *core) takeRoom(size int) bool {
	if p.o.MaxBytes == 0 {
		p.reserved.add(size)
		return true
	}
	return p.reserved.addUpTo(size, p.o.MaxBytes)
}

// shortOfMemory reports whether a failure may be cured by releasing memory.
func shortOfMemory(err error) bool {
	return (errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, hostmem.ErrLimit)) &&
		!errors.Is(err, ErrTooLarge)
}
