package cudart

import (
	"fmt"
	"runtime"
)

// A StreamHandle is a cudaStream_t, for other libraries that take one.
type StreamHandle uintptr

// StreamOptions shape a stream. The zero value is what most programs want.
type StreamOptions struct {
	// Blocking makes the stream wait for work on CUDA's default stream and
	// that work wait for it. Streams are non-blocking otherwise.
	Blocking bool
	// Priority is a number in the range of [Device.StreamPriorities], where
	// less is more urgent. It does not affect copies.
	Priority int
}

// A Stream is a queue of work that the device does in order. Methods may be
// called from any goroutine; what several goroutines queue is done in the
// order in which their calls were made.
type Stream struct {
	dev     *Device
	handle  StreamHandle
	alive   lifetime
	waiting waitQueue
	cleanup runtime.Cleanup
}

// NewStream makes a stream (cudaStreamCreateWithPriority). Close it; one that
// is lost is destroyed when the garbage collector finds it.
func (d *Device) NewStream(o StreamOptions) (*Stream, error) {
	const nonBlocking = 1
	var flags uintptr = nonBlocking
	if o.Blocking {
		flags = 0
	}
	f := d.rt.frame()
	defer d.rt.put(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), flags, uintptr(o.Priority)
	if code := d.guard(nil, fnStreamCreate, f); code != Success {
		return nil, d.rt.errorf(fnStreamCreate, code, "%+v on %v", o, d)
	}
	s := &Stream{dev: d, handle: StreamHandle(f.out[0])}
	s.cleanup = runtime.AddCleanup(s, func(h StreamHandle) { _ = d.destroy(fnStreamDestroy, uintptr(h)) }, s.handle)
	return s, nil
}

// destroy ends a stream or an event. Either may have work under way: CUDA
// releases what it uses when that is done.
func (d *Device) destroy(fn function, handle uintptr) error {
	f := d.rt.frame()
	defer d.rt.put(f)
	f.args[0] = handle
	if code := d.guard(nil, fn, f); code != Success {
		return d.rt.errorf(fn, code, "handle %#x on %v", handle, d)
	}
	return nil
}

// arg is the stream as an argument, and life what a call on it enters. Both
// serve the calls that exist with and without a stream, so nil is allowed.
func (s *Stream) arg() uintptr {
	if s == nil {
		return 0
	}
	return uintptr(s.handle)
}

func (s *Stream) life() *lifetime {
	if s == nil {
		return nil
	}
	return &s.alive
}

// Device returns the stream's device.
func (s *Stream) Device() *Device { return s.dev }

// Handle returns the cudaStream_t, to queue work by other means. It is valid
// until Close.
func (s *Stream) Handle() StreamHandle { return s.handle }

// String names the stream in messages.
func (s *Stream) String() string { return fmt.Sprintf("stream %#x of %v", uintptr(s.handle), s.dev) }

// Query tells whether all work queued so far is done (cudaStreamQuery). An
// error is one of the stream's work.
func (s *Stream) Query() (done bool, err error) {
	return s.dev.query(&s.alive, fnStreamQuery, uintptr(s.handle))
}

// query is cudaStreamQuery or cudaEventQuery, where "not ready" is an answer.
func (d *Device) query(l *lifetime, fn function, handle uintptr) (bool, error) {
	f := d.rt.frame()
	f.args[0] = handle
	code := d.guard(l, fn, f)
	d.rt.put(f)
	switch code {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, d.rt.errorf(fn, code, "handle %#x on %v", handle, d)
}

// Wait makes work that is queued later wait for what e recorded, which may be
// on another stream or device (cudaStreamWaitEvent). The caller does not wait.
func (s *Stream) Wait(e *Event) error {
	if !e.alive.enter() {
		return s.dev.rt.errorf(fnStreamWaitEvent, codeClosed, "event")
	}
	defer e.alive.leave()
	f := s.dev.rt.frame()
	f.args[0], f.args[1], f.args[2] = uintptr(s.handle), uintptr(e.handle), 0
	code := s.dev.guard(&s.alive, fnStreamWaitEvent, f)
	s.dev.rt.put(f)
	if code != Success {
		return s.dev.rt.errorf(fnStreamWaitEvent, code, "%v waits for %v", s, e)
	}
	return nil
}

// Record makes e stand for all work queued so far (cudaEventRecord). The event
// must be of the same device.
func (s *Stream) Record(e *Event) error {
	if !e.alive.enter() {
		return s.dev.rt.errorf(fnEventRecord, codeClosed, "event")
	}
	defer e.alive.leave()
	f := s.dev.rt.frame()
	f.args[0], f.args[1] = uintptr(e.handle), uintptr(s.handle)
	code := s.dev.guard(&s.alive, fnEventRecord, f)
	s.dev.rt.put(f)
	if code != Success {
		return s.dev.rt.errorf(fnEventRecord, code, "%v on %v", e, s)
	}
	return nil
}

// Close destroys the stream without waiting for its work, which still runs to
// its end (cudaStreamDestroy): synchronise first if memory that the work uses
// is to be released. A second Close does nothing.
func (s *Stream) Close() error {
	if !s.alive.close() {
		return nil
	}
	if err := s.dev.destroy(fnStreamDestroy, uintptr(s.handle)); err != nil {
		s.alive.reopen()
		return err
	}
	s.cleanup.Stop()
	return nil
}
