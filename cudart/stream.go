package cudart

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
)

// A StreamHandle is a cudaStream_t, for other libraries that take one.
type StreamHandle uintptr

// StreamOptions shape a stream. The zero value suits most programs.
type StreamOptions struct {
	// Blocking orders the stream with CUDA's default stream: each waits for the
	// work of the other. The zero value is a stream that does not
	// (cudaStreamNonBlocking).
	Blocking bool
	// Priority is more urgent the smaller it is: 0 is the least urgent of most devices, -5 the
	// most. Numbers out of a device's range are replaced by the nearest, so math.MinInt is as urgent as
	// can be. It does not affect copies.
	Priority int
}

// A Stream is a queue of work that the device does in order. Its methods may be
// called from any goroutine; CUDA orders what several goroutines queue at once.
//
// A method that queues work returns before the work is done. It blocks while the
// stream is full, which is at about a thousand entries.
type Stream struct {
	dev      *Device
	timeline *timeline
	cleanup  runtime.Cleanup

	followed pointID // what WaitPoint made the stream wait for last; guarded by timeline.mu
}

// NewStream creates a stream (cudaStreamCreateWithPriority). Close it; the garbage
// collector destroys a stream that is lost. The error wraps [ErrMemoryAllocation] if
// there is not enough memory.
func (d *Device) NewStream(o StreamOptions) (*Stream, error) {
	const nonBlocking = 1
	var flags uintptr = nonBlocking
	if o.Blocking {
		flags = 0
	}
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), flags, uintptr(min(max(o.Priority, math.MinInt32), math.MaxInt32))
	out, err := d.do(fnStreamCreate, f, func() string { return fmt.Sprintf("%+v on %v", o, d) })
	if err != nil {
		return nil, err
	}
	s := &Stream{dev: d, timeline: newTimeline(d, uintptr(out[0]))}
	// On a goroutine of its own, because the calls may block.
	s.cleanup = runtime.AddCleanup(s, func(t *timeline) { go t.collect() }, s.timeline)
	return s, nil
}

func (s *Stream) made() bool { return s != nil && s.timeline != nil }

// arg is the stream as an argument of a call, 0 for no stream.
func (s *Stream) arg() uintptr {
	if !s.made() {
		return 0
	}
	return s.timeline.value
}

// either returns async for a call on a stream, and sync for no stream.
func (s *Stream) either(sync, async function) function {
	if s == nil {
		return sync
	}
	return async
}

// Device returns the stream's device, nil for a nil Stream.
func (s *Stream) Device() *Device {
	if s == nil {
		return nil
	}
	return s.dev
}

// Handle returns the cudaStream_t, to queue work by other means. It is valid until
// Close. After the first call of Handle every [Point] of the stream records an event,
// because other code may have queued work.
func (s *Stream) Handle() StreamHandle {
	if s.made() {
		s.timeline.exposed.Store(true)
	}
	return StreamHandle(s.arg())
}

// String returns the handle and the device, for messages.
func (s *Stream) String() string {
	if !s.made() {
		return "no stream"
	}
	return s.timeline.String()
}

// Query reports whether all work queued so far is done (cudaStreamQuery). The error
// is one of the stream's work: done is false then, although no work may be left.
func (s *Stream) Query() (done bool, err error) {
	if !s.made() {
		return false, notMade(fnStreamQuery)
	}
	done, err = s.timeline.query(fnStreamQuery)
	if err == nil {
		err = s.timeline.report()
	}
	return done && err == nil, err
}

// SynchronizeBlocking is Synchronize inside of CUDA (cudaStreamSynchronize): it
// occupies the calling thread and, unless the process has chosen otherwise, a core, and
// nothing but the end of the work ends it. For work of a few microseconds it takes
// less time than Synchronize, which has to query. The error is one of the stream's work,
// or wraps [ErrClosed] if the stream is closed.
func (s *Stream) SynchronizeBlocking() error {
	if !s.made() {
		return notMade(fnStreamSynchronize)
	}
	_, err := s.timeline.query(fnStreamSynchronize)
	return errors.Join(err, s.timeline.report())
}

