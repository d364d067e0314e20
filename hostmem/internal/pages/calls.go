package pages

import (
	"os"
	"unsafe"
)

// Advice is what Calls.Advise can ask of the kernel.
type Advice int

const (
	AdviseHuge Advice = iota
	AdviseNoHuge
	AdviseDontFork
	AdviseDontDump
	AdvisePopulate
	AdvisePopulateRead
)

// Calls are the system calls that a region makes, as a table so that tests can
// put failures in their place. Lengths are in bytes, addresses page aligned.
type Calls struct {
	// Map maps n bytes of private, anonymous, readable and writable memory, from
	// the hugetlb pool with pages of hugetlb bytes unless that is 0.
	Map func(n, hugetlb int) (unsafe.Pointer, error)
	// MapFile maps n bytes of a file from off on, shared and for reading only.
	MapFile func(f *os.File, off int64, n int) (unsafe.Pointer, error)
	// Unmap unmaps.
	Unmap func(p unsafe.Pointer, n int) error
	// Advise is madvise.
	Advise func(p unsafe.Pointer, n int, a Advice) error
	// Name shows the mapping as [anon:name] in /proc/self/maps.
	Name func(p unsafe.Pointer, n int, name string) error
	// Bind is mbind to one node, MPOL_PREFERRED.
	Bind func(p unsafe.Pointer, n, node int) error
	// Where is move_pages without a move: the node of each page, negative (an
	// errno) where there is none.
	Where func(pages []unsafe.Pointer, nodes []int32) error
	// Resident is mincore: bit 0 of a byte a page.
	Resident func(p unsafe.Pointer, n int, vec []byte) error
	// Private counts the pages that are resident and this process's alone, by
	// /proc/self/pagemap.
	Private func(pages []unsafe.Pointer) (n int, err error)
	// FileSystem is statfs.
	FileSystem func(path string) (FileSystem, error)
	// Touch writes to one word in every step bytes and leaves its value alone. A
	// page that the kernel does not have is an error.
	Touch func(p unsafe.Pointer, n, step int) error
}

// Before returns calls that call hook first, with the field's name and the advice
// or mode where there is one ("Advise huge"), and fail with its error.
func (c Calls) Before(hook func(call string) error) Calls {
	first := func(name string, call func() error) error {
		if err := hook(name); err != nil {
			return err
		}
		return call()
	}
	return Calls{
		Map: func(n, hugetlb int) (p unsafe.Pointer, err error) {
			name := "Map"
			if hugetlb > 0 {
				name = "Map hugetlb"
			}
			err = first(name, func() error { p, err = c.Map(n, hugetlb); return err })
			return p, err
		},
		MapFile: func(f *os.File, off int64, n int) (p unsafe.Pointer, err error) {
			err = first("MapFile", func() error { p, err = c.MapFile(f, off, n); return err })
			return p, err
		},
		Unmap: func(p unsafe.Pointer, n int) error { return first("Unmap", func() error { return c.Unmap(p, n) }) },
		Advise: func(p unsafe.Pointer, n int, a Advice) error {
			return first("Advise "+a.String(), func() error { return c.Advise(p, n, a) })
		},
		Name: func(p unsafe.Pointer, n int, name string) error {
			return first("Name", func() error { return c.Name(p, n, name) })
		},
		Bind: func(p unsafe.Pointer, n, node int) error {
			return first("Bind", func() error { return c.Bind(p, n, node) })
		},
		Where: func(pages []unsafe.Pointer, nodes []int32) error {
			return first("Where", func() error { return c.Where(pages, nodes) })
		},
		Resident: func(p unsafe.Pointer, n int, vec []byte) error {
			return first("Resident", func() error { return c.Resident(p, n, vec) })
		},
		Private: func(pages []unsafe.Pointer) (n int, err error) {
			err = first("Private", func() error { n, err = c.Private(pages); return err })
			return n, err
		},
		FileSystem: func(path string) (fs FileSystem, err error) {
			err = first("FileSystem", func() error { fs, err = c.FileSystem(path); return err })
			return fs, err
		},
		Touch: func(p unsafe.Pointer, n, step int) error {
			return first("Touch", func() error { return c.Touch(p, n, step) })
		},
	}
}

func (a Advice) String() string {
	switch a {
	case AdviseHuge:
		return "huge"
	case AdviseNoHuge:
		return "nohuge"
	case AdviseDontFork:
		return "dontfork"
	case AdviseDontDump:
		return "dontdump"
	case AdvisePopulateRead:
		return "populate read"
	default:
		return "populate"
	}
}
