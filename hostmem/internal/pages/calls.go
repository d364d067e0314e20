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
	// Bind is mbind to one node: MPOL_BIND when strict, MPOL_PREFERRED when not.
	Bind func(p unsafe.Pointer, n, node int, strict bool) error
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
	return Calls{
		Map: func(n, hugetlb int) (unsafe.Pointer, error) {
			name := "Map"
			if hugetlb > 0 {
				name = "Map hugetlb"
			}
			if err := hook(name); err != nil {
				return nil, err
			}
			return c.Map(n, hugetlb)
		},
		MapFile: func(f *os.File, off int64, n int) (unsafe.Pointer, error) {
			if err := hook("MapFile"); err != nil {
				return nil, err
			}
			return c.MapFile(f, off, n)
		},
		Unmap: func(p unsafe.Pointer, n int) error {
			if err := hook("Unmap"); err != nil {
				return err
			}
			return c.Unmap(p, n)
		},
		Advise: func(p unsafe.Pointer, n int, a Advice) error {
			if err := hook("Advise " + a.String()); err != nil {
				return err
			}
			return c.Advise(p, n, a)
		},
		Name: func(p unsafe.Pointer, n int, name string) error {
			if err := hook("Name"); err != nil {
				return err
			}
			return c.Name(p, n, name)
		},
		Bind: func(p unsafe.Pointer, n, node int, strict bool) error {
			if err := hook("Bind"); err != nil {
				return err
			}
			return c.Bind(p, n, node, strict)
		},
		Where: func(pages []unsafe.Pointer, nodes []int32) error {
			if err := hook("Where"); err != nil {
				return err
			}
			return c.Where(pages, nodes)
		},
		Resident: func(p unsafe.Pointer, n int, vec []byte) error {
			if err := hook("Resident"); err != nil {
				return err
			}
			return c.Resident(p, n, vec)
		},
		Private: func(pages []unsafe.Pointer) (int, error) {
			if err := hook("Private"); err != nil {
				return 0, err
			}
			return c.Private(pages)
		},
		FileSystem: func(path string) (FileSystem, error) {
			if err := hook("FileSystem"); err != nil {
				return FileSystem{}, err
			}
			return c.FileSystem(path)
		},
		Touch: func(p unsafe.Pointer, n, step int) error {
			if err := hook("Touch"); err != nil {
				return err
			}
			return c.Touch(p, n, step)
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
