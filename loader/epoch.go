package loader

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
)

// An epoch is one pass over the batches. It ends when the loop has got them all and they are
// on the device, with an error, or with EndEpoch. The next one may use all slots that the
// consumer has not got.
type epoch struct {
	l       *Loader
	number  int
	done    batchSet // before the epoch begins, because of Options.Start
	order   permutation
	loop    atomic.Pointer[loop]  // that runs, or the last one
	blocks  atomic.Pointer[block] // that is claimed from, which leads to those after it
	filled  chan *slot            // for the driver
	arrived chan *slot            // copied, for the loop

	handed chan claim // for workers that wait for a block

	failure  atomic.Pointer[failure] // errDrained at the end
	failed   chan struct{}           // has a token if failure has changed
	draining atomic.Bool             // the loop has got all batches

	// Guarded by driver.mu.
	waiting int  // workers
	stopped bool // the loop has ended: no worker may wait
	opened  bool // no block follows: there is no batch, or an error comes before it

	// Of the goroutine that drives.
	last *block
	next int // batch to be opened

	// Of the loop.
	got       batchSet      // all batches that a loop has got, or are done
	early     map[int]*slot // batches that came before their turn
	consuming bool          // the phase of the loop: from one batch to the next if that is there
}

// A failure is the error that ends an epoch before a batch.
type failure struct {
	batch int
	err   error
}

// errDrained ends an epoch whose batches are all on the device.
var errDrained = errors.New("drained")

// A loop is one range over Batches, over an epoch or a part of it.
type loop struct {
	e       *epoch
	ctx     context.Context
	cancel  context.CancelCauseFunc
	workers lifetime.Lifetime // goroutines that use workers
	over    bool              // the epoch ends with the loop
}

func newEpoch(l *Loader, number int, done batchSet) *epoch {
	n := len(l.slots)
	e := &epoch{
		l: l, number: number, done: done, got: slices.Clone(done), last: new(block), early: make(map[int]*slot),
		filled: make(chan *slot, n), arrived: make(chan *slot, n), failed: make(chan struct{}, 1), handed: make(chan claim, l.o.Workers),
	}
	e.opened = e.ends()
	e.blocks.Store(e.last)
	if l.o.Shuffle {
		e.order = newPermutation(l.n, l.o.Seed, number)
	}
	return e
}

// sample returns which sample is at a position of a batch.
func (e *epoch) sample(batch, at int) int {
	i := batch*e.l.o.BatchSize + at
	if e.l.o.Shuffle {
		i = e.order.at(i)
	}
	return i
}

// ends sets next to the next batch that is to be opened, and reports whether there is none,
// or an error comes before it.
func (e *epoch) ends() bool {
	e.next = e.done.next(e.next)
	return e.next >= e.l.batches() || e.failedBefore(e.next) != nil
}

// position returns where to go on: at the end of the epoch with the next one.
func (e *epoch) position() Position {
	if e.finished() {
		return Position{Epoch: e.number + 1, Order: e.l.order}
	}
	return Position{Epoch: e.number, Batch: e.got.next(0), Done: e.got.String(), Order: e.l.order}
}

// finished reports whether loops have got a batch, and all that there are.
func (e *epoch) finished() bool { return e.got != nil && e.got.next(0) == e.l.batches() }

// ahead returns how many claims are open in blocks from which nothing was claimed yet.
func (e *epoch) ahead() int {
	b := e.blocks.Load()
	return e.last.before + e.last.claims - b.before - b.claims
}

// fail ends the epoch with the error of a batch, before that batch.
func (e *epoch) fail(batch int, err error) {
	if e.l.o.Unordered {
		batch = 0 // it comes before all others
	}
	f := &failure{batch, err}
	for old := e.failure.Load(); old == nil || batch < old.batch; old = e.failure.Load() {
		if e.failure.CompareAndSwap(old, f) {
			select {
			case e.failed <- struct{}{}:
			default:
			}
			return
		}
	}
}

// failedBefore returns the error that ends the epoch before a batch.
func (e *epoch) failedBefore(batch int) error {
	if f := e.failure.Load(); f != nil && f.batch <= batch {
		return f.err
	}
	return nil
}

