package cudart

import (
	"runtime"
	"sync/atomic"
)

// A handle is a stream or an event of the library, shared by any number of
// goroutines. No lock is held during calls that use it. Instead the calls in progress
// are counted, and the last of them destroys a handle that was closed during the call.
//
// state holds, from the low bits up, the number of calls in progress, the stages of
// closing, and the number of calls that have queued work. So one addition ends a call
// and counts it.
type handle struct {
	value uintptr
	state atomic.Uint64
	frame *frame // for the call that found no other in progress
}

const (
	handleUsers      = 1<<16 - 1 // calls in progress
	handleClosed     = 1 << 16   // refuses calls
	handleDestroying = 1 << 17   // a goroutine is about to destroy it
	handleDestroyed  = 1 << 18
	handleQueued     = 1 << 19 // one call that queued work
)

// enter starts a call that uses the handle. ok is false if the handle is closed. alone
// reports that no other call is in progress: the handle's frame is then the caller's
// until leave.
func (h *handle) enter() (alone, ok bool) {
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

// leave ends a call; queued reports that it may have queued work. If leave returns
// true, the caller must destroy the handle.
func (h *handle) leave(queued bool) (destroy bool) {
	end := ^uint64(0) // -1
	if queued {
		end += handleQueued
	}
	s := h.state.Add(end)
	return s&handleClosed != 0 && h.claim()
}

// close refuses calls from now on. If it returns true, no call is in progress, and
// the caller must destroy the handle.
func (h *handle) close() (destroy bool) {
	h.state.Or(handleClosed)
	return h.claim()
}

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

// unclaim undoes claim after a destruction that failed and can be tried again.
func (h *handle) unclaim() { h.state.And(^uint64(handleDestroying)) }

func (h *handle) destroyed() { h.state.Or(handleDestroyed) }

// queued returns the number of calls that have queued work. It changes before such a
// call returns to its caller.
func (h *handle) queued() uint64 { return h.state.Load() / handleQueued }
