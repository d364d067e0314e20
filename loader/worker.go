package loader

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"
)

// A worker fills runs, one after another. What it is at is kept apart from its
// goroutine, which the source may end (runtime.Goexit): the worker goes on from
// there on another.
type worker struct {
	e      *epoch
	c      *workerCounters
	places [][]byte
	asked  []int // what a BatchSource is asked for, if the source is one

	run
	stage   stage
	at      int  // position in the batch
	tries   int  // that failed, of the sample at this position
	calling bool // the source
}

// A stage is what a worker does with the samples of its run.
type stage int

const (
	readingAll   stage = iota // in one call of ReadBatch
	reading                   // one at a time
	transforming              // one at a time
)

// work works until there is nothing left to claim.
func (w *worker) work() {
	// A source that reads a mapped file which was cut short then panics, where
	// the process would end otherwise. This is the goroutine's setting.
	debug.SetPanicOnFault(true)
	defer w.replace()
	for w.s != nil || w.claim() {
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
	w.failed(errGoexit)
	w.e.workers.Go(w.work)
}

var errGoexit = errors.New("the source ended its goroutine (runtime.Goexit)")

// claim takes the next samples. It is false when there are no more or the epoch
// ends.
func (w *worker) claim() bool {
	e := w.e
	for !e.broken.Load() && e.ctx.Err() == nil {
		o := e.current.Load()
		if r, ok := o.claim(); ok {
			w.begin(r)
			if r.from == 0 {
				e.openAhead(o)
			}
			return true
		}
		next := o.next.Load()
		if next == nil {
			asked := time.Now()
			next = e.openNext(o)
			w.c.slotWaits.Add(int64(time.Since(asked)))
		}
		if next == nil {
			break
		}
		e.current.CompareAndSwap(o, next)
	}
	return false
}

// begin readies the worker for the samples of a run.
func (w *worker) begin(r run) {
	w.run, w.at, w.stage = r, r.from, reading
	if w.e.l.batch != nil {
		w.stage = readingAll
	}
	for at := r.from; at < r.to; at++ {
		r.s.indices[at] = w.e.sample(r.s.number, at)
	}
}

// fill reads and transforms the samples of the run, from where it is.
func (w *worker) fill() {
	l := w.e.l
	start := time.Now()
	if w.stage != transforming {
		w.samples()
		w.at, w.stage = w.from, transforming
	}
	read := time.Now()
	w.c.reading.Add(int64(read.Sub(start)))
	if l.transform == nil {
		return
	}
	l.turns <- struct{}{}
	defer func() { <-l.turns }()
	turn := time.Now()
	w.c.transformWaits.Add(int64(turn.Sub(read)))
	w.samples()
	w.c.transforming.Add(int64(time.Since(turn)))
}

// samples reads, or transforms, the samples from where the worker is.
func (w *worker) samples() {
	for w.at < w.to && w.e.ctx.Err() == nil {
		w.calling = true
		err := w.guarded()
		w.calling = false
		if err != nil {
			w.failed(err)
		}
	}
}

// guarded calls the source until it fails: a panic is an error too. Guarding each
// sample by itself would cost more than reading a small one.
func (w *worker) guarded() (err error) {
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
	if w.stage == readingAll {
		return w.readAll()
	}
	for ; w.at < w.to && w.e.ctx.Err() == nil; w.at++ {
		if err := w.try(); err != nil {
			return err
		}
		w.tries = 0
	}
	return nil
}

// readAll reads the samples of the run in one call. The source gets a copy of their
// numbers, because it may change that.
func (w *worker) readAll() error {
	e, s := w.e, w.s
	n := copy(w.asked, s.indices[w.from:w.to])
	s.samples(&e.l.layout, w.from, w.to, w.places)
	if err := e.l.batch.ReadBatch(e.ctx, w.asked[:n], w.places); err != nil {
		return err
	}
	w.at = w.to
	return nil
}

// try reads, or transforms, the sample that the worker is at. Before a Transform is
// repeated, the sample is read again, because the one that failed may have changed
// some of it.
func (w *worker) try() error {
	e, s := w.e, w.s
	if w.stage == transforming && s.skipped[w.at] {
		return nil
	}
	i := s.indices[w.at]
	s.samples(&e.l.layout, w.at, w.at+1, w.places)
	if w.stage == reading || w.tries > 0 {
		if err := e.l.src.Read(e.ctx, i, w.places); err != nil {
			return err
		}
	}
	if w.stage == transforming {
		return e.l.transform.Transform(e.ctx, i, w.places)
	}
	return nil
}

// failed takes an error of the source, and decides what the worker goes on with.
func (w *worker) failed(err error) {
	e := w.e
	switch {
	case e.ctx.Err() != nil: // which may be why it failed, and is reported anyway
	case w.stage == readingAll:
		w.stage = reading // which finds the sample that fails
		e.l.stats.retried.Add(int64(w.to - w.from))
	case w.tries < e.l.o.Retries:
		w.tries++
		e.l.stats.retried.Add(1)
	default:
		w.s.skip(w.at)
		if e.l.o.SkipErrors {
			e.l.stats.skipped.Add(1)
		} else {
			e.fail(w.s.number, fmt.Errorf("loader: sample %d, batch %d of epoch %d: %w", w.s.indices[w.at], w.s.number, e.start.Epoch, err))
		}
		w.tries = 0
		w.at++
	}
}

// finish hands in the run.
func (w *worker) finish() {
	r := w.run
	w.run = run{}
	if r.s.left.Add(-int32(r.to-r.from)) == 0 {
		w.e.sender.complete(r.s)
	}
}