// begin starts a loop over what is left of an epoch, or over the next one.
func (l *Loader) begin(ctx context.Context) (*loop, error) {
	if err := l.check(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.life.Sealed():
		return nil, ErrClosed
	case l.running != nil:
		return nil, ErrRunning
	}
	l.life.Begin()
	e, phase := l.epoch.Load(), waiting
	if e == nil {
		e, phase = newEpoch(l, l.next, l.done), starting
		l.next, l.done = l.next+1, nil
	}
	l.watch.enter(phase)
	p := &loop{e: e}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	l.running, e.consuming = p, false
	e.loop.Store(p)
	l.epoch.Store(e)
	l.driver.setStopped(e, false)
	since := time.Since(l.born)
	for i := range l.workers {
		w := &l.workers[i]
		if w.since = since; w.e != e {
			w.e, w.claim, w.tries, w.spoiled = e, claim{}, 0, false
		}
		p.workers.Begin()
		go w.work(p)
	}
	return p, nil
}

// tryDrive drives on a worker's goroutine, unless another goroutine drives. The loop does
// not wait for that goroutine meanwhile. It returns false if the loop has ended: then the
// goroutine must return.
func (p *loop) tryDrive() (mine bool) {
	if p.e.l.driver.requests.Add(1) > 1 {
		return true
	}
	p.workers.End()
	p.e.l.driver.drive()
	return p.workers.Begin()
}

// end ends the workers' goroutines, and the loop.
func (p *loop) end() {
	l := p.e.l
	l.enter(ending)
	p.cancel(context.Canceled)
	p.workers.Seal()
	l.driver.setStopped(p.e, true)
	_ = p.workers.Wait(context.Background())
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch.enter(idle)
	l.running = nil
	if p.over {
		l.epoch.Store(nil)
	}
	l.life.End()
}

// ended returns why the loop's context has ended.
func (p *loop) ended() error {
	err := context.Cause(p.ctx)
	if err != ErrClosed {
		err = bounded.Ended(p.ctx)
	}
	if p.allKept() {
		err = fmt.Errorf("all %d batches are kept, and none was released: %w", len(p.e.l.slots), err)
	}
	return fmt.Errorf("loader: epoch %d: %w", p.e.number, err)
}

// allKept reports whether there is no memory left to fill.
func (p *loop) allKept() bool { return int(p.e.l.counters.kept.Load()) == len(p.e.l.slots) }

// get returns the next batch for the consumer. When it has got all and they are on the
// device, it returns nil, or the error of a copy that failed.
func (p *loop) get() (*slot, error) {
	e, l := p.e, p.e.l
	for {
		want := e.got.next(0)
		s := e.early[want]
		switch {
		case p.ctx.Err() != nil:
			return nil, p.ended()
		case s != nil:
			delete(e.early, want)
			return s, nil
		case want == l.batches() && !e.draining.Swap(true):
			l.enter(ending)
			l.driver.request()
		}
		select {
		case s = <-e.arrived:
		default:
			switch err := e.failedBefore(want); err {
			case nil:
			case errDrained:
				return nil, nil
			default:
				return nil, err
			}
			if e.consuming && !p.allKept() && !e.draining.Load() {
				e.consuming = false
				l.enter(waiting)
			}
			select {
			case s = <-e.arrived:
			case <-e.failed:
				continue
			case <-p.ctx.Done():
				continue
			}
		}
		if l.o.Unordered || s.number == want {
			return s, nil
		}
		e.early[s.number] = s
	}
}

// give gives a batch to the loop's body for a turn, or longer if it is kept. It returns
// false if the loop was left.
func (p *loop) give(s *slot, yield func(*Batch, error) bool) (more bool) {
	e, l := p.e, p.e.l
	e.got = e.got.with(s.number)
	l.counters.batches.Add(1)
	s.lent.Store(true)
	b := &Batch{l: l, s: s, indices: s.indices, epoch: e.number, number: s.number, position: e.position()}
	if !e.consuming {
		e.consuming = true
		l.enter(consuming)
	}
	defer b.endTurn() // the body may panic
	return yield(b, nil)
}
