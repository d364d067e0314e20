package loader

import (
	"errors"
	"fmt"
	"runtime"
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

// A worker fills grains, one after another. What it is at is kept apart from
// its goroutine, which the source may end (runtime.Goexit): the worker goes on
// from there on another.
type worker struct {
	e      *epoch
	c      *workerCounters
	places [][]byte

	grain
	at           int  // position in the batch
	transforming bool // rather than reading
	tries        int  // that failed, of the sample at this position
	calling      bool // the source
}

// run works until there is nothing left to claim.
func (w *worker) run() {
	// A source that reads a mapped file which was cut short then panics, where
	// the process would end otherwise. This is the goroutine's setting.
	debug.SetPanicOnFault(true)
	defer w.replace()
	for w.opening != nil || w.claim() {
		w.fill()
		w.finish()
	}
}

// replace goes on on another goroutine if the source is ending this one.
func (w *worker) replace() {
	if !w.calling {
		return
	}
	w.calling = false
	if w.tried(errGoexit) {
		w.at++
	}
	w.e.workers.Go(w.run)
}

var errGoexit = errors.New("the source ended its goroutine (runtime.Goexit)")

// claim takes the next samples. It is false when there are no more or the epoch
// ends.
func (w *worker) claim() bool {
	e := w.e
	for !e.broken.Load() && e.ctx.Err() == nil {
		o := e.open.Load()
		if g, ok := o.claim(e.l.layout.grain(e.l.o.Workers)); ok {
			w.grain, w.at = g, g.from
			if g.from == 0 {
				e.openAhead(o)
			}
			return true
		}
		if next := o.next.Load(); next != nil {
			e.open.CompareAndSwap(o, next)
		} else if !w.openNext(o) {
			break
		}
	}
	return false
}

// openAhead opens the batch after o, if that is the last one and a slot is free
// for it: workers that have to wait for it take long to wake. The caller has
// samples in hand, and must not wait for other workers.
func (e *epoch) openAhead(o *opening) {
	if !e.claims.TryLock() {
		return
	}
	defer e.claims.Unlock()
	if e.last != o || !e.more() {
		return
	}
	select {
	case free := <-e.l.free:
		if free.copying.Done(e.ctx) {
			// An error is for the worker that needs the batch: as long as there are
			// samples left before it, they come first.
			if e.ahead = e.openOn(free); e.ahead == nil {
				return
			}
		}
		e.l.free <- free
	default:
	}
}

// openNext opens the batch after o, of which nothing is left, unless another
// worker has. It waits for a free slot, and is false when there are no
// more batches, or the epoch ends.
func (w *worker) openNext(o *opening) bool {
	e := w.e
	asked := time.Now()
	defer func() { w.c.slotWaits.Add(int64(time.Since(asked))) }()
	e.claims.Lock()
	defer e.claims.Unlock()
	switch {
	case e.last != o:
		return true
	case !e.more():
		return false
	}
	err := e.ahead
	if err == nil {
		select {
		case free := <-e.l.free:
			if err = e.openOn(free); err == nil {
				return true
			}
			e.l.free <- free
		case <-e.ctx.Done():
		}
	}
	if e.ctx.Err() == nil {
		e.fail(e.next, fmt.Errorf("loader: batch %d of epoch %d: %w", e.next, e.start.Epoch, err))
	}
	return false
}

// more reports whether there is a batch to be opened, and sets next to it.
func (e *epoch) more() bool {
	for e.start.has(e.next) {
		e.next++
	}
	return e.next < e.l.batches()
}

// openOn opens the next batch on a free slot, when the slot's copy is done.
func (e *epoch) openOn(s *slot) error {
	if err := e.reclaim(s); err != nil {
		return err
	}
	o := &opening{s: s, number: e.next, size: e.l.sizeOf(e.next)}
	s.begin(e.start.Epoch, o.number, o.size)
	e.last.next.Store(o)
	e.last, e.next = o, o.number+1
	return nil
}

// fill reads and transforms the samples of the grain, from where it is.
func (w *worker) fill() {
	l := w.e.l
	start := time.Now()
	if !w.transforming {
		w.samples()
		w.at, w.transforming = w.from, l.transform != nil
	}
	read := time.Now()
	w.c.reading.Add(int64(read.Sub(start)))
	if !w.transforming {
		return
	}
	l.turns <- struct{}{}
	defer func() { <-l.turns }()
	turn := time.Now()
	w.c.transformWaits.Add(int64(turn.Sub(read)))
	w.samples()
	w.transforming = false
	w.c.transforming.Add(int64(time.Since(turn)))
}

// samples reads, or transforms, the samples from where the worker is.
func (w *worker) samples() {
	e, s := w.e, w.s
	for ; w.at < w.to && e.ctx.Err() == nil; w.at++ {
		if w.transforming && s.skipped[w.at] {
			continue
		}
		if !w.transforming {
			s.indices[w.at] = e.sample(w.number, w.at)
		}
		for done := false; !done; {
			s.sample(&e.l.layout, w.at, w.places)
			w.calling = true
			err := w.try(s.indices[w.at])
			w.calling = false
			done = w.tried(err)
		}
	}
}

// try reads, or transforms, sample i. Before a Transform is repeated, the sample
// is read again, because the one that failed may have changed some of it.
func (w *worker) try(i int) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = fmt.Errorf("no memory at %#x: it was unmapped, or the file behind it cut short: %w\n%s", p.Addr(), p, debug.Stack())
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	e := w.e
	if !w.transforming || w.tries > 0 {
		if err := e.l.src.Read(e.ctx, i, w.places); err != nil {
			return err
		}
	}
	if w.transforming {
		return e.l.transform.Transform(e.ctx, i, w.places)
	}
	return nil
}

