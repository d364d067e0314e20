package cudart

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"time"
)

// An EventHandle is a cudaEvent_t, for other libraries that take one.
type EventHandle uintptr

// EventOptions shape an event.
type EventOptions struct {
	// Timing makes the event store the time at which the GPU reached it, for
	// [Event.Since]. Without, events are cheaper (cudaEventDisableTiming).
	Timing bool
}

// An Event stands for the work that was queued on a stream when [Stream.Record]
// recorded it. Its methods may be called from any goroutine.
type Event struct {
	dev     *Device
	timing  bool
	exposed atomic.Bool // Handle was called: other code may record it
	closed  atomic.Bool
	current *atomic.Pointer[cEvent] // replaced by Stream.Record
	cleanup runtime.Cleanup
}

// NewEvent creates an event (cudaEventCreateWithFlags). Close it; the garbage
// collector destroys an event that is lost. The error wraps [ErrMemoryAllocation] if
// there is not enough memory.
func (d *Device) NewEvent(o EventOptions) (*Event, error) {
	c, err := d.newCEvent(o.Timing)
	if err != nil {
		return nil, err
	}
	return d.eventOf(c, o.Timing), nil
}

func (d *Device) eventOf(c *cEvent, timing bool) *Event {
	e := &Event{dev: d, timing: timing, current: new(atomic.Pointer[cEvent])}
	e.current.Store(c)
	e.cleanup = runtime.AddCleanup(e, func(current *atomic.Pointer[cEvent]) { go current.Load().collect() }, e.current)
	return e
}

func (e *Event) made() bool { return e != nil && e.current != nil }

// Device returns the event's device, nil for a nil Event.
func (e *Event) Device() *Device {
	if e == nil {
		return nil
	}
	return e.dev
}

// Handle returns the cudaEvent_t. It is valid until Close.
func (e *Event) Handle() EventHandle {
	if !e.made() {
		return 0
	}
	e.exposed.Store(true)
	return EventHandle(e.current.Load().value)
}

// String returns the handle and the device, for messages.
func (e *Event) String() string {
	if !e.made() {
		return "no event"
	}
	return e.current.Load().String()
}

// begin starts a call that uses the event. The cudaEvent_t may be replaced meanwhile.
func (e *Event) begin() (*cEvent, *frame) {
	for {
		c := e.current.Load()
		f := c.begin()
		if !f.refused || c == e.current.Load() {
			return c, f
		}
		e.dev.rt.end(f)
	}
}

// use is begin for a call that has a frame already. After ok, call cEvent.endUse.
func (e *Event) use() (c *cEvent, ok bool) {
	for {
		c = e.current.Load()
		if c, ok = c.use(); ok || c == e.current.Load() {
			return c, ok
		}
	}
}

// Query reports whether the work that the event recorded is done (cudaEventQuery). An
// event that was never recorded is done.
func (e *Event) Query() (done bool, err error) {
	if !e.made() {
		return false, notMade(fnEventQuery)
	}
	c, f := e.begin()
	return c.queryBy(f)
}

// Synchronize waits until the work that the event recorded is done (cudaEventQuery). An
// event that was never recorded is done. If [Stream.Record] records the event again
// during the wait, the wait is still for the earlier work, unless [Event.Handle] was
// called: then it ends when the later work is done. The errors are those of
// [Stream.Synchronize].
func (e *Event) Synchronize(ctx context.Context) error {
	switch {
	case !e.made():
		return notMade(fnEventQuery)
	case ctx == nil:
		return fmt.Errorf("synchronize %v: %w", e, errNilContext)
	}
	c := e.current.Load()
	for !c.addWait(e) {
		c = e.current.Load()
	}
	defer c.removeWait()
	return e.dev.waits.await(ctx, e.dev.waits.get(position{c, c.queries.Load() + 1}))
}

// Since returns the time on the GPU from start to e, with a resolution of about half
// a microsecond (cudaEventElapsedTime). The error wraps [ErrInvalidValue] unless both
// events have EventOptions.Timing, [ErrInvalidResourceHandle] unless both were
// recorded on the same device, [ErrNotReady] until both are done, and [ErrClosed] if
// either is closed; a nil event is an error.
func (e *Event) Since(start *Event) (time.Duration, error) {
	if !e.made() {
		return 0, notMade(fnEventElapsedTime)
	}
	if !start.made() {
		return 0, fmt.Errorf("cudaEventElapsedTime: to %v: %w", e, errNilEvent)
	}
	if !e.timing || !start.timing {
		return 0, invalid(fnEventElapsedTime, "both events must be made with EventOptions.Timing")
	}
	end, f := e.begin()
	code := codeClosed
	if begin, ok := start.use(); ok {
		f.args[0], f.args[1], f.args[2] = f.outPtr(0), begin.value, end.value
		code = e.dev.guard(fnEventElapsedTime, f)
		begin.endUse(0)
	}
	out, err := e.dev.rt.finish(fnEventElapsedTime, f, code, func() string { return fmt.Sprintf("from %v to %v", start, e) })
	return time.Duration(float64(math.Float32frombits(uint32(out[0]))) * float64(time.Millisecond)), err
}

// Record makes e stand for all work that is queued so far (cudaEventRecord), in place
// of what it recorded before. The error wraps [ErrInvalidResourceHandle] if e is of
// another device, and [ErrClosed] if either is closed; a nil event is an error.
func (s *Stream) Record(e *Event) error {
	if !e.made() {
		return fmt.Errorf("cudaEventRecord: %v: %w", s, errNilEvent)
	}
	if c := e.current.Load(); s.made() && c.waits.Load() > 0 && !e.exposed.Load() {
		return s.recordAnew(e, c)
	}
	return s.with(fnEventRecord, e, e.use)
}

// recordAnew records a new cudaEvent_t instead of c, which goroutines wait for: CUDA
// forgets what an event recorded before.
func (s *Stream) recordAnew(e *Event, c *cEvent) error {
	e.dev.destroyBroken()
	replacement, err := e.dev.newCEvent(e.timing)
	if err != nil {
		return err
	}
	if err := s.with(fnEventRecord, replacement, replacement.use); err != nil {
		return errors.Join(err, replacement.close())
	}
	err = e.current.Swap(replacement).replace()
	if e.closed.Load() {
		return errors.Join(e.dev.rt.errorf(fnEventRecord, codeClosed, "%v and %v", s, e), err, replacement.close())
	}
	return err
}

// WaitEvent makes work that is queued later wait for the work that e recorded, on any
// stream of any device (cudaStreamWaitEvent). The caller does not wait. An event that
// was never recorded is not waited for. The error wraps [ErrClosed] if the event or
// the stream is closed; a nil event is an error.
func (s *Stream) WaitEvent(e *Event) error {
	if !e.made() {
		return fmt.Errorf("cudaStreamWaitEvent: %v: %w", s, errNilEvent)
	}
	return s.with(fnStreamWaitEvent, e, e.use)
}

// Close destroys the event (cudaEventDestroy). Streams that wait for it still do. If
// other goroutines are inside calls on the event, the last of them destroys it, and
// Close does not wait for that. A second Close does nothing; after an error Close may
// be called again.
func (e *Event) Close() error {
	if !e.made() {
		return nil
	}
	e.closed.Store(true)
	if err := e.current.Load().close(); err != nil {
		return err
	}
	e.cleanup.Stop()
	return nil
}
