package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/internal/bounded"
)

// errFull is the error of requests that a limit does not allow now.
var errFull = fmt.Errorf("%w reached", hostmem.ErrLimit)

// miss is a Get that the local shard could not serve.
func (p *core) miss(ctx context.Context, class, n int, wait bool) (*block, error) {
	if size := p.minSize(class, n); p.o.MaxBytes > 0 && size > p.o.MaxBytes {
		return nil, fmt.Errorf("%w: it takes %d bytes, and Options.MaxBytes is %d", hostmem.ErrTooLarge, size, p.o.MaxBytes)
	}
	if !p.life.Begin() {
		return nil, cudart.ErrClosed
	}
	defer p.life.End()
	b, err := p.find(ctx, class, n, wait)
	switch {
	case err == nil:
		s := p.shard()
		s.mu.Lock()
		p.leased(s, b, n)
	case ctx.Err() == nil && !errors.Is(err, cudart.ErrClosed) && !errors.Is(err, errFull):
		p.failures.Add(1)
	}
	return b, err
}

// find returns an idle block or makes one, and waits until it can. Without wait it returns
// errFull instead of waiting.
func (p *core) find(ctx context.Context, class, n int, wait bool) (b *block, err error) {
	var r *budget.Reservation
	err = errFull
	if p.waiting.Load() == 0 {
		if b := p.pending.Find(ctx, class, n, func() *block { return p.steal(class, n) }); b != nil {
			return b, nil
		}
		b, r, err = p.grow(ctx, class, n)
	}
	lowMemory, retried := false, false
	for {
		if errors.Is(err, errFull) {
			if !wait {
				return nil, err
			}
			b, r, err = p.wait(ctx, class, n, lowMemory)
		}
		if err == nil && b == nil {
			b, err = p.make(ctx, class, p.minSize(class, n), r)
		}
		if err == nil || !isLowMemory(err) || ctx.Err() != nil {
			return b, err
		}
		// The host may have memory once idle memory of the pool is unmapped, or once the
		// GPU is done with more.
		querying, cancel := searching(ctx)
		p.pending.Reclaim(querying)
		cancel()
		chosen, _ := p.plan(everything, never)
		freed, trimErr := p.unmapSoon(ctx, chosen)
		switch {
		case freed > 0 && !retried:
			retried = true
			b, r, err = p.grow(ctx, class, n)
		case p.pending.Bytes() > 0:
			lowMemory, err = true, errFull
		default:
			return nil, errors.Join(err, trimErr)
		}
	}
}

// minSize returns the size in bytes of the smallest registration for a request.
func (p *core) minSize(class, n int) int {
	if isSmall(class) {
		n = runSize(class)
	}
	return p.roundUp(n)
}

func (p *core) roundUp(n int) int { return (n + p.unit - 1) / p.unit * p.unit }

// request requests the bytes of a new registration within the limits of the pool and of the
// process. The error is errFull if a limit is reached. If that is the process's, r waits for
// it in the order of the process's requests: pass r again, or withdraw it.
func (p *core) request(size int, r *budget.Reservation) (*budget.Reservation, error) {
	switch {
	case p.closed():
		return r, cudart.ErrClosed
	case r == nil && p.o.MaxBytes > 0 && size > p.o.MaxBytes-p.stats().ReservedBytes:
		return nil, errFull
	case r == nil:
		r = p.budget.Reserve(size)
	}
	select {
	case <-r.Done():
	default:
		return r, errFull
	}
	err := r.Err()
	if err == nil && !p.reserve(size) {
		err = errFull // of the pool's limit meanwhile
	}
	if err != nil {
		r.Withdraw()
		return nil, err
	}
	return r, nil
}

// tryRequest is request that leaves no request waiting.
func (p *core) tryRequest(size int) (*budget.Reservation, error) {
	r, err := p.request(size, nil)
	if err != nil && r != nil {
		r.Withdraw()
	}
	return r, err
}

