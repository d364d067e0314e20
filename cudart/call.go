package cudart

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
	"weak"
)

// A cCall is a call of a C function: its address, up to eleven arguments that are
// integers or pointers, and its result. The function ignores arguments that it does not
// take.
type cCall struct {
	entry  uintptr
	args   [maxCallArgs]uintptr
	result uintptr

	// For [Runtime.Stuck]: name is the number of the call, its device and its
	// function. callEntry copies it to inside while the call is inside the
	// library, by plain stores: atomic ones would cost as much as the rest.
	name, inside uint64
	device       int32 // ordinal
	calls        uint32

	driver [2]uint64 // results of the calls that an adapter makes besides
}

// maxCallArgs is the number of arguments of cuLaunchKernel, which has most.
const maxCallArgs = 11

// A frame holds the arguments and results of a call. Frames are in the heap, because C
// writes to them and a goroutine's stack may move. They are pooled, or belong to a
// handle, so that a call allocates nothing.
type frame struct {
	cCall
	own  cCall          // for the calls that guard makes for itself
	out  results        // that C writes: sizes, handles, numbers
	host unsafe.Pointer // keeps host memory alive, and in the heap, during the call

	handle  *handle // of the stream or the event that the call uses, if any
	pooled  bool
	refused bool // the stream or event is closed
	entries int  // that it may queue on the stream
}

// outPtr returns the address of result i, as an argument.
func (f *frame) outPtr(i int) uintptr { return uintptr(unsafe.Pointer(&f.out[i])) }

// A binding is a loaded library: the address of each function, how it takes its
// arguments, and what makes the call if that takes more than the function.
type binding struct {
	entry    [maxFunctions]uintptr
	abi      [maxFunctions]abi
	adapt    [maxFunctions]adapter
	contexts []atomic.Uintptr // of the devices, where libcuda is called; 0 until they are retained
	frames   sync.Pool
	launches sync.Pool // of *launch

	mu   sync.Mutex
	made []weak.Pointer[frame] // all frames, some of them in use
}

func newBinding() *binding {
	b := &binding{}
	b.frames.New = func() any {
		f := b.newFrame()
		f.pooled = true
		return f
	}
	b.launches.New = func() any { return newArgs() }
	return b
}

func (b *binding) newFrame() *frame {
	f := new(frame)
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.made) == cap(b.made) { // drop what was garbage collected
		b.made = slices.DeleteFunc(b.made, func(w weak.Pointer[frame]) bool { return w.Value() == nil })
	}
	b.made = append(b.made, weak.Make(f))
	return f
}

// begin starts a call that uses neither a stream nor an event.
func (b *binding) begin() *frame { return b.frames.Get().(*frame) }

// begin starts a call that queues work on a stream. With a nil stream it starts one
// that uses none: functions with and without a stream share their code.
func (d *Device) begin(s *Stream) *frame {
	switch {
	case !d.made():
		return new(frame) // do makes no call
	case s == nil:
		return d.rt.begin()
	}
	f := s.timeline.begin()
	f.entries = 1
	return f
}

// end ends what begin started.
func (b *binding) end(f *frame) {
	handle, entries := f.handle, f.entries
	f.host, f.handle, f.entries, f.refused = nil, nil, 0, false
	if f.pooled {
		b.frames.Put(f)
	}
	if handle != nil {
		handle.endUse(entries)
	}
}

// call is the one place that calls the library. It runs on any thread, so with any
// device current: see guard.
func (b *binding) call(fn function, c *cCall) Code {
	if c.entry = b.entry[fn]; c.entry == 0 {
		return codeMissing
	}
	c.calls++
	c.name = nameCall(c.calls, c.device, fn)
	if adapt := b.adapt[fn]; adapt != nil {
		return adapt(b, c)
	}
	return c.call()
}

// call calls the function at entry.
func (c *cCall) call() Code {
	callC(c)
	return Code(int32(c.result))
}

// clear takes the last error of the calling thread (cudaGetLastError), so that no
// later call returns it.
func (b *binding) clear(f *frame) { b.call(fnGetLastError, &f.own) }

