package queue

import (
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/raw"
)

// Allocations are the device's allocations that the parts of a chunk are in. They are asked for each chunk
// anew, because memory may be freed between calls.
type Allocations struct {
	Device *cudart.Device
	list   []allocation // sorted
	last   allocation
	few    [4]allocation // memory of the list, mostly
}

// An allocation is memory from one address to another.
type allocation struct{ from, to cudart.DevPtr }

// of returns the allocation that contains an address. It is empty if no allocation does, or the library cannot tell.
func (a *Allocations) of(p cudart.DevPtr) allocation {
	if a.last.from <= p && p < a.last.to {
		return a.last
	}
	i, _ := slices.BinarySearchFunc(a.list, p, func(x allocation, p cudart.DevPtr) int {
		if x.to > p {
			return 1
		}
		return -1
	})
	if i == len(a.list) || a.list[i].from > p {
		base, n := raw.AddressRange(a.Device, uintptr(p))
		if n == 0 {
			return allocation{}
		}
		if a.list == nil {
			a.list = a.few[:0]
		}
		a.list = slices.Insert(a.list, i, allocation{cudart.DevPtr(base), cudart.DevPtr(base) + cudart.DevPtr(n)})
	}
	a.last = a.list[i]
	return a.last
}

// Hold reports whether allocations have all n bytes at p. Neighbours may share them, as the parts of memory
// that grows do.
func (a *Allocations) Hold(p cudart.DevPtr, n int) bool {
	end := p + cudart.DevPtr(n)
	for at := p; at < end; at = a.last.to {
		if a.of(at).to <= at {
			return false
		}
	}
	return end >= p // no allocation goes beyond the last address
}

// Joins reports whether n bytes at p may be one copy: CUDA refuses a copy that spans two allocations.
func (a *Allocations) Joins(p cudart.DevPtr, n int) bool {
	x := a.of(p)
	return x.to == 0 || cudart.DevPtr(n) <= x.to-p // unknown: CUDA decides
}
