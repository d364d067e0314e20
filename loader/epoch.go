package loader

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
)

// An epoch is one loop over the batches.
type epoch struct {
	l       *Loader
	ctx     context.Context
	cancel  context.CancelCauseFunc
	start   Position
	order   permutation
	workers sync.WaitGroup

	// What is being claimed, which leads to what was opened after it.
	current atomic.Pointer[opening]

	// One worker at a time opens the next block, without holding claims.
	claims   sync.Mutex
	opening  bool
	opened   sync.Cond // or there is no other block
	last     *opening  // nil when there will be no other
	next     int       // batch to be opened, of the worker that is opening
	unopened error     // why it could not be

	sender  *sender
	arrived chan *slot // filled, and the copy queued

	failing sync.Mutex
	failed  chan struct{} // something has
	broken  atomic.Bool
	err     error // of the first batch that failed
	badly   int   // its number, 0 if the error is no batch's

	// The consumer's.
	position  Position
	waiting   map[int]*slot // those that came before their turn
	consuming bool          // the phase of the loop: from one batch to the next if that is there
}

func newEpoch(ctx context.Context, l *Loader, start Position) *epoch {
	e := &epoch{
		l: l, start: start, next: start.Batch, position: start,
		arrived: make(chan *slot, len(l.slots)), failed: make(chan struct{}, 1), badly: math.MaxInt, waiting: make(map[int]*slot),
	}
	e.sender = newSender(e)
	e.last = newOpening(l) // a block of nothing, after which the first one is opened
	e.opened.L = &e.claims
	e.current.Store(e.last)
	if l.o.Shuffle {
		e.order = newPermutation(l.n, l.o.Seed, start.Epoch)
	}
	e.ctx, e.cancel = context.WithCancelCause(ctx)
	workers, fields := make([]worker, len(l.workers)), len(l.layout.sizes)
	places := make([][]byte, fields*len(workers))
	for i := range workers {
		workers[i] = worker{e: e, c: &l.workers[i], places: places[i*fields : (i+1)*fields]}
		if l.batch != nil {
			workers[i].asked = make([]int, l.layout.run(l.layout.block, len(workers)))
		}
		e.workers.Go(workers[i].work)
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

// finish waits for the copies of an epoch that has given all its batches, and
// returns the error of one that failed.
func (e *epoch) finish() error {
	l := e.l
	l.loops.enter(ending)
	e.workers.Wait() // they have nothing left to claim
	for _, s := range l.slots {
		if err := e.reclaim(s); err != nil {
			return fmt.Errorf("loader: end of epoch %d: %w", e.start.Epoch, err)
		}
	}
	return nil
}

// end ends the workers, and frees the slots that the loop did not get. Copies
// may still be under way.
func (e *epoch) end() {
	l := e.l
	l.loops.enter(ending)
	e.cancel(context.Canceled)
	e.claims.Lock()
	e.opened.Broadcast() // those that wait for a block see it
	e.claims.Unlock()
	e.workers.Wait()
	for o := e.current.Load(); o != nil; o = o.next.Load() {
		for _, s := range o.left() {
			l.free.put(s) // no worker will complete it
		}
	}
	for _, s := range e.waiting {
		l.free.put(s)
	}
	for len(e.arrived) > 0 {
		l.free.put(<-e.arrived)
	}
	l.loops.enter(idle)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel = nil
}

// fail ends the epoch with the error of a batch. Those before it still come.
func (e *epoch) fail(batch int, err error) {
	e.failing.Lock()
	defer e.failing.Unlock()
	if batch >= e.badly {
		return
	}
	e.err, e.badly = err, batch
	e.broken.Store(true)
	select {
	case e.failed <- struct{}{}:
	default:
	}
}

// failedBefore returns the error that ends the epoch before a batch.
func (e *epoch) failedBefore(batch int) error {
	e.failing.Lock()
	defer e.failing.Unlock()
	if batch < e.badly && !(e.l.o.Unordered && e.err != nil) {
		return nil
	}
	return e.err
}

// canceled returns why the epoch's context ended.
func (e *epoch) canceled() error {
	cause := context.Cause(e.ctx)
	if n := len(e.l.slots); e.allKept() {
		return fmt.Errorf("loader: epoch %d: all %d batches are kept, and none was released: %w", e.start.Epoch, n, cause)
	}
	return fmt.Errorf("loader: epoch %d: %w", e.start.Epoch, cause)
}

// allKept reports whether there is no memory left to fill.
func (e *epoch) allKept() bool { return int(e.l.kept.Load()) == len(e.l.slots) }

// get returns the next batch for the consumer, nil when there are no more.
func (e *epoch) get() (*slot, error) {
	for {
		if e.ctx.Err() != nil {
			e.fail(0, e.canceled())
			return nil, e.failedBefore(0)
		}
		want := e.position.Batch
		if s := e.waiting[want]; s != nil {
			delete(e.waiting, want)
			return s, nil
		}
		if want == e.l.batches() {
			return nil, nil
		}
		var s *slot
		select {
		case s = <-e.arrived:
		default:
			if err := e.failedBefore(want); err != nil {
				return nil, err
			}
			if e.consuming && !e.allKept() {
				e.consuming = false
				e.l.loops.enter(waiting)
			}
			select {
			case s = <-e.arrived:
			case <-e.failed:
				continue
			case <-e.ctx.Done():
				continue
			}
		}
		if e.l.o.Unordered || s.number == want {
			return s, nil
		}
		e.waiting[s.number] = s
	}
}

// give gives a batch to the loop for a turn, or longer if it is kept. It is
// false when the loop was left.
func (e *epoch) give(s *slot, yield func(*Batch, error) bool) (more bool) {
	l := e.l
	e.position = e.position.after(s.number)
	l.stats.batches.Add(1)
	b := &Batch{l: l, s: s, indices: s.indices, epoch: e.start.Epoch, number: s.number, position: e.position}
	if !e.consuming {
		e.consuming = true
		l.loops.enter(consuming)
	}
	defer func() { // the body may panic
		if !b.kept {
			_ = b.Release() // the body may have
		}
	}()
	return yield(b, nil)
}
