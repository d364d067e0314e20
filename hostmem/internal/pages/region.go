package pages

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/units"
)

var errUnmapped = errors.New("the region is unmapped")

// Region is memory that was mapped, trimmed and advised, and perhaps populated. Its
// methods may be called from any goroutine.
type Region struct {
	sys *System
	plan
	node     int // bound to, or -1
	base     unsafe.Pointer
	backing  Backing
	whole    []byte            // the mapping that Unmap unmaps, nil for memory of another owner
	external *Memory           // nil for memory that Map mapped
	life     lifetime.Lifetime // of the mapping; it is used while pages are populated or examined

	slow   sync.Once   // noted
	small  atomic.Bool // a file in memory gets no more huge pages
	mu     sync.Mutex
	notes  []string
	stalls stalls
}

// Map maps n bytes with these options. After an error, ctx's included, nothing
// stays mapped, unless the error reports that unmapping failed.
func Map(ctx context.Context, n int, o Options) (*Region, error) {
	sys := o.System
	if sys == nil {
		sys = Host()
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, bounded.Ended(ctx))
	}
	var notes []string
	for _, size := range o.Hugetlb {
		p, err := newPlan(n, size, o.Align, 0)
		if err != nil {
			return nil, err
		}
		p.hugetlb = true
		r, err := sys.mapHugetlb(p, o, notes)
		if err == nil {
			return r, nil
		}
		notes = append(notes, fmt.Sprintf("hugetlb: %v: other pages were taken", err))
	}
	huge := sys.HugePage
	if o.NoHuge {
		huge = 0
	}
	p, err := newPlan(n, sys.Page, o.Align, huge)
	if err == nil && o.Admit != nil {
		err = o.Admit(p.mapped)
	}
	if err != nil {
		return nil, err
	}
	return sys.mapPlan(p, o, notes)
}

// mapHugetlb is mapPlan for pages of a hugetlb pool, which may have too few.
func (s *System) mapHugetlb(p plan, o Options, notes []string) (*Region, error) {
	want := p.mapped / p.page
	// The kernel promises pages by the host's count, and a page that the node does
	// not have fails when it is touched: check the node first.
	if o.NodeSet && len(s.Nodes) > 1 {
		if free := s.freeHuge(p.page, o.Node); free < want {
			return nil, fmt.Errorf("%d of %d pages of %s free on node %d", free, want, units.ExactBytes(p.page), o.Node)
		}
	}
	r, err := s.mapPlan(p, o, notes)
	if err != nil {
		return nil, fmt.Errorf("%d of %d pages of %s free (%w)", s.freeHuge(p.page, -1), want, units.ExactBytes(p.page), err)
	}
	return r, nil
}

// mapPlan maps enough for p's alignment anywhere, unmaps the bytes before and after, and
// advises and binds the region.
func (s *System) mapPlan(p plan, o Options, notes []string) (*Region, error) {
	whole, hugetlb, backing := p.mapped+p.align-p.page, 0, Ordinary
	if p.hugetlb {
		hugetlb, backing = p.page, Reserved
	}
	base, err := s.Calls.Map(whole, hugetlb)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes aligned to %d: %w", p.n, p.align, err)
	}
	head := int(-uintptr(base) & uintptr(p.align-1))
	tail := whole - head - p.mapped
	keep := unsafe.Add(base, head)
	if tail > 0 {
		if err := s.Calls.Unmap(unsafe.Add(keep, p.mapped), tail); err != nil {
			return nil, s.undo(base, whole, fmt.Errorf("trim %d bytes after %d: %w", tail, p.mapped, err))
		}
	}
	if head > 0 {
		if err := s.Calls.Unmap(base, head); err != nil {
			return nil, s.undo(base, head+p.mapped, fmt.Errorf("trim %d bytes before %d: %w", head, p.mapped, err))
		}
	}
	r := &Region{sys: s, plan: p, base: keep, whole: unsafe.Slice((*byte)(keep), p.mapped), node: -1, backing: backing, notes: notes}
	r.advise(o)
	r.bind(o)
	return r, nil
}

// undo unmaps memory after a failed step. The error reports memory that stays mapped.
func (s *System) undo(base unsafe.Pointer, n int, cause error) error {
	if err := s.Calls.Unmap(base, n); err != nil {
		return errors.Join(cause, fmt.Errorf("%d bytes at %p stay mapped: %w", n, base, err))
	}
	return cause
}

// advise gives the kernel advice on the region. Advice that it refuses costs speed,
// so it is a note and not an error.
func (r *Region) advise(o Options) {
	take := func(a Advice, why string) bool {
		err := r.sys.Calls.Advise(r.base, r.mapped, a)
		if err != nil {
			r.note("madvise %s failed (%v): %s", a, err, why)
		}
		return err == nil
	}
	// Not every kernel has names; they are for readers of /proc/self/maps.
	_ = r.sys.Calls.Name(r.base, r.mapped, "pinned")
	if !o.Fork {
		take(AdviseDontFork, "forks of this process are slow while the region is pinned")
	}
	if !o.Dump {
		take(AdviseDontDump, "core dumps hold the region")
	}
	switch {
	case r.hugetlb:
	case r.thp && r.sys.THP != "never":
		r.thp = take(AdviseHuge, "4 KiB pages, slower to pin")
	case r.thp:
		r.thp = false
		r.note("transparent huge pages are switched off (/sys/kernel/mm/transparent_hugepage/enabled), pinning is slower")
	case r.sys.THP == "always":
		// Small neighbours are one mapping to the kernel: a huge page for one of them
		// would take memory for all.
		take(AdviseNoHuge, "the region may be given a huge page")
	}
}

func (r *Region) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// numaNote begins the notes on pages that may reside on another NUMA node than was requested.
const numaNote = "numa: "

// Misplaced returns, in words, why pages may reside on another NUMA node than was requested;
// nil if nothing of that kind was seen.
func (r *Region) Misplaced() (why []string) {
	for _, note := range r.Notes() {
		if text, ok := strings.CutPrefix(note, numaNote); ok {
			why = append(why, text)
		}
	}
	return why
}

// Notes returns the requests that the host refused, in words and in order.
func (r *Region) Notes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.notes)
}

// Bytes returns the memory, exactly as long as requested, and nil from Unmap on, after
// which it must not be used.
func (r *Region) Bytes() []byte {
	if r.life.Sealed() {
		return nil
	}
	return unsafe.Slice((*byte)(r.base), r.n)
}

// Len returns the size in bytes as requested.
func (r *Region) Len() int { return r.n }

// Mapped returns the reserved bytes: Len rounded up to a page.
func (r *Region) Mapped() int { return r.mapped }

// Unmap unmaps the memory once populating has ended (munmap). A second call does
// nothing. After an error the memory is still mapped and Unmap may be called again.
func (r *Region) Unmap() error {
	return r.life.Close(context.Background(), func(context.Context) error {
		if r.whole == nil {
			return nil
		}
		if err := r.sys.Calls.Unmap(unsafe.Pointer(&r.whole[0]), len(r.whole)); err != nil {
			return fmt.Errorf("unmap %d bytes at %p: %w", r.mapped, r.base, err)
		}
		return nil
	})
}
