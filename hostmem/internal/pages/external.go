package pages

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// A guest is what a region knows of memory that it did not make itself. It
// begins and ends anywhere in a page.
type guest struct {
	readOnly bool
	whole    unsafe.Pointer // the mapping to give back, nil for memory that is only borrowed
	size     int
	slow     sync.Once // noted
}

// Borrow makes a region of memory that somebody else mapped, to populate it.
// Unmap leaves it mapped. The memory must stay until then.
func Borrow(s *System, mem []byte, readOnly bool) (*Region, error) {
	if s.Calls.Advise == nil {
		return nil, fmt.Errorf("pages: %w here", errors.ErrUnsupported)
	}
	return s.host(unsafe.Pointer(unsafe.SliceData(mem)), len(mem), &guest{readOnly: readOnly}), nil
}

// MapFile maps n bytes of a file from off on, which need not be a page's
// begin, shared and for reading only. The region keeps the file's pages in the
// mapping, not the file: f may be closed. Bytes that the file loses later are a
// SIGBUS to whoever reads them.
func MapFile(s *System, f *os.File, off int64, n int) (*Region, error) {
	skip := int(off & int64(s.Page-1))
	size := roundUp(skip+n, s.Page)
	whole, err := s.Calls.MapFile(f, off-int64(skip), size)
	if err != nil {
		return nil, fmt.Errorf("pages: map %d bytes of %s at %d: %w", n, f.Name(), off, err)
	}
	return s.host(unsafe.Add(whole, skip), n, &guest{readOnly: true, whole: whole, size: size}), nil
}

func (s *System) host(base unsafe.Pointer, n int, g *guest) *Region {
	return &Region{sys: s, plan: plan{n: n, mapped: n, page: s.Page}, base: base, mapped: n, node: -1, guest: g}
}

func (g *guest) giveBack(s *System) error {
	if g.whole == nil {
		return nil
	}
	return s.Calls.Unmap(g.whole, g.size)
}

// fault makes the pages of a block resident that are within the region. It only
// advises: other people's memory may be a device's, where a touch does things.
// A kernel that does not know the advice (before 5.14) leaves the work to
// whoever comes next.
func (g *guest) fault(r *Region, p unsafe.Pointer, n int) error {
	// Work is rounded out to whole pages, which may be one too many here.
	n = min(n, r.mapped-int(uintptr(p)-uintptr(r.base)))
	if n <= 0 {
		return nil
	}
	// The kernel wants a page's begin; it rounds the end itself.
	skip := int(uintptr(p) & uintptr(r.sys.Page-1))
	page := unsafe.Add(p, -skip)
	n += skip
	how := AdvisePopulate
	if g.readOnly {
		how = AdvisePopulateRead
	}
	err := r.sys.Calls.Advise(page, n, how)
	if err == nil {
		return nil
	}
	if errors.Is(err, syscall.EFAULT) {
		return fmt.Errorf("%w: %w", errFault, err)
	}
	g.slow.Do(func() {
		r.note("madvise %s failed (%v): pages that are not there come one by one, slower", how, err)
	})
	return nil
}
