package cudart

// What the tests need to compare our waits with CUDA's own.

// WaitInC is cudaStreamSynchronize: it keeps the thread, and mostly a core.
func (s *Stream) WaitInC() error {
	f := s.dev.rt.frame()
	defer s.dev.rt.put(f)
	f.args[0] = uintptr(s.handle)
	if code := s.dev.guard(&s.alive, fnStreamSynchronize, f); code != Success {
		return s.dev.rt.errorf(fnStreamSynchronize, code, "%v", s)
	}
	return nil
}

// NewBlockingEvent makes an event whose WaitInC sleeps instead of spinning.
func (d *Device) NewBlockingEvent() (*Event, error) {
	const blockingSync, disableTiming = 1, 2
	f := d.rt.frame()
	defer d.rt.put(f)
	f.args[0], f.args[1] = f.outPtr(0), blockingSync|disableTiming
	if code := d.guard(nil, fnEventCreate, f); code != Success {
		return nil, d.rt.errorf(fnEventCreate, code, "%v", d)
	}
	return &Event{dev: d, handle: EventHandle(f.out[0])}, nil
}

// WaitInC is cudaEventSynchronize.
func (e *Event) WaitInC() error {
	f := e.dev.rt.frame()
	defer e.dev.rt.put(f)
	f.args[0] = uintptr(e.handle)
	if code := e.dev.guard(&e.alive, fnEventSynchronize, f); code != Success {
		return e.dev.rt.errorf(fnEventSynchronize, code, "%v", e)
	}
	return nil
}

// PendingError is the calling thread's cudaGetLastError.
func (rt *Runtime) PendingError() Code { return rt.call(fnGetLastError, &rt.frame().cCall) }
