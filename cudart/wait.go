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
// that it leaves an event with one goroutine that asks for all waits of the
// runtime, the oldest one of each stream, and sleeps in between: for an eighth
// of the time that the youngest of them has waited already, so that a wait
// ends at most about an eighth late, and never less than asking took, so that
// a thousand waits use at most half a core. RATIONALE.md has the alternatives
// (blocking-sync events, host functions) with figures.
const (
	spinFor  = 25 * time.Microsecond
	minSleep = 5 * time.Microsecond
	maxSleep = time.Millisecond
)

// waits are the waits of a runtime.
type waits struct {
	rt       *Runtime
	spinners atomic.Int32 // goroutines that ask for themselves just now
	pool     sync.Pool    // of *waiter

	mu      sync.Mutex
	queues  []*waitQueue // those with waiters
	closed  bool
	running bool
	stopped chan struct{}
	bell    *bell
}

// A waitQueue holds the waits for one stream, or for one event. What is
// recorded on a stream is done in order, so only the first has to be asked
// for.
type waitQueue struct {
	record      sync.Mutex // keeps the order of records and waiters the same
	first, last *waiter
	listed      bool // in waits.queues
}

type waiter struct {
	next  *waiter
	event *Event
	since time.Time
	done  chan error
}

func newWaits(rt *Runtime) *waits {
	w := &waits{rt: rt, stopped: make(chan struct{})}
	w.pool.New = func() any { return &waiter{done: make(chan error, 1)} }
	return w
}

// waitCancelled says that a wait ended before the work did.
func waitCancelled(what string, err error) error {
	return fmt.Errorf("cudart: wait for %s given up, its work on the GPU goes on: %w", what, err)
}

// Synchronize waits until all work queued on the stream so far is done, and
// returns the work's error if it failed. When ctx ends first it returns ctx's
// error, while the GPU's work goes on: memory that it uses must stay.
// A wait does not occupy a thread.
func (s *Stream) Synchronize(ctx context.Context) error {
	w := s.dev.rt.waits
	done, err := w.spin(ctx, s.dev, &s.alive, fnStreamQuery, uintptr(s.handle))
	if done || err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return waitCancelled(s.String(), err)
	}
	e, err := s.dev.takeEvent()
	if err != nil {
		return err
	}
	s.waiting.record.Lock()
	if err := s.Record(e); err != nil {
		s.waiting.record.Unlock()
		s.dev.giveEvent(e)
		return err
	}
	me, err := w.enqueue(&s.waiting, e)
	s.waiting.record.Unlock()
	if err == nil {
		err = w.await(ctx, &s.waiting, me, s)
	}
	s.dev.giveEvent(e)
	return err
}

// Synchronize waits until the work that the event recorded is done. What is
// said of [Stream.Synchronize] goes for it.
func (e *Event) Synchronize(ctx context.Context) error {
	w := e.dev.rt.waits
	done, err := w.spin(ctx, e.dev, &e.alive, fnEventQuery, uintptr(e.handle))
	if done || err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return waitCancelled(e.String(), err)
	}
	me, err := w.enqueue(&e.waiting, e)
	if err != nil {
		return err
	}
	return w.await(ctx, &e.waiting, me, e)
}

// spin asks for a few microseconds, if not too many do. Their number is what
// bounds the cores that short waits can use.
func (w *waits) spin(ctx context.Context, d *Device, l *lifetime, fn function, handle uintptr) (bool, error) {
	limit := time.Duration(0)
	if int(w.spinners.Add(1)) <= max(1, runtime.GOMAXPROCS(0)/8) {
		limit = spinFor
	}
	defer w.spinners.Add(-1)
	if !l.enter() {
		return false, w.rt.errorf(fn, codeClosed, "wait")
	}
	f := w.rt.frame()
	f.args[0] = handle
	runtime.LockOSThread()
	code := Success
	if w.rt.several {
		code = d.makeCurrent(w.rt.binding, f)
	}
	if code == Success {
		code = w.rt.call(fn, f.args[:1])
		if code == ErrNotReady && limit > 0 {
			for start := time.Now(); code == ErrNotReady && time.Since(start) < limit && ctx.Err() == nil; {
				code = w.rt.call(fn, f.args[:1])
			}
		}
	}
	if code != Success {
		w.rt.clear()
	}
	runtime.UnlockOSThread()
	l.leave()
	w.rt.put(f)
	switch code {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, w.rt.errorf(fn, code, "handle %#x on %v", handle, d)
}

// enqueue leaves the wait for e with the goroutine that asks for all.
func (w *waits) enqueue(q *waitQueue, e *Event) (*waiter, error) {
	me := w.pool.Get().(*waiter)
	me.next, me.event, me.since = nil, e, time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, fmt.Errorf("cudart: wait for %v: %w", e, ErrClosed)
	}
	if !w.running {
		b, err := newBell()
		if err != nil {
			return nil, fmt.Errorf("cudart: wait for %v: %w", e, err)
		}
		w.bell, w.running = b, true
		go w.run()
	}
	if q.first == nil {
		q.first, q.last = me, me
	} else {
		q.last.next, q.last = me, me
	}
	if !q.listed {
		q.listed = true
		w.queues = append(w.queues, q)
	}
	w.bell.ring()
	return me, nil
}

