package cudart

import (
	"runtime"
	"sync"
	"unsafe"
)

// A cCall is one call of a C function: its address, up to nine arguments that
// are integers or pointers, and what it returned. Arguments that the function
// does not take may be anything.
type cCall struct {
	entry  uintptr
	args   [9]uintptr
	result uintptr
}

// A frame carries a call's arguments and takes its results. Frames are heap
// memory, pooled or part of a handle: a call allocates nothing, and C never
// writes through a pointer into a goroutine's stack, which may move.
type frame struct {
	cCall
	own   cCall          // of the calls that guard makes for itself
	out   [4]uint64      // what C writes: sizes, handles, numbers
	host  unsafe.Pointer // keeps host memory alive, and on the heap, during the call
	owner *handle        // whose frame it is, nil for one of the pool
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
}

func newBinding() *binding {
	b := &binding{}
	b.frames.New = func() any { return new(frame) }
	return b
}

// call is the one place that calls the library. It makes no promise about
// which thread, so which device, it runs on: that is guard's work.
func (b *binding) call(fn function, c *cCall) Code {
	if c.entry = b.entry[fn]; c.entry == 0 {
		return codeMissing
	}
	callC(c)
	return Code(int32(c.result))
}

// clear takes the pending error off the calling thread, so that it cannot
// surface at a later, unrelated call.
func (b *binding) clear(f *frame) { b.call(fnGetLastError, &f.own) }

// guard makes a call with the device current, and is the only way by which
// methods of devices, streams and events reach the library. The current device
// and the last error belong to the OS thread while goroutines move, so it
// locks the thread, selects the device, calls, takes the error and unlocks.
//
// On a host with one device nothing needs to be selected: a fresh thread has
// device 0 as current. With several, asking which is current costs less than
// half of setting it, and after a first call it mostly is the right one.
func (d *Device) guard(fn function, f *frame) Code {
	if f.owner != nil && f.owner.closed {
		return codeClosed
	}
	b := d.rt.binding
	runtime.LockOSThread()
	code := Success
	if d.rt.several {
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

func (d *Device) makeCurrent(b *binding, f *frame) Code {
	f.own.args[0] = f.outPtr(3)
	if code := b.call(fnGetDevice, &f.own); code != Success {
		return code
	}
	if f.outInt(3) == d.ordinal {
		return Success
	}
	f.own.args[0] = uintptr(d.ordinal)
	return b.call(fnSetDevice, &f.own)
}
