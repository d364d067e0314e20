package loader

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// A worker fills claims, one after another. It is a type of its own beside its goroutine: if the
// source ends the goroutine (runtime.Goexit), or the loop ends, the worker continues on another
// one. The loop does not wait for a goroutine that makes calls into CUDA:
//
//	goroutine    entered by                    | uses the worker | in loop.workers
//	working      begin, work, tryDrive's end   | yes             | yes
//	driving      tryDrive                      | no              | no
//	abandoned    tryDrive's end, if the loop   | no: it returns  | no
//	             has ended meanwhile           |                 |
type worker struct {
	l *Loader
	e *epoch

	claim
	stage   stage
	at      int  // index of the sample in the batch
	tries   int  // failed attempts of this sample
	spoiled bool // a Transform failed: the sample must be read again
	calling bool // the source is being called

	fields [][]byte // arguments of the source
	list   []int    // argument of ReadBatch

	since time.Duration                                                           // the last update of times, after Loader.created
	times struct{ reading, transforming, transformWaits, slotWaits atomic.Int64 } // in ns

	_ [128]byte // two workers share no cache line
}

// A stage is a step of the work on a claim.
type stage int

const (
	readingAll   stage = iota // one call of ReadBatch for all samples
	reading                   // Read for each sample
	transforming              // Transform for each sample
)

func (w *worker) init(l *Loader) {
	n := len(l.host.sizes)
	w.l = l
	w.fields = make([][]byte, n, n+5) // a cache line longer
	if l.batch != nil {
		n := l.layout.claimSize(l.layout.block, l.o.Workers)
		if l.plain && l.o.slots() >= minSlots(l.o.Workers) {
			n = l.layout.samples
		}
		w.list = make([]int, n)
	}
}

// work fills claims until there are none, or the loop ends.
func (w *worker) work(p *loop) {
	// A source that reads a mapped file which was truncated panics with this setting of
	// the goroutine. Without it the process would end.
	debug.SetPanicOnFault(true)
	mine := true
	defer func() {
		switch {
		case !mine:
		case w.calling: // the source is ending the goroutine
			w.calling = false
			w.handleError(p.ctx, bounded.ErrExited)
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
		if w.finishClaim() {
			mine = p.tryDrive()
		}
	}
}

// next takes a claim. It returns false if there is none, or the loop ends. first reports whether it
// is the first claim of a block, or one of the last if no block follows, and the worker has to make a request for
// the next one. A worker that fills a whole batch makes one soon, so that it does not if there is a block already.
func (w *worker) next(ctx context.Context) (ok, first bool) {
	e := w.e
	for ctx.Err() == nil {
		b := e.current.Load()
		var c claim
		if n := int(b.claimed.Add(1)) - 1; n < b.claims {
			last := b.next.Load() == nil
			c, first = b.at(n), n == 0 && (last || !b.whole) || n == b.claims-w.l.o.Workers && last
		} else if next := b.next.Load(); next != nil {
			e.current.CompareAndSwap(b, next)
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

// begin prepares the worker for a claim.
func (w *worker) begin(c claim) {
	w.claim, w.at, w.stage = c, c.from, reading
	if w.l.batch != nil {
		w.stage = readingAll
	}
	for at := c.from; at < c.to; at++ {
		c.s.indices[at] = w.e.order(c.s.number*w.l.o.BatchSize + at)
	}
}

// fill reads and transforms the samples of the claim, from w.at on. It returns false if the loop
// ends before.
func (w *worker) fill(ctx context.Context) bool {
	l := w.l
	if w.stage != transforming {
		w.samples(ctx)
		w.spent(&w.times.reading)
		if l.o.Transform == nil || w.at < w.to {
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
	now := time.Since(w.l.created)
	total.Add(int64(now - w.since))
	w.since = now
}

// samples reads or transforms the samples from w.at on.
func (w *worker) samples(ctx context.Context) {
	for w.at < w.to && ctx.Err() == nil {
		w.calling = true
		err := w.guarded(ctx)
		w.calling = false
		if err != nil {
			w.handleError(ctx, err)
		}
	}
}

// guarded calls the source until it fails or panics. A recover for each sample would cost more
// than reading a small sample.
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

// readAll reads the samples of the claim in one call, with a copy of their indices, because the
// source may change it.
func (w *worker) readAll(ctx context.Context) error {
	n := copy(w.list, w.s.indices[w.from:w.to])
	w.s.samples(&w.l.host, w.from, w.to, w.fields)
	if err := w.l.batch.ReadBatch(ctx, w.list[:n], w.fields); err != nil {
		return err
	}
	w.at = w.to
	return nil
}

// try reads or transforms the sample at w.at. Before it repeats a Transform, it reads the sample
// again, because the Transform that failed may have changed some of it.
func (w *worker) try(ctx context.Context) error {
	l, s := w.l, w.s
	if w.stage == transforming && s.skipped[w.at] {
		return nil
	}
	i := s.indices[w.at]
	s.samples(&l.host, w.at, w.at+1, w.fields)
	if w.stage == reading || w.spoiled {
		if err := l.src.Read(ctx, i, w.fields); err != nil {
			return err
		}
	}
	if w.stage == transforming {
		return l.o.Transform(ctx, i, w.fields)
	}
	return nil
}

// handleError handles an error of the source: it repeats the sample, skips it, or ends the epoch.
func (w *worker) handleError(ctx context.Context, err error) {
	e, c := w.e, &w.l.counters
	w.spoiled = true
	switch {
	case ctx.Err() != nil: // which may be the cause: the next loop tries again
	case w.stage == readingAll:
		w.stage = reading // to find the sample that fails
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

// finishClaim ends the claim. It returns true if the batch is filled, and the driver must copy it now.
func (w *worker) finishClaim() (due bool) {
	c := w.claim
	w.claim = claim{}
	if c.s.missing.Add(-int32(c.to-c.from)) > 0 {
		return false
	}
	c.s.compact(&w.l.host)
	w.e.filled <- c.s // never full
	return w.l.driver.due(w.e)
}

// A semaphore limits a number of goroutines. Below the limit it is only a counter, which is cheaper
// than a channel for thousands of workers.
type semaphore struct {
	free  atomic.Int64  // the limit, less the goroutines inside and waiting
	freed chan struct{} // has a token for each waiting goroutine that may continue
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
