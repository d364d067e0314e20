package cudart

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// A Timeline is the order in which a stream does its work. It outlives the stream:
// queued work is done although the [Stream] is closed, or garbage. So code that keeps
// memory for a stream keeps the Timeline, not the Stream.
//
// The Points of a Timeline are numbered. A recording of an event gets the next number
// when it begins, and stands for all Points up to that number. So a later event stands
// for earlier Points too: if one could not be recorded, or cannot be queried, the next
// one answers for it.
type Timeline struct {
	dev     *Device
	id      uint64 // no other Timeline of the process has it
	handle  handle
	exposed atomic.Bool   // Stream.Handle was called: work may be queued unseen
	asked   atomic.Bool   // Stream.Timeline was called: there may be Points
	done    atomic.Uint64 // Points up to this number are reached
	foreign *foreign      // the stream is not this package's; nil if it is

	// unreported is an error of the stream's work that a look at a Point has
	// found. Stream.Query or Stream.Synchronize returns it.
	unreported atomic.Pointer[error]

	mu        sync.Mutex // not held during calls into the library
	begun     uint64     // newest recording that was begun
	wanted    uint64     // newest Point
	recording bool       // a goroutine is inside cudaEventRecord
	draining  bool       // cudaDeviceSynchronize is to answer
	ended     bool       // the stream is destroyed
	failures  int        // of recording or asking, since the last success
	failed    []failure
	failing   atomic.Bool // failed is not empty
	asking    atomic.Bool // a goroutine is inside cudaEventQuery

	// latest is the newest recording that can be queried, or is done, and
	// latestAt the value of handle.queued before it.
	latest, latestAt uint64
	events           *lineEvents

	waiting waitQueue // guarded by waits.mu
}

// lineEvents are the events of a timeline. They are apart from it so that a cleanup can
// reuse them when the timeline is garbage.
type lineEvents struct {
	dev     *Device
	pending []pendingEvent // in the order of their recording
	unused  []*Event
}

// A pendingEvent is recorded and not known to be done. It stands for the Points up to n.
type pendingEvent struct {
	event *Event
	n     uint64
}

// A failure is an error of a look at the Points from after+1 to upTo.
type failure struct {
	after, upTo uint64
	err         error
}

const (
	// maxPending is the number of events that a stream has pending at the most.
	// Beyond it Points share events, and are found to be reached a little later.
	maxPending = 128
	// maxUnused is the number of unused events that a stream keeps for itself,
	// which saves it the device's lock.
	maxUnused = 2
	// maxFailures is the number of ranges of failed Points that are remembered.
	maxFailures = 16
	// drainAfter is the number of failures in a row after which the device as a
	// whole is asked.
	drainAfter = 2
)

// timelines is the number of Timelines that the process has made.
var timelines atomic.Uint64

func newTimeline(d *Device, stream uintptr) *Timeline {
	t := &Timeline{dev: d, id: timelines.Add(1), handle: handle{value: stream, frame: d.rt.newFrame()}, events: &lineEvents{dev: d}}
	t.waiting.line = t
	runtime.AddCleanup(t, (*lineEvents).release, t.events)
	return t
}

// release makes the events available to other streams.
func (es *lineEvents) release() {
	for _, p := range es.pending {
		es.dev.putEvent(p.event)
	}
	for _, e := range es.unused {
		es.dev.putEvent(e)
	}
	es.pending, es.unused = nil, nil
}

// Timeline returns the order of the stream's work, which outlives the stream.
func (s *Stream) Timeline() *Timeline {
	if !s.line.asked.Load() {
		s.line.asked.Store(true)
	}
	return s.line
}

// Point returns the place after all work that is queued so far, and records an event
// there (cudaEventRecord). If no work was queued since the last Point it returns that
// one and makes no call. If the event cannot be recorded, the Point is valid all the
// same: later looks at it try again.
func (t *Timeline) Point() Point {
	p, fresh := t.next()
	if fresh {
		t.record(false)
	}
	return p
}

// End returns the place after all work that is queued so far. It makes no call: the
// first look at the Point records the event, or [Point.Record]. Until then, work that is
// queued later may be waited for as well.
func (t *Timeline) End() Point {
	p, _ := t.next()
	return p
}

// Quiet returns the latest Point, and true if no work was queued since, so that a look
// at it queues nothing. That is so for streams that were closed, too.
func (t *Timeline) Quiet() (Point, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Point{t, t.latest}, t.current()
}

// next returns the Point after all work that is queued so far. If fresh is true, an
// event must be recorded for it.
func (t *Timeline) next() (p Point, fresh bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current() {
		return Point{t, t.latest}, false
	}
	t.wanted = t.begun + 1
	return Point{t, t.wanted}, true
}

