package cudart

import (
	"fmt"
	"unsafe"
)

// ManagedFlags are flags of cudaMallocManaged.
type ManagedFlags uint32

// Flags for [Device.MallocManaged]. One of them is needed.
const (
	ManagedGlobal ManagedFlags = 1 // every stream of every device can access it
	ManagedHost   ManagedFlags = 2 // no device can, until it is attached to a stream
)

// A LocationKind is a cudaMemLocationType.
type LocationKind int

// The kinds of locations.
const (
	LocationNone            LocationKind = 0 // no place, or not the same for all of a range
	LocationDevice          LocationKind = 1 // a device
	LocationHost            LocationKind = 2 // the host
	LocationHostNUMA        LocationKind = 3 // a NUMA node of the host, CUDA 12.2 or later
	LocationHostNUMACurrent LocationKind = 4 // the NUMA node of the calling thread, CUDA 12.2 or later
)

// A Location is a place for managed memory.
type Location struct {
	Kind LocationKind
	ID   int // device ordinal for LocationDevice, node for LocationHostNUMA
}

// Location returns the device's memory as a place for managed memory.
func (d *Device) Location() Location { return Location{Kind: LocationDevice, ID: d.ordinal} }

// String names the location in messages: "device 0", "the host", "NUMA node 1".
func (l Location) String() string {
	switch l.Kind {
	case LocationDevice:
		return fmt.Sprintf("device %d", l.ID)
	case LocationHost:
		return "the host"
	case LocationHostNUMA:
		return fmt.Sprintf("NUMA node %d", l.ID)
	case LocationHostNUMACurrent:
		return "the NUMA node of the calling thread"
	case LocationNone:
		return "no location"
	}
	return fmt.Sprintf("location of kind %d", int(l.Kind))
}

// locationArg is a place as an argument: from 12.2 on a cudaMemLocation by value (two ints
// in one register), before an ordinal, -1 for the host.
func (d *Device) locationArg(fn function, p DevPtr, n int, l Location) (uintptr, error) {
	switch {
	case d.rt.abi[fn] == abiLocation:
		return uintptr(uint64(uint32(l.Kind)) | uint64(uint32(l.ID))<<32), nil
	case l.Kind == LocationDevice:
		return uintptr(l.ID), nil
	case l.Kind == LocationHost:
		return ^uintptr(0), nil
	}
	return 0, fmt.Errorf("%s: %d bytes at %#x: a NUMA node as the location needs CUDA 12.2 or later: %w", fn.name(), n, uintptr(p), ErrUnsupported)
}

// An Advice is a cudaMemoryAdvise.
type Advice int

// Advice for [Device.MemAdvise].
const (
	AdviseReadMostly             Advice = 1 // mostly read: each place keeps a copy. No location is needed
	AdviseUnsetReadMostly        Advice = 2
	AdvisePreferredLocation      Advice = 3 // the location where it stays
	AdviseUnsetPreferredLocation Advice = 4
	AdviseAccessedBy             Advice = 5 // the location maps it, so that access causes no fault
	AdviseUnsetAccessedBy        Advice = 6
)

// MallocManaged allocates n bytes that the host and all devices access at the same
// address, and that the driver moves between them (cudaMallocManaged). The address
// for copies is DevPtr(uintptr(p)). Release it with [Device.Free]. The error wraps
// [ErrInvalidValue] if n <= 0 or if flags are not one of ManagedGlobal and
// ManagedHost, [ErrMemoryAllocation] if there is no room, and [ErrNotSupported] if
// [AttrManagedMemory] is 0.
func (d *Device) MallocManaged(n int, flags ManagedFlags) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, invalid(fnMallocManaged, "size %d: must be positive", n)
	}
	f := d.rt.begin()
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), uintptr(flags)
	out, err := d.do(fnMallocManaged, f, func() string { return fmt.Sprintf("%d bytes on %v", n, d) })
	return *(*unsafe.Pointer)(unsafe.Pointer(&out[0])), err
}

// Prefetch queues the move of n bytes of managed memory at p to a location
// (cudaMemPrefetchAsync). The error wraps [ErrInvalidValue] if n <= 0 or if they are
// not managed memory, [ErrInvalidDevice] if the location does not exist or cannot
// access managed memory concurrently ([AttrConcurrentManagedAccess]), and
// [ErrUnsupported] for a NUMA node before CUDA 12.2.
func (s *Stream) Prefetch(p DevPtr, n int, to Location) error {
	if n <= 0 {
		return invalid(fnMemPrefetch, "size %d: must be positive", n)
	}
	where, err := s.dev.locationArg(fnMemPrefetch, p, n, to)
	if err != nil {
		return err
	}
	f := s.dev.begin(s)
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(n), where, s.arg()
	if s.dev.rt.abi[fnMemPrefetch] == abiLocation {
		f.args[3], f.args[4] = 0, s.arg()
	}
	_, err = s.dev.do(fnMemPrefetch, f, func() string { return fmt.Sprintf("%d bytes at %#x to %v", n, uintptr(p), to) })
	return err
}

// MemAdvise advises the driver how n bytes of managed memory at p will be used, and
// where (cudaMemAdvise). The errors are those of [Stream.Prefetch].
func (d *Device) MemAdvise(p DevPtr, n int, advice Advice, at Location) error {
	if n <= 0 {
		return invalid(fnMemAdvise, "size %d: must be positive", n)
	}
	where, err := d.locationArg(fnMemAdvise, p, n, at)
	if err != nil {
		return err
	}
	f := d.rt.begin()
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(n), uintptr(advice), where
	_, err = d.do(fnMemAdvise, f, func() string {
		return fmt.Sprintf("%d bytes at %#x, advice %d, location %v", n, uintptr(p), advice, at)
	})
	return err
}
