package managed

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// findInPlace returns the memory that the steps use in place, each byte once, in the order of
// addresses. accessed is the number of bytes that the steps access there, each byte once in each
// step. Memory that one step uses in place and another one moves is an error: its location would
// depend on the order of the moves.
func findInPlace(steps []Step) (merged []Range, accessed int, err error) {
	for _, step := range steps {
		var uses []Range
		for _, u := range step {
			if u.Mode == InPlace {
				uses = append(uses, u.Range)
			}
		}
		uses = merge(uses)
		for _, r := range uses {
			accessed += r.Len
		}
		merged = append(merged, uses...)
	}
	merged = merge(merged)
	for i, step := range steps {
		for _, u := range step {
			k := firstPast(merged, u.Range.ptr())
			if u.Mode != InPlace && k < len(merged) && merged[k].ptr() < u.Range.ptr()+cudart.DevPtr(u.Range.Len) {
				return nil, 0, fmt.Errorf("step %d moves %d bytes at offset %d of %v, and a step uses %d bytes at offset %d of the same memory in place (use them in place in all steps, or in none)",
					i, u.Range.Len, u.Range.Off, u.Range.Memory, merged[k].Len, merged[k].Off)
			}
		}
	}
	return merged, accessed, nil
}

// merge sorts ranges by their addresses, and joins ranges that overlap or touch.
func merge(ranges []Range) []Range {
	slices.SortFunc(ranges, func(x, y Range) int { return cmp.Compare(x.ptr(), y.ptr()) })
	merged := ranges[:0]
	for _, r := range ranges {
		if last := len(merged) - 1; last >= 0 && merged[last].Memory == r.Memory && r.Off <= merged[last].Off+merged[last].Len {
			merged[last].Len = max(merged[last].Len, r.Off+r.Len-merged[last].Off)
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// firstPast returns the index of the first of sorted ranges that ends after an address.
func firstPast(ranges []Range, at cudart.DevPtr) int {
	k, _ := slices.BinarySearchFunc(ranges, at+1, func(r Range, at cudart.DevPtr) int {
		return cmp.Compare(r.ptr()+cudart.DevPtr(r.Len), at)
	})
	return k
}

// adviseInPlace moves the memory that is used in place to the host, which also populates untouched
// pages. It advises the driver to leave the memory there (PreferredLocation) and to map it for the
// device (AccessedBy), so that the device's accesses cause no page faults. That takes as long as a
// move, so only the first Run does it. The advice stays, also after an error, because another plan
// may need it. Memory beyond the capacity has this advice from Alloc on. p.running guards the call.
func (p *Plan) adviseInPlace(ctx context.Context) error {
	if p.advised || len(p.inPlace) == 0 {
		return nil
	}
	if err := p.a.move(ctx, cudart.HostLocation(), p.inPlace); err != nil {
		return err
	}
	for _, r := range p.inPlace {
		if r.Memory.onHost {
			continue
		}
		if err := p.a.mem.stayOnHost(ctx, r); err != nil {
			return err
		}
	}
	p.advised = true
	return nil
}