func (w *waits) await(ctx context.Context, q *waitQueue, me *waiter, what fmt.Stringer) error {
	select {
	case err := <-me.done:
		me.event = nil
		w.pool.Put(me)
		return err
	case <-ctx.Done():
	}
	// The asking goroutine may hold me just now: it is not reused.
	w.mu.Lock()
	w.remove(q, me)
	w.mu.Unlock()
	return waitCancelled(what.String(), ctx.Err())
}

// remove takes a waiter out of its queue, if it is still there. The queue
// itself leaves w.queues at the next round.
func (w *waits) remove(q *waitQueue, me *waiter) bool {
	var before *waiter
	for at := q.first; at != nil; before, at = at, at.next {
		if at != me {
			continue
		}
		if before == nil {
			q.first = me.next
		} else {
			before.next = me.next
		}
		if q.last == me {
			q.last = before
		}
		return true
	}
	return false
}

// run asks for all waits until the runtime is closed. It keeps its thread,
// which dies with it, because the precision of sleep is the thread's.
func (w *waits) run() {
	defer close(w.stopped)
	runtime.LockOSThread()
	w.bell.precise()
	defer w.bell.close()
	var heads []*waiter
	var queues []*waitQueue
	for {
		heads, queues = heads[:0], queues[:0]
		w.mu.Lock()
		if w.closed {
			w.failAll()
			w.mu.Unlock()
			return
		}
		kept := w.queues[:0]
		for _, q := range w.queues {
			if q.listed = q.first != nil; q.listed {
				kept = append(kept, q)
				heads, queues = append(heads, q.first), append(queues, q)
			}
		}
		clear(w.queues[len(kept):])
		w.queues = kept
		w.mu.Unlock()

		if len(heads) == 0 {
			w.bell.wait(-1)
			continue
		}
		begin := time.Now()
		youngest := time.Duration(1<<63 - 1)
		ended := false
		for i, me := range heads {
			for me != nil {
				done, err := me.event.Query()
				if !done && err == nil {
					youngest = min(youngest, begin.Sub(me.since))
					break
				}
				ended = true
				me = w.end(queues[i], me, err)
			}
		}
		clear(heads)
		if ended {
			continue // who waited goes on, and others may be done by now
		}
		sleep := min(max(youngest/8, minSleep, time.Since(begin)), maxSleep)
		w.bell.wait(sleep)
	}
}

// end tells a waiter the outcome and returns the next one of its queue.
func (w *waits) end(q *waitQueue, me *waiter, err error) *waiter {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.remove(q, me) {
		me.done <- err
	}
	return q.first
}

func (w *waits) failAll() {
	for _, q := range w.queues {
		for me := q.first; me != nil; {
			next := me.next
			me.done <- fmt.Errorf("cudart: wait for %v: %w", me.event, ErrClosed)
			me = next
		}
		q.first, q.last, q.listed = nil, nil, false
	}
	w.queues = nil
}

// close ends all waits and the goroutine that asks for them.
func (w *waits) close() error {
	w.mu.Lock()
	w.closed = true
	running := w.running
	if running {
		w.bell.ring()
	}
	w.mu.Unlock()
	if running {
		<-w.stopped
	}
	var errs []error
	for _, d := range w.rt.devices {
		errs = append(errs, d.closeEvents())
	}
	return errors.Join(errs...)
}
