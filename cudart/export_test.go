package cudart

import (
	"context"
	"unsafe"

	"github.com/gopinned/pinned/internal/findlib"
)

// To compare our waits with CUDA's own.

// NewBlockingEvent makes an event whose WaitInC sleeps instead of spinning.
func (d *Device) NewBlockingEvent() (*Event, error) {
	const blockingSync, disableTiming = 1, 2
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), blockingSync|disableTiming
	if code := d.guard(fnEventCreate, f); code != success {
		return nil, d.rt.errorf(fnEventCreate, code, "%v", d)
	}
	return newEvent(d.cEventOf(uintptr(f.out[0]))), nil
}

// WaitInC is cudaEventSynchronize.
func (e *Event) WaitInC() error {
	f := e.c.begin()
	defer e.c.dev.rt.end(f)
	f.args[0] = e.c.value
	if code := e.c.dev.guard(fnEventSynchronize, f); code != success {
		return e.c.dev.rt.errorf(fnEventSynchronize, code, "%v", e)
	}
	return nil
}

type Timeline = timeline

// Timeline returns the order of the stream's work.
func (s *Stream) Timeline() *Timeline { return s.order() }

// Point is Stream.Point, also of a stream that is closed.
func (t *timeline) Point() Point { return t.point() }

// Record records an event for a Point of Timeline.End.
func (p Point) Record() { p.record() }

// CloseEvent destroys the event that stands for the Point.
func (p Point) CloseEvent() error { return p.timeline.eventFor(p.n).event.close() }

// PendingError is the calling thread's cudaGetLastError.
func (rt *Runtime) PendingError() Code {
	if rt.lib.API == DriverAPI {
		return success // libcuda keeps none
	}
	return rt.call(fnGetLastError, &rt.begin().cCall)
}

// The sizes of memory to which C writes.
const (
	PointerAttributesSize = int(unsafe.Sizeof(cPointerAttributes{}))
	PropertiesSize        = propertiesSize
)

// Waiting returns the number of waits that were left to the pollers.
func (rt *Runtime) Waiting() int {
	n := 0
	for _, d := range rt.Devices() {
		d.waits.mu.Lock()
		for _, q := range d.waits.queues {
			for me := q.first; me != nil; me = me.next {
				n++
			}
		}
		d.waits.mu.Unlock()
	}
	return n
}

// OpenHere is Open on the caller's goroutine: it returns when the call does.
func OpenHere(ctx context.Context, o Options) (*Runtime, error) {
	return (&librarySearch{o: o, host: findlib.This()}).run(ctx)
}

// Verdict chooses the error of Open among those of its attempts.
var Verdict = verdict

var ErrDamagedDriver = errDamagedDriver

// Polling reports whether there is a poller.
func (rt *Runtime) Polling() bool {
	for _, d := range rt.Devices() {
		d.waits.mu.Lock()
		polling := d.waits.sleeper != nil
		d.waits.mu.Unlock()
		if polling {
			return true
		}
	}
	return false
}

// Drains returns the number of requests that wait for the next cudaDeviceSynchronize.
func (d *Device) Drains() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.drainer.next)
}

// QueuedWaits returns the number of waits for places in the Point's stream that are queued.
func QueuedWaits(p Point) (n int) {
	w := &p.timeline.dev.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	for me := p.timeline.waitQueue.first; me != nil; me = me.next {
		n++
	}
	return n
}
