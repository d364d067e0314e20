package cudart

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"
	"unsafe"
)

// An EventHandle is a cudaEvent_t, for other libraries that take one.
type EventHandle uintptr

// EventOptions shape an event.
type EventOptions struct {
	// Timing makes the event remember when the GPU reached it, for
	// [Event.Since]. Events without are cheaper.
	Timing bool
}

// An Event marks a point in a stream. Methods may be called from any
// goroutine.
type Event struct {
	dev     *Device
	handle  handle
	timing  bool
	waiting waitQueue
	cleanup runtime.Cleanup
}

// NewEvent makes an event (cudaEventCreateWithFlags). Close it; one that is
// lost is destroyed when the garbage collector finds it.
func (d *Device) NewEvent(o EventOptions) (*Event, error) {
	const disableTiming = 2
	var flags uintptr = disableTiming
	if o.Timing {
		flags = 0
	}
	f := d.rt.begin(nil)
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), flags
	if code := d.guard(fnEventCreate, f); code != Success {
		return nil, d.rt.errorf(fnEventCreate, code, "%+v on %v", o, d)
	}
	e := &Event{dev: d, handle: handle{value: uintptr(f.out[0])}, timing: o.Timing}
	e.cleanup = runtime.AddCleanup(e, func(value uintptr) { d.destroy(fnEventDestroy, value) }, e.handle.value)
	return e, nil
}

// Device returns the event's device.
func (e *Event) Device() *Device { return e.dev }

// Handle returns the cudaEvent_t. It is valid until Close.
func (e *Event) Handle() EventHandle { return EventHandle(e.handle.value) }

// String names the event in messages.
func (e *Event) String() string { return fmt.Sprintf("event %#x of %v", e.handle.value, e.dev) }

// Query tells whether the work that the event recorded is done; an event that
// was never recorded is (cudaEventQuery).
func (e *Event) Query() (done bool, err error) { return e.dev.query(fnEventQuery, &e.handle) }

// Since returns the time on the GPU from start to e, with a resolution of
// about half a microsecond (cudaEventElapsedTime). Both must be made with
// Timing, recorded, and done.
func (e *Event) Since(start *Event) (time.Duration, error) {
	if !e.timing || !start.timing {
		return 0, invalid(fnEventElapsedTime, "both events must be made with EventOptions.Timing")
	}
	// In the order of their addresses, as another goroutine may ask for the
	// time between the same two the other way round.
	first, second := &start.handle, &e.handle
	if uintptr(unsafe.Pointer(first)) > uintptr(unsafe.Pointer(second)) {
		first, second = second, first
	}
	f := e.dev.rt.begin(first)
	defer e.dev.rt.end(f)
	if second != first {
		second.mu.Lock()
		defer second.mu.Unlock()
	}
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), start.handle.value, e.handle.value
	code := codeClosed
	if !second.closed {
		code = e.dev.guard(fnEventElapsedTime, f)
	}
	if code != Success {
		return 0, e.dev.rt.errorf(fnEventElapsedTime, code, "from %v to %v", start, e)
	}
	milliseconds := math.Float32frombits(uint32(f.out[0]))
	return time.Duration(float64(milliseconds) * float64(time.Millisecond)), nil
}

// Close destroys the event (cudaEventDestroy). A second Close does nothing.
func (e *Event) Close() error {
	if err := e.dev.close(fnEventDestroy, &e.handle); err != nil {
		return err
	}
	e.cleanup.Stop()
	return nil
}

// An eventPool keeps the device's events that the package itself uses to wait.
type eventPool struct {
	mu     sync.Mutex
	free   []*Event
	closed bool
}

func (d *Device) takeEvent() (*Event, error) {
	d.events.mu.Lock()
	if n := len(d.events.free); n > 0 {
		e := d.events.free[n-1]
		d.events.free = d.events.free[:n-1]
		d.events.mu.Unlock()
		return e, nil
	}
	d.events.mu.Unlock()
	return d.NewEvent(EventOptions{})
}

// giveEvent puts an event back. It may still be pending: recording it anew is
// allowed at any time.
func (d *Device) giveEvent(e *Event) {
	d.events.mu.Lock()
	closed := d.events.closed
	if !closed {
		d.events.free = append(d.events.free, e)
	}
	d.events.mu.Unlock()
	if closed {
		_ = e.Close() // the runtime is closed already: nobody is left to tell
	}
}

func (d *Device) closeEvents() error {
	d.events.mu.Lock()
	free := d.events.free
	d.events.free, d.events.closed = nil, true
	d.events.mu.Unlock()
	var errs []error
	for _, e := range free {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}