// query calls a function that reports for all work so far.
func (t *timeline) query(fn function) (done bool, err error) {
	pointed := t.pointed.Load()
	var n, queued uint64
	if pointed {
		n, queued = t.beginQuery()
	}
	f := t.begin()
	code := t.sameStream(f)
	if code == success {
		f.args[0] = t.value
		code = t.dev.guard(fn, f)
	}
	if pointed && code == success {
		t.completed(n, queued)
	}
	t.dev.rt.end(f)
	return t.dev.queryResult(fn, code, t)
}

// queryResult interprets the code of cudaStreamQuery or cudaEventQuery: cudaErrorNotReady
// is not an error.
func (d *Device) queryResult(fn function, code Code, what fmt.Stringer) (done bool, err error) {
	switch code {
	case success:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, d.rt.errorf(fn, code, "%v", what)
}

// with makes a call that takes the stream and an event.
func (s *Stream) with(fn function, c *cEvent) error {
	f := s.Device().begin(s)
	code := codeClosed
	if c, ok := c.use(); ok {
		f.args[0], f.args[1], f.args[2] = s.arg(), c.value, 0
		if fn == fnEventRecord {
			f.args[0], f.args[1] = c.value, s.arg()
		}
		code = s.dev.guard(fn, f)
		c.endUse(0)
	}
	_, err := s.dev.rt.finish(fn, f, code, func() string { return fmt.Sprintf("%v and %v", s, c) })
	return err
}

// LaunchHostFunc queues a call of fn on a thread of CUDA's (cudaLaunchHostFunc). It
// runs when the work that is queued so far is done, and work that is queued later
// waits until it returns. fn must be short, and must call neither CUDA nor this
// package. fn must return: a panic, and the end of its goroutine (runtime.Goexit, which
// testing.T.FailNow calls), end the process, because C has called it. If earlier work of
// the stream fails, CUDA does not call fn, reports nothing, and fn stays referenced. A nil
// fn is an error.
func (s *Stream) LaunchHostFunc(fn func()) error {
	switch {
	case !s.made():
		return notMade(fnLaunchHostFunc)
	case fn == nil:
		return fmt.Errorf("cudaLaunchHostFunc: %v: the function is nil", s)
	}
	id := lastHostFunc.Add(1)
	hostFuncs.Store(id, fn)
	f := s.Device().begin(s)
	f.args[0], f.args[1], f.args[2] = s.arg(), hostFuncEntry(), id
	_, err := s.Device().do(fnLaunchHostFunc, f, s.String)
	if err != nil {
		hostFuncs.Delete(id)
	}
	return err
}

// Close destroys the stream and does not wait for its work, which runs to its end
// (cudaStreamDestroy): synchronize first if memory that the work uses is to be
// released. If other goroutines are inside calls on the stream, the last of them
// destroys it, and Close does not wait for that. A second Close does nothing; after
// an error Close may be called again. A stream of [Device.StreamFromHandle] is not
// destroyed: see there.
func (s *Stream) Close() error {
	if !s.made() {
		return nil
	}
	if err := s.timeline.close(); err != nil {
		return err
	}
	if f := s.timeline.foreign; f != nil {
		<-f.unused
	}
	s.cleanup.Stop()
	return nil
}

// hostFuncs are the functions that the library is to call, by number: it takes a C function
// and a number.
var (
	hostFuncs    sync.Map // of func()
	lastHostFunc atomic.Uintptr
)

// hostFuncEntry returns the one C function that calls all of them: purego never frees any.
var hostFuncEntry = sync.OnceValue(func() uintptr {
	return newHostFuncEntry(func(id uintptr) {
		if fn, ok := hostFuncs.LoadAndDelete(id); ok {
			fn.(func())()
		}
	})
})
