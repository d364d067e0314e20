package cudart

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// How a goroutine waits for the GPU.
//
// CUDA's own waits keep a thread each, and by default a core. Here a wait asks
// for a few microseconds itself, which is all that small copies need. After
// that it leaves its place with a goroutine that asks for all waits of the
// runtime, the first one of each stream, and sleeps in between: for a
// sixteenth of the time that the youngest of them has waited already, so that
// a wait ends some percent late at most, and never less than asking took, so
// that a thousand waits use half a core at most. RATIONALE.md has the
// alternatives (blocking-sync events, host functions) with figures.
//
// Any call into the library may block: a stream blocks its caller when about a
// thousand entries are queued, and drivers have locks and bugs. So a wait whose
// context can end makes its calls on another goroutine, which costs half a
// microsecond, and the goroutine that asks for all is replaced by another while
// it is stuck inside the library.
const (
	spinFor  = 25 * time.Microsecond
	minSleep = 5 * time.Microsecond
	maxSleep = 200 * time.Microsecond

	stuckAfter = 5 * time.Millisecond // inside the library
)

// waits are the waits of a runtime.
type waits struct {
	rt      *Runtime
	pool    sync.Pool // of *wait
	turns   turns
	closing chan struct{} // closed by close

	mu     sync.Mutex
	queues []*waitQueue // those with waits
	closed bool
	poller *poller // that asks, nil if none does
	stuck  int     // pollers that were replaced while they were inside the library
}

// A waitQueue holds the waits for points of one stream, or for one event.
type waitQueue struct {
	line  *Timeline // or
	event *Event

	// Guarded by waits.mu. Waits for points are in the points' order.
	first, last *wait
	listed      bool // in waits.queues
	asking      bool // of an event: a goroutine is inside cudaEventQuery
}

type waitKind uint8

const (
	waitStream waitKind = iota // for all that is queued on line
	waitPoint                  // for point n of line
	waitEvent                  // for event
	waitPeek                   // not at all: look at point n once
	waitNotify                 // for point n of line, with no goroutine waiting
)

// A wait is one goroutine's. It is reused once its outcome was received.
type wait struct {
	kind  waitKind
	line  *Timeline
	event *Event
	n     uint64

	begin    func() // made once, so that starting a goroutine allocates nothing
	done     chan error
	notify   chan<- struct{} // in place of done
	patience *time.Timer     // releases the turn of a call that blocks
	turn     atomic.Int32

	// Guarded by waits.mu.
	queue      *waitQueue
	prev, next *wait
	since      time.Time
	abandoned  bool
}

// errNotReached is the outcome of a look.
var errNotReached = errors.New("not reached")

func newWaits(rt *Runtime) *waits {
	w := &waits{rt: rt, turns: newTurns(), closing: make(chan struct{})}
	w.pool.New = func() any {
		me := &wait{done: make(chan error, 1)}
		me.begin = func() { w.begin(me) }
		me.patience = time.AfterFunc(time.Hour, func() { w.turns.leave(me) })
		me.patience.Stop()
		return me
	}
	return w
}

func (w *waits) get(kind waitKind) *wait {
	me := w.pool.Get().(*wait)
	me.kind, me.line, me.event, me.n = kind, nil, nil, 0
	return me
}

// waitCanceled says that a wait ended before the work did.
func waitCanceled(what fmt.Stringer, ctx context.Context) error {
	return fmt.Errorf("wait for %v canceled, its work on the GPU goes on: %w", what, ctx.Err())
}

// Synchronize waits until all work queued on the stream so far is done, and
// returns the work's error if it failed. When ctx ends first it returns ctx's
// error, while the GPU's work goes on: memory that it uses must stay.
// A wait occupies no thread.
func (s *Stream) Synchronize(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("synchronize %v: %w", s, errNilContext)
	}
	w := s.dev.rt.waits
	if ctx.Done() == nil && w.turns.spin() {
		// Nothing can end the wait early: the caller may ask itself.
		over, err := spin(s.line.query)
		w.turns.spinning.Add(-1)
		if over {
			return errors.Join(err, s.line.report())
		}
	}
	me := w.get(waitStream)
	me.line = s.line
	if err := w.await(ctx, me); err != nil {
		return err
	}
	return s.line.report()
}

