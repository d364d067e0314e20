package cudart

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// A Timeline is the order in which a stream does its work. It outlives the
// stream: work that was queued is done although the [Stream] was closed, or
// collected as garbage. Memory that a stream uses keeps the stream's Timeline,
// not the Stream.
//
// Points of a timeline are numbered. An event that is recorded gets the next
// number, and stands for all points up to it: those that were asked for before
// the recording began. A later event always stands for the earlier points too,
// so that one which could not be recorded, or cannot be queried, is made good
// by the next.
type Timeline struct {
	dev     *Device
	handle  handle
	exposed atomic.Bool   // Stream.Handle was called: others may queue work unseen
	asked   atomic.Bool   // Stream.Timeline was called: someone may ask for points
	done    atomic.Uint64 // points up to this number were reached

	// unreported is an error of the stream's work that was found by asking for
	// a point. Stream.Query or Stream.Synchronize returns it.
	unreported atomic.Pointer[error]

	mu        sync.Mutex // not held during calls into the library
	begun     uint64     // the newest recording that was begun
	wanted    uint64     // the newest point that was asked for
	recording bool       // a goroutine is inside cudaEventRecord
	draining  bool       // the device-wide answer is on its way
	ended     bool       // the stream is destroyed
	failures  int        // of recording or asking, since the last success
	failed    []failure
	failing   atomic.Bool // failed is not empty
	asking    atomic.Bool // a goroutine is inside cudaEventQuery

	// latest is the newest recording that can be asked for, or is done, and
	// latestAt what handle.queued was before it.
	latest, latestAt uint64
	recorded         *recorded

	waiting waitQueue // guarded by waits.mu
}

// recorded are the events that were recorded and not yet reached, in order. It
// is apart from the timeline so that they can be reused when that is garbage.
type recorded struct {
	dev   *Device
	marks []mark
	spare []*Event
}

// A mark is an event that stands for the points up to n.
type mark struct {
	event *Event
	n     uint64
}

// A failure is an error that asking for the points after `after`, up to upTo,
// has returned.
type failure struct {
	after, upTo uint64
	err         error
}

const (
	// mostMarks bounds the events that a stream has pending. Beyond it points
	// share events, so that they are found done a little later.
	mostMarks = 128
	// mostFailures is how many ranges of failed points are remembered.
	mostFailures = 16
	// drainAfter is the number of failures in a row after which the device as a
	// whole is asked.
	drainAfter = 2
)

func newTimeline(d *Device, stream uintptr) *Timeline {
	t := &Timeline{dev: d, handle: handle{value: stream, frame: d.rt.newFrame()}, recorded: &recorded{dev: d}}
	t.waiting.line = t
	runtime.AddCleanup(t, (*recorded).release, t.recorded)
	return t
}

// release makes the events available to other streams.
func (r *recorded) release() {
	for _, m := range r.marks {
		r.dev.putEvent(m.event)
	}
	for _, e := range r.spare {
		r.dev.putEvent(e)
	}
	r.marks, r.spare = nil, nil
}

// A Point is a place in the order of a stream: after all work that was queued
// when the Point was made, and before what is queued later. The zero Point is
// reached. Points are cheap to make and compare equal if no work was queued
// between them.
//
// What a Point returns in each case:
//
//	event not recorded  | not reached; each look records anew, a later event
//	                    | stands for this point too
//	event query failed  | not reached; the next look records and queries anew
//	two failures in row | cudaDeviceSynchronize, once for all points of the
//	                    | device that need it; reached if it succeeds
//	that fails as well  | Wait returns the error, Done is false: the memory
//	                    | may be in use, and the next look asks anew
//	stream closed, lost | an event is recorded before the stream is destroyed
//	call blocks         | looks by others see "not reached" and go on
//	runtime closed      | reached if that is known; else Wait is ErrClosed
//
// An error of the work itself does not keep a point from being reached: see Err.
type Point struct {
	line *Timeline
	n    uint64
}