// callAnyDevice makes a call that does not depend on the current device.
func (rt *Runtime) callAnyDevice(fn function, f *frame) Code {
	f.device = noDevice
	// The last error belongs to the thread.
	runtime.LockOSThread()
	code := rt.call(fn, &f.cCall)
	if code != success && code != codeMissing {
		rt.clear(f)
	}
	runtime.UnlockOSThread()
	return code
}

// guard makes a call with the device current. All methods of devices, streams and
// events call the library through it. The current device and the last error belong to
// the OS thread, and goroutines move between threads. So guard locks the thread,
// selects the device, calls, takes the last error and unlocks.
//
// With one device nothing needs to be selected: a new thread has device 0 current.
// With several, asking for the current device (cudaGetDevice) costs less than half of
// setting it (cudaSetDevice), and is mostly enough.
func (d *Device) guard(fn function, f *frame) Code {
	rt := d.rt
	switch {
	case f.refused:
		return codeClosed
	case rt.isClosed() && !worksAfterClose[fn]:
		return codeRuntimeClosed
	}
	b := rt.binding
	f.device, f.own.device = int32(d.ordinal), int32(d.ordinal)
	runtime.LockOSThread()
	code := success
	if rt.several {
		code = d.makeCurrent(b, f)
	}
	if code == success {
		code = b.call(fn, &f.cCall)
		if code != success && b.wantsContext(fn, code, f) {
			if code = b.attach(fn, f); code == success {
				code = b.call(fn, &f.cCall)
			}
		}
	}
	if code != success && code != codeMissing {
		b.clear(f)
	}
	runtime.UnlockOSThread()
	return code
}

// results are the values that C wrote to a frame.
type results [4]uint64

// int returns result i, a C int.
func (r *results) int(i int) int { return int(int32(r[i])) }

// do makes a call by guard, and ends the frame. detail describes the call's arguments for
// its error. After an error the results are 0. It allocates nothing unless the call fails.
func (d *Device) do(fn function, f *frame, detail func() string) (results, error) {
	if !d.made() {
		return results{}, notMade(fn)
	}
	return d.rt.finish(fn, f, d.guard(fn, f), detail)
}

// finish ends the frame of a call that returned code.
func (rt *Runtime) finish(fn function, f *frame, code Code, detail func() string) (out results, err error) {
	if code == success {
		out = f.out
	} else {
		err = rt.errorf(fn, code, "%s", detail())
	}
	rt.end(f)
	return out, err
}

// wantsContext reports whether a call failed because the thread has no context. Not all functions
// of libcuda say so: cuMemcpyBatchAsync calls its arguments invalid. So the thread is asked.
func (b *binding) wantsContext(fn function, code Code, f *frame) bool {
	switch {
	case code == errDeviceUninitialized:
		return true
	case b.contexts == nil || code == ErrNotReady:
		return false
	case code == ErrContextIsDestroyed:
		return renewsContext[fn]
	}
	f.own.args[0] = f.outPtr(3)
	return b.call(fnGetDevice, &f.own) == success && f.out.int(3) < 0
}

// attach attaches the context of the current device to the calling thread, for a function. Before
// 12.0 cudaSetDevice does not, and some functions (such as cudaMemAdvise of 11.8) then
// fail on a new thread with "invalid device context". cudaFree of nothing is the
// customary way. With libcuda instead of libcudart no thread has a context from the
// start. An error is returned as the function's that returned it (Code.of).
func (b *binding) attach(fn function, f *frame) Code {
	if b.contexts != nil {
		return b.attachByDriver(&f.own, int(f.own.device), renewsContext[fn])
	}
	b.clear(f)
	f.own.args[0] = 0
	return b.call(fnFree, &f.own).of(fnFree)
}

// makeCurrent selects the device on the calling thread. An error of cudaGetDevice or
// cudaSetDevice is returned as theirs (Code.of).
func (d *Device) makeCurrent(b *binding, f *frame) Code {
	f.own.args[0] = f.outPtr(3)
	if code := b.call(fnGetDevice, &f.own); code != success {
		return code.of(fnGetDevice)
	}
	if f.out.int(3) == d.ordinal {
		return success
	}
	f.own.args[0] = uintptr(d.ordinal)
	if code := b.call(fnSetDevice, &f.own); code != success {
		return code.of(fnSetDevice)
	}
	return success
}