// report returns an error of the stream's work that was found by others, once.
func (t *Timeline) report() error {
	if t.unreported.Load() == nil {
		return nil
	}
	if err := t.unreported.Swap(nil); err != nil {
		return *err
	}
	return nil
}

// Synchronize waits until the work that the event recorded is done; an event
// that was never recorded is. If the event is recorded anew meanwhile, through
// [Stream.Record], the wait is still for the work before. The requirements of
// [Stream.Synchronize] apply.
func (e *Event) Synchronize(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("synchronize %v: %w", e, errNilContext)
	}
	e.waits.Add(1)
	defer e.waits.Add(-1)
	w := e.dev.rt.waits
	me := w.get(waitEvent)
	me.event = e
	return w.await(ctx, me)
}

// await begins a wait and waits for its outcome, or until ctx ends.
func (w *waits) await(ctx context.Context, me *wait) error {
	what := me.what()
	if ctx.Err() != nil {
		w.pool.Put(me)
		return waitCanceled(what, ctx)
	}
	if ctx.Done() == nil {
		me.begin()
	} else {
		go me.begin()
	}
	select {
	case err := <-me.done:
		w.pool.Put(me)
		return err
	case <-ctx.Done():
		w.abandon(me)
		return waitCanceled(what, ctx)
	case <-w.closing:
		w.abandon(me)
		return fmt.Errorf("wait for %v: the Runtime was closed: %w", what, ErrClosed)
	}
}

// abandon ends a wait whose outcome is not wanted any more. Another goroutine
// may hold it just now: it is not reused.
func (w *waits) abandon(me *wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	me.abandoned = true
	w.remove(me)
}

// what is waited for, in messages.
func (me *wait) what() fmt.Stringer {
	if me.event != nil {
		return me.event
	}
	return me.line
}

// begin looks whether the wait is over already, and else leaves it with the
// poller.
func (w *waits) begin(me *wait) {
	if me.kind == waitPeek {
		over, _ := me.ask()
		if over {
			me.done <- nil
		} else {
			me.done <- errNotReached
		}
		return
	}
	if me.kind == waitPoint {
		// One goroutine at a time asks for a stream, so these need no turns.
		if over, _ := spin(me.ask); over {
			me.done <- nil
		} else {
			w.enqueue(me)
		}
		return
	}
	if err := w.turns.take(me, w.closing); err != nil {
		me.done <- fmt.Errorf("wait for %v: %w", me.what(), err)
		return
	}
	over, err := me.look()
	if !over && me.kind == waitStream {
		p, fresh := me.line.next()
		if fresh {
			me.line.record(false)
		}
		me.n = p.n
	}
	w.turns.leave(me)
	if over {
		me.done <- err
	} else {
		w.enqueue(me)
	}
}

// look asks once, or for a few microseconds if the turn allows it.
func (me *wait) look() (over bool, err error) {
	if me.turn.Load() == turnSpins {
		return spin(me.ask)
	}
	over, err = me.ask()
	return over || err != nil, err
}

// spin asks for a few microseconds, until it is done or fails.
func spin(ask func() (done bool, err error)) (over bool, _ error) {
	// The clock is read now and then only: that takes as long as a question.
	const questions = 8
	done, err := ask()
	if done || err != nil {
		return true, err
	}
	for start := time.Now(); time.Since(start) < spinFor; {
		for range questions {
			if done, err := ask(); done || err != nil {
				return true, err
			}
		}
	}
	return false, nil
}

// ask asks the library once. An error of a stream or event ends the wait.
func (me *wait) ask() (done bool, err error) {
	switch me.kind {
	case waitStream:
		return me.line.query()
	case waitEvent:
		return me.event.Query()
	}
	return me.line.reached(me.n), nil
}

// turns bound how many goroutines ask at once. It is what bounds the cores
// that short waits can use, and the threads that a crowd of them makes: each
// goroutine inside the library needs one.
type turns struct {
	spinning *atomic.Int32
	spinners int32         // that many may ask again and again
	crowd    chan struct{} // others queue here, and ask once
}

// The values of wait.turn.
const (
	turnNone int32 = iota
	turnSpins
	turnCrowd
)

