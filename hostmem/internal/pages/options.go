package pages

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// Options of Map. The zero value maps ordinary memory and advises huge pages from
// 2 MiB on.
type Options struct {
	// Align of the first byte, a power of two in bytes. 0 means a page, or a huge
	// page where the region can hold one.
	Align int
	// NoHuge keeps the region on base pages.
	NoHuge bool
	// Hugetlb are the sizes in bytes of hugetlb pages to take. Where a pool has too few,
	// the next size is tried, and then ordinary pages, with a note.
	Hugetlb []int
	// Node is the NUMA node the memory should come from, if NodeSet. Other nodes are not
	// forbidden: the kernel kills processes when the only node allowed has no memory left.
	Node    int
	NodeSet bool
	// Fork lets a forked child have the region too. By default the child does not
	// get it (MADV_DONTFORK), because copying the page tables of pinned memory is
	// slow.
	Fork bool
	// Dump includes the region in core dumps (by default MADV_DONTDUMP).
	Dump bool
	// Admit, if set, is called before ordinary pages are mapped, with their bytes. Map
	// returns its error.
	Admit func(bytes int) error
	// System is the host, and nil is this one.
	System *System
}

// Populate has the options of making a region resident. The zero value adapts to the host.
type Populate struct {
	// Threads is their number: 0 means one for each core that the process may use, at most
	// 16.
	Threads int
	// Item is the number of bytes that a thread takes at a time, rounded up to
	// whole huge pages: 0 means up to 4 MiB.
	Item int
	// Done, if set, is called by the thread that made [off, off+n) resident,
	// right afterwards: several at a time, in no order, each item once. n is
	// Item, counted in mapped bytes, and less at the ends. An error ends populating
	// and is returned. Done must not call Unmap, which waits for populating to end.
	Done func(off, n int) error
}

// A plan has the sizes of a region of n bytes with one kind of page.
type plan struct {
	n, mapped int // bytes requested, bytes reserved
	page      int // page size in bytes, of which mapped is a multiple
	align     int
	hugetlb   bool
	thp       bool // has transparent huge pages, on advice
}

var (
	errSize  = errors.New("size must be positive and fit the address space")
	errAlign = errors.New("alignment must be a power of two")
)

// newPlan plans a region of pages of one size. Transparent huge pages are advised if huge,
// their size, is not 0.
func newPlan(n, page, align, huge int) (plan, error) {
	if align < 0 || bits.OnesCount(uint(align)) > 1 {
		return plan{}, fmt.Errorf("map %d bytes aligned to %d: %w", n, align, errAlign)
	}
	p := plan{n: n, page: page, thp: huge > page && n >= huge}
	p.align = max(align, page)
	if align == 0 && p.thp {
		p.align = huge
	}
	if n <= 0 || n > math.MaxInt-p.page-p.align {
		return plan{}, fmt.Errorf("map %d bytes aligned to %d: %w", n, p.align, errSize)
	}
	p.mapped = roundUp(n, page)
	return p, nil
}

func roundUp(n, unit int) int { return (n + unit - 1) &^ (unit - 1) }
