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
// CUDA's own waits keep a thread each, and by default a core. Here a wait first queries
// by itself for a few microseconds, which is enough for small copies. Then it joins a
// queue, and one goroutine, the poller, queries for all waits of the runtime: for the
// first one of each stream. Between two rounds the poller sleeps for a sixteenth of the
// time that the youngest wait has lasted, so that a wait ends some percent late at most;
// and at least as long as the round took, so that a thousand waits use half a core at
// most. RATIONALE.md has the alternatives (blocking-sync events, host functions) with
// figures.
//
// Any call into the library can block: a stream blocks its caller when about a thousand
// entries are queued, and drivers have locks and defects. So a wait whose context can
// end makes its calls on another goroutine, which costs half a microsecond, and another
// poller replaces one that is stuck inside the library.
const (
	spinFor  = 25 * time.Microsecond
	minSleep = 5 * time.Microsecond
	maxSleep = 200 * time.Microsecond

	stuckAfter = 5 * time.Millisecond   // inside the library
	peekFor    = 200 * time.Millisecond // the longest look that a caller waits for
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
	poller *poller // nil if there is none
	stuck  int     // pollers that were replaced while they were inside the library
}

// A waitQueue holds the waits for Points of one stream, or for one event.
type waitQueue struct {
	line  *Timeline // or
	event *Event

	// Guarded by waits.mu. Waits for Points are in the Points' order.
	first, last *wait
	listed      bool // in waits.queues
	asking      bool // of an event: a goroutine is inside cudaEventQuery
}

type waitKind uint8

const (
	waitStream waitKind = iota // for all that is queued on line
	waitPoint                  // for Point n of line
	waitEvent                  // for event
	waitPeek                   // not at all: look at Point n once
	waitNotify                 // for Point n of line, with no goroutine waiting
)

// A wait is one goroutine's. It is reused after its outcome was received.
type wait struct {
	kind  waitKind
	line  *Timeline
	event *Event
	n     uint64

	begin    func() // created once, so that starting a goroutine allocates nothing
	done     chan error
	notify   chan<- struct{} // in place of done
	patience *time.Timer     // ends the turn of a call that blocks
	peek     *time.Timer     // ends a look whose call blocks
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
		me.peek = time.NewTimer(time.Hour)
		me.peek.Stop()
		return me
	}
	return w
}

func (w *waits) get(kind waitKind) *wait {
	me := w.pool.Get().(*wait)
	me.kind, me.line, me.event, me.n = kind, nil, nil, 0
	return me
}

// waitCanceled makes the error of a wait whose context ended first.
func waitCanceled(what fmt.Stringer, ctx context.Context) error {
	return fmt.Errorf("wait for %v canceled, its work on the GPU goes on: %w", what, ctx.Err())
}

// Synchronize waits until all work that is queued on the stream so far is done
// (cudaStreamQuery, cudaEventQuery), and returns the work's error if it failed. If ctx
// ends first, it returns ctx's error, and the GPU's work goes on: memory that it uses
// must stay. If the Runtime is closed, the error wraps [ErrClosed]; a nil ctx is an
// error. A wait occupies no thread.
func (s *Stream) Synchronize(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("synchronize %v: %w", s, errNilContext)
	}
	w := s.dev.rt.waits
	if ctx.Done() == nil && w.turns.spin() {
		// Nothing can end the wait early: the caller's goroutine may query.
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

// report returns, once, an error of the stream's work that a look at a Point has found.
func (t *Timeline) report() error {
	if t.unreported.Load() == nil {
		return nil
	}
	if err := t.unreported.Swap(nil); err != nil {
		return *err
	}
	return nil
}

// Synchronize waits until the work that the event recorded is done (cudaEventQuery). An
// event that was never recorded is done. If [Stream.Record] records the event again
// during the wait, the wait is still for the earlier work. The errors are those of
// [Stream.Synchronize].
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

// await starts a wait and waits for its outcome, or until ctx ends.
func (w *waits) await(ctx context.Context, me *wait) error {
	what := me.what()
	if ctx.Err() != nil {
		w.pool.Put(me)
		return waitCanceled(what, ctx)
	}
	var late <-chan time.Time
	if ctx.Done() == nil {
		me.begin()
	} else {
		go me.begin()
		if me.kind == waitPeek {
			me.peek.Reset(peekFor)
			late = me.peek.C
		}
	}
	select {
	case err := <-me.done:
		me.peek.Stop()
		w.pool.Put(me)
		return err
	case <-ctx.Done():
		w.abandon(me)
		return waitCanceled(what, ctx)
	case <-w.closing:
		w.abandon(me)
		return fmt.Errorf("wait for %v: the Runtime was closed: %w", what, ErrClosed)
	case <-late:
		select { // on a busy host both may be true
		case err := <-me.done:
			w.pool.Put(me)
			return err
		default:
		}
		w.abandon(me)
		return errNotReached
	}
}

// abandon ends a wait whose caller has gone. It is not reused, because another goroutine
// may hold it.
func (w *waits) abandon(me *wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	me.abandoned = true
	w.remove(me)
}

// what returns what is waited for, for messages.
func (me *wait) what() fmt.Stringer {
	if me.event != nil {
		return me.event
	}
	return me.line
}

// begin looks whether the wait is over, and if not leaves it to the poller.
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

// look queries once, or for a few microseconds if the turn allows it.
func (me *wait) look() (over bool, err error) {
	if me.turn.Load() == turnSpins {
		return spin(me.ask)
	}
	over, err = me.ask()
	return over || err != nil, err
}

// spin queries for a few microseconds, until the work is done or has failed.
func spin(ask func() (done bool, err error)) (over bool, _ error) {
	// The clock is read after several queries, because it takes as long as one.
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

// ask queries once. An error of a stream or event ends the wait.
func (me *wait) ask() (done bool, err error) {
	switch me.kind {
	case waitStream:
		return me.line.query()
	case waitEvent:
		return me.event.Query()
	}
	return me.line.reached(me.n), nil
}

// turns bound the number of goroutines that query at once, so the cores that short waits
// can use, and the threads that many waits create: each goroutine inside the library
// needs one.
type turns struct {
	spinning *atomic.Int32
	spinners int32         // so many may query repeatedly
	crowd    chan struct{} // others queue here, and query once
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

// spin takes a turn to query repeatedly, if there is one. The caller adds -1 to spinning
// at the end.
func (t turns) spin() bool {
	if t.spinning.Add(1) <= t.spinners {
		return true
	}
	t.spinning.Add(-1)
	return false
}

// take waits for a turn. If a call of one of the crowd blocks, its turn goes to the next
// one, and it goes on without.
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

// enqueue leaves a wait to the poller.
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

// insert puts a wait after those for earlier Points.
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

// remove takes a wait out of its queue, if it is in one. The poller removes an empty
// queue from w.queues in its next round.
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

// end ends the waits of a queue for Points up to n.
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

// rerecorded makes waits for an event wait for the end of its stream's work instead,
// because the event is about to be recorded again.
func (w *waits) rerecorded(e *Event) {
	t := e.last.Load()
	if t == nil {
		return // other code recorded it, on an unknown stream
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