// current reports whether no work was queued since the latest recording began.
func (t *Timeline) current() bool {
	return t.latest >= t.wanted && t.latestAt == t.handle.queued() && (!t.exposed.Load() || t.ended)
}

// record records events until all Points have one, or until that fails. Only one
// goroutine records at a time; for others record returns, and that goroutine goes on
// for them. end is set for the end of a stream that is being closed.
//
// After drainAfter failures a stream gets no more events until the device as a whole
// has answered: they would fill its queue.
func (t *Timeline) record(end bool) {
	t.mu.Lock()
	for !t.recording && !t.ended && t.latest < t.wanted && (end || t.failures < drainAfter) {
		t.recording = true
		t.begun++
		n, queued := t.begun, t.handle.queued()
		e := t.events.take()
		t.mu.Unlock()
		e, err := t.recordOne(e, end)
		t.mu.Lock()
		t.recording = false
		switch {
		case err == nil:
			t.events.add(pendingEvent{e, n})
			if n > t.latest {
				t.latest, t.latestAt = n, queued
			}
			continue
		case e != nil:
			t.events.unused = append(t.events.unused, e)
		}
		if end || t.handle.state.Load()&handleClosed == 0 { // else finish records the end
			t.fail(err)
		}
		break
	}
	t.mu.Unlock()
}

// recordOne records e, or a new event, on the stream.
func (t *Timeline) recordOne(e *Event, end bool) (*Event, error) {
	if e == nil {
		var err error
		if e, err = t.dev.takeEvent(); err != nil {
			return nil, err
		}
	}
	var f *frame
	if end { // the handle is closed
		f = t.dev.rt.begin()
	} else {
		f = t.begin()
	}
	code := t.sameStream(f)
	if code == Success {
		code = codeClosed
		if _, ok := e.handle.enter(); ok { // Runtime.Close destroys events that are in use, too
			f.args[0], f.args[1] = e.handle.value, t.handle.value
			code = t.dev.guard(fnEventRecord, f)
			e.leave()
		}
	}
	t.dev.rt.end(f)
	if code != Success {
		return e, t.dev.rt.errorf(fnEventRecord, code, "%v", t)
	}
	return e, nil
}

// take removes an unused event. It returns nil if there is none.
func (es *lineEvents) take() (e *Event) {
	if n := len(es.unused); n > 0 {
		e, es.unused = es.unused[n-1], es.unused[:n-1]
	}
	return e
}

// add appends an event. If there are too many, it drops every second one: the one after
// it stands for its Points too.
func (es *lineEvents) add(p pendingEvent) {
	if len(es.pending) == maxPending {
		rest := es.pending[:0]
		for i, p := range es.pending {
			if i%2 == 1 {
				rest = append(rest, p)
			} else {
				es.unused = append(es.unused, p.event)
			}
		}
		clear(es.pending[len(rest):])
		es.pending = rest
	}
	es.pending = append(es.pending, p)
}

// done removes the first n events, which are done.
func (es *lineEvents) done(n int) {
	for _, p := range es.pending[:n] {
		es.unused = append(es.unused, p.event)
	}
	es.pending = slices.Delete(es.pending, 0, n)
	for len(es.unused) > maxUnused {
		last := len(es.unused) - 1
		es.dev.putEvent(es.unused[last])
		es.unused = es.unused[:last]
	}
}

// standsFor returns the index of the first event that stands for Point n, or -1.
func (es *lineEvents) standsFor(n uint64) int {
	return slices.IndexFunc(es.pending, func(p pendingEvent) bool { return p.n >= n })
}

// reached looks whether Point n is reached. It does not wait for goroutines that are
// inside the library.
func (t *Timeline) reached(n uint64) bool {
	if n <= t.done.Load() {
		return true
	}
	if t.asking.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.latest < n {
		t.mu.Unlock()
		t.record(false)
		t.mu.Lock()
		if t.latest < n && !t.recording && (t.ended || t.failures >= drainAfter) {
			t.drain()
		}
	}
	i := t.events.standsFor(n)
	if i < 0 || t.asking.Load() {
		return n <= t.done.Load()
	}
	p := t.events.pending[i]
	t.asking.Store(true)
	t.mu.Unlock()
	done, err := p.event.Query()
	t.mu.Lock()
	t.asking.Store(false)
	// Other goroutines may have changed the list during the call.
	i = slices.Index(t.events.pending, p)
	switch {
	case err != nil:
		t.fail(err)
		if i >= 0 {
			t.events.pending = slices.Delete(t.events.pending, i, i+1)
			t.discard(p.event)
		}
	case i < 0: // the event may stand for another Point now
	case done:
		t.failures = 0
		t.reach(p.n)
		t.events.done(i + 1)
	default:
		t.failures = 0
	}
	return n <= t.done.Load()
}

