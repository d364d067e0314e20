package cudart

import "sync"

// A handle is a stream or an event of the library. Its lock is held during
// every call that is given the handle, so that none is destroyed meanwhile;
// CUDA takes the calls on one stream one after the other anyway. With the lock
// comes a frame for the call.
type handle struct {
	mu     sync.Mutex
	value  uintptr
	closed bool
	frame  frame
}

// begin starts a call: on a handle, or on none if h is nil.
func (rt *Runtime) begin(h *handle) *frame {
	if h == nil {
		return rt.frames.Get().(*frame)
	}
	h.mu.Lock()
	h.frame.owner = h
	return &h.frame
}

// end ends what begin started.
func (rt *Runtime) end(f *frame) {
	f.host = nil
	if f.owner == nil {
		rt.frames.Put(f)
		return
	}
	f.owner.mu.Unlock()
}

// close destroys the handle by fn. A second close does nothing; one that
// failed may be tried again. Either kind of handle may have work under way:
// CUDA releases what it uses when that is done.
func (d *Device) close(fn function, h *handle) error {
	f := d.rt.begin(h)
	defer d.rt.end(f)
	if h.closed {
		return nil
	}
	f.args[0] = h.value
	if code := d.guard(fn, f); code != Success {
		return d.rt.errorf(fn, code, "handle %#x on %v", h.value, d)
	}
	h.closed = true
	return nil
}

// destroy destroys a handle that was lost, unless the runtime is closed: its
// library may be another one by then, if it was a simulated one.
func (d *Device) destroy(fn function, value uintptr) {
	if d.rt.closed.Load() {
		return
	}
	f := d.rt.begin(nil)
	defer d.rt.end(f)
	f.args[0] = value
	d.guard(fn, f) // nobody is left to tell
}

// query is cudaStreamQuery or cudaEventQuery, where "not ready" is an answer.
func (d *Device) query(fn function, h *handle) (done bool, err error) {
	f := d.rt.begin(h)
	f.args[0] = h.value
	code := d.guard(fn, f)
	d.rt.end(f)
	switch code {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, d.rt.errorf(fn, code, "handle %#x on %v", h.value, d)
}
