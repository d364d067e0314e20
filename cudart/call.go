package cudart

import (
	"runtime"
	"sync"
	"unsafe"
	"weak"
)

// A cCall is one call of a C function: its address, up to nine arguments that
// are integers or pointers, and what it returned. Arguments that the function
// does not take may be anything.
type cCall struct {
	entry  uintptr
	args   [9]uintptr
	result uintptr

	// Which call it is, for [Runtime.Stuck]: its number, the device, the
	// function. callEntry puts it into inside as long as the call is inside the
	// library, with plain stores, as atomic ones would cost as much as the rest.
	name, inside uint64
	device       int32 // ordinal
	calls        uint32
}

// A frame carries a call's arguments and takes its results. Frames are heap
// memory, pooled or part of a handle: a call allocates nothing, and C never
// writes through a pointer into a goroutine's stack, which may move.
type frame struct {
	cCall
	own  cCall          // of the calls that guard makes for itself
	out  [4]uint64      // what C writes: sizes, handles, numbers
	host unsafe.Pointer // keeps host memory alive, and on the heap, during the call

	// What the call uses: a stream or an event, or neither.
	line    *Timeline
	event   *Event
	pooled  bool
	refused bool // what it uses was closed
	queues  bool // it may queue work on line
}

// outPtr is the address of result i, as an argument.
func (f *frame) outPtr(i int) uintptr { return uintptr(unsafe.Pointer(&f.out[i])) }

// outInt is the C int that was written to result i.
func (f *frame) outInt(i int) int { return int(*(*int32)(unsafe.Pointer(&f.out[i]))) }

// A binding is a loaded library: the address of each function, and how it
// takes its arguments.
type binding struct {
	entry  [numFunctions]uintptr
	abi    [numFunctions]abi
	frames sync.Pool

	mu   sync.Mutex
	made []weak.Pointer[frame] // those that may be in use
}

func newBinding() *binding {
	b := &binding{}
	b.frames.New = func() any {
		f := b.newFrame()
		f.pooled = true
		return f
	}
	return b
}

func (b *binding) newFrame() *frame {
	f := new(frame)
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.made) == cap(b.made) {
		b.forgetFrames()
	}
	b.made = append(b.made, weak.Make(f))
	return f
}

// begin starts a call that uses neither a stream nor an event.
func (b *binding) begin() *frame { return b.frames.Get().(*frame) }

// begin starts a call that queues work on a stream. A nil stream stands for
// none: the calls that exist with and without a stream share their code.
func (d *Device) begin(s *Stream) *frame {
	if s == nil {
		return d.rt.begin()
	}
	f := s.line.begin()
	f.queues = true
	return f
}

// begin starts a call that uses the stream and queues no work.
func (t *Timeline) begin() *frame {
	f := t.dev.rt.enter(&t.handle)
	if !f.refused {
		f.line = t
	}
	return f
}

// begin starts a call that uses the event.
func (e *Event) begin() *frame {
	f := e.dev.rt.enter(&e.handle)
	if !f.refused {
		f.event = e
	}
	return f
}

func (b *binding) enter(h *handle) *frame {
	alone, ok := h.enter()
	if alone {
		return h.frame
	}
	f := b.begin()
	f.refused = !ok
	return f
}

// end ends what begin started.
func (b *binding) end(f *frame) {
	line, event, queues := f.line, f.event, f.queues
	f.host, f.line, f.event, f.queues, f.refused = nil, nil, nil, false, false
	if f.pooled {
		b.frames.Put(f)
	}
	switch {
	case line != nil:
		line.leave(queues)
	case event != nil:
		event.leave()
	}
}

// call is the one place that calls the library. It makes no promise about
// which thread, so which device, it runs on: that is guard's work.
func (b *binding) call(fn function, c *cCall) Code {
	if c.entry = b.entry[fn]; c.entry == 0 {
		return codeMissing
	}
	c.calls++
	c.name = nameCall(c.calls, c.device, fn)
	callC(c)
	return Code(int32(c.result))
}

// clear takes the pending error off the calling thread, so that it cannot
// surface at a later, unrelated call.
func (b *binding) clear(f *frame) { b.call(fnGetLastError, &f.own) }

// ask makes a call that does not depend on the current device.
func (rt *Runtime) ask(fn function, f *frame) Code {
	f.device = noDevice
	// The pending error belongs to the thread.
	runtime.LockOSThread()
	code := rt.call(fn, &f.cCall)
	if code != Success && code != codeMissing {
		rt.clear(f)
	}
	runtime.UnlockOSThread()
	return code
}

// guard makes a call with the device current. It is the only way by which
// methods of devices, streams and events reach the library. The current device
// and the last error belong to the OS thread while goroutines move, so it
// locks the thread, selects the device, calls, takes the error and unlocks.
//
// On a host with one device nothing needs to be selected: a fresh thread has
// device 0 as current. With several, asking which is current costs less than
// half of setting it, and after a first call it mostly is the right one.
func (d *Device) guard(fn function, f *frame) Code {
	rt := d.rt
	switch {
	case f.refused:
		return codeClosed
	case rt.closed.Load() && !worksAfterClose[fn]:
		return codeRuntimeClosed
	}
	b := rt.binding
	f.device, f.own.device = int32(d.ordinal), int32(d.ordinal)
	runtime.LockOSThread()
	code := Success
	if rt.several {
		code = d.makeCurrent(b, f)
	}
	if code == Success {
		code = b.call(fn, &f.cCall)
		if code == ErrDeviceUninitialized && b.attach(f) {
			code = b.call(fn, &f.cCall)
		}
	}
	if code != Success && code != codeMissing {
		b.clear(f)
	}
	runtime.UnlockOSThread()
	return code
}

// attach gives the calling thread the context of its current device. Before 12.0
// selecting a device does not, and some calls (cudaMemAdvise of 11.8, for one)
// then fail on a fresh thread with "invalid device context" where others attach
// it themselves. Freeing nothing is the customary way.
func (b *binding) attach(f *frame) bool {
	b.clear(f)
	f.own.args[0] = 0
	return b.call(fnFree, &f.own) == Success
}

// makeCurrent selects the device on the calling thread. Its errors are marked
// as those of the selection, not of the call that it was for.
func (d *Device) makeCurrent(b *binding, f *frame) Code {
	f.own.args[0] = f.outPtr(3)
	if code := b.call(fnGetDevice, &f.own); code != Success {
		return code.of(fnGetDevice)
	}
	if f.outInt(3) == d.ordinal {
		return Success
	}
	f.own.args[0] = uintptr(d.ordinal)
	if code := b.call(fnSetDevice, &f.own); code != Success {
		return code.of(fnSetDevice)
	}
	return Success
}

// worksAfterClose are the functions that a closed runtime still calls: those
// that release what the caller has, and those that tell whether it may be
// released.
var worksAfterClose = [numFunctions]bool{
	fnFree: true, fnFreeAsync: true, fnFreeHost: true, fnHostUnregister: true,
	fnStreamDestroy: true, fnStreamQuery: true,
	fnEventDestroy: true, fnEventQuery: true, fnEventRecord: true,
	fnDeviceSynchronize: true, fnPointerGetAttributes: true, fnDeviceDisablePeerAccess: true,
}
