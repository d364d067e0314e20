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
	handle  handle
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
	f := d.rt.begin(nil)
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), flags, uintptr(o.Priority)
	if code := d.guard(fnStreamCreate, f); code != Success {
		return nil, d.rt.errorf(fnStreamCreate, code, "%+v on %v", o, d)
	}
	s := &Stream{dev: d, handle: handle{value: uintptr(f.out[0])}}
	s.cleanup = runtime.AddCleanup(s, func(value uintptr) { d.destroy(fnStreamDestroy, value) }, s.handle.value)
	return s, nil
}

// own is the stream's handle, and arg the handle as an argument. Both serve the
// calls that exist with and without a stream, so nil is allowed.
func (s *Stream) own() *handle {
	if s == nil {
		return nil
	}
	return &s.handle
}

func (s *Stream) arg() uintptr {
	if s == nil {
		return 0
	}
	return s.handle.value
}

// Device returns the stream's device.
func (s *Stream) Device() *Device { return s.dev }

// Handle returns the cudaStream_t, to queue work by other means. It is valid
// until Close.
func (s *Stream) Handle() StreamHandle { return StreamHandle(s.handle.value) }

// String names the stream in messages.
func (s *Stream) String() string { return fmt.Sprintf("stream %#x of %v", s.handle.value, s.dev) }

// Query tells whether all work queued so far is done (cudaStreamQuery). An
// error is one of the stream's work.
func (s *Stream) Query() (done bool, err error) { return s.dev.query(fnStreamQuery, &s.handle) }

// Wait makes work that is queued later wait for what e recorded, which may be
// on another stream or device (cudaStreamWaitEvent). The caller does not wait.
func (s *Stream) Wait(e *Event) error {
	return s.with(e, fnStreamWaitEvent, s.handle.value, e.handle.value)
}

// Record makes e stand for all work queued so far (cudaEventRecord). The event
// must be of the same device.
func (s *Stream) Record(e *Event) error {
	return s.with(e, fnEventRecord, e.handle.value, s.handle.value)
}

// with makes a call that takes both a stream and an event. Locks are taken in
// that order.
func (s *Stream) with(e *Event, fn function, first, second uintptr) error {
	f := s.dev.rt.begin(&s.handle)
	f.args[0], f.args[1], f.args[2] = first, second, 0
	e.handle.mu.Lock()
	code := codeClosed
	if !e.handle.closed {
		code = s.dev.guard(fn, f)
	}
	e.handle.mu.Unlock()
	s.dev.rt.end(f)
	if code != Success {
		return s.dev.rt.errorf(fn, code, "%v and %v", s, e)
	}
	return nil
}

// Close destroys the stream without waiting for its work, which still runs to
// its end (cudaStreamDestroy): synchronise first if memory that the work uses
// is to be released. A second Close does nothing.
func (s *Stream) Close() error {
	if err := s.dev.close(fnStreamDestroy, &s.handle); err != nil {
		return err
	}
	s.cleanup.Stop()
	return nil
}