// Point returns the end of what is queued on the stream just now, and records
// an event there: see [Timeline.Point].
func (s *Stream) Point() Point { return s.Timeline().Point() }

// Timeline returns the order of the stream's work, which outlives the stream.
func (s *Stream) Timeline() *Timeline {
	if !s.line.asked.Load() {
		s.line.asked.Store(true)
	}
	return s.line
}

// Device returns the timeline's device.
func (t *Timeline) Device() *Device { return t.dev }

// Point returns the end of what is queued just now, and records an event there
// (cudaEventRecord). The call into the library is left out if no work was
// queued since the last Point; work queued by other libraries, through
// [Stream.Handle], is seen as well. A Point whose event cannot be recorded is
// returned all the same: its methods try again.
func (t *Timeline) Point() Point {
	p, fresh := t.next()
	if fresh {
		t.record(false)
	}
	return p
}

// End returns the end of what is queued just now, as Point does, and leaves the
// event to whoever asks for the point first. It makes no call into the library.
// Work that is queued until then may be waited for as well.
func (t *Timeline) End() Point {
	p, _ := t.next()
	return p
}

// Quiet is End, and reports whether the point can be asked for without queueing
// anything. It is so for streams that were closed, and for those on which
// nothing was queued since the last Point.
func (t *Timeline) Quiet() (Point, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Point{t, t.latest}, t.current()
}

// next returns the point after all that is queued just now; fresh says that an
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

