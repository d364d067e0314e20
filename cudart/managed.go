package cudart

import (
	"fmt"
	"unsafe"
)

// ManagedFlags say who may reach managed memory.
type ManagedFlags uint32

// The values of cudaMallocManaged's flags.
const (
	ManagedGlobal ManagedFlags = 1 // any stream on any device
	ManagedHost   ManagedFlags = 2 // no device, until attached to a stream
)

// A LocationKind says what kind of place a [Location] is.
type LocationKind int

// The values of cudaMemLocationType.
const (
	LocationDevice          LocationKind = 1
	LocationHost            LocationKind = 2
	LocationHostNUMA        LocationKind = 3 // CUDA 12.2 or later
	LocationHostNUMACurrent LocationKind = 4 // CUDA 12.2 or later
)

// A Location is a place where managed memory can be.
type Location struct {
	Kind LocationKind
	ID   int // device ordinal or NUMA node
}

// Location returns the device's memory as a place.
func (d *Device) Location() Location { return Location{Kind: LocationDevice, ID: d.ordinal} }

// ordinal is the place as 11.x and 12.0 know it: a device, or -1 for the host.
func (l Location) ordinal() (int, error) {
	switch l.Kind {
	case LocationDevice:
		return l.ID, nil
	case LocationHost:
		return -1, nil
	}
	return 0, fmt.Errorf("cudart: a NUMA node as a place needs CUDA 12.2 or later: %w", ErrUnsupported)
}

// word is the place as a cudaMemLocation by value: two ints in one register.
func (l Location) word() uintptr {
	return uintptr(uint64(uint32(l.Kind)) | uint64(uint32(l.ID))<<32)
}

// An Advice is a cudaMemoryAdvise.
type Advice int

// The values of cudaMemoryAdvise.
const (
	AdviseReadMostly             Advice = 1
	AdviseUnsetReadMostly        Advice = 2
	AdvisePreferredLocation      Advice = 3
	AdviseUnsetPreferredLocation Advice = 4
	AdviseAccessedBy             Advice = 5
	AdviseUnsetAccessedBy        Advice = 6
)

// MallocManaged allocates n bytes that host and devices reach at the same
// address (cudaMallocManaged). The device's view is DevPtr(uintptr(p)); give
// it back with [Device.Free].
func (d *Device) MallocManaged(n int, flags ManagedFlags) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, invalid(fnMallocManaged, "size %d: must be positive", n)
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), uintptr(flags)
	if code := d.guard(fnMallocManaged, f); code != Success {
		return nil, d.rt.errorf(fnMallocManaged, code, "%d bytes on %v", n, d)
	}
	return *(*unsafe.Pointer)(unsafe.Pointer(&f.out[0])), nil
}

// Prefetch moves managed memory to a place, in stream order
// (cudaMemPrefetchAsync).
func (s *Stream) Prefetch(p DevPtr, n int, to Location) error {
	rt := s.dev.rt
	f := s.dev.begin(s)
	defer rt.end(f)
	f.args[0], f.args[1] = uintptr(p), uintptr(n)
	if rt.abi[fnMemPrefetch] == abiLocation {
		f.args[2], f.args[3], f.args[4] = to.word(), 0, s.arg()
	} else {
		device, err := to.ordinal()
		if err != nil {
			return err
		}
		f.args[2], f.args[3] = uintptr(device), s.arg()
	}
	if code := s.dev.guard(fnMemPrefetch, f); code != Success {
		return rt.errorf(fnMemPrefetch, code, "%d bytes at %#x to %+v", n, uintptr(p), to)
	}
	return nil
}

// MemAdvise tells the driver how managed memory will be used (cudaMemAdvise).
func (d *Device) MemAdvise(p DevPtr, n int, advice Advice, at Location) error {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = uintptr(p), uintptr(n), uintptr(advice)
	if d.rt.abi[fnMemAdvise] == abiLocation {
		f.args[3] = at.word()
	} else {
		device, err := at.ordinal()
		if err != nil {
			return err
		}
		f.args[3] = uintptr(device)
	}
	if code := d.guard(fnMemAdvise, f); code != Success {
		return d.rt.errorf(fnMemAdvise, code, "%d bytes at %#x, advice %d, place %+v", n, uintptr(p), advice, at)
	}
	return nil
}
