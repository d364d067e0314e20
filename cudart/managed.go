package cudart

import (
	"errors"
	"fmt"
	"unsafe"
)

// A LocationKind is a cudaMemLocationType.
type LocationKind int

// The kinds of locations.
const (
	LocationNone            LocationKind = 0 // no location, or not the same for all of a range
	LocationDevice          LocationKind = 1 // a device
	LocationHost            LocationKind = 2 // the host
	LocationHostNUMA        LocationKind = 3 // a NUMA node of the host, CUDA 12.2 or later
	LocationHostNUMACurrent LocationKind = 4 // the NUMA node of the calling thread, CUDA 12.2 or later
)

// A Location is a place for managed memory.
type Location struct {
	Kind LocationKind // which of the processors
	ID   int          // device ordinal for LocationDevice, node for LocationHostNUMA
}

// Location returns the device's memory as a place for managed memory.
func (d *Device) Location() Location { return Location{Kind: LocationDevice, ID: d.Ordinal()} }

// HostLocation returns the host as a place for managed memory.
func HostLocation() Location { return Location{Kind: LocationHost} }

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
	case !d.made():
		return 0, notMade(fn)
	case d.rt.abi[fn] == abiLocation:
		return uintptr(uint64(uint32(l.Kind)) | uint64(uint32(l.ID))<<32), nil
	case l.Kind == LocationDevice:
		return uintptr(l.ID), nil
	case l.Kind == LocationHost:
		return ^uintptr(0), nil
	}
	return 0, fmt.Errorf("%s: %d bytes at %v: a NUMA node as the location needs CUDA 12.2 or later: %w", fn.name(), n, p, errors.ErrUnsupported)
}

// An Advice is a cudaMemoryAdvise.
type Advice int

// Advice for [Device.MemAdvise].
const (
	AdviseReadMostly             Advice = 1 // mostly read: each location keeps a copy. No location is needed
	AdviseUnsetReadMostly        Advice = 2
	AdvisePreferredLocation      Advice = 3 // the location where it stays
	AdviseUnsetPreferredLocation Advice = 4
	AdviseAccessedBy             Advice = 5 // the location maps it, so that access causes no fault
	AdviseUnsetAccessedBy        Advice = 6
)

// MallocManaged allocates n bytes that the host and all devices access at the same
// address, and that the driver moves between them (cudaMallocManaged). The address
// for copies is DevPtr(uintptr(p)). Release it with [Device.Free]. The error wraps
// [ErrInvalidValue] if n <= 0, [ErrMemoryAllocation] if there is not enough memory, and [ErrNotSupported] if
// [AttrManagedMemory] is 0.
func (d *Device) MallocManaged(n int) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, invalid(fnMallocManaged, "size %d: must be positive", n)
	}
	const attachGlobal = 1 // every stream of every device can access it
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), attachGlobal
	out, err := d.do(fnMallocManaged, f, func() string { return fmt.Sprintf("%d bytes on %v", n, d) })
	return *(*unsafe.Pointer)(unsafe.Pointer(&out[0])), err
}

// Prefetch queues the move of n bytes of managed memory at p to a location
// (cudaMemPrefetchAsync). The error wraps [ErrInvalidValue] if n <= 0 or if they are
// not managed memory, [ErrInvalidDevice] if the location does not exist or cannot
// access managed memory concurrently ([AttrConcurrentManagedAccess]), and
// [errors.ErrUnsupported] for a NUMA node before CUDA 12.2.
func (s *Stream) Prefetch(p DevPtr, n int, to Location) error {
	if n <= 0 {
		return invalid(fnMemPrefetch, "size %d: must be positive", n)
	}
	where, err := s.Device().locationArg(fnMemPrefetch, p, n, to)
	if err != nil {
		return err
	}
	f := s.Device().begin(s)
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(n), where, s.arg()
	if s.dev.rt.abi[fnMemPrefetch] == abiLocation {
		f.args[3], f.args[4] = 0, s.arg()
	}
	_, err = s.Device().do(fnMemPrefetch, f, func() string { return fmt.Sprintf("%d bytes at %v to %v", n, p, to) })
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
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(n), uintptr(advice), where
	_, err = d.do(fnMemAdvise, f, func() string {
		return fmt.Sprintf("%d bytes at %v, advice %d, location %v", n, p, advice, at)
	})
	return err
}

