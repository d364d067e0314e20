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
// runtime, the oldest one of each stream, and sleeps in between: for a
// sixteenth of the time that the youngest of them has waited already, so that
// a wait ends some percent late at most, and never less than asking took, so
// that a thousand waits use half a core at most. RATIONALE.md has the
// alternatives (blocking-sync events, host functions) with figures.
const (
	spinFor  = 25 * time.Microsecond
	minSleep = 5 * time.Microsecond
	maxSleep = 200 * time.Microsecond
)

// waits are the waits of a runtime.
type waits struct {
	rt    *Runtime
	pool  sync.Pool // of *waiter
	first turns

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
	w := &waits{rt: rt, stopped: make(chan struct{}), first: newTurns()}
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
	turn := w.first.take()
	done, err := w.look(ctx, s.dev, fnStreamQuery, &s.handle, turn)
	if done || err != nil {
		w.first.leave(turn)
		return err
	}
	me, err := w.record(s)
	w.first.leave(turn)
	if err != nil {
		return err
	}
	e := me.event
	err = w.await(ctx, &s.waiting, me, s)
	s.dev.giveEvent(e)
	return err
}

// Synchronize waits until the work that the event recorded is done. What is
// said of [Stream.Synchronize] goes for it.
func (e *Event) Synchronize(ctx context.Context) error {
	w := e.dev.rt.waits
	turn := w.first.take()
	done, err := w.look(ctx, e.dev, fnEventQuery, &e.handle, turn)
	w.first.leave(turn)
	if done || err != nil {
		return err
	}
	me, err := w.enqueue(&e.waiting, e)
	if err != nil {
		return err
	}
	return w.await(ctx, &e.waiting, me, e)
}

// turns bound how many goroutines ask at once. It is what bounds the cores
// that short waits can use, and the threads that a crowd of them makes: each
// goroutine in a C function needs one.
type turns struct {
	spinning *atomic.Int32
	spinners int32         // that many may ask again and again
	crowd    chan struct{} // others queue here, and ask once
}

// A turn is what take gave and leave takes back.
type turn bool

const (
	spins turn = true
	queue turn = false
)

func newTurns() turns {
	procs := runtime.GOMAXPROCS(0)
	return turns{spinning: new(atomic.Int32), spinners: int32(max(1, procs/8)), crowd: make(chan struct{}, max(1, procs/8))}
}

func (t turns) take() turn {
	if t.spinning.Add(1) <= t.spinners {
		return spins
	}
	t.spinning.Add(-1)
	t.crowd <- struct{}{}
	return queue
}

func (t turns) leave(k turn) {
	if k == spins {
		t.spinning.Add(-1)
		return
	}
	<-t.crowd
}

// look asks once, or for a few microseconds. It is guard with a call that is
// repeated: the pending "not ready" is taken away once, at the end.
func (w *waits) look(ctx context.Context, d *Device, fn function, h *handle, turn turn) (done bool, err error) {
	f := w.rt.begin(nil)
	f.args[0] = h.value
	runtime.LockOSThread()
	code := Success
	if w.rt.several {
		code = d.makeCurrent(w.rt.binding, f)
	}
	if code == Success {
		code = w.ask(fn, h, f)
	}
	if code == ErrNotReady && turn == spins {
		// The clock and the context are looked at now and then only: that takes
		// as long as the question.
		const questions = 8
		for start := time.Now(); code == ErrNotReady && time.Since(start) < spinFor && ctx.Err() == nil; {
			for i := 0; i < questions && code == ErrNotReady; i++ {
				code = w.ask(fn, h, f)
			}
		}
	}
	if code != Success && code != codeClosed {
		w.rt.clear(f)
	}
	runtime.UnlockOSThread()
	w.rt.end(f)
	switch code {
	case Success:
		return true, nil
	case ErrNotReady:
		if err := ctx.Err(); err != nil {
			return false, waitCancelled(fmt.Sprintf("handle %#x of %v", h.value, d), err)
		}
		return false, nil
	}
	return false, w.rt.errorf(fn, code, "handle %#x on %v", h.value, d)
}

// ask asks once. Others may use the handle between two questions.
func (w *waits) ask(fn function, h *handle, f *frame) Code {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return codeClosed
	}
	return w.rt.call(fn, &f.cCall)
}

// record leaves a wait for all that is queued on s just now.
func (w *waits) record(s *Stream) (*waiter, error) {
	e, err := s.dev.takeEvent()
	if err != nil {
		return nil, err
	}
	s.waiting.record.Lock()
	defer s.waiting.record.Unlock()
	if err = s.Record(e); err == nil {
		var me *waiter
		if me, err = w.enqueue(&s.waiting, e); err == nil {
			return me, nil
		}
	}
	s.dev.giveEvent(e)
	return nil, err
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
		sleep := max(min(max(youngest/16, minSleep), maxSleep), time.Since(begin))
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
