package loader

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// A worker fills claims, one after another. It is kept apart from its goroutine: if the
// source ends that (runtime.Goexit), or the loop ends, the worker goes on from where it is
// on another one. A goroutine that makes calls into CUDA is not waited for:
//
//	goroutine    entered by                    | uses the worker | in loop.workers
//	working      begin, work, tryDrive's end   | yes             | yes
//	driving      tryDrive                      | no              | no
//	left behind  tryDrive's end, if the loop   | no: it returns  | no
//	             has ended meanwhile           |                 |
type worker struct {
	l *Loader
	e *epoch

	claim
	stage   stage
	at      int  // position in the batch
	tries   int  // that failed, of the sample at this position
	spoiled bool // by a Transform that failed: the sample has to be read again
	calling bool // the source

	places [][]byte
	list   []int // of indices, for ReadBatch

	since time.Duration                                                           // when its time was counted last, after Loader.born
	times struct{ reading, transforming, transformWaits, slotWaits atomic.Int64 } // in ns

	_ [128]byte // two workers share no cache line
}

// A stage is what a worker does with the samples of its claim.
type stage int

const (
	readingAll   stage = iota // in one call of ReadBatch
	reading                   // one at a time
	transforming              // one at a time
)

func (w *worker) init(l *Loader) {
	fields := len(l.layout.sizes)
	w.l = l
	w.places = make([][]byte, fields, fields+5) // a cache line longer
	if l.batch != nil {
		w.list = make([]int, l.layout.claimSize(l.layout.block, l.o.Workers))
	}
}

// work works until there is nothing left to claim, or the loop ends.
func (w *worker) work(p *loop) {
	// A source that reads a mapped file which was cut short then panics, where
	// the process would end otherwise. This is the goroutine's setting.
	debug.SetPanicOnFault(true)
	mine := true
	defer func() {
		switch {
		case !mine:
		case w.calling: // the source is ending the goroutine
			w.calling = false
			w.failed(p.ctx, bounded.ErrExited)
			go w.work(p)
		default:
			p.workers.End()
		}
	}()
	for mine {
		if w.s == nil {
			ok, first := w.next(p.ctx)
			if !ok {
				break
			}
			if first {
				mine = p.tryDrive() // opens the next block
				continue
			}
		}
		if !w.fill(p.ctx) {
			break
		}
		if w.handIn() {
			mine = p.tryDrive()
		}
	}
}

// next claims samples. It returns false if there are none left, or the loop ends. first is
// true if they are the first ones of a block.
func (w *worker) next(ctx context.Context) (ok, first bool) {
	e := w.e
	for ctx.Err() == nil {
		b := e.blocks.Load()
		var c claim
		if n := int(b.claimed.Add(1)) - 1; n < b.claims {
			c, first = b.at(n), n == 0
		} else if next := b.next.Load(); next != nil {
			e.blocks.CompareAndSwap(b, next)
			continue
		} else {
			var again bool
			c, again = w.l.driver.wait(e, b)
			w.spent(&w.times.slotWaits)
			if again {
				continue
			}
		}
		if c.s == nil || e.failedBefore(c.s.number) != nil {
			break
		}
		w.begin(c)
		return true, first
	}
	return false, false
}

// begin readies the worker for the samples of a claim.
func (w *worker) begin(c claim) {
	w.claim, w.at, w.stage = c, c.from, reading
	if w.l.batch != nil {
		w.stage = readingAll
	}
	for at := c.from; at < c.to; at++ {
		c.s.indices[at] = w.e.sample(c.s.number, at)
	}
}

// fill reads and transforms the samples of the claim, from where the worker is. It returns
// false if the loop has ended before.
func (w *worker) fill(ctx context.Context) bool {
	l := w.l
	if w.stage != transforming {
		w.samples(ctx)
		w.spent(&w.times.reading)
		if l.transform == nil || w.at < w.to {
			return w.at == w.to
		}
		w.at, w.stage = w.from, transforming
	}
	l.transforms.acquire()
	defer l.transforms.release()
	w.spent(&w.times.transformWaits)
	w.samples(ctx)
	w.spent(&w.times.transforming)
	return w.at == w.to
}