// tried takes the outcome of a try, and reports whether it was the last one of
// this sample.
func (w *worker) tried(err error) (last bool) {
	e := w.e
	if err != nil && w.tries < e.l.o.Retries && e.ctx.Err() == nil {
		w.tries++
		e.l.stats.retried.Add(1)
		return false
	}
	w.tries = 0
	if err == nil {
		return true
	}
	w.s.skip(w.at)
	switch {
	case e.ctx.Err() != nil: // which may be why it failed, and is reported anyway
	case e.l.o.SkipErrors:
		e.l.stats.skipped.Add(1)
	default:
		e.fail(w.number, fmt.Errorf("loader: sample %d, batch %d of epoch %d: %w", w.s.indices[w.at], w.number, e.start.Epoch, err))
	}
	return true
}

// finish hands in the grain.
func (w *worker) finish() {
	g := w.grain
	w.grain = grain{}
	n := int32(g.to - g.from)
	if g.s.left.Add(-n) == 0 {
		w.e.complete(g.s)
	}
}

// complete sends a batch whose samples are all there on its way. One worker at a
// time queues copies; others leave it their batches and go on.
func (e *epoch) complete(s *slot) {
	e.filled <- s
	if e.unsent.Add(1) > 1 {
		return
	}
	for more := true; more; more = e.unsent.Add(-1) > 0 {
		e.send(<-e.filled)
	}
}

// send queues the copy of a batch. After an error that ends the epoch before it,
// its slot is free again.
func (e *epoch) send(s *slot) {
	l := e.l
	if e.ctx.Err() != nil || e.failedBefore(s.number) != nil {
		l.free <- s
		return
	}
	s.compact(&l.layout)
	if err := l.upload(e.ctx, s); err != nil {
		e.fail(s.number, fmt.Errorf("loader: copy batch %d of epoch %d: %w", s.number, e.start.Epoch, err))
		l.free <- s
		return
	}
	l.stats.samples.Add(int64(len(s.indices)))
	e.arrived <- s
}