// RangeAttributes are the advice and the prefetches of a range of managed memory. They do not
// include where pages reside, because accesses move pages too.
type RangeAttributes struct {
	ReadMostly   bool       // advised for all pages
	Preferred    Location   // advised for all pages; LocationNone if for none, or not the same for all
	AccessedBy   []Location // advised for all pages
	LastPrefetch Location   // where all pages were last prefetched to; LocationNone as with Preferred
}

// Attributes of cudaMemRangeGetAttribute.
const (
	rangeReadMostly   = 1
	rangePreferred    = 2
	rangeAccessedBy   = 3
	rangeLastPrefetch = 4
)

// cudaCpuDeviceId and cudaInvalidDeviceId.
const (
	ordinalHost = -1
	ordinalNone = -2
)

// locationOf is the place that an ordinal stands for.
func locationOf(ordinal int32) Location {
	switch {
	case ordinal >= 0:
		return Location{Kind: LocationDevice, ID: int(ordinal)}
	case ordinal == ordinalHost:
		return Location{Kind: LocationHost}
	}
	return Location{}
}

// RangeAttributes returns what was advised and prefetched for n bytes of managed memory
// at p (cudaMemRangeGetAttribute). A place that is a NUMA node is returned as
// LocationNone, because CUDA has only device ordinals here. The error wraps
// [ErrInvalidValue] if n <= 0 or if they are not managed memory, and [errors.ErrUnsupported] if
// the library does not export the function.
func (d *Device) RangeAttributes(p DevPtr, n int) (RangeAttributes, error) {
	if n <= 0 {
		return RangeAttributes{}, invalid(fnMemRangeGetAttribute, "size %d: must be positive", n)
	}
	var err error
	get := func(attribute, count int) []int32 {
		ints := make([]int32, count) // C writes to it
		if err == nil {
			f := d.begin(nil)
			f.host = unsafe.Pointer(&ints[0])
			f.args = [maxCallArgs]uintptr{uintptr(f.host), uintptr(4 * count), uintptr(attribute), uintptr(p), uintptr(n)}
			_, err = d.do(fnMemRangeGetAttribute, f, func() string { return fmt.Sprintf("attribute %d of %d bytes at %v", attribute, n, p) })
		}
		return ints
	}
	a := RangeAttributes{
		ReadMostly:   get(rangeReadMostly, 1)[0] == 1,
		Preferred:    locationOf(get(rangePreferred, 1)[0]),
		LastPrefetch: locationOf(get(rangeLastPrefetch, 1)[0]),
	}
	for _, ordinal := range get(rangeAccessedBy, d.Runtime().DeviceCount()+1) { // all devices and the host
		if ordinal != ordinalNone {
			a.AccessedBy = append(a.AccessedBy, locationOf(ordinal))
		}
	}
	if err != nil {
		return RangeAttributes{}, err
	}
	return a, nil
}

// discardSince is the first version of library and driver that discard.
const discardSince Version = 13000

// Discard declares that the contents of n bytes of managed memory at p do not matter any
// more (cudaMemDiscardBatchAsync, of CUDA 13.0 or later): what moves later is not copied.
// Until they are written again, reads return anything. The errors are those of
// [Stream.Prefetch], and [errors.ErrUnsupported] if the library is older. A default stream is
// refused by CUDA.
func (s *Stream) Discard(p DevPtr, n int) error {
	if n <= 0 {
		return invalid(fnMemDiscardBatch, "size %d: must be positive", n)
	}
	f := s.Device().begin(s)
	f.out[0], f.out[1] = uint64(p), uint64(n)
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = f.outPtr(0), f.outPtr(1), 1, 0, s.arg()
	_, err := s.Device().do(fnMemDiscardBatch, f, func() string { return fmt.Sprintf("%d bytes at %v", n, p) })
	return err
}
