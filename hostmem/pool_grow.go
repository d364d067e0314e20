package hostmem

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/gopinned/pinned/cudart"
)

// errFull says that the limit does not allow another registration.
var errFull = errors.New("limit reached")

// miss is a Get that the nearest shard could not serve.
func (p *poolCore) miss(ctx context.Context, class, n int) (*block, error) {
	if least := p.least(class, n); p.o.MaxBytes > 0 && least > p.o.MaxBytes {
		return nil, fmt.Errorf("%w: it takes %d bytes, and PoolOptions.MaxBytes is %d", ErrTooLarge, least, p.o.MaxBytes)
	}
	var b *block
	var isHit bool
	err := errFull
	if p.gate.Load() == 0 {
		b, isHit, err = p.find(ctx, class, n)
		_ = p.returned() // what was in hand there was not to be seen by others
	}
	if errors.Is(err, errFull) {
		b, isHit, err = p.queue(ctx, class, n)
	}
	if err != nil {
		return nil, err
	}
	p.lent(b, n, isHit)
	if p.closed() {
		return nil, errors.Join(ErrClosed, p.put(b, n))
	}
	return b, nil
}

// least returns the bytes that a new registration for a request would take at
// least.
func (p *poolCore) least(class, n int) int {
	if isSmall(class) {
		n = runSize(class)
	}
	return (n + p.page - 1) / p.page * p.page
}

// find looks everywhere before it makes a new block.
func (p *poolCore) find(ctx context.Context, class, n int) (b *block, isHit bool, err error) {
	if b := p.steal(class, n); b != nil {
		return b, true, nil
	}
	if b := p.reap(class, n); b != nil {
		return b, true, nil
	}
	return p.grow(ctx, class, n)
}

// stealMost is how many small blocks move to the near shard at once, so that
// goroutines which only take do not search all shards each time.
const stealMost = 8

// steal takes an idle block from any shard.
func (p *poolCore) steal(class, n int) *block {
	near := p.shard()
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		b := s.popFree(class, n)
		var more blockList
		if b != nil && s != near && isSmall(class) {
			for range stealMost - 1 {
				if m := s.popFree(class, n); m != nil {
					more.pushBack(m)
				}
			}
		}
		s.mu.Unlock()
		if more.first != nil {
			near.mu.Lock()
			for m := more.first; m != nil; {
				next := m.next
				near.pushFree(m)
				m = next
			}
			near.mu.Unlock()
		}
		if b != nil {
			return b
		}
	}
	return nil
}

// grow makes a new block: errFull if the limit does not allow it.
func (p *poolCore) grow(ctx context.Context, class, n int) (b *block, isHit bool, err error) {
	if p.closed() {
		return nil, false, ErrClosed
	}
	if isSmall(class) {
		b, err = p.growSmall(ctx, class)
		return b, false, err
	}
	return p.growLarge(ctx, class, n)
}

func (p *poolCore) growSmall(ctx context.Context, class int) (*block, error) {
	for {
		if b := p.carve(class); b != nil {
			return b, nil
		}
		if p.making.acquire(ctx, 1) != nil {
			return nil, ctx.Err()
		}
		// Another may have made an arena meanwhile.
		b := p.carve(class)
		var err error
		if b == nil {
			err = p.addArena(ctx, class)
		}
		p.making.release(1)
		if b != nil || err != nil {
			return b, err
		}
	}
}

// addArena makes room for blocks of a small class: as much as all arenas have,
// so that there are few, or less where limits forbid that.
func (p *poolCore) addArena(ctx context.Context, class int) error {
	least := p.least(class, 0)
	size := 0
	p.mu.Lock()
	for _, a := range p.arenas {
		size += a.buf.Len()
	}
	p.mu.Unlock()
	size = min(max(size/minArena*minArena, minArena), maxArena)
	for {
		buf, err := p.alloc(ctx, size)
		if err == nil {
			p.mu.Lock()
			p.arenas = append(p.arenas, newArena(buf))
			p.mu.Unlock()
			return nil
		}
		if size == least || !errors.Is(err, errFull) && !shortOfMemory(err) {
			return err
		}
		if size = size / 2 / minArena * minArena; size < max(least, minArena) {
			size = least
		}
	}
}

// growLarge makes a block of exactly n bytes, to a page. A cached block of the
// class that is smaller goes: with it the pool would have more blocks of the
// class than were ever used at once.
func (p *poolCore) growLarge(ctx context.Context, class, n int) (b *block, isHit bool, err error) {
	if b := p.steal(class, 1); b != nil {
		if b.size >= n {
			return b, true, nil
		}
		_, _ = p.freeLarge(b) // Trim and Close try again, and tell
	}
	buf, err := p.alloc(ctx, p.least(class, n))
	if err != nil {
		return nil, false, err
	}
	b = &block{pool: p, base: buf.Pointer(), size: buf.Len(), class: class, buf: buf}
	if spans := buf.Spans(); len(spans) > 1 {
		b.spans = spans
	}
	p.mu.Lock()
	p.large[b] = struct{}{}
	p.mu.Unlock()
	return b, false, nil
}

// alloc pins memory under the pool's limit. If the process's limit or the
// system has no room, it gives back all that is idle here first, or then.
func (p *poolCore) alloc(ctx context.Context, size int) (*Buffer, error) {
	if !p.limit.tryAcquire(size) {
		return nil, errFull
	}
	if limits.bytes.room() < size {
		_, _ = p.trimAll() // else Alloc might wait for what is idle here
	}
	buf, err := Alloc(ctx, p.dev, size, p.o.Buffer)
	if err != nil && shortOfMemory(err) && ctx.Err() == nil {
		freed, trimErr := p.trimAll()
		if freed > 0 {
			buf, err = Alloc(ctx, p.dev, size, p.o.Buffer)
		}
		if err != nil {
			err = errors.Join(err, trimErr)
		}
	}
	if err != nil {
		p.failures.Add(1)
		p.limit.release(size)
		return nil, err
	}
	p.kept.add(size)
	return buf, nil
}

// shortOfMemory tells whether a failure may be cured by giving memory back.
func shortOfMemory(err error) bool {
	return (errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, ErrLimit)) &&
		!errors.Is(err, ErrTooLarge)
}
