package loader

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
)

// An epoch is one pass over the batches. It ends with an error, with EndEpoch, or when all
// batches are delivered and on the device. The next epoch may use all slots that are not lent to
// the consumer.
type epoch struct {
	l       *Loader
	number  int
	done    batchSet              // batches before Options.Start, which are not delivered
	order   func(i int) int       // the sample at position i
	windows *windowOrder          // nil unless the source is Shards
	loop    atomic.Pointer[loop]  // the running loop, or the last one
	current atomic.Pointer[block] // the block that workers claim from; block.next is the one after it
	filled  chan *slot            // to the driver, which copies them
	arrived chan []*slot          // to the loop: their copy is queued

	handed chan claim // to workers that wait for a block

	epochEnd
	publishing
	delivery

	// Of the goroutine that drives.
	last *block
	next int // first batch that is in no block
}

// An epochEnd is how far the end of an epoch has come.
type epochEnd struct {
	failure  atomic.Pointer[failure] // errDrained at the end
	failed   chan struct{}           // has a token after a change of failure
	draining atomic.Bool             // all batches are delivered
}

// The publishing of an epoch's blocks. It is guarded by driver.mu.
type publishing struct {
	waiting      int  // number of workers that wait for a block
	stopped      bool // the loop has ended: no worker may wait
	allPublished bool // no block follows: there is no other batch, or an error comes before it
}

// The delivery of an epoch's batches belongs to the loop.
type delivery struct {
	got       batchSet      // batches that are delivered or done
	ready     []*slot       // batches that have arrived
	early     map[int]*slot // those that came before their turn
	consuming bool          // the loop is in phase consuming: also between batches, unless it waits
}

// A failure is the error that ends an epoch.
type failure struct {
	batch int // lowest batch that is not delivered because of it
	err   error
}

// errDrained is the failure of an epoch whose batches are all on the device.
var errDrained = errors.New("drained")

// A loop is one range over Batches, over an epoch or a part of it.
type loop struct {
	e         *epoch
	ctx       context.Context
	cancel    context.CancelCauseFunc
	workers   lifetime.Lifetime // counts goroutines that use workers
	endsEpoch bool              // the epoch ends with this loop
}

func newEpoch(l *Loader, number int, done batchSet) *epoch {
	n := len(l.slots)
	e := &epoch{
		l: l, number: number, done: done, last: new(block),
		filled: make(chan *slot, n), arrived: make(chan []*slot, n), handed: make(chan claim, l.o.Workers),
		epochEnd: epochEnd{failed: make(chan struct{}, 1)},
		delivery: delivery{got: slices.Clone(done), early: make(map[int]*slot)},
	}
	e.allPublished = e.ends()
	e.current.Store(e.last)
	switch {
	case l.shards != nil:
		e.windows = newWindowOrder(l.shards, l.o, number)
		e.order = e.windows.at
	case l.o.Shuffle:
		random := newPermutation(l.n, l.o.Seed, number)
		e.order = random.at
	default:
		e.order = func(i int) int { return i }
	}
	return e
}

// ends sets next to the next batch that is not done. It reports whether there is none, or an
// error comes before it.
func (e *epoch) ends() bool {
	e.next = e.done.next(e.next)
	return e.next >= e.l.batches() || e.failedBefore(e.next) != nil
}

// position returns the place after the batches that are delivered. At the end of the epoch that
// is the beginning of the next one.
func (e *epoch) position() Position {
	if e.finished() {
		return Position{Epoch: e.number + 1, Order: e.l.order}
	}
	return Position{Epoch: e.number, Batch: e.got.next(0), Done: e.got.String(), Order: e.l.order}
}

// finished reports whether all batches are delivered. An epoch without batches is not finished.
func (e *epoch) finished() bool { return e.got != nil && e.got.next(0) == e.l.batches() }

// ahead returns the number of claims in the blocks after the current one.
func (e *epoch) ahead() int {
	b := e.current.Load()
	return e.last.before + e.last.claims - b.before - b.claims
}

// unclaimed returns the number of claims that workers have yet to take.
func (e *epoch) unclaimed() int {
	b := e.current.Load()
	return e.last.before + e.last.claims - b.before - min(int(b.claimed.Load()), b.claims)
}

// fail ends the epoch before a batch with the batch's error.
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

