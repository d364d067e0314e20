package pages

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"github.com/gopinned/pinned/internal/bounded"
)

// Memory describes a region that Map did not make: memory that other code mapped, or a
// file. It starts and ends anywhere in a page.
type Memory struct {
	Bytes    []byte
	Backing  Backing
	ReadOnly bool // it cannot be written
	Shared   bool // it was mapped shared
}

// Borrow makes a region of memory that other code mapped, to populate it. Unmap
// leaves it mapped. The memory must stay mapped until then.
func Borrow(s *System, m Memory) (*Region, error) {
	if s.Calls.Advise == nil {
		return nil, fmt.Errorf("populating is %w", errors.ErrUnsupported)
	}
	return s.external(m, s.Page), nil
}

// Allocated makes a region of n bytes at base, with size bytes reserved. Other code has
// allocated it, resident, and frees it: Unmap leaves it as it is.
func Allocated(s *System, base unsafe.Pointer, n, size int) *Region {
	r := s.external(Memory{Bytes: unsafe.Slice((*byte)(base), n)}, s.Page)
	r.mapped = size
	return r
}

// MapFile maps n bytes of a file from off on, which need not be the start of a page,
// shared, for reading and if requested for writing. The region keeps the file's pages in the mapping, not
// the file: f may be closed. Reading bytes that the file loses later is a SIGBUS.
func MapFile(s *System, f *os.File, off int64, n int, write bool) (*Region, error) {
	on, _ := s.Calls.FileSystem(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) // after an error a plain one is assumed
	page := max(s.Page, on.Page)
	skip := int(off & int64(page-1))
	size := roundUp(skip+n, page)
	whole, err := s.Calls.MapFile(f, off-int64(skip), size, write)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of %s at %d: %w", n, f.Name(), off, err)
	}
	mapping := unsafe.Slice((*byte)(whole), size)
	r := s.external(Memory{Bytes: mapping[skip:][:n], Backing: on.Backing(), ReadOnly: !write, Shared: true}, page)
	r.whole = mapping
	r.thp = write && on.Memory && on.Page == 0 && s.HugePage > 0
	return r, nil
}

func (s *System) external(m Memory, page int) *Region {
	n := len(m.Bytes)
	return &Region{
		sys: s, plan: plan{n: n, mapped: n, page: page}, node: -1,
		base: unsafe.Pointer(unsafe.SliceData(m.Bytes)), backing: m.Backing, external: &m,
	}
}

// faultExternal makes the pages of a block resident that are within the region: as a huge page if it is one of a file in
// memory, whose single pages are made at a tenth of the speed. It gives
// advice only: the memory may be a device's, where a touch has effects. On kernels
// that do not know the advice (before 5.14) pages become resident later, one by one.
func (r *Region) faultExternal(p unsafe.Pointer, n int) error {
	// Work is rounded out to whole pages, which may be one too many here.
	n = min(n, r.mapped-int(uintptr(p)-uintptr(r.base)))
	if n <= 0 {
		return nil
	}
	if r.thp && n == r.sys.HugePage && !r.small.Load() {
		if r.sys.Calls.Advise(p, n, AdviseCollapse) == nil {
			return nil
		}
		r.small.Store(true) // the kernel has no such advice, or no space or memory for huge pages
	}
	// The kernel wants the start of a page; it rounds the end itself.
	skip := int(uintptr(p) & uintptr(r.sys.Page-1))
	page := unsafe.Add(p, -skip)
	n += skip
	how := AdvisePopulate
	if r.external.ReadOnly {
		how = AdvisePopulateRead
	}
	err := r.sys.Calls.Advise(page, n, how)
	if err == nil {
		return nil
	}
	if errors.Is(err, syscall.EFAULT) {
		return fmt.Errorf("%w: %w", ErrFault, err)
	}
	r.slow.Do(func() {
		r.note("madvise %s failed (%v): pages that are not resident become so one by one, which is slower", how, err)
	})
	return nil
}

// Clear writes zeros to the memory with several threads, 0 for one for each core that
// the process may use. The memory must be resident. An error is ctx's.
func (r *Region) Clear(ctx context.Context, threads int) error {
	mem := r.Bytes()
	return bounded.ForEach(ctx, len(mem), maxItem, defaultThreads(threads), func(_ context.Context, off, n int) error {
		clear(mem[off : off+n])
		return nil
	})
}

// Sizes returns the size of n bytes rounded up to base pages, and their alignment, in bytes.
func (s *System) Sizes(n, align int) (size, aligned int, err error) {
	p, err := newPlan(n, s.Page, align, 0)
	return p.mapped, p.align, err
}
