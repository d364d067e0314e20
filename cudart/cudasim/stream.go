package cudasim

import (
	"cmp"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// Handles that every device has.
const (
	streamLegacy    = 1 // also 0
	streamPerThread = 2
)

const streamNonBlocking = 1

// A stream runs its operations later and in order. Its Sim's mu guards it.
type stream struct {
	dev       *device
	handle    uintptr
	number    uint64 // in the order in which streams were made
	flags     uint32
	priority  int
	changed   *sync.Cond // done grew, the stream was destroyed, the device lost or the Sim closed
	queue     []*operation
	issued    uint64 // operations enqueued so far
	done      uint64 // operations that have run
	working   bool   // a goroutine runs the queue
	destroyed bool

	clock   timeline      // end of the last operation that began
	reached time.Duration // virtual time at which the last operation that is done ended

	lost   cudart.Code // transient error that no call has returned yet
	lostAt uint64      // the operation that it is of
}

// A timeline is a point in virtual and in real time. Virtual time follows the
// link model alone, and events have their times from it: operations in a queue
// begin where the one before ended, and the host takes no time. Real time, since
// the Sim's start, is the earliest at which an operation lands.
type timeline struct{ virtual, real time.Duration }

func (t timeline) max(o timeline) timeline {
	return timeline{max(t.virtual, o.virtual), max(t.real, o.real)}
}

func (t timeline) add(d time.Duration) timeline { return timeline{t.virtual + d, t.real + d} }

// An engine does one thing at a time, for all streams of its device.
type engine struct{ free timeline }

// An operation is one entry of a stream.
type operation struct {
	seq     uint64
	engine  *engine       // that it occupies, or nil
	took    time.Duration // duration by the link model
	measure func()        // sets engine and took when it begins, with mu; nil if they are known before

	between [2]*device // of a copy; nil for the host
	issued  timeline
	after   []mark  // positions in other streams that it waits for
	event   *record // that it waits for, or nil
	uses    []*block

	move   func() cudart.Code // moves the data, without mu
	host   hostCall
	record *record // that it completes, or nil
	finish func()  // runs with mu when it is done

	fail failure     // how it is to fail
	code cudart.Code // how it ended
}

// A hostCall is a call of a host function, none if fn is 0.
type hostCall struct{ fn, data uintptr }

// A mark is a place in a stream.
type mark struct {
	stream *stream
	seq    uint64
}

func (d *device) newStream(handle uintptr, flags uint32, priority int) *stream {
	d.sim.lastStream++
	st := &stream{dev: d, handle: handle, number: d.sim.lastStream, flags: flags, priority: priority,
		changed: sync.NewCond(&d.sim.mu)}
	d.streams[st] = struct{}{}
	return st
}

// stream returns the stream with a handle.
func (c *call) stream(h uintptr) (*stream, cudart.Code) {
	switch h {
	case 0, streamLegacy:
		if c.dev.legacy == nil {
			c.dev.legacy = c.dev.newStream(streamLegacy, 0, leastPriority)
		}
		return c.dev.legacy, success
	case streamPerThread:
		st := c.dev.perThread[c.thread.id]
		if st == nil {
			st = c.dev.newStream(streamPerThread, 0, leastPriority)
			c.dev.perThread[c.thread.id] = st
		}
		return st, success
	}
	st := c.streams[h]
	if st == nil {
		return nil, c.stale("stream", h)
	}
	c.on(st.dev, "stream", h)
	return st, st.dev.makeContext()
}

// add appends an operation to the stream's queue, once there is room. The caller
// must see to it that it runs: see enqueue.
func (c *call) add(st *stream, o *operation) cudart.Code {
	for _, b := range o.uses {
		b.uses++ // now: the memory may be freed while the call waits for room
	}
	if code := c.awaitSlot(st); code != success {
		c.unuse(o)
		return code
	}
	st.issued++
	o.seq = st.issued
	o.issued = timeline{c.hostClock, c.now()}
	o.fail, c.async = c.async, failure{}
	o.after = st.mustFollow()
	st.queue = append(st.queue, o)
	return success
}

// unuse ends an operation's use of its memory.
func (s *Sim) unuse(o *operation) {
	for _, b := range o.uses {
		b.uses--
		s.blocks.unmap(b)
	}
}

// awaitSlot waits until the stream's queue has a slot for an operation.
func (c *call) awaitSlot(st *stream) cudart.Code {
	if st.full() {
		c.addBlocked(c.name, 1)
		for st.full() {
			st.changed.Wait()
		}
		c.addBlocked(c.name, -1)
	}
	switch {
	case c.life.Sealed():
		return cudart.ErrCudartUnloading
	case st.dev.broken != success:
		return st.dev.broken
	case st.destroyed:
		return cudart.ErrInvalidResourceHandle
	}
	return success
}

// full reports whether a call that enqueues must wait for room.
func (st *stream) full() bool {
	s := st.dev.sim
	return s.cfg.QueueDepth > 0 && len(st.queue) >= s.cfg.QueueDepth &&
		!st.destroyed && st.dev.broken == success && !s.life.Sealed()
}

// enqueue appends an operation, which runs later.
func (c *call) enqueue(st *stream, o *operation) cudart.Code {
	code := c.add(st, o)
	st.wake()
	return code
}

// do appends an operation, waits for it, and returns how it ended. An idle
// stream works on the calling thread, which saves two switches.
func (c *call) do(st *stream, o *operation) cudart.Code {
	if code := c.add(st, o); code != success {
		return code
	}
	if !st.working {
		st.working = true
		st.work(o.seq)
	}
	st.wake() // for what other threads added meanwhile
	m := mark{st, o.seq}
	if code := c.wait(m); code != success {
		return code
	}
	if o.fail.transient {
		m.takeError() // this call returns it
	}
	return o.code
}

// wake starts a goroutine for the queue if it has operations and none runs them.
func (st *stream) wake() {
	if st.working || len(st.queue) == 0 {
		return
	}
	st.working = true
	s := st.dev.sim
	s.life.Hold() // within a call, so the Sim is not done yet
	go func() {
		defer s.life.End()
		s.mu.Lock()
		defer s.mu.Unlock()
		st.work(math.MaxUint64)
	}()
}

// mustFollow returns the positions in other streams that CUDA's implicit order puts
// before the next operation: between the legacy default stream and all streams
// that are not non-blocking.
func (st *stream) mustFollow() []mark {
	if st != st.dev.legacy {
		if l := st.dev.legacy; l != nil && st.blocking() && l.pending() {
			return []mark{{l, l.issued}}
		}
		return nil
	}
	var marks []mark
	for o := range st.dev.streams {
		if o != st && o.blocking() && o.pending() {
			marks = append(marks, mark{o, o.issued})
		}
	}
	return marks
}

func (st *stream) blocking() bool { return st.flags&streamNonBlocking == 0 }
func (st *stream) pending() bool  { return st.done < st.issued }

// waiting reports whether a call that waits for a place in the stream must go on
// waiting.
func (st *stream) waiting(seq uint64) bool {
	return st.done < seq && st.dev.broken == success && !st.dev.sim.life.Sealed()
}

// work runs the queue until it is empty, or up to a place.
func (st *stream) work(upTo uint64) {
	s := st.dev.sim
	for len(st.queue) > 0 && st.done < upTo {
		o := st.queue[0]
		if !st.run(o) {
			return // the Sim was closed: what is queued stays pending
		}
		st.queue[0] = nil
		st.queue = st.queue[1:]
		st.done, st.reached = o.seq, st.clock.virtual
		if r := o.record; r != nil {
			r.done, r.at = true, st.reached
		}
		s.unuse(o)
		if o.finish != nil {
			o.finish()
		}
		st.changed.Broadcast()
	}
	if len(st.queue) == 0 {
		st.queue = nil
	}
	st.working = false
	st.drop()
}

// drop removes a stream that was destroyed and has no work left.
func (st *stream) drop() {
	if st.destroyed && !st.working && len(st.queue) == 0 {
		delete(st.dev.streams, st)
	}
}

func (st *stream) destroy() {
	st.destroyed = true
	st.changed.Broadcast()
	st.drop()
}

// run does one operation, at its time. It is called with mu, which it unlocks
// while it waits and works. It is false when the Sim was closed meanwhile.
func (st *stream) run(o *operation) bool {
	s := st.dev.sim
	st.follow(o)
	if !st.unheld() {
		return false
	}
	if o.measure != nil {
		o.measure()
	}
	begin := st.clock.max(o.issued)
	if o.engine != nil {
		begin = begin.max(o.engine.free)
	}
	st.clock = begin.add(o.took)
	if o.engine != nil {
		o.engine.free = st.clock
	}
	if s.now() < st.clock.real {
		until := st.clock.real
		s.mu.Unlock()
		s.sleepUntil(until)
		s.mu.Lock()
		if !st.unheld() {
			return false
		}
	}
	st.do(o)
	return !s.life.Sealed()
}

// follow waits for what the operation has to follow in other streams. It releases mu meanwhile.
func (st *stream) follow(o *operation) {
	for _, m := range o.after {
		for m.stream.waiting(m.seq) {
			m.stream.changed.Wait()
		}
		st.clock.virtual = max(st.clock.virtual, m.stream.reached)
	}
	if r := o.event; r != nil {
		for !r.done && r.stream.waiting(r.seq) {
			r.stream.changed.Wait()
		}
		st.clock.virtual = max(st.clock.virtual, r.at)
	}
}

// do does the operation's work, or fails it. It releases mu meanwhile.
func (st *stream) do(o *operation) {
	if code := o.lost(); code != success && st.dev.broken == success {
		o.fail = failure{code, true} // the device of the stream is not lost
	}
	switch {
	case st.dev.broken != success:
		o.code = st.dev.broken
	case o.fail.transient:
		o.code = o.fail.code
		if st.lost == success {
			st.lost, st.lostAt = o.code, o.seq
		}
	case o.fail.code != success:
		o.code = o.fail.code
		st.dev.broken = o.code
		st.dev.sim.wakeAll()
	case o.host.fn != 0:
		st.callHost(o)
	case o.move != nil:
		st.dev.sim.runMove(o)
	}
}

// lost returns what is wrong with a device that is copied to or from.
func (o *operation) lost() cudart.Code {
	for _, d := range o.between {
		if d != nil && d.broken != success {
			return d.broken
		}
	}
	return success
}

// runMove moves the data of an operation, without mu.
func (s *Sim) runMove(o *operation) {
	s.running++
	s.mu.Unlock()
	defer func() {
		r := recover()
		s.mu.Lock()
		if r != nil {
			s.fail("%s: panic in a stream: %v\n%s", s, r, debug.Stack())
			o.code = cudart.ErrUnknown
		}
		if s.running--; s.running == 0 {
			s.gate.Broadcast()
		}
	}()
	o.code = o.move()
}

// unheld waits for [Sim.Release]. It is false when the Sim was closed.
func (st *stream) unheld() bool {
	s := st.dev.sim
	for s.held && st.dev.broken == success && !s.life.Sealed() {
		s.gate.Wait()
	}
	return !s.life.Sealed()
}

// callHost runs a host function, on a thread on which CUDA calls are refused.
func (st *stream) callHost(o *operation) {
	s := st.dev.sim
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t := s.thread(s.threads.current())
	s.hostClock = max(s.hostClock, st.clock.virtual)
	t.inHost = true
	s.mu.Unlock()
	callHostFunction(o.host.fn, o.host.data)
	s.mu.Lock()
	t.inHost = false
}

// shortSleep is the longest sleep for which timers are too coarse.
const shortSleep = 100 * time.Microsecond

func (s *Sim) sleepUntil(t time.Duration) {
	if d := t - s.now(); d > shortSleep {
		s.pause(d)
	}
	for s.now() < t && !s.life.Sealed() {
		runtime.Gosched()
	}
}

// wait waits for a place in a stream.
func (c *call) wait(m mark) cudart.Code {
	for m.stream.waiting(m.seq) {
		m.stream.changed.Wait()
	}
	switch {
	case m.stream.dev.broken != success:
		return m.stream.dev.broken
	case m.stream.done < m.seq:
		return cudart.ErrCudartUnloading
	}
	c.hostClock = max(c.hostClock, m.stream.reached)
	return success
}

// takeError returns the transient error of the operations up to a place in a
// stream, and forgets it.
func (m mark) takeError() cudart.Code {
	st := m.stream
	if st.lost == success || st.lostAt > m.seq {
		return success
	}
	code := st.lost
	st.lost = success
	return code
}

// report waits for positions in streams and returns how the work before them ended.
func (c *call) report(marks ...mark) cudart.Code {
	if code := c.waitAll(marks); code != success {
		return code
	}
	for _, m := range marks {
		if code := m.takeError(); code != success {
			return code
		}
	}
	return success
}

// marks returns the ends of all streams of a device.
func (d *device) marks() []mark {
	var marks []mark
	for st := range d.streams {
		marks = append(marks, mark{st, st.issued})
	}
	slices.SortFunc(marks, func(a, b mark) int { return cmp.Compare(a.stream.number, b.stream.number) })
	return marks
}

// drain waits for all streams of a device.
func (c *call) drain(d *device) cudart.Code { return c.waitAll(d.marks()) }

func (c *call) waitAll(marks []mark) cudart.Code {
	for _, m := range marks {
		if code := c.wait(m); code != success {
			return code
		}
	}
	return success
}

// marks returns what cudaStreamSynchronize waits for: the end of the stream and,
// for the legacy default stream, the ends of the streams that it is in order with.
func (st *stream) marks() []mark {
	own := mark{st, st.issued}
	if st == st.dev.legacy {
		return append(st.mustFollow(), own)
	}
	return []mark{own}
}

func (c *call) streamCreateWithPriority() cudart.Code {
	if c.ptr(0) == 0 || c.u32(1)&^streamNonBlocking != 0 {
		return cudart.ErrInvalidValue
	}
	priority := min(max(c.i32(2), greatestPriority), leastPriority)
	h := c.streamHandle()
	c.streams[h] = c.dev.newStream(h, c.u32(1), priority)
	return put(c, 0, h)
}

// streamHandle makes the handle of a new stream: see Config.ReuseHandles.
func (c *call) streamHandle() uintptr {
	last := len(c.freeHandles) - 1
	if last < 0 {
		return c.handle()
	}
	h := c.freeHandles[last]
	c.freeHandles = c.freeHandles[:last]
	return h
}

// streamDestroy returns at once; the work still completes.
func (c *call) streamDestroy() cudart.Code {
	h := c.ptr(0)
	if h <= streamPerThread {
		return cudart.ErrInvalidResourceHandle
	}
	st, code := c.stream(h)
	if code != success {
		return code
	}
	delete(c.streams, h)
	st.destroy()
	if c.cfg.ReuseHandles {
		c.freeHandles = append(c.freeHandles, h)
	}
	return success
}

// onStream returns a function for the stream of an argument.
func onStream(argument int, do func(*call, *stream) cudart.Code) func(*call) cudart.Code {
	return func(c *call) cudart.Code {
		st, code := c.stream(c.ptr(argument))
		if code != success {
			return code
		}
		return do(c, st)
	}
}

func (c *call) streamQuery(st *stream) cudart.Code {
	for _, m := range st.marks() {
		if m.stream.waiting(m.seq) {
			return cudart.ErrNotReady
		}
	}
	return c.report(st.marks()...)
}

func (c *call) streamSynchronize(st *stream) cudart.Code { return c.report(st.marks()...) }
func (c *call) streamGetPriority(st *stream) cudart.Code { return put(c, 1, int32(st.priority)) }
func (c *call) streamGetFlags(st *stream) cudart.Code    { return put(c, 1, st.flags) }

// streamGetID returns a number that no other stream has, also not one that gets the
// handle later.
func (c *call) streamGetID(st *stream) cudart.Code { return put(c, 1, st.number) }

func (c *call) launchHostFunc(st *stream) cudart.Code {
	if c.ptr(1) == 0 {
		return cudart.ErrInvalidValue
	}
	return c.enqueue(st, &operation{host: hostCall{c.ptr(1), c.ptr(2)}})
}
