package loader

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// An epoch is one loop over the batches.
type epoch struct {
	l       *Loader
	ctx     context.Context
	cancel  context.CancelCauseFunc
	start   Position
	order   permutation
	workers sync.WaitGroup

	// What is being claimed, from which the way leads to what is open behind it.
	// Who waits for a free slot holds the lock: the others would wait for it too.
	open   atomic.Pointer[opening]
	claims sync.Mutex
	last   *opening
	next   int // batch to be opened

	arrived chan *slot // filled, the copy under way

	failing sync.Mutex
	failed  chan struct{} // something has
	broken  atomic.Bool
	err     error // of the first batch that failed
	badly   int   // its number, 0 if it is nobody's fault

	// The consumer's.
	position Position
	waiting  map[int]*slot // those that came before their turn
}

func newEpoch(ctx context.Context, l *Loader, start Position) *epoch {
	e := &epoch{
		l: l, start: start, next: start.Batch, position: start,
		arrived: make(chan *slot, len(l.slots)), failed: make(chan struct{}, 1), badly: math.MaxInt, waiting: make(map[int]*slot),
	}
	e.last = new(opening) // a batch of nothing, behind which the first one is opened
	e.open.Store(e.last)
	if l.o.Shuffle {
		e.order = newPermutation(l.n, l.o.Seed, start.Epoch)
	}
	e.ctx, e.cancel = context.WithCancelCause(ctx)
	for i := range l.workers {
		e.workers.Go(func() { e.work(&l.workers[i]) })
	}
	return e
}

// end ends the workers, waits for copies that are under way, and takes back what
// nobody was given.
func (e *epoch) end() {
	e.cancel(context.Canceled)
	e.workers.Wait()
	l := e.l
	for o := e.open.Load(); o != nil; o = o.next.Load() {
		if int(o.claimed.Load()) < o.size {
			l.free <- o.s // nobody will complete it
		}
	}
	for _, s := range e.waiting {
		l.free <- s
	}
	for len(e.arrived) > 0 {
		l.free <- <-e.arrived
	}
	// An error of the copies is the device's, which every later call tells.
	_ = l.stream.Synchronize(context.Background())
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

// failedBefore is the error that ends the epoch before a batch.
func (e *epoch) failedBefore(batch int) error {
	e.failing.Lock()
	defer e.failing.Unlock()
	if batch < e.badly && !(e.l.o.Unordered && e.err != nil) {
		return nil
	}
	return e.err
}

// get returns the next batch for the consumer, nil when there are no more.
func (e *epoch) get() (*slot, error) {
	for {
		if e.ctx.Err() != nil {
			e.fail(0, fmt.Errorf("loader: epoch %d: %w", e.start.Epoch, context.Cause(e.ctx)))
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
			select {
			case s = <-e.arrived:
			case <-e.failed:
				continue
			case <-e.ctx.Done():
				continue
			}
		}
		if e.l.o.Unordered {
			return s, nil
		}
		e.waiting[s.number] = s
	}
}

// give lends a batch for a turn of the loop, or longer if it is kept.
func (e *epoch) give(s *slot, yield func(*Batch, error) bool) (more bool, err error) {
	e.position = e.position.after(s.number)
	e.l.stats.batches.Add(1)
	b := &Batch{l: e.l, s: s, indices: s.indices, epoch: e.start.Epoch, number: s.number, position: e.position}
	given := time.Now()
	defer func() { // the loop may panic
		e.l.stats.consuming.Add(int64(time.Since(given)))
		if !b.kept && !b.released {
			err = b.Release()
		}
	}()
	return yield(b, nil), nil
}
