package cudasim

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// maxMisuses bounds the misuses that are kept, and the internal errors.
const maxMisuses = 1000

// A MisuseKind says what was wrong.
type MisuseKind int

const (
	// WrongDevice is a call that used a stream, an event or memory of another
	// device than the thread's current one. CUDA accepts most of these and makes
	// a context on the current device.
	WrongDevice MisuseKind = iota + 1
	// StaleHandle is a call with a stream or event that was destroyed or never
	// made. The real library may crash.
	StaleHandle
	// FreedMemory is a use of device memory after cudaFreeAsync.
	FreedMemory
	// UnmappedMemory is host memory that was unmapped while it was registered, or
	// before a copy of it ran.
	UnmappedMemory
	// BusyMemory is host memory that was unregistered while copies of it were
	// pending.
	BusyMemory
	// DriverHang is a call that never returns with a real driver. Here it returns
	// cudaErrorInvalidValue; see [Sim.Block] for calls that do not return.
	DriverHang
	// CallFromHostFunction is a CUDA call inside a host function.
	CallFromHostFunction
	// BusyManagedMemory is an access of the CPU to managed memory while the device
	// works and cannot access it concurrently. The real process crashes.
	BusyManagedMemory
	// BusyModule is code that was unloaded before launches of its kernels had run.
	BusyModule
	// IllegalAccess is a kernel that accessed memory which the device cannot access. It makes
	// the device unusable.
	IllegalAccess
)

// String names the kind: "wrong device".
func (k MisuseKind) String() string {
	switch k {
	case WrongDevice:
		return "wrong device"
	case StaleHandle:
		return "stale handle"
	case FreedMemory:
		return "freed memory"
	case UnmappedMemory:
		return "unmapped memory"
	case BusyMemory:
		return "busy memory"
	case DriverHang:
		return "driver hang"
	case CallFromHostFunction:
		return "call from host function"
	case BusyManagedMemory:
		return "busy managed memory"
	case BusyModule:
		return "busy module"
	case IllegalAccess:
		return "illegal access"
	}
	return "unknown misuse"
}

// A Misuse is something that a caller did wrong, whether the call failed or not.
type Misuse struct {
	Kind    MisuseKind
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
	c.misuse(StaleHandle, -1, "no %s %#x", what, h)
	return cudart.ErrInvalidResourceHandle
}