// reserve counts bytes for the pool's limit, and reports whether it allows them.
func (p *core) reserve(size int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.MaxBytes > 0 && size > p.o.MaxBytes-p.reserved {
		return false
	}
	p.reserved += size
	p.peakReserved = max(p.peakReserved, p.reserved)
	return true
}

// unreserve undoes reserve.
func (p *core) unreserve(size int) {
	p.mu.Lock()
	p.reserved -= size
	p.mu.Unlock()
	p.wakeUp()
}

// grow cuts a small block, or makes a reservation for a new one.
func (p *core) grow(ctx context.Context, class, n int) (*block, *budget.Reservation, error) {
	if !isSmall(class) {
		if b := p.replace(ctx, class, n); b != nil {
			return b, nil, nil
		}
		r, err := p.tryRequest(p.minSize(class, n))
		return nil, r, err
	}
	if b := p.cut(class); b != nil {
		return b, nil, nil
	}
	// One goroutine makes an arena, and others take their blocks from it. They do not
	// wait for one that is stuck inside CUDA.
	soon, cancel := searching(ctx)
	defer cancel()
	select {
	case p.making <- struct{}{}:
		defer func() { <-p.making }()
	case <-soon.Done():
		if ctx.Err() != nil {
			return nil, nil, bounded.Ended(ctx)
		}
	case <-p.began:
		return nil, nil, cudart.ErrClosed
	}
	if b := p.cut(class); b != nil {
		return b, nil, nil
	}
	b, err := p.addArena(ctx, class)
	return b, nil, err
}

// replace returns an idle block of a large class that holds n bytes. A smaller one it
// unmaps, so that the class never has more blocks than were in use at once.
func (p *core) replace(ctx context.Context, class, n int) *block {
	b := p.steal(class, 1)
	if b == nil || b.Size >= n {
		return b
	}
	p.mu.Lock()
	delete(p.large, b)
	p.mu.Unlock()
	_, _ = p.unmapSoon(ctx, []*hostmem.Buffer{b.buf}) // Trim and Close try again, and report
	return nil
}

// addArena pins an arena as large as all others together, so that there are few of them, or
// a smaller one where the limits or the host do not allow that. It returns a block of it.
func (p *core) addArena(ctx context.Context, class int) (*block, error) {
	minSize := p.minSize(class, 0)
	size := 0
	p.mu.Lock()
	for _, a := range p.arenas {
		size += a.buf.Len()
	}
	p.mu.Unlock()
	size = max(minSize, p.roundUp(min(max(size/minArena*minArena, minArena), maxArena)))
	for {
		r, err := p.tryRequest(size)
		if err == nil {
			var b *block
			if b, err = p.make(ctx, class, size, r); err == nil {
				return b, nil
			}
		}
		if size == minSize || !errors.Is(err, errFull) && !isLowMemory(err) && !errors.Is(err, hostmem.ErrTooLarge) {
			return nil, err
		}
		if size = p.roundUp(size / 2 / minArena * minArena); size < max(minSize, minArena) {
			size = minSize
		}
	}
}

// make pins memory that was reserved, and returns a block of it.
func (p *core) make(ctx context.Context, class, size int, r *budget.Reservation) (*block, error) {
	buf, err := hostmem.Alloc(r.With(ctx), p.dev, size, p.o.Buffer)
	if err != nil {
		r.Withdraw()
		p.unreserve(size)
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reserved += buf.Info().Reserved - size
	p.peakReserved = max(p.peakReserved, p.reserved)
	if isSmall(class) {
		p.arenas = append(p.arenas, newArena(buf))
		return p.cutLocked(class), nil
	}
	b := p.newBlock(buf.Pointer(), buf.Len(), class)
	b.buf = buf
	b.split = len(slices.Collect(buf.Spans(0, buf.Len()))) > 1
	p.large[b] = struct{}{}
	return b, nil
}

// isLowMemory reports whether unmapping memory may help after an error.
func isLowMemory(err error) bool {
	return (errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, hostmem.ErrLimit)) &&
		!errors.Is(err, hostmem.ErrTooLarge)
}
