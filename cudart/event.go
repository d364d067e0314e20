package cudart

import (
	"fmt"
	"math"
	"runtime"
	"time"
)

// An EventHandle is a cudaEvent_t, for other libraries that take one.
type EventHandle uintptr

// An Event is the time at which the GPU reached a place in the order of a stream: [Stream.Record] records it there. To
// order streams, and to wait, use a [Point]. The methods of an Event may be called from any goroutine.
type Event struct {
	c       *cEvent
	cleanup runtime.Cleanup
}

// NewEvent creates an event (cudaEventCreateWithFlags). Close it; the garbage
// collector destroys an event that is lost. The error wraps [ErrMemoryAllocation] if
// there is not enough memory.
func (d *Device) NewEvent() (*Event, error) {
	c, err := d.newCEvent(true)
	if err != nil {
		return nil, err
	}
	return newEvent(c), nil
}

func newEvent(c *cEvent) *Event {
	e := &Event{c: c}
	e.cleanup = runtime.AddCleanup(e, func(c *cEvent) { go c.collect() }, c)
	return e
}

func (e *Event) made() bool { return e != nil && e.c != nil }

// Device returns the event's device, nil for a nil Event.
func (e *Event) Device() *Device {
	if !e.made() {
		return nil
	}
	return e.c.dev
}

// Handle returns the cudaEvent_t. It is valid until Close.
func (e *Event) Handle() EventHandle {
	if !e.made() {
		return 0
	}
	return EventHandle(e.c.value)
}

// String returns the handle and the device, for messages.
func (e *Event) String() string {
	if !e.made() {
		return "no event"
	}
	return e.c.String()
}

// Since returns the time on the GPU from start to e, with a resolution of about half
// a microsecond (cudaEventElapsedTime). The error wraps [ErrInvalidResourceHandle] unless both were
// recorded on the same device, [ErrNotReady] until both are reached, and [ErrClosed] if
// either is closed; a nil event is an error.
func (e *Event) Since(start *Event) (time.Duration, error) {
	if !e.made() {
		return 0, notMade(fnEventElapsedTime)
	}
	if !start.made() {
		return 0, fmt.Errorf("cudaEventElapsedTime: to %v: %w", e, errNilEvent)
	}
	f := e.c.begin()
	code := codeClosed
	if begin, ok := start.c.use(); ok {
		f.args[0], f.args[1], f.args[2] = f.outPtr(0), begin.value, e.c.value
		code = e.c.dev.guard(fnEventElapsedTime, f)
		begin.endUse(0)
	}
	out, err := e.c.dev.rt.finish(fnEventElapsedTime, f, code, func() string { return fmt.Sprintf("from %v to %v", start, e) })
	return time.Duration(float64(math.Float32frombits(uint32(out[0]))) * float64(time.Millisecond)), err
}

// Record makes e stand for all work that is queued so far (cudaEventRecord), instead
// of what it recorded before. The error wraps [ErrInvalidResourceHandle] if e is of
// another device, and [ErrClosed] if either is closed; a nil event is an error.
func (s *Stream) Record(e *Event) error {
	if !e.made() {
		return fmt.Errorf("cudaEventRecord: %v: %w", s, errNilEvent)
	}
	return s.with(fnEventRecord, e.c)
}

// Close destroys the event (cudaEventDestroy). Streams that wait for it still do. If
// other goroutines are inside calls on the event, the last of them destroys it, and
// Close does not wait for that. A second Close does nothing; after an error Close may
// be called again.
func (e *Event) Close() error {
	if !e.made() {
		return nil
	}
	if err := e.c.close(); err != nil {
		return err
	}
	e.cleanup.Stop()
	return nil
}
