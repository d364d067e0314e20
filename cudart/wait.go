package cudart

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/poll"
)

// How a goroutine waits for the GPU.
//
// CUDA's own waits keep a thread each, and by default a core. Here a wait first queries
// by itself for a few microseconds, which is enough for small copies. Then it joins a
// queue, and one goroutine for each device, the poller, queries for all waits: for the
// first one of each stream. Between two rounds the poller sleeps for a sixteenth of the
// time that the youngest wait has lasted, so that a wait ends some percent late at most;
// and at least as long as the round took, so that a thousand waits use half a core at
// most. RATIONALE.md has the alternatives (blocking-sync events, host functions) with
// figures.
//
// Any call into the library can block: a stream blocks its caller when about a thousand
// entries are queued, and drivers have locks and defects. So a wait whose context can
// end makes no call on the caller's goroutine, which costs half a microsecond. A bounded
// number of waits query at a time; the poller queries for the others. When the poller is
// stuck inside the library, another goroutine takes over. So a device that hangs occupies a
// bounded number of threads, and holds up no wait for another device.
const (
	spinFor  = 25 * time.Microsecond
	minSleep = 5 * time.Microsecond
	maxSleep = 200 * time.Microsecond
)

// waits are the waits for the work of one device.
//
//	a wait is | entered by                       | left by
//	querying  | await, up to waits.spinners      | its outcome, or queued
//	queued    | enqueue                          | its outcome (end), abandon
//	abandoned | its context, Runtime.Close       | – (another goroutine may hold it)
//
// A wait's fields are its caller's until it is queued, and guarded by waits.mu from then on.
type waits struct {
	rt       *Runtime
	pool     sync.Pool     // of *wait
	spinning poll.Limit    // waits that query
	spinners int32         // maximum of spinning
	queries  bounded.Group // of Point.Done
	poller   *bounded.Relay

	mu      sync.Mutex // never held during calls into the library
	queues  []*waitQueue
	closed  bool
	sleeper *sleeper // wakes the poller; nil if it does not run
}

// A waitQueue holds the waits for Points of one timeline, in their order. It is guarded by waits.mu.
type waitQueue struct {
	of          *timeline
	first, last *wait
	listed      bool // in waits.queues
}

// A wait is one goroutine's. It is reused after its outcome was received.
type wait struct {
	at     Point
	query  func() (over bool, err error) // for the first microseconds
	done   chan error
	notify chan<- struct{} // instead of done
	drains uint64          // number of the device's newest cudaDeviceSynchronize when the wait began

	// Created once, so that starting a goroutine allocates nothing.
	begin, queryOnce func()
	reached, streams func() (bool, error) // for query
	timer            *time.Timer          // of Point.Done

	// Guarded by waits.mu.
	queue      *waitQueue
	prev, next *wait
	since      time.Time
	abandoned  bool
}

// errNotReached is the outcome of Point.Done.
var errNotReached = errors.New("not reached")

func (w *waits) init(rt *Runtime) {
	w.rt, w.spinners = rt, int32(max(2, runtime.GOMAXPROCS(0)/4))
	w.poller = bounded.NewRelay(w.poll)
	w.pool.New = func() any {
		me := &wait{done: make(chan error, 1)}
		me.begin = func() { w.begin(me) }
		me.queryOnce = func() { w.queryOnce(me) }
		me.reached = func() (bool, error) { return me.at.timeline.reached(me.at.n), nil }
		me.streams = func() (bool, error) { return me.at.timeline.queryStream() }
		me.timer = time.NewTimer(time.Hour)
		me.timer.Stop()
		return me
	}
}

func (w *waits) get(p Point) *wait {
	me := w.pool.Get().(*wait)
	me.at, me.query, me.drains = p, me.reached, p.timeline.dev.drainer.begun.Load()
	return me
}

// put makes a wait available that no other goroutine holds.
func (w *waits) put(me *wait) {
	me.at = Point{} // keeps no stream from being collected
	w.pool.Put(me)
}

// waitCanceled makes the error of a wait whose context ended first.
func waitCanceled(what fmt.Stringer, ctx context.Context) error {
	return fmt.Errorf("wait for %v canceled, its work on the GPU goes on: %w", what, bounded.Ended(ctx))
}

// Synchronize waits until all work that is queued on the stream so far is done
// (cudaStreamQuery, cudaEventQuery), and returns the work's error if it failed. If ctx
// ends first, it returns ctx's error, and the GPU's work goes on: memory that it uses
// must stay. The same is so for errors of CUDA that [Point.Wait] returns. If the Runtime
// or the stream is closed, the error wraps [ErrClosed]; a nil ctx is an error. A wait
// occupies no thread.
func (s *Stream) Synchronize(ctx context.Context) error {
	if !s.made() {
		return notMade(fnStreamQuery)
	}
	t := s.timeline
	switch {
	case ctx == nil:
		return fmt.Errorf("synchronize %v: %w", s, errNilContext)
	case t.closed():
		return t.dev.rt.errorf(fnStreamQuery, codeClosed, "%v", s)
	}
	w := &s.dev.waits
	me := w.get(t.End())
	me.query = me.streams // which needs no event, and reports errors of an idle stream too
	if err := w.await(ctx, me); err != nil {
		return err
	}
	return t.report()
}

