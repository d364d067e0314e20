package cudart

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
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
	handle  handle
	timing  bool
	cleanup runtime.Cleanup

	last    atomic.Pointer[Timeline] // on which Stream.Record recorded it last
	waits   atomic.Int32             // callers of Synchronize
	waiting waitQueue                // guarded by waits.mu
}

// NewEvent creates an event (cudaEventCreateWithFlags). Close it; the garbage
// collector destroys an event that is lost. The error wraps [ErrMemoryAllocation] if
// there is no room.
func (d *Device) NewEvent(o EventOptions) (*Event, error) {
	const disableTiming = 2
	var flags uintptr = disableTiming
	if o.Timing {
		flags = 0
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), flags
	if code := d.guard(fnEventCreate, f); code != Success {
		return nil, d.rt.errorf(fnEventCreate, code, "%+v on %v", o, d)
	}
	e := &Event{dev: d, handle: handle{value: uintptr(f.out[0]), frame: d.rt.newFrame()}, timing: o.Timing}
	e.waiting.event = e
	e.cleanup = runtime.AddCleanup(e, func(value uintptr) { go d.collectEvent(value) }, e.handle.value)
	return e, nil
}

// collectEvent destroys an event that was garbage collected, as Timeline.collect does
// a stream.
func (d *Device) collectEvent(value uintptr) {
	if d.rt.closed.Load() {
		return
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0] = value
	d.guard(fnEventDestroy, f) // no caller is left to report to
}

// Device returns the event's device.
func (e *Event) Device() *Device { return e.dev }

// Handle returns the cudaEvent_t. It is valid until Close.
func (e *Event) Handle() EventHandle { return EventHandle(e.handle.value) }

// String returns the handle and the device, for messages.
func (e *Event) String() string { return fmt.Sprintf("event %#x of %v", e.handle.value, e.dev) }

// Query reports whether the work that the event recorded is done (cudaEventQuery). An
// event that was never recorded is done.
func (e *Event) Query() (done bool, err error) {
	f := e.begin()
	f.args[0] = e.handle.value
	code := e.dev.guard(fnEventQuery, f)
	e.dev.rt.end(f)
	return e.dev.answer(fnEventQuery, code, e)
}

// Since returns the time on the GPU from start to e, with a resolution of about half
// a microsecond (cudaEventElapsedTime). The error wraps [ErrInvalidValue] unless both
// events have EventOptions.Timing, [ErrInvalidResourceHandle] unless both were
// recorded on the same device, [ErrNotReady] until both are done, and [ErrClosed] if
// either is closed; a nil event is an error.
func (e *Event) Since(start *Event) (time.Duration, error) {
	if start == nil {
		return 0, fmt.Errorf("cudaEventElapsedTime: to %v: %w", e, errNilEvent)
	}
	if !e.timing || !start.timing {
		return 0, invalid(fnEventElapsedTime, "both events must be made with EventOptions.Timing")
	}
	f := e.begin()
	defer e.dev.rt.end(f)
	code := codeClosed
	if _, ok := start.handle.enter(); ok {
		f.args[0], f.args[1], f.args[2] = f.outPtr(0), start.handle.value, e.handle.value
		code = e.dev.guard(fnEventElapsedTime, f)
		start.leave()
	}
	if code != Success {
		return 0, e.dev.rt.errorf(fnEventElapsedTime, code, "from %v to %v", start, e)
	}
	milliseconds := math.Float32frombits(uint32(f.out[0]))
	return time.Duration(float64(milliseconds) * float64(time.Millisecond)), nil
}

// leave ends a call on the event, and destroys the event if it was closed during the
// call.
func (e *Event) leave() {
	if !e.handle.leave(false) {
		return
	}
	if e.destroy() != nil {
		e.dev.rt.undone(e.Close)
	}
}

// Close destroys the event (cudaEventDestroy). Streams that wait for it still do. If
// other goroutines are inside calls on the event, the last of them destroys it, and
// Close does not wait for that. A second Close does nothing; after an error Close may
// be called again.
func (e *Event) Close() error {
	if e.handle.close() {
		if err := e.destroy(); err != nil {
			return err
		}
	}
	e.cleanup.Stop()
	return nil
}

func (e *Event) destroy() error { return e.dev.destroy(fnEventDestroy, &e.handle, e) }

// destroy destroys a handle that was closed. A sticky error means that the context is
// lost with all its handles. After any other error the caller may try again.
func (d *Device) destroy(fn function, h *handle, what fmt.Stringer) error {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0] = h.value
	code := d.guard(fn, f)
	if code == Success || code.sticky() {
		h.destroyed()
	} else {
		h.unclaim()
	}
	if code != Success {
		return d.rt.errorf(fn, code, "%v", what)
	}
	return nil
}

// An eventPool holds the events of the device that the package itself uses.
type eventPool struct {
	mu     sync.Mutex
	free   []*Event
	made   []*Event // all of them; some are with streams
	broken []*Event // that could not be queried, to be destroyed
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
	broken := d.events.broken
	d.events.broken = nil
	d.events.mu.Unlock()
	for _, e := range broken {
		_ = e.Close() // closeEvents tries again
	}
	e, err := d.NewEvent(EventOptions{})
	if err != nil {
		return nil, err
	}
	d.events.mu.Lock()
	if d.events.closed { // meanwhile
		d.events.mu.Unlock()
		return nil, errors.Join(d.rt.errorf(fnEventCreate, codeRuntimeClosed, "%v", d), e.Close())
	}
	defer d.events.mu.Unlock()
	if len(d.events.made) == cap(d.events.made) {
		d.events.made = slices.DeleteFunc(d.events.made, func(e *Event) bool { return e.handle.state.Load()&handleDestroyed != 0 })
	}
	d.events.made = append(d.events.made, e)
	return e, nil
}

// putEvent makes an event available again. It may still be pending: an event may be
// recorded again at any time.
func (d *Device) putEvent(e *Event) {
	d.events.mu.Lock()
	defer d.events.mu.Unlock()
	if !d.events.closed {
		d.events.free = append(d.events.free, e)
	}
}

// discardEvent takes an event out of use. It is destroyed before another one is
// created, not here: the caller holds locks.
func (d *Device) discardEvent(e *Event) {
	d.events.mu.Lock()
	defer d.events.mu.Unlock()
	d.events.broken = append(d.events.broken, e)
}

// closeEvents destroys all events that takeEvent created, also those in use.
func (d *Device) closeEvents() error {
	d.events.mu.Lock()
	made := d.events.made
	d.events.free, d.events.made, d.events.broken, d.events.closed = nil, nil, nil, true
	d.events.mu.Unlock()
	var errs []error
	for _, e := range made {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}