// record records events until all points that were asked for have one, or it
// fails. Only one goroutine records at a time; others return, as it goes on for
// them. The end of a stream that is closed is recorded with end set.
//
// A stream whose events have failed gets no more of them until the device as a
// whole has answered: they would fill its queue.
func (t *Timeline) record(end bool) {
	t.mu.Lock()
	for !t.recording && !t.ended && t.latest < t.wanted && (end || t.failures < drainAfter) {
		t.recording = true
		t.begun++
		n, queued := t.begun, t.handle.queued()
		e := t.recorded.take()
		t.mu.Unlock()
		e, err := t.recordOne(e, end)
		t.mu.Lock()
		t.recording = false
		switch {
		case err == nil:
			t.recorded.add(mark{e, n})
			if n > t.latest {
				t.latest, t.latestAt = n, queued
			}
			continue
		case e != nil:
			t.recorded.spare = append(t.recorded.spare, e)
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
	f.args[0], f.args[1] = e.handle.value, t.handle.value
	code := t.dev.guard(fnEventRecord, f)
	t.dev.rt.end(f)
	if code != Success {
		return e, t.dev.rt.errorf(fnEventRecord, code, "%v", t)
	}
	return e, nil
}

// take removes a spare event, nil if there is none.
func (r *recorded) take() (e *Event) {
	if n := len(r.spare); n > 0 {
		e, r.spare = r.spare[n-1], r.spare[:n-1]
	}
	return e
}

// add appends a mark. When there are too many, every second one leaves: the
// mark after it stands for its points too.
func (r *recorded) add(m mark) {
	if len(r.marks) == mostMarks {
		kept := r.marks[:0]
		for i, m := range r.marks {
			if i%2 == 1 {
				kept = append(kept, m)
			} else {
				r.spare = append(r.spare, m.event)
			}
		}
		clear(r.marks[len(kept):])
		r.marks = kept
	}
	r.marks = append(r.marks, m)
}

// drop removes the first n marks, which were reached.
func (r *recorded) drop(n int) {
	for _, m := range r.marks[:n] {
		r.spare = append(r.spare, m.event)
	}
	r.marks = slices.Delete(r.marks, 0, n)
	for len(r.spare) > spareEvents {
		last := len(r.spare) - 1
		r.dev.putEvent(r.spare[last])
		r.spare = r.spare[:last]
	}
}

// spareEvents is how many unused events a stream keeps for itself, which saves
// it the device's lock.
const spareEvents = 2

// reached looks whether a point was reached. It does not wait for other
// goroutines that are inside the library.
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
	i := slices.IndexFunc(t.recorded.marks, func(m mark) bool { return m.n >= n })
	if i < 0 || t.asking.Load() {
		return n <= t.done.Load()
	}
	m := t.recorded.marks[i]
	t.asking.Store(true)
	t.mu.Unlock()
	done, err := m.event.Query()
	t.mu.Lock()
	t.asking.Store(false)
	// Others may have added, thinned or dropped marks meanwhile.
	i = slices.Index(t.recorded.marks, m)
	switch {
	case err != nil:
		t.fail(err)
		if i >= 0 {
			t.recorded.marks = slices.Delete(t.recorded.marks, i, i+1)
			t.forget(m.event)
		}
	case i < 0: // the event may be another point's by now
	case done:
		t.failures = 0
		t.reach(m.n)
		t.recorded.drop(i + 1)
	default:
		t.failures = 0
	}
	return n <= t.done.Load()
}

// forget takes an event out of use that cannot be queried, with its mark gone.
func (t *Timeline) forget(e *Event) {
	if t.latest = t.done.Load(); len(t.recorded.marks) > 0 {
		t.latest = t.recorded.marks[len(t.recorded.marks)-1].n
	}
	// What was queued since that older recording is not known any more.
	t.latestAt = ^uint64(0)
	t.wanted = max(t.wanted, t.begun)
	go func() { _ = e.Close() }() // the call may block; a lost event costs a few bytes
	if t.failures >= drainAfter {
		t.drain()
	}
}

func (t *Timeline) reach(n uint64) {
	if n > t.done.Load() {
		t.done.Store(n)
	}
}

// fail remembers an error of recording or asking.
func (t *Timeline) fail(err error) {
	t.failures++
	t.failing.Store(true)
	t.unreported.Store(&err)
	t.failed = append(t.failed, failure{after: t.done.Load(), upTo: t.begun, err: err})
	if len(t.failed) > mostFailures {
		t.failed = slices.Delete(t.failed, 0, 1)
	}
}

// drain asks the device as a whole. It needs t.mu.
func (t *Timeline) drain() {
	if !t.draining {
		t.draining = true
		t.dev.drainer.add(drainRequest{line: t})
	}
}

// beginAnswer gives an answer that is about all work so far, and needs no
// event, its number: that of cudaStreamQuery or cudaDeviceSynchronize. queued is
// what handle.queued is before it.
func (t *Timeline) beginAnswer() (n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begun++
	return t.begun, t.handle.queued()
}

// answered takes the answer that all work before point n is done.
func (t *Timeline) answered(n, queued uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures = 0
	t.reach(n)
	if t.latest < n {
		t.latest, t.latestAt = n, queued
	}
	marks := t.recorded.marks
	past := slices.IndexFunc(marks, func(m mark) bool { return m.n > n })
	if past < 0 {
		past = len(marks)
	}
	t.recorded.drop(past)
}

// drained takes the outcome of the device-wide wait.
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

// leave ends a call on the stream, and destroys the stream if it was closed
// meanwhile.
func (t *Timeline) leave(queued bool) {
	if t.handle.leave(queued) {
		if err := t.finish(); err != nil {
			t.dev.rt.undone(t.finishAgain)
		}
	}
}

// close refuses work from now on and destroys the stream, or leaves that to the
// last call in progress.
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

// finish records the end of the stream's work, if that is not known and may be
// asked for, and destroys the stream (cudaStreamDestroy).
func (t *Timeline) finish() error {
	if t.asked.Load() {
		t.mu.Lock()
		if !t.current() {
			t.wanted = t.begun + 1
		}
		t.mu.Unlock()
		t.record(true)
	}
	err := t.dev.destroy(fnStreamDestroy, &t.handle, t)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.handle.state.Load()&handleDestroyed != 0 {
		t.ended = true
		for e := t.recorded.take(); e != nil; e = t.recorded.take() {
			t.dev.putEvent(e)
		}
	}
	return err
}

// String names the stream in messages.
func (t *Timeline) String() string { return fmt.Sprintf("stream %#x of %v", t.handle.value, t.dev) }

// err returns the first error that was found at or before a point and was not
// seen to be that of earlier work.
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

// Known reports whether the point is known to be reached, without a call into
// the library.
func (p Point) Known() bool { return p.line == nil || p.n <= p.line.done.Load() }

// Done reports whether the point was reached: all work before it is done, or
// has failed, and uses no memory any more (cudaEventQuery). When ctx can end,
// the library is asked on another goroutine, so that a call which blocks does
// not keep the caller; Done is false then.
func (p Point) Done(ctx context.Context) bool {
	switch {
	case p.Known():
		return true
	case ctx == nil:
		return false
	case ctx.Done() == nil:
		return p.line.reached(p.n)
	}
	w := p.line.dev.rt.waits
	me := w.get(waitPeek)
	me.line, me.n = p.line, p.n
	return w.await(ctx, me) == nil
}

// Wait waits until the point is reached: all work before it is done, or has
// failed, and uses no memory any more. It returns nil then, whatever became of
// the work: see Err. When ctx ends first it returns ctx's error, while the
// GPU's work goes on. Any other error says that it cannot be known whether the
// work is done: memory that it uses must stay. A wait occupies no thread.
func (p Point) Wait(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	if p.Known() {
		return nil
	}
	w := p.line.dev.rt.waits
	if ctx.Done() == nil {
		// Nothing can end the wait early: the caller may ask itself.
		if over, _ := spin(func() (bool, error) { return p.line.reached(p.n), nil }); over {
			return nil
		}
	}
	me := w.get(waitPoint)
	me.line, me.n = p.line, p.n
	return w.await(ctx, me)
}

// Notify sends to c once the point is reached, or it turns out that this cannot
// be known just now: Known tells which. It does not block: where nothing can be
// sent, c has a message already. stop withdraws it.
func (p Point) Notify(c chan<- struct{}) (stop func()) {
	if p.Known() {
		select {
		case c <- struct{}{}:
		default:
		}
		return func() {}
	}
	w := p.line.dev.rt.waits
	me := &wait{kind: waitNotify, line: p.line, n: p.n, notify: c}
	w.enqueue(me)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.remove(me)
	}
}