// spent adds the time since the last call to a total.
func (w *worker) spent(total *atomic.Int64) {
	now := time.Since(w.l.born)
	total.Add(int64(now - w.since))
	w.since = now
}

// samples reads, or transforms, the samples from where the worker is.
func (w *worker) samples(ctx context.Context) {
	for w.at < w.to && ctx.Err() == nil {
		w.calling = true
		err := w.guarded(ctx)
		w.calling = false
		if err != nil {
			w.failed(ctx, err)
		}
	}
}

// guarded calls the source until it fails: a panic is an error too. Guarding each
// sample by itself would cost more than reading a small one.
func (w *worker) guarded(ctx context.Context) (err error) {
	defer bounded.Recovered(&err)
	if w.stage == readingAll {
		return w.readAll(ctx)
	}
	for ; w.at < w.to && ctx.Err() == nil; w.at++ {
		if err := w.try(ctx); err != nil {
			return err
		}
		w.tries, w.spoiled = 0, false
	}
	return nil
}

// readAll reads the samples of the claim in one call. The source gets a copy of their
// indices, because it may change that.
func (w *worker) readAll(ctx context.Context) error {
	n := copy(w.list, w.s.indices[w.from:w.to])
	w.s.samples(&w.l.layout, w.from, w.to, w.places)
	if err := w.l.batch.ReadBatch(ctx, w.list[:n], w.places); err != nil {
		return err
	}
	w.at = w.to
	return nil
}

// try reads, or transforms, the sample that the worker is at. Before a Transform is
// repeated, the sample is read again, because the one that failed may have changed
// some of it.
func (w *worker) try(ctx context.Context) error {
	l, s := w.l, w.s
	if w.stage == transforming && s.skipped[w.at] {
		return nil
	}
	i := s.indices[w.at]
	s.samples(&l.layout, w.at, w.at+1, w.places)
	if w.stage == reading || w.spoiled {
		if err := l.src.Read(ctx, i, w.places); err != nil {
			return err
		}
	}
	if w.stage == transforming {
		return l.transform.Transform(ctx, i, w.places)
	}
	return nil
}

// failed takes an error of the source, and decides what the worker goes on with.
func (w *worker) failed(ctx context.Context, err error) {
	e, c := w.e, &w.l.counters
	w.spoiled = true
	switch {
	case ctx.Err() != nil: // which may be why it failed: the next loop tries again
	case w.stage == readingAll:
		w.stage = reading // which finds the sample that fails
		c.retried.Add(int64(w.to - w.from))
	case w.tries < w.l.o.Retries:
		w.tries++
		c.retried.Add(1)
	default:
		w.s.skip(w.at)
		if w.l.o.SkipErrors {
			c.skipped.Add(1)
		} else {
			e.fail(w.s.number, fmt.Errorf("loader: sample %d, batch %d of epoch %d: %w", w.s.indices[w.at], w.s.number, e.number, err))
		}
		w.tries, w.spoiled = 0, false
		w.at++
	}
}

// handIn ends the claim. It returns true if the batch is filled, so that the driver has to
// copy it.
func (w *worker) handIn() (filled bool) {
	c := w.claim
	w.claim = claim{}
	if c.s.missing.Add(-int32(c.to-c.from)) > 0 {
		return false
	}
	c.s.compact(&w.l.layout)
	w.e.filled <- c.s // never full
	return true
}

// A semaphore admits a number of goroutines at a time. While they are no more, it is but a
// counter.
type semaphore struct {
	free  atomic.Int64  // places, less the goroutines that wait
	freed chan struct{} // has a token for each goroutine that may go on
}

func (s *semaphore) init(n, goroutines int) {
	s.free.Store(int64(n))
	s.freed = make(chan struct{}, goroutines)
}

func (s *semaphore) acquire() {
	if s.free.Add(-1) < 0 {
		<-s.freed
	}
}

func (s *semaphore) release() {
	if s.free.Add(1) <= 0 {
		s.freed <- struct{}{}
	}
}