// discard takes an event out of use that cannot be queried and was removed from the
// pending ones. A new event has to stand for its Points.
func (t *Timeline) discard(e *Event) {
	if t.latest = t.done.Load(); len(t.events.pending) > 0 {
		t.latest = t.events.pending[len(t.events.pending)-1].n
	}
	// The number of calls before that older recording is not known any more.
	t.latestAt = ^uint64(0)
	t.wanted = max(t.wanted, t.begun)
	t.dev.discardEvent(e)
	if t.failures >= drainAfter {
		t.drain()
	}
}

func (t *Timeline) reach(n uint64) {
	if n > t.done.Load() {
		t.done.Store(n)
	}
}

// fail remembers an error of recording or querying an event.
func (t *Timeline) fail(err error) {
	t.failures++
	t.failing.Store(true)
	t.unreported.Store(&err)
	t.failed = append(t.failed, failure{after: t.done.Load(), upTo: t.begun, err: err})
	if len(t.failed) > maxFailures {
		t.failed = slices.Delete(t.failed, 0, 1)
	}
}

// drain lets cudaDeviceSynchronize answer for the Points so far. It needs t.mu.
func (t *Timeline) drain() {
	if !t.draining {
		t.draining = true
		t.dev.drainer.add(drainRequest{line: t})
	}
}

// beginAnswer returns the number of an answer that is about all work so far and needs no
// event: of cudaStreamQuery or cudaDeviceSynchronize. queued is the value of
// handle.queued before it.
func (t *Timeline) beginAnswer() (n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begun++
	return t.begun, t.handle.queued()
}

// answered records the answer that all work before Point n is done.
func (t *Timeline) answered(n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures = 0
	t.reach(n)
	if t.latest < n {
		t.latest, t.latestAt = n, queued
	}
	past := t.events.standsFor(n + 1)
	if past < 0 {
		past = len(t.events.pending)
	}
	t.events.done(past)
}

// drained records the outcome of cudaDeviceSynchronize.
func (t *Timeline) drained(n, queued uint64, err error) {
	if err == nil {
		t.answered(n, queued)
	}
	t.mu.Lock()
	t.draining = false
	if err != nil {
		t.fail(err)
	}
	t.mu.Unlock()
	t.dev.rt.waits.end(&t.waiting, n, err)
}

// leave ends a call on the stream, and destroys the stream if it was closed during the
// call.
func (t *Timeline) leave(queued bool) {
	if t.handle.leave(queued) {
		if err := t.finish(); err != nil {
			t.dev.rt.undone(t.finishAgain)
		}
	}
}

// close refuses work from now on, and destroys the stream unless calls are in progress:
// then the last of them does.
func (t *Timeline) close() error {
	if t.handle.close() {
		return t.finish()
	}
	return nil
}

func (t *Timeline) finishAgain() error {
	if t.handle.claim() {
		return t.finish()
	}
	return nil
}

// finish destroys the stream (cudaStreamDestroy), unless other code owns it. If there
// may be Points, it records an event for the end of the stream's work first.
func (t *Timeline) finish() error {
	if t.asked.Load() {
		t.mu.Lock()
		if !t.current() {
			t.wanted = t.begun + 1
		}
		t.mu.Unlock()
		t.record(true)
	}
	var err error
	if t.foreign == nil {
		err = t.dev.destroy(fnStreamDestroy, &t.handle, t)
	} else {
		t.handle.destroyed()
		defer close(t.foreign.unused)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.handle.state.Load()&handleDestroyed != 0 {
		t.ended = true
		for e := t.events.take(); e != nil; e = t.events.take() {
			t.dev.putEvent(e)
		}
	}
	return err
}

// String returns the handle and the device of the stream, for messages.
func (t *Timeline) String() string { return fmt.Sprintf("stream %#x of %v", t.handle.value, t.dev) }

// err returns the first error that was found at or before Point n and is not one of
// earlier work.
func (t *Timeline) err(n uint64) error {
	if !t.failing.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.failed {
		if f.after < n && n <= f.upTo {
			return f.err
		}
	}
	return nil
}

// eventFor returns an event that stands for Point n, without an event if there is none.
//
// Other goroutines may destroy the event before the caller uses it, or record it again,
// on any stream: isPending reports whether that could have happened.
func (t *Timeline) eventFor(n uint64) pendingEvent {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.events.standsFor(n)
	if i < 0 {
		return pendingEvent{}
	}
	return t.events.pending[i]
}

// isPending reports whether an event of eventFor has stood for the same Points ever since.
func (t *Timeline) isPending(p pendingEvent) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Contains(t.events.pending, p)
}
