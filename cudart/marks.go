package cudart

import (
	"slices"
	"sync/atomic"
)

// The marks of a timeline are the events that stand for its Points. They are guarded by
// timeline.mu. The atomic fields are written under it, and read without too.
//
//	number | newest recording that                | set by
//	begun  | was begun, or query without an event  | record, beginQuery
//	latest | can be queried, or is done            | record, completed, discard
//
// One goroutine at a time is inside cudaEventRecord (recording), and one inside
// cudaEventQuery (querying). Others do not wait for them.
type marks struct {
	begun     uint64
	wanted    uint64 // newest Point
	recording bool
	querying  atomic.Bool
	draining  bool // cudaDeviceSynchronize was requested
	ended     bool // the stream is destroyed

	latest   uint64
	latestAt uint64        // handle.queued before the recording
	doneAt   atomic.Uint64 // handle.queued before timeline.done
	events   *timelineEvents
}

// timelineEvents are the events of a timeline. They are apart from it so that a cleanup can
// reuse them when the timeline is garbage.
type timelineEvents struct {
	dev     *Device
	pending []pendingEvent // in the order of their recording
	unused  []*cEvent
}

// A pendingEvent is recorded and not known to be done. It stands for the Points up to n.
type pendingEvent struct {
	event     *cEvent
	n, queued uint64 // and handle.queued before the recording
}

const (
	// maxPending is the maximum number of pending events of a stream.
	// Beyond it Points share events, and are found to be reached a little later.
	maxPending = 128
	// maxUnused is the number of unused events that a stream keeps for itself,
	// which saves it the device's lock.
	maxUnused = 2
	// maxUnblocked is the number of entries that certainly fit a stream's queue, which
	// has room for about a thousand.
	maxUnblocked = 256
)

// mayBlock reports whether queueing an entry may block because the stream is full.
func (t *timeline) mayBlock() bool {
	return t.exposed.Load() || t.queued()-t.marks.doneAt.Load() > maxUnblocked
}

// record records events until all Points have one, or until that fails. Only one
// goroutine records at a time; for others record returns, and that goroutine goes on
// for them. end is set for the end of a stream that is being closed.
//
// Its use of the handle lasts from before recording is set until that is cleared. So finish,
// which runs when there is no use, never finds a goroutine that records and would be refused:
// the end of the stream would have no event.
//
// After drainAfter failures a stream gets no more events until the device as a whole
// has answered: they would fill its queue.
func (t *timeline) record(end bool) {
	m := &t.marks
	var f *frame
	if end { // the handle is closed
		f = t.dev.rt.begin()
	} else {
		f = t.begin()
	}
	defer t.dev.rt.end(f) // without the lock: it may call finish
	t.mu.Lock()
	defer t.mu.Unlock()
	for !f.refused && !m.recording && !m.ended && m.latest < m.wanted && (end || t.faults.inRow < drainAfter) {
		m.recording = true
		p := pendingEvent{n: m.begun + 1, queued: t.queued()}
		m.begun = p.n
		c := m.events.take()
		t.mu.Unlock()
		c, err := t.recordOne(f, c)
		t.mu.Lock()
		m.recording = false
		if err == nil {
			p.event = c
			m.events.add(p)
			if p.n > m.latest {
				m.latest, m.latestAt = p.n, p.queued
			}
			continue
		}
		if c != nil {
			m.events.unused = append(m.events.unused, c)
		}
		if end || !t.closed() { // else finish records the end
			t.fail(err)
		}
		break
	}
}

// recordFree records an event on the stream that stands for no Point.
func (t *timeline) recordFree() (*cEvent, error) {
	f := t.begin()
	defer t.dev.rt.end(f)
	return t.recordOne(f, nil)
}

// recordOne records c, or an event of the device if c is nil, on the stream. f is a frame of
// t.begin, or of any call while the stream is destroyed.
func (t *timeline) recordOne(f *frame, c *cEvent) (*cEvent, error) {
	if c == nil {
		var err error
		if c, err = t.dev.takeEvent(); err != nil {
			return nil, err
		}
	}
	code := t.sameStream(f)
	if code == success {
		code = codeClosed
		if _, ok := c.beginUse(); ok { // Runtime.Close destroys events that are in use, too
			f.args[0], f.args[1] = c.value, t.value
			code = t.dev.guard(fnEventRecord, f)
			c.endUse(0)
		}
	}
	if code != success {
		return c, t.dev.rt.errorf(fnEventRecord, code, "%v", t)
	}
	return c, nil
}

// eventFor returns an event that stands for Point n, without an event if there is none.
//
// Other goroutines may destroy the event before the caller uses it, or record it again,
// on any stream: isPending reports whether that could have happened.
func (t *timeline) eventFor(n uint64) pendingEvent {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.marks.events.eventOfPoint(n)
	if i < 0 {
		return pendingEvent{}
	}
	return t.marks.events.pending[i]
}

// isPending reports whether an event of eventFor has stood for the same Points ever since.
func (t *timeline) isPending(p pendingEvent) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Contains(t.marks.events.pending, p)
}

// take removes an unused event. It returns nil if there is none.
func (es *timelineEvents) take() (c *cEvent) {
	if n := len(es.unused); n > 0 {
		c, es.unused = es.unused[n-1], es.unused[:n-1]
	}
	return c
}

// add appends an event. If there are too many, it drops every second one: the one after
// it stands for its Points too.
func (es *timelineEvents) add(p pendingEvent) {
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
func (es *timelineEvents) done(n int) {
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

// eventOfPoint returns the index of the first event that is recorded at or after Point n, or -1.
func (es *timelineEvents) eventOfPoint(n uint64) int {
	return slices.IndexFunc(es.pending, func(p pendingEvent) bool { return p.n >= n })
}

// release makes the events available to other streams.
func (es *timelineEvents) release() {
	for _, p := range es.pending {
		es.dev.putEvent(p.event)
	}
	for _, c := range es.unused {
		es.dev.putEvent(c)
	}
	es.pending, es.unused = nil, nil
}