// queryStream reports whether all work so far is done, without an event. What it cannot
// find out, an event or the device as a whole will report: see timeline.reached.
func (t *timeline) queryStream() (done bool, err error) {
	done, err = t.query(fnStreamQuery)
	if err != nil {
		t.mu.Lock()
		t.fail(err)
		t.mu.Unlock()
		return false, errNotReached
	}
	return done, nil
}

// await starts a wait and waits for its outcome, or until ctx ends.
func (w *waits) await(ctx context.Context, me *wait) error {
	what := me.at.timeline
	switch {
	case ctx.Err() != nil:
		w.put(me)
		return waitCanceled(what, ctx)
	case w.rt.isClosed():
		w.put(me)
		return fmt.Errorf("wait for %v: the Runtime was closed: %w", what, ErrClosed)
	case !w.spinning.TryBegin(w.spinners):
		w.enqueue(me)
	case ctx.Done() == nil: // nothing can end the wait early: the caller may query
		over, err := w.spin(me)
		if over {
			w.put(me)
			return err
		}
		w.enqueue(me)
	default:
		go me.begin()
	}
	select {
	case err := <-me.done:
		w.put(me)
		return err
	case <-ctx.Done():
		w.abandon(me)
		return waitCanceled(what, ctx)
	case <-w.rt.closing:
		w.abandon(me)
		return fmt.Errorf("wait for %v: the Runtime was closed: %w", what, ErrClosed)
	}
}

// abandon ends a wait whose caller has returned. It is not reused, because another goroutine
// may hold it.
func (w *waits) abandon(me *wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	me.abandoned = true
	w.remove(me)
}

// begin is the wait of a caller whose context can end.
func (w *waits) begin(me *wait) {
	if over, err := w.spin(me); over {
		me.done <- err
	} else {
		w.enqueue(me)
	}
}

// spin queries for a few microseconds, until the place is reached. Then it counts as
// spinning no more, and an event marks the place, so that work which is queued
// later is not waited for.
func (w *waits) spin(me *wait) (over bool, err error) {
	over, err = spin(me.query)
	if !over && !me.at.Completed() {
		me.at.timeline.mark(me.at.n)
	}
	w.spinning.Add(-1)
	return over, err
}

// mark records an event that stands for Point n, unless there is one.
func (t *timeline) mark(n uint64) {
	t.mu.Lock()
	t.marks.wanted = max(t.marks.wanted, n)
	t.mu.Unlock()
	t.record(false)
}

// spin queries for a few microseconds. errNotReached ends that early.
func spin(query func() (done bool, err error)) (over bool, err error) {
	over = poll.Poller{For: spinFor, Polls: 8}.Until(func() (done bool) {
		done, err = query()
		return done || err != nil
	})
	if err == errNotReached {
		return false, nil
	}
	return over, err
}

// queryOnce is the wait of Point.Done: it queries once.
func (w *waits) queryOnce(me *wait) {
	var err error
	if !me.at.timeline.reached(me.at.n) {
		err = errNotReached
	}
	w.queries.End()
	me.done <- err
}

// enqueue leaves a wait to the poller.
func (w *waits) enqueue(me *wait) {
	w.mu.Lock()
	switch {
	case me.abandoned:
		w.mu.Unlock()
		return
	case w.closed:
		me.end(fmt.Errorf("wait for %v: %w", me.at.timeline, ErrClosed))
		w.mu.Unlock()
		return
	}
	me.since = time.Now()
	q := &me.at.timeline.waitQueue
	q.insert(me)
	if !q.listed {
		q.listed = true
		w.queues = append(w.queues, q)
	}
	if w.sleeper != nil {
		w.sleeper.wake()
	}
	w.mu.Unlock()
	w.poller.Start()
}

// insert puts a wait behind all waits for earlier places.
func (q *waitQueue) insert(me *wait) {
	before := q.last
	for before != nil && before.at.n > me.at.n {
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

// end ends the waits of a queue for places up to n: with an error those that began before a cudaDeviceSynchronize, by its
// number, and else all.
func (w *waits) end(q *waitQueue, n, drain uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for me := q.first; me != nil && me.at.n <= n; {
		next := me.next
		if err == nil || me.drains < drain {
			w.remove(me)
			me.end(err)
		}
		me = next
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

// close ends all waits.
func (w *waits) close() {
	w.mu.Lock()
	w.closed = true
	queues := w.queues
	w.queues = nil
	if w.sleeper != nil {
		w.sleeper.wake()
	}
	w.mu.Unlock()
	for _, q := range queues {
		w.end(q, math.MaxUint64, math.MaxUint64, fmt.Errorf("wait for %v: %w", q.of, ErrClosed))
	}
}
