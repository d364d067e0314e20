package cudart

import (
	"fmt"
	"runtime"
	"sync/atomic"
)

// A handle is a stream or an event of the library, shared by any number of
// goroutines. No lock is held during calls that use it. Instead the calls in progress
// are counted, and the last of them destroys a handle that was closed during the call.
//
// state holds, from the low bits up, the number of calls in progress, the stages of
// closing, and the number of entries that calls have queued. So one addition ends a call
// and counts them.
type handle struct {
	dev   *Device
	value uintptr
	state atomic.Uint64
	frame *frame // for the call that found no other in progress
	owner handleOwner
}

// A handleOwner is a timeline or a cEvent.
type handleOwner interface {
	fmt.Stringer
	finish() error // destroys the handle
}

const (
	handleUsers      = 1<<16 - 1 // calls in progress
	handleClosed     = 1 << 16   // refuses calls
	handleDestroying = 1 << 17   // a goroutine is about to destroy it
	handleDestroyed  = 1 << 18
	handleQueued     = 1 << 19 // one entry that was queued
)

// beginUse starts a call that uses the handle. ok is false if the handle is closed. alone
// reports that no other call is in progress: the handle's frame is then the caller's
// until endUse.
func (h *handle) beginUse() (alone, ok bool) {
	for {
		s := h.state.Load()
		switch {
		case s&handleClosed != 0:
			return false, false
		case s&handleUsers == handleUsers:
			runtime.Gosched()
		case h.state.CompareAndSwap(s, s+1):
			return s&handleUsers == 0, true
		}
	}
}

// begin starts a call that uses the handle and queues no work.
func (h *handle) begin() *frame {
	alone, ok := h.beginUse()
	f := h.frame
	if !alone {
		f = h.dev.rt.begin()
	}
	if f.refused = !ok; ok {
		f.handle = h
	}
	return f
}

// endUse ends a call, which may have queued entries, and destroys the handle if it
// was closed during the call.
func (h *handle) endUse(entries int) {
	s := h.state.Add(uint64(entries)*handleQueued - 1)
	if s&handleClosed != 0 && h.claim() && h.owner.finish() != nil {
		h.dev.rt.retryAtClose(h.close)
	}
}

// close refuses calls from now on, and destroys the handle unless calls are in progress:
// then the last of them does.
func (h *handle) close() error {
	h.state.Or(handleClosed)
	if h.claim() {
		return h.owner.finish()
	}
	return nil
}

// collect closes a handle whose Stream or Event was garbage collected. If the runtime is
// closed it does not: a simulated library may be closed too, and another one in its place.
func (h *handle) collect() {
	if !h.dev.rt.isClosed() {
		_ = h.close() // no caller is left to report to
	}
}

func (h *handle) closed() bool { return h.state.Load()&handleClosed != 0 }

func (h *handle) isDestroyed() bool { return h.state.Load()&handleDestroyed != 0 }

// claim reserves the destruction of a closed handle for the caller. It fails if calls
// are in progress, or if another caller has reserved it.
func (h *handle) claim() bool {
	for {
		s := h.state.Load()
		if s&handleUsers != 0 || s&(handleDestroying|handleDestroyed) != 0 {
			return false
		}
		if h.state.CompareAndSwap(s, s|handleDestroying) {
			return true
		}
	}
}

func (h *handle) destroyed() { h.state.Or(handleDestroyed) }

// queued returns the number of entries that were queued, modulo 2^45. It changes before a
// call that queues some returns to its caller.
func (h *handle) queued() uint64 { return h.state.Load() / handleQueued }

// destroy destroys a handle that was closed. A sticky error means that the context is
// lost with all its handles. After any other error the caller may try again.
func (h *handle) destroy(fn function) error {
	f := h.dev.rt.begin()
	f.args[0] = h.value
	code := h.dev.guard(fn, f)
	if code == success || code.Fatal() {
		h.destroyed()
	} else {
		h.state.And(^uint64(handleDestroying))
	}
	_, err := h.dev.rt.finish(fn, f, code, h.owner.String)
	return err
}
