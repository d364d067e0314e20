package loader

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// An opening is a batch whose samples are being claimed. It is made anew for
// each, since a worker may come late, when its slot is already another's.
type opening struct {
	s       *slot
	number  int // of the batch
	size    int // samples
	claimed atomic.Int64
	next    atomic.Pointer[opening]
}

// A grain is samples of one batch that a worker has claimed.
type grain struct {
	*opening
	from, to int // positions in the batch
}

// claim takes up to n samples; there are none left if it is false.
func (o *opening) claim(n int) (grain, bool) {
	to := int(o.claimed.Add(int64(n)))
	return grain{o, to - n, min(to, o.size)}, to-n < o.size
}

// work is one worker.
func (e *epoch) work(c *workerCounters) {
	places := make([][]byte, len(e.l.layout.sizes))
	for {
		g, ok := e.claim(c)
		if !ok {
			return
		}
		if g.from == 0 {
			e.openAhead(g.opening)
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
		o := e.open.Load()
		if g, ok := o.claim(e.l.o.grain()); ok {
			return g, true
		}
		if next := o.next.Load(); next != nil {
			e.open.CompareAndSwap(o, next)
		} else if !e.openNext(c, o) {
			break
		}
	}
	return grain{}, false
}

// openAhead opens the batch behind o, if that is the last one and a slot is free
// for it: workers that have to wait for it take long to wake. Who calls
// it has samples in hand, and must not wait for anybody.
func (e *epoch) openAhead(o *opening) {
	if !e.claims.TryLock() {
		return
	}
	defer e.claims.Unlock()
	if e.last != o {
		return
	}
	select {
	case free := <-e.l.free:
		if done, err := free.copied.Query(); err == nil && done {
			// A failure is for whoever opens the batch when it is needed: as long
			// as there are samples left before it, they come first.
			if opened, _ := e.openOn(free); opened {
				return
			}
		}
		e.l.free <- free
	default:
	}
}

// openNext opens the batch behind o, of which nothing is left, unless another
// worker has. It waits for a free slot, and is false when there are no
// more batches, or the epoch ends.
func (e *epoch) openNext(c *workerCounters, o *opening) bool {
	asked := time.Now()
	defer func() { c.slot.Add(int64(time.Since(asked))) }()
	e.claims.Lock()
	defer e.claims.Unlock()
	if e.last != o {
		return true
	}
	select {
	case free := <-e.l.free:
		opened, err := e.openOn(free)
		if !opened {
			e.l.free <- free
		}
		if err != nil && e.ctx.Err() == nil {
			e.fail(e.next, fmt.Errorf("loader: batch %d of epoch %d: %w", e.next, e.start.Epoch, err))
		}
		return opened
	case <-e.ctx.Done():
		return false
	}
}

// openOn opens the next batch on a free slot, when the slot's copy is done. It
// does not where there are no more batches.
func (e *epoch) openOn(s *slot) (opened bool, err error) {
	l := e.l
	number := e.next
	for e.start.has(number) {
		number++
	}
	if number >= l.batches() {
		return false, nil
	}
	if err := l.settle(e.ctx, s); err != nil {
		return false, err
	}
	o := &opening{s: s, number: number, size: l.sizeOf(number)}
	s.begin(number, o.size)
	e.last.next.Store(o)
	e.last, e.next = o, number+1
	return true, nil
}

// fill reads and computes the samples of a grain.
func (e *epoch) fill(c *workerCounters, g grain, places [][]byte) {
	l := e.l
	start := time.Now()
	for at := g.from; at < g.to && e.ctx.Err() == nil; at++ {
		i := g.number*l.o.BatchSize + at
		if l.o.Shuffle {
			i = e.order.at(i)
		}
		g.s.indices[at] = i
		g.s.sample(&l.layout, at, places)
		e.try(g.s, at, places, l.src.Read, l.src.Read)
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
	for at := g.from; at < g.to && e.ctx.Err() == nil; at++ {
		if g.s.skipped[at] {
			continue
		}
		g.s.sample(&l.layout, at, places)
		e.try(g.s, at, places, l.comp.Transform, l.readAndTransform)
	}
	c.computing.Add(int64(time.Since(turn)))
}

// readAndTransform is what a Transform that failed needs: it may have changed
// some of the sample.
func (l *Loader) readAndTransform(ctx context.Context, i int, places [][]byte) error {
	if err := l.src.Read(ctx, i, places); err != nil {
		return err
	}
	return l.comp.Transform(ctx, i, places)
}

// A stage is what is done to one sample.
type stage func(ctx context.Context, i int, places [][]byte) error

// try does one stage of one sample, and what Options say of errors.
func (e *epoch) try(s *slot, at int, places [][]byte, first, again stage) {
	l, i := e.l, s.indices[at]
	err := safely(e.ctx, i, places, first)
	for n := 0; err != nil && n < l.o.Retries && e.ctx.Err() == nil; n++ {
		l.stats.retried.Add(1)
		s.sample(&l.layout, at, places)
		err = safely(e.ctx, i, places, again)
	}
	if err == nil {
		return
	}
	s.skip(at)
	switch {
	case e.ctx.Err() != nil: // which may be why it failed, and is told anyway
	case l.o.SkipErrors:
		l.stats.skipped.Add(1)
	default:
		e.fail(s.number, fmt.Errorf("loader: sample %d, batch %d of epoch %d: %w", i, s.number, e.start.Epoch, err))
	}
}

// safely makes an error of a panic, whose stack no caller of ours is on.
func safely(ctx context.Context, i int, places [][]byte, do stage) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return do(ctx, i, places)
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
