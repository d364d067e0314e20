package cudart

import "unsafe"

// What the tests need to compare our waits with CUDA's own.

// WaitInC is cudaStreamSynchronize: it keeps the thread, and mostly a core.
func (s *Stream) WaitInC() error {
	f := s.dev.rt.begin(&s.handle)
	defer s.dev.rt.end(f)
	f.args[0] = s.handle.value
	if code := s.dev.guard(fnStreamSynchronize, f); code != Success {
		return s.dev.rt.errorf(fnStreamSynchronize, code, "%v", s)
	}
	return nil
}

// NewBlockingEvent makes an event whose WaitInC sleeps instead of spinning.
func (d *Device) NewBlockingEvent() (*Event, error) {
	const blockingSync, disableTiming = 1, 2
	f := d.rt.begin(nil)
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), blockingSync|disableTiming
	if code := d.guard(fnEventCreate, f); code != Success {
		return nil, d.rt.errorf(fnEventCreate, code, "%v", d)
	}
	return &Event{dev: d, handle: handle{value: uintptr(f.out[0])}}, nil
}

// WaitInC is cudaEventSynchronize.
func (e *Event) WaitInC() error {
	f := e.dev.rt.begin(&e.handle)
	defer e.dev.rt.end(f)
	f.args[0] = e.handle.value
	if code := e.dev.guard(fnEventSynchronize, f); code != Success {
		return e.dev.rt.errorf(fnEventSynchronize, code, "%v", e)
	}
	return nil
}

// PendingError is the calling thread's cudaGetLastError.
func (rt *Runtime) PendingError() Code { return rt.call(fnGetLastError, &rt.begin(nil).cCall) }

// The room that calls give C to write to.
const (
	PointerAttributesSize = int(unsafe.Sizeof(cPointerAttributes{}))
	PropertiesSize        = propertiesSize
)

// Verdict chooses the error of Open among those of its attempts.
var Verdict = verdict