func newTurns() turns {
	n := max(1, runtime.GOMAXPROCS(0)/8)
	return turns{spinning: new(atomic.Int32), spinners: int32(n), crowd: make(chan struct{}, n)}
}

// spin takes a turn of those that spin, if there is one. Who has it adds -1 to
// spinning at the end.
func (t turns) spin() bool {
	if t.spinning.Add(1) <= t.spinners {
		return true
	}
	t.spinning.Add(-1)
	return false
}

// take waits for a turn. One of the crowd whose call blocks loses it to the
// next, and goes on without.
func (t turns) take(me *wait, closing <-chan struct{}) error {
	if t.spin() {
		me.turn.Store(turnSpins)
		return nil
	}
	select {
	case t.crowd <- struct{}{}:
	case <-closing:
		return ErrClosed
	}
	me.turn.Store(turnCrowd)
	me.patience.Reset(stuckAfter)
	return nil
}

func (t turns) leave(me *wait) {
	switch me.turn.Swap(turnNone) {
	case turnSpins:
		t.spinning.Add(-1)
	case turnCrowd:
		me.patience.Stop()
		<-t.crowd
	}
}

// enqueue leaves a wait with the poller.
func (w *waits) enqueue(me *wait) {
	var q *waitQueue
	if me.line != nil {
		q = &me.line.waiting
	} else {
		q = &me.event.waiting
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case me.abandoned:
		return
	case w.closed:
		me.end(fmt.Errorf("wait for %v: %w", me.what(), ErrClosed))
		return
	}
	me.since = time.Now()
	w.insert(q, me)
	if !q.listed {
		q.listed = true
		w.queues = append(w.queues, q)
	}
	if w.poller == nil {
		w.startPoller()
	}
	w.poller.bell.ring()
}

// insert puts a wait behind those for earlier points.
func (w *waits) insert(q *waitQueue, me *wait) {
	before := q.last
	for before != nil && before.n > me.n {
		before = before.prev
	}
	me.queue, me.prev = q, before
	if before == nil {
		me.next, q.first = q.first, me
	} else {
		me.next, before.next = before.next, me
	}
	if me.next == nil {
		q.last = me
	} else {
		me.next.prev = me
	}
}

// remove takes a wait out of its queue, if it is in one. The queue itself
// leaves w.queues at the next round.
func (w *waits) remove(me *wait) {
	q := me.queue
	if q == nil {
		return
	}
	if me.prev == nil {
		q.first = me.next
	} else {
		me.prev.next = me.next
	}
	if me.next == nil {
		q.last = me.prev
	} else {
		me.next.prev = me.prev
	}
	me.queue, me.prev, me.next = nil, nil, nil
}

// end ends the waits of a queue for points up to n.
func (w *waits) end(q *waitQueue, n uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for me := q.first; me != nil && me.n <= n; me = q.first {
		w.remove(me)
		me.end(err)
	}
}

// end reports the outcome.
func (me *wait) end(err error) {
	if me.notify == nil {
		me.done <- err
		return
	}
	select {
	case me.notify <- struct{}{}:
	default:
	}
}

// rerecorded lets waits for an event wait for the stream's present end instead,
// because the event is about to be recorded anew.
func (w *waits) rerecorded(e *Event) {
	t := e.last.Load()
	if t == nil {
		return // other code recorded it: nothing tells on which stream
	}
	p := t.Point()
	w.mu.Lock()
	defer w.mu.Unlock()
	for me := e.waiting.first; me != nil; me = e.waiting.first {
		w.remove(me)
		me.line, me.n = t, p.n
		w.insert(&t.waiting, me)
	}
	if t.waiting.first != nil && !t.waiting.listed {
		t.waiting.listed = true
		w.queues = append(w.queues, &t.waiting)
	}
}

// close ends all waits.
func (w *waits) close() {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		close(w.closing)
	}
	for _, q := range w.queues {
		for me := q.first; me != nil; me = q.first {
			w.remove(me)
			me.end(fmt.Errorf("wait for %v: %w", me.what(), ErrClosed))
		}
		q.listed = false
	}
	w.queues = nil
	if w.poller != nil {
		w.poller.bell.ring()
	}
	w.mu.Unlock()
}
