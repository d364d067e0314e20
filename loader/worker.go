package loader

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"
)

// A grain is samples of one batch that a worker has claimed.
type grain struct {
	s        *slot
	number   int // of the batch
	from, to int // positions in the batch
	last     bool
}

// work is one worker.
func (e *epoch) work(c *workerCounters) {
	places := make([][]byte, len(e.l.layout.sizes))
	for {
		g, ok := e.claim(c)
		if !ok {
			return
		}
		if g.last {
			e.openNext(c, false) // before the others come for it
		}
		e.fill(c, g, places)
		n := int32(g.to - g.from)
		c.samples.Add(int64(n))
		if g.s.left.Add(-n) == 0 {
			e.complete(g.s)
		}
	}
}

// claim gives the next samples, and false when there are no more or the epoch
// ends.
func (e *epoch) claim(c *workerCounters) (grain, bool) {
	for !e.broken.Load() && e.ctx.Err() == nil {
		if s := e.open.Load(); s != nil {
			if g, ok := s.claim(e.l.o.grain(), e.l.sizeOf); ok {
				return g, true
			}
		}
		if !e.openNext(c, true) {
			break
		}
	}
	return grain{}, false
}

// openNext takes a free slot for the next batch, unless another worker has done
// so meanwhile. Where none is free it waits, if it may. It is false when there
// is no next batch, or none can be opened.
func (e *epoch) openNext(c *workerCounters, wait bool) bool {
	l := e.l
	// Who has samples in hand must not wait for somebody who waits for a slot:
	// it might be the one that they are for.
	if wait {
		e.claims.Lock()
	} else if !e.claims.TryLock() {
		return false
	}
	defer e.claims.Unlock()
	if s := e.open.Load(); s != nil && s.claimable(l.sizeOf) {
		return true
	}
	number := e.next
	for e.start.has(number) {
		number++
	}
	if number >= l.batches() {
		return false
	}
	s := e.freeSlot(c, wait)
	if s == nil {
		return false
	}
	if err := l.settle(e.ctx, s); err != nil {
		l.free <- s
		if e.ctx.Err() == nil {
			e.fail(number, fmt.Errorf("loader: batch %d of epoch %d: %w", number, e.start.Epoch, err))
		}
		return false
	}
	s.begin(number, l.sizeOf(number))
	e.next = number + 1
	e.open.Store(s)
	return true
}

// freeSlot returns a slot that is free, nil if there is none or the epoch ends.
func (e *epoch) freeSlot(c *workerCounters, wait bool) *slot {
	select {
	case s := <-e.l.free:
		return s
	default:
		if !wait {
			return nil
		}
	}
	asked := time.Now()
	defer func() { c.slot.Add(int64(time.Since(asked))) }()
	select {
	case s := <-e.l.free:
		return s
	case <-e.ctx.Done():
		return nil
	}
}

// fill reads and computes the samples of a grain.
func (e *epoch) fill(c *workerCounters, g grain, places [][]byte) {
	l := e.l
	start := time.Now()
	for at := g.from; at < g.to; at++ {
		i := g.number*l.o.BatchSize + at
		if l.o.Shuffle {
			i = e.order.at(i)
		}
		g.s.indices[at] = i
		g.s.sample(&l.layout, at, places)
		e.try(g.s, at, places, l.src.Read)
	}
	read := time.Now()
	c.reading.Add(int64(read.Sub(start)))
	if l.comp == nil {
		return
	}
	l.turns <- struct{}{}
	defer func() { <-l.turns }()
	turn := time.Now()
	c.turn.Add(int64(turn.Sub(read)))
	for at := g.from; at < g.to; at++ {
		if g.s.skipped[at] {
			continue
		}
		g.s.sample(&l.layout, at, places)
		e.try(g.s, at, places, l.comp.Transform)
	}
	c.computing.Add(int64(time.Since(turn)))
}

// try does one stage of one sample, and what Options say of errors.
func (e *epoch) try(s *slot, at int, places [][]byte, stage func(context.Context, int, [][]byte) error) {
	l, i := e.l, s.indices[at]
	err := safely(e.ctx, i, places, stage)
	for n := 0; err != nil && n < l.o.Retries && e.ctx.Err() == nil; n++ {
		l.stats.retried.Add(1)
		s.sample(&l.layout, at, places)
		err = safely(e.ctx, i, places, stage)
	}
	switch {
	case err == nil:
	case l.o.SkipErrors && e.ctx.Err() == nil:
		s.skip(at)
		l.stats.skipped.Add(1)
	default:
		e.fail(s.number, fmt.Errorf("loader: sample %d, batch %d of epoch %d: %w", i, s.number, e.start.Epoch, err))
	}
}

// safely makes an error of a panic, whose stack no caller of ours is on.
func safely(ctx context.Context, i int, places [][]byte, stage func(context.Context, int, [][]byte) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return stage(ctx, i, places)
}

// complete sends a batch whose samples are all there on its way. One that an
// error ended is nobody's any more.
func (e *epoch) complete(s *slot) {
	l := e.l
	if e.ctx.Err() != nil || e.failedBefore(s.number) != nil {
		l.free <- s
		return
	}
	s.compact(&l.layout)
	err := l.upload(s)
	if err == nil {
		l.stats.bytes.Add(int64(len(s.indices) * l.layout.sample()))
		e.arrived <- s
		return
	}
	e.fail(s.number, fmt.Errorf("loader: copy batch %d of epoch %d: %w", s.number, e.start.Epoch, err))
	if err := l.stream.Synchronize(context.Background()); err != nil {
		l.giveUp(err)
	}
	l.free <- s
}
