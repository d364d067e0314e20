package cudart

import (
	"fmt"
	"unsafe"
)

// RangeAttributes are what was advised and prefetched for a range of managed memory.
// They do not say where its pages lie: pages move when they are accessed, too.
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
// [ErrInvalidValue] if n <= 0 or if they are not managed memory, and [ErrUnsupported] if
// the library does not export the function.
func (d *Device) RangeAttributes(p DevPtr, n int) (RangeAttributes, error) {
	if n <= 0 {
		return RangeAttributes{}, invalid(fnMemRangeGetAttribute, "size %d: must be positive", n)
	}
	var err error
	get := func(attribute, count int) []int32 {
		ints := make([]int32, count) // C writes to it
		if err == nil {
			f := d.rt.begin()
			f.host = unsafe.Pointer(&ints[0])
			f.args = [maxCallArgs]uintptr{uintptr(f.host), uintptr(4 * count), uintptr(attribute), uintptr(p), uintptr(n)}
			_, err = d.do(fnMemRangeGetAttribute, f, func() string { return fmt.Sprintf("attribute %d of %d bytes at %#x", attribute, n, uintptr(p)) })
		}
		return ints
	}
	a := RangeAttributes{
		ReadMostly:   get(rangeReadMostly, 1)[0] == 1,
		Preferred:    locationOf(get(rangePreferred, 1)[0]),
		LastPrefetch: locationOf(get(rangeLastPrefetch, 1)[0]),
	}
	for _, ordinal := range get(rangeAccessedBy, d.rt.DeviceCount()+1) { // all devices and the host
		if ordinal != ordinalNone {
			a.AccessedBy = append(a.AccessedBy, locationOf(ordinal))
		}
	}
	if err != nil {
		return RangeAttributes{}, err
	}
	return a, nil
}

// prefetchBatchSince is the first version of library and driver with batches of
// prefetches.
const prefetchBatchSince Version = 13000

// A PrefetchBatch is a list of ranges of managed memory that [Stream.PrefetchBatch] moves
// with one call. The zero value is an empty list. A list may be queued several times.
// Only one goroutine may use it at a time.
type PrefetchBatch struct {
	// What C reads during the call: one place for each range.
	ptrs      []uintptr
	sizes     []int
	locations []cLocation
	indexes   []uintptr // of the first range of each place

	err error // of the first range with a size that cannot be
}

// cLocation is cudaMemLocation.
type cLocation struct{ kind, id int32 }

// Add adds the move of n bytes at p to a location. If n <= 0, [Stream.PrefetchBatch]
// returns an error.
func (b *PrefetchBatch) Add(p DevPtr, n int, to Location) {
	if n <= 0 && b.err == nil {
		b.err = invalid(fnMemPrefetchBatch, "range %d, at %#x: size %d: must be positive", len(b.ptrs), uintptr(p), n)
	}
	b.indexes = append(b.indexes, uintptr(len(b.ptrs)))
	b.ptrs, b.sizes = append(b.ptrs, uintptr(p)), append(b.sizes, n)
	b.locations = append(b.locations, cLocation{int32(to.Kind), int32(to.ID)})
}

// Len returns the number of ranges.
func (b *PrefetchBatch) Len() int { return len(b.ptrs) }

// Reset makes the list empty, and keeps its memory for the next ranges.
func (b *PrefetchBatch) Reset() {
	b.ptrs, b.sizes, b.locations, b.indexes, b.err = b.ptrs[:0], b.sizes[:0], b.locations[:0], b.indexes[:0], nil
}

// CanPrefetchBatch reports whether [Stream.PrefetchBatch] makes one call of a list: both
// library and driver must be of CUDA 13.0 or later.
func (rt *Runtime) CanPrefetchBatch() bool {
	return rt.entry[fnMemPrefetchBatch] != 0 && rt.lib.Driver >= prefetchBatchSince
}

// PrefetchBatch queues the moves of a list: with one call (cudaMemPrefetchBatchAsync)
// where [Runtime.CanPrefetchBatch] is true and the stream is not a default stream, else
// one by one (cudaMemPrefetchAsync). An empty list is ignored. The batch has its place in
// the stream's order; its moves run in any order. The errors are those of
// [Stream.Prefetch]; a nil batch is an error. After an error some moves may have been
// queued.
func (s *Stream) PrefetchBatch(b *PrefetchBatch) error {
	rt := s.dev.rt
	switch {
	case b == nil:
		return fmt.Errorf("cudaMemPrefetchBatchAsync: %v: the batch is nil", s)
	case b.err != nil:
		return b.err
	case b.Len() == 0:
		return nil
	}
	if s.isDefault() || !rt.CanPrefetchBatch() {
		for i, p := range b.ptrs {
			to := Location{Kind: LocationKind(b.locations[i].kind), ID: int(b.locations[i].id)}
			if err := s.Prefetch(DevPtr(p), b.sizes[i], to); err != nil {
				return fmt.Errorf("range %d of %d: %w", i, b.Len(), err)
			}
		}
		return nil
	}
	f := s.dev.begin(s)
	f.host = unsafe.Pointer(b)
	f.args = [maxCallArgs]uintptr{
		uintptr(unsafe.Pointer(&b.ptrs[0])), uintptr(unsafe.Pointer(&b.sizes[0])), uintptr(b.Len()),
		uintptr(unsafe.Pointer(&b.locations[0])), uintptr(unsafe.Pointer(&b.indexes[0])), uintptr(b.Len()), 0, s.arg(),
	}
	_, err := s.dev.do(fnMemPrefetchBatch, f, func() string { return fmt.Sprintf("%d ranges on %v", b.Len(), s.dev) })
	return err
}

// CanDiscard reports whether [Stream.Discard] works: both library and driver must be of
// CUDA 13.0 or later.
func (rt *Runtime) CanDiscard() bool {
	return rt.entry[fnMemDiscardBatch] != 0 && rt.lib.Driver >= prefetchBatchSince
}

// Discard declares that the contents of n bytes of managed memory at p do not matter any
// more (cudaMemDiscardBatchAsync, of CUDA 13.0 or later): what moves later is not copied.
// Until they are written again, reads return anything. The errors are those of
// [Stream.Prefetch], and [ErrUnsupported] if the library is older. A default stream is
// refused by CUDA.
func (s *Stream) Discard(p DevPtr, n int) error {
	if n <= 0 {
		return invalid(fnMemDiscardBatch, "size %d: must be positive", n)
	}
	f := s.dev.begin(s)
	f.out[0], f.out[1] = uint64(p), uint64(n)
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = f.outPtr(0), f.outPtr(1), 1, 0, s.arg()
	_, err := s.dev.do(fnMemDiscardBatch, f, func() string { return fmt.Sprintf("%d bytes at %#x", n, uintptr(p)) })
	return err
}