// begin starts a loop over the rest of an epoch, or over the next epoch.
func (l *Loader) begin(ctx context.Context) (*loop, error) {
	if err := l.check(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.life.Sealed():
		return nil, cudart.ErrClosed
	case l.running != nil:
		return nil, errRunning
	}
	l.life.Begin()
	e, phase := l.epoch.Load(), waiting
	if e == nil {
		e, phase = newEpoch(l, l.next, l.done), starting
		l.next, l.done = l.next+1, nil
	}
	l.watch.setPhase(phase)
	p := &loop{e: e}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	l.running, e.consuming = p, false
	e.loop.Store(p)
	l.epoch.Store(e)
	l.driver.setStopped(e, false)
	since := time.Since(l.created)
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

// tryDrive drives on a worker's goroutine, unless another goroutine drives or is to. Meanwhile the loop
// does not wait for the goroutine. It returns false if the loop has ended: then the goroutine
// must return.
func (p *loop) tryDrive() (mine bool) {
	d := &p.e.l.driver
	if d.apart.Load() {
		d.request()
		return true
	}
	if d.requests.Add(1) > 1 {
		return true
	}
	p.workers.End()
	d.drive()
	return p.workers.Begin()
}

// end ends the loop, after the workers' goroutines.
func (p *loop) end() {
	l := p.e.l
	l.setPhase(ending)
	p.cancel(context.Canceled)
	p.workers.Seal()
	l.driver.setStopped(p.e, true)
	_ = p.workers.Wait(context.Background())
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch.setPhase(noLoop)
	l.running = nil
	if p.endsEpoch {
		l.epoch.Store(nil)
	}
	l.life.End()
}

// ended returns the error of the loop's context, which has ended.
func (p *loop) ended() error {
	err := context.Cause(p.ctx)
	if err != cudart.ErrClosed {
		err = bounded.Ended(p.ctx)
	}
	if p.allRetained() {
		err = fmt.Errorf("all %d batches are retained, and none was released: %w", len(p.e.l.slots), err)
	}
	return fmt.Errorf("loader: epoch %d: %w", p.e.number, err)
}

// allRetained reports whether the consumer retains all batches, so that workers have no memory.
func (p *loop) allRetained() bool { return int(p.e.l.counters.retained.Load()) == len(p.e.l.slots) }

// nextSlot returns the slot of the next batch. When all batches are delivered, it waits until they
// are on the device, and returns nil, or the error of a copy.
func (p *loop) nextSlot() (*slot, error) {
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
		case len(e.ready) > 0:
			if s, e.ready = e.ready[0], e.ready[1:]; l.o.Unordered || s.number == want {
				return s, nil
			}
			e.early[s.number] = s
			continue
		case want == l.batches() && !e.draining.Swap(true):
			l.setPhase(ending)
			l.driver.request()
		}
		switch err := p.receive(want); {
		case err == errDrained:
			return nil, nil
		case err != nil:
			return nil, err
		}
	}
}

// receive waits for slots to arrive. It returns the error that ends the epoch before the wanted batch, if there is one, and
// nil after a change of it, and when the loop's context ends.
func (p *loop) receive(want int) error {
	e, l := p.e, p.e.l
	select {
	case e.ready = <-e.arrived:
		return nil
	default:
	}
	if err := e.failedBefore(want); err != nil {
		return err
	}
	if e.consuming && !p.allRetained() && !e.draining.Load() {
		e.consuming = false
		l.setPhase(waiting)
	}
	select {
	case e.ready = <-e.arrived:
	case <-e.failed:
	case <-p.ctx.Done():
	}
	return nil
}

// deliver passes a batch to the loop's body for a turn, or longer if it is retained. It returns
// false if the body has left the loop.
func (p *loop) deliver(s *slot, yield func(*Batch, error) bool) (more bool) {
	e, l := p.e, p.e.l
	e.got = e.got.with(s.number)
	l.counters.batches.Add(1)
	s.lent.Store(true)
	b := &Batch{l: l, s: s, indices: s.indices, epoch: e.number, number: s.number, position: e.position()}
	if !e.consuming {
		e.consuming = true
		l.setPhase(consuming)
	}
	defer b.endTurn() // the body may panic
	return yield(b, nil)
}
