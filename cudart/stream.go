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
// called from any goroutine; what several goroutines queue at once is done in
// the order in which CUDA takes their calls.
//
// A method that queues work returns before the work is done, unless about a
// thousand entries are queued: then it blocks until there is room.
type Stream struct {
	dev     *Device
	line    *Timeline
	cleanup runtime.Cleanup
}

// NewStream makes a stream (cudaStreamCreateWithPriority). Close it; one that
// is garbage collected without is destroyed then.
func (d *Device) NewStream(o StreamOptions) (*Stream, error) {
	const nonBlocking = 1
	var flags uintptr = nonBlocking
	if o.Blocking {
		flags = 0
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), flags, uintptr(o.Priority)
	if code := d.guard(fnStreamCreate, f); code != Success {
		return nil, d.rt.errorf(fnStreamCreate, code, "%+v on %v", o, d)
	}
	s := &Stream{dev: d, line: newTimeline(d, uintptr(f.out[0]))}
	// On a goroutine of its own, as the calls may block.
	s.cleanup = runtime.AddCleanup(s, func(t *Timeline) { go t.collect() }, s.line)
	return s, nil
}

// collect destroys a stream that was garbage collected, unless the runtime is
// closed: its library may be another one by then, if it was a simulated one.
func (t *Timeline) collect() {
	if !t.dev.rt.closed.Load() {
		_ = t.close() // no caller is left to report to
	}
}

// arg is the stream as an argument, 0 for none.
func (s *Stream) arg() uintptr {
	if s == nil {
		return 0
	}
	return s.line.handle.value
}

// Device returns the stream's device.
func (s *Stream) Device() *Device { return s.dev }

// Handle returns the cudaStream_t, to queue work by other means. It is valid
// until Close.
func (s *Stream) Handle() StreamHandle {
	s.line.exposed.Store(true)
	return StreamHandle(s.arg())
}

// String names the stream in messages.
func (s *Stream) String() string { return s.line.String() }

// Query reports whether all work queued so far is done (cudaStreamQuery). An
// error is one of the stream's work.
func (s *Stream) Query() (done bool, err error) {
	done, err = s.line.query()
	if err == nil {
		err = s.line.report()
	}
	return done && err == nil, err
}

func (t *Timeline) query() (done bool, err error) {
	asked := t.asked.Load()
	var n, queued uint64
	if asked {
		n, queued = t.beginAnswer()
	}
	f := t.begin()
	f.args[0] = t.handle.value
	code := t.dev.guard(fnStreamQuery, f)
	if asked && code == Success {
		t.answered(n, queued)
	}
	t.dev.rt.end(f)
	return t.dev.answer(fnStreamQuery, code, t)
}

// answer interprets the code of cudaStreamQuery or cudaEventQuery, for which
// "not ready" is no error.
func (d *Device) answer(fn function, code Code, what fmt.Stringer) (done bool, err error) {
	switch code {
	case Success:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, d.rt.errorf(fn, code, "%v", what)
}

// WaitEvent makes work that is queued later wait for what e recorded, which may
// be on another stream or device (cudaStreamWaitEvent). The caller does not
// wait.
func (s *Stream) WaitEvent(e *Event) error {
	if e == nil {
		return fmt.Errorf("cudaStreamWaitEvent: %v: %w", s, errNilEvent)
	}
	return s.with(e, fnStreamWaitEvent, s.arg(), e.handle.value)
}

// Record makes e stand for all work queued so far (cudaEventRecord). The event
// must be of the same device.
func (s *Stream) Record(e *Event) error {
	if e == nil {
		return fmt.Errorf("cudaEventRecord: %v: %w", s, errNilEvent)
	}
	if e.waits.Load() > 0 {
		s.dev.rt.waits.rerecorded(e)
	}
	if err := s.with(e, fnEventRecord, e.handle.value, s.arg()); err != nil {
		return err
	}
	e.last.Store(s.line)
	return nil
}

// with makes a call that takes both a stream and an event.
func (s *Stream) with(e *Event, fn function, first, second uintptr) error {
	f := s.line.begin()
	// A recorded event uses no memory: no point has to cover it.
	f.queues = fn == fnStreamWaitEvent
	code := codeClosed
	if _, ok := e.handle.enter(); ok {
		f.args[0], f.args[1], f.args[2] = first, second, 0
		code = s.dev.guard(fn, f)
		e.leave()
	}
	s.dev.rt.end(f)
	if code != Success {
		return s.dev.rt.errorf(fn, code, "%v and %v", s, e)
	}
	return nil
}

// Close destroys the stream without waiting for its work, which still runs to
// its end (cudaStreamDestroy): synchronise first if memory that the work uses
// is to be released. Calls in progress on other goroutines come to their end
// first: the last of them then destroys the stream, and Close does not wait for
// it. A second Close does nothing; after an error Close may be called again.
func (s *Stream) Close() error {
	if err := s.line.close(); err != nil {
		return err
	}
	s.cleanup.Stop()
	return nil
}