// Err returns the error that the stream reported while the point was not known
// to be reached: what was copied before the point may be wrong. It is to be
// asked after Done or Wait, and before many more errors.
func (p Point) Err() error {
	if p.line == nil {
		return nil
	}
	return p.line.err(p.n)
}

// Record records an event for a point of [Timeline.End], unless there is one.
func (p Point) Record() {
	if !p.Known() {
		p.line.record(false)
	}
}

// WaitPoint makes work that is queued later wait until a point of another stream
// is reached (cudaStreamWaitEvent). The caller does not wait. If no event can be
// recorded for the point, nothing is queued, and the error says why.
func (s *Stream) WaitPoint(p Point) error {
	if p.Known() || p.line == s.line {
		return nil
	}
	if e := p.line.eventFor(p.n); e != nil {
		return s.WaitEvent(e)
	}
	// One that is recorded now stands for the point too. It is not the
	// timeline's: another goroutine may be recording there just now.
	e, err := p.line.recordOne(nil, false)
	if e == nil {
		return err
	}
	defer p.line.dev.putEvent(e)
	if err != nil {
		return err
	}
	return s.WaitEvent(e)
}

// eventFor returns an event that stands for a point, nil if there is none.
//
// Others may take the event for a later point before the caller uses it: then
// this point was reached, or it is of the same stream, and waiting for the later
// one does no harm.
func (t *Timeline) eventFor(n uint64) *Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.recorded.marks, func(m mark) bool { return m.n >= n })
	if i < 0 {
		return nil
	}
	return t.recorded.marks[i].event
}

// Line returns the point's timeline, nil for the zero Point.
func (p Point) Line() *Timeline { return p.line }

// After reports whether the point is no earlier than another one of the same
// timeline.
func (p Point) After(other Point) bool { return p.line == other.line && p.n >= other.n }
