package cudart

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// A timeline is the order in which a stream does its work. It outlives the stream:
// queued work is done although the [Stream] is closed, or garbage. So code that keeps
// memory for a stream keeps the timeline, not the Stream.
//
// The Points of a timeline are numbered. A recording of an event gets the next number
// when it begins, and stands for all Points up to that number. So a later event stands
// for earlier Points too: if one could not be recorded, or cannot be queried, the next
// one takes its place.
type timeline struct {
	handle
	id      uint64        // no other timeline of the process has it
	exposed atomic.Bool   // Stream.Handle was called: work may be queued unseen
	pointed atomic.Bool   // Stream.order was called: there may be Points
	done    atomic.Uint64 // Points up to this number are reached
	foreign *foreign      // the stream is not this package's; nil if it is

	mu     sync.Mutex // not held during calls into the library
	marks  marks
	faults faults

	waitQueue // guarded by waits.mu
}

// timelines is the number of timelines that the process has made.
var timelines atomic.Uint64

func newTimeline(d *Device, stream uintptr) *timeline {
	t := &timeline{id: timelines.Add(1), handle: handle{dev: d, value: stream, frame: d.rt.newFrame()}}
	t.marks.events = &timelineEvents{dev: d}
	t.owner, t.of = t, t
	runtime.AddCleanup(t, (*timelineEvents).release, t.marks.events)
	return t
}

// order returns the stream's timeline, nil if the stream is not made.
func (s *Stream) order() *timeline {
	if !s.made() {
		return nil
	}
	if !s.timeline.pointed.Load() {
		s.timeline.pointed.Store(true)
	}
	return s.timeline
}

// point returns the place after all work that is queued so far: see [Stream.Point].
func (t *timeline) point() Point {
	p, needsEvent := t.next()
	if needsEvent {
		t.record(false)
	}
	return p
}

// End returns the place after all work that is queued so far. It makes no call: the
// first query of the Point records the event, or Point.record. Until then, work that is
// queued later may be waited for as well.
func (t *timeline) End() Point {
	p, _ := t.next()
	return p
}

// Idle returns the latest Point, and true if no work was queued since, so that a query
// of it queues nothing. Closed streams are included.
func (t *timeline) Idle() (Point, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Point{t, t.marks.latest}, t.current()
}

// ID returns a number that no other timeline of the process has, and that is not 0.
func (t *timeline) ID() uint64 { return t.id }

// next returns the Point after all work that is queued so far. If needsEvent is true, an
// event must be recorded for it.
func (t *timeline) next() (p Point, needsEvent bool) {
	if t == nil {
		return Point{}, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current() {
		return Point{t, t.marks.latest}, false
	}
	t.marks.wanted = t.marks.begun + 1
	return Point{t, t.marks.wanted}, true
}

// current reports whether no work was queued since the latest recording began.
func (t *timeline) current() bool {
	m := &t.marks
	return m.latest >= m.wanted && m.latestAt == t.queued() && (!t.exposed.Load() || m.ended)
}

// reached queries whether Point n is reached. It does not wait for goroutines that are
// inside the library.
func (t *timeline) reached(n uint64) bool {
	if n <= t.done.Load() {
		return true
	}
	m := &t.marks
	if m.querying.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if m.latest < n {
		m.wanted = max(m.wanted, n)
		t.mu.Unlock()
		t.record(false)
		t.mu.Lock()
		if m.latest < n && !m.recording && (m.ended || t.faults.inRow >= drainAfter) {
			t.drain()
		}
	}
	i := m.events.eventOfPoint(n)
	if i < 0 || m.querying.Load() {
		return n <= t.done.Load()
	}
	p := m.events.pending[i]
	m.querying.Store(true)
	t.mu.Unlock()
	done, err := p.event.query()
	t.mu.Lock()
	m.querying.Store(false)
	// Other goroutines may have changed the list during the call.
	i = slices.Index(m.events.pending, p)
	switch {
	case err != nil:
		t.fail(err)
		if i >= 0 {
			m.events.pending = slices.Delete(m.events.pending, i, i+1)
			t.discard(p.event)
		}
	case i < 0: // the event may stand for another Point now
	case done:
		t.faults.inRow = 0
		t.reach(p.n, p.queued)
		m.events.done(i + 1)
	default:
		t.faults.inRow = 0
	}
	return n <= t.done.Load()
}

// discard takes an event out of use that cannot be queried and was removed from the
// pending ones. A new event has to stand for its Points.
func (t *timeline) discard(c *cEvent) {
	m := &t.marks
	if m.latest = t.done.Load(); len(m.events.pending) > 0 {
		m.latest = m.events.pending[len(m.events.pending)-1].n
	}
	// The number of entries before that older recording is not known any more.
	m.latestAt = ^uint64(0)
	m.wanted = max(m.wanted, m.begun)
	t.dev.discardEvent(c)
	if t.faults.inRow >= drainAfter {
		t.drain()
	}
}

// reach records that the stream has done Point n, which was made after queued entries.
func (t *timeline) reach(n, queued uint64) {
	if n > t.done.Load() {
		t.done.Store(n)
		t.marks.doneAt.Store(queued)
	}
}

// drain requests a cudaDeviceSynchronize for the Points so far. It needs t.mu.
func (t *timeline) drain() {
	if !t.marks.draining {
		t.marks.draining = true
		t.dev.addDrain(&drainRequest{timeline: t})
	}
}

// beginQuery returns the number of a query for all work so far that needs no event:
// cudaStreamQuery or cudaDeviceSynchronize. queued is the value of handle.queued before it.
func (t *timeline) beginQuery() (n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.marks.begun++
	return t.marks.begun, t.queued()
}

// completed records that all work before Point n is done.
func (t *timeline) completed(n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := &t.marks
	t.faults.inRow = 0
	t.reach(n, queued)
	if m.latest < n {
		m.latest, m.latestAt = n, queued
	}
	past := m.events.eventOfPoint(n + 1)
	if past < 0 {
		past = len(m.events.pending)
	}
	m.events.done(past)
}

// drained records the outcome of a cudaDeviceSynchronize, by its number. An error does not end waits that came after the
// call began: they query again, and request the next call if that fails.
func (t *timeline) drained(n, queued, drain uint64, err error) {
	if err == nil {
		t.completed(n, queued)
	}
	t.mu.Lock()
	t.marks.draining = false
	if err != nil {
		t.fail(err)
	}
	t.mu.Unlock()
	t.dev.waits.end(&t.waitQueue, n, drain, err)
}

// finish destroys the stream (cudaStreamDestroy), unless other code owns it. If there
// may be Points, it records an event for the end of the stream's work first.
func (t *timeline) finish() error {
	if t.pointed.Load() {
		t.mu.Lock()
		if !t.current() {
			t.marks.wanted = t.marks.begun + 1
		}
		t.mu.Unlock()
		t.record(true)
	}
	var err error
	if t.foreign == nil {
		err = t.destroy(fnStreamDestroy)
	} else {
		t.destroyed()
		defer close(t.foreign.unused)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.isDestroyed() {
		t.marks.ended = true
		for c := t.marks.events.take(); c != nil; c = t.marks.events.take() {
			t.dev.putEvent(c)
		}
	}
	return err
}

// String returns the handle and the device of the stream, for messages.
func (t *timeline) String() string {
	return fmt.Sprintf("stream %#x of %v", t.value, t.dev)
}
