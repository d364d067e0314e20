package cudart

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/internal/bounded"
)

// A Point is a place in the order of a stream: after all work that was queued when the
// Point was made, and before work that is queued later. The zero Point is reached.
// Points are cheap to make, and compare equal if no work was queued between them.
//
// A Point is reached if all work before it is done, or has failed: in both cases that
// work uses no memory any more. Err returns the error of failed work. The device
// reports through events that are recorded on the stream, and a later event stands for
// earlier Points too. If calls fail or block:
//
//	case                        | the Point is
//	cudaEventRecord fails       | not reached; each query records again
//	cudaEventQuery fails        | not reached; the next query records first
//	two failures in a row       | reached if cudaDeviceSynchronize succeeds, which is
//	                            | called once for all Points of the device
//	that fails as well          | not reached: Wait returns the error, because the
//	                            | memory may be in use; the next query tries again
//	stream closed or lost       | queried by an event that is recorded before the
//	                            | stream is destroyed
//	a call blocks               | not reached; other queries do not wait for the call
//	Runtime closed              | reached if that is known, or cudaDeviceSynchronize
//	                            | succeeds at once; else Wait returns ErrClosed
type Point struct {
	timeline *timeline
	n        uint64
}

// Point returns the place after all work that is queued on the stream so far, and
// records an event there (cudaEventRecord). If no work was queued since the last Point it
// returns that one and makes no call. If the event cannot be recorded, the Point is valid
// all the same: later queries of it try again. A Point stays valid after the stream's Close.
func (s *Stream) Point() Point { return s.order().point() }

// Completed reports whether the Point is known to be reached. It does not call the library.
func (p Point) Completed() bool { return p.timeline == nil || p.n <= p.timeline.done.Load() }

// Done reports whether the Point is reached (cudaEventQuery). It returns false if ctx
// is nil, or ends first. If ctx can end, the library is called on another goroutine, so
// that a call that blocks holds up the caller for 200 ms at most: Done returns false then.
// Meanwhile it returns false at once to other callers that query the stream.
func (p Point) Done(ctx context.Context) bool {
	switch {
	case p.Completed():
		return true
	case ctx == nil || ctx.Err() != nil:
		return false
	case ctx.Done() == nil:
		return p.timeline.reached(p.n)
	}
	w := &p.timeline.dev.waits
	if !w.queries.TryBegin() { // bounded.MaxInside calls are inside the library
		return false
	}
	me := w.get(p)
	go me.queryOnce()
	me.timer.Reset(bounded.QueryTimeout)
	defer me.timer.Stop()
	select {
	case err := <-me.done:
		me.timer.Stop()
		w.put(me)
		return err == nil
	case <-ctx.Done():
	case <-me.timer.C:
	}
	// The goroutine of the query holds the wait.
	return p.Completed()
}

// Wait waits until the Point is reached. It then returns nil, also if the work failed:
// see Err. If ctx ends first, Wait returns ctx's error, and the GPU's work goes on. Any
// other error means that CUDA cannot report whether the work is done: memory that it
// uses must stay. A nil ctx is an error. A wait occupies no thread.
func (p Point) Wait(ctx context.Context) error {
	switch {
	case ctx == nil:
		return fmt.Errorf("wait for a Point: %w", errNilContext)
	case p.Completed():
		return nil
	case p.timeline.dev.rt.isClosed() && ctx.Err() == nil:
		return p.timeline.waitClosed(ctx)
	}
	return p.timeline.dev.waits.await(ctx, p.timeline.dev.waits.get(p))
}

// Notify sends to c when the Point is reached, or when CUDA cannot report that it is:
// Completed returns which. It never blocks: if c is full, nothing is sent. stop
// withdraws the request.
func (p Point) Notify(c chan<- struct{}) (stop func()) {
	if p.Completed() {
		select {
		case c <- struct{}{}:
		default:
		}
		return func() {}
	}
	w := &p.timeline.dev.waits
	me := &wait{at: p, notify: c, drains: p.timeline.dev.drainer.begun.Load()}
	w.enqueue(me)
	return func() { w.abandon(me) }
}

// Err returns the error that the stream reported before the Point was known to be
// reached: bytes that were copied before the Point may be wrong. Call it after Done or
// Wait. A stream keeps its last 16 errors.
func (p Point) Err() error {
	if p.timeline == nil {
		return nil
	}
	return p.timeline.err(p.n)
}

// record records an event for a Point of timeline.End, unless there is one
// (cudaEventRecord). If that fails, later queries of the Point try again. It does not
// block: on a stream that may be full, and on one that other code uses, the call is made
// on another goroutine, and work that is queued meanwhile may be waited for as well.
func (p Point) record() {
	t := p.timeline
	switch {
	case p.Completed():
	case t.mayBlock():
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.marks.latest < p.n && !t.marks.recording {
			go t.record(false)
		}
	default:
		t.record(false)
	}
}

// WaitPoint makes work that is queued later wait until a Point of another stream is
// reached (cudaStreamWaitEvent). The caller does not wait. It makes no call, and queues
// nothing, if the Point is known to be reached, or if the last wait that WaitPoint queued is
// for it or for a later one of its stream. After [Stream.Handle], and on a stream of
// [Device.StreamFromHandle], only a Point that is reached needs no call: the last wait may
// have gone into a graph that other code was capturing. If no event can be recorded for the
// Point, nothing is queued, and the error is of cudaEventRecord.
func (s *Stream) WaitPoint(p Point) error {
	if !s.made() {
		return notMade(fnStreamWaitEvent)
	}
	if p.Completed() || p.timeline == s.timeline || s.follows(p) {
		return nil
	}
	if e := p.timeline.eventFor(p.n); e.event != nil {
		err := s.with(fnStreamWaitEvent, e.event)
		switch {
		case err != nil && !e.event.closed():
			return err
		case err == nil && p.timeline.isPending(e):
			s.timeline.mu.Lock()
			defer s.timeline.mu.Unlock()
			s.followed = pointID{p.timeline.id, e.n}
			return nil
		}
		// During the call another goroutine found that it is done, or has destroyed it,
		// because it could not be queried, or recorded it again, perhaps on another stream.
		if p.Completed() {
			return nil
		}
	}
	// One that is recorded now stands for the Point too. It is not the timeline's, because
	// another goroutine may be recording there. So it has no number to be remembered by.
	c, err := p.timeline.recordFree()
	if c == nil {
		return err
	}
	defer p.timeline.dev.putEvent(c)
	if err != nil {
		return err
	}
	return s.with(fnStreamWaitEvent, c)
}

// A pointID is a Point that does not keep its timeline from being collected.
type pointID struct{ timeline, n uint64 }

// follows reports whether the stream waits for the Point already. If it is closed, the call
// is to return the error.
func (s *Stream) follows(p Point) bool {
	if s.timeline.exposed.Load() || s.timeline.closed() || s.dev.rt.isClosed() {
		return false
	}
	s.timeline.mu.Lock()
	defer s.timeline.mu.Unlock()
	return s.followed.timeline == p.timeline.id && s.followed.n >= p.n
}

// After reports whether the Point is no earlier than another one of the same stream.
func (p Point) After(other Point) bool { return p.timeline == other.timeline && p.n >= other.n }
