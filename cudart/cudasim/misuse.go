package cudasim

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// maxMisuses bounds the misuses that are kept, and the internal errors.
const maxMisuses = 1000

// The kinds of misuses.
const (
	wrongDevice          = "wrong device"
	staleHandle          = "stale handle"
	freedMemory          = "freed memory"
	unmappedMemory       = "unmapped memory"
	busyMemory           = "busy memory"
	driverHang           = "driver hang"
	callFromHostFunction = "call from host function"
	busyManagedMemory    = "busy managed memory"
	busyModule           = "busy module"
	illegalAccess        = "illegal access"
)

// A Misuse is something that a caller did wrong, whether the call failed or not.
//
//	wrong device             a stream, an event or memory of another device than the thread's current one was used. CUDA
//	                         accepts most of these calls and makes a context on the current device
//	stale handle             a stream or an event was destroyed or never made. The real library may crash
//	freed memory             device memory was used after cudaFreeAsync
//	unmapped memory          host memory was unmapped while it was registered, or before a copy of it ran
//	busy memory              host memory was unregistered while copies of it were pending
//	driver hang              a real driver never returns from this call. Here it returns cudaErrorInvalidValue; see
//	                         [Sim.Block] for calls that do not return
//	call from host function  a host function called CUDA
//	busy managed memory      the CPU accessed managed memory while the device worked and could not access it
//	                         concurrently. The real process crashes
//	busy module              code was unloaded before launches of its kernels had run
//	illegal access           a kernel accessed memory that the device cannot access. It makes the device unusable
type Misuse struct {
	Kind    string // one of the list: "busy memory"
	Call    string // the C function, or the kernel
	Thread  uint64 // number of the OS thread, unique in the process
	Current int    // the thread's current device
	Want    int    // the device that should have been current, -1 if that does not matter
	Detail  string
}

// String describes the misuse in one line.
func (m Misuse) String() string {
	return fmt.Sprintf("%s: %s: %s (thread %d, current device %d)", m.Kind, m.Call, m.Detail, m.Thread, m.Current)
}

// Misuses returns what callers did wrong so far, the first 1000 misuses.
func (s *Sim) Misuses() []Misuse {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Misuse(nil), s.misuses...)
}

// stale is the result of a call with a handle that is none. It is a misuse, unless the
// handle is of a closed Sim whose function pointers this one has: lost streams and
// events may be destroyed at any time.
func (c *call) stale(what string, h uintptr) cudart.Code {
	if space := h - (h-deviceAddresses)%addressSpaceSize; space != c.base && slices.Contains(c.earlier, space) {
		return cudart.ErrCudartUnloading
	}
	c.misuse(staleHandle, -1, "no %s %#x", what, h)
	return cudart.ErrInvalidResourceHandle
}
