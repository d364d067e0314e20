package pages

import (
	"os"
	"reflect"
	"unsafe"
)

// Advice is an advice of madvise.
type Advice int

const (
	AdviseHuge Advice = iota
	AdviseNoHuge
	AdviseDontFork
	AdviseDontDump
	AdvisePopulate
	AdvisePopulateRead
	AdviseCollapse // of whole huge pages, after a small page of each
)

// Calls are the system calls that a region makes, as a table so that tests can
// put failures in their place. Lengths are in bytes, addresses page aligned.
type Calls struct {
	// Map maps n bytes of private, anonymous, readable and writable memory, from
	// the hugetlb pool with pages of hugetlb bytes unless that is 0.
	Map func(n, hugetlb int) (unsafe.Pointer, error)
	// MapFile maps n bytes of a file from off on, shared, for reading and if requested for writing, where the file's huge
	// pages can be mapped as such.
	MapFile func(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error)
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
	// Touch writes to one word in every step bytes, and does not change its value. A
	// page that the kernel does not have is an error.
	Touch func(p unsafe.Pointer, n, step int) error
}

// Before returns calls that call hook first, with the field's name and the advice or mode
// where there is one ("Advise huge", "Map hugetlb"), and fail with its error.
func (c Calls) Before(hook func(call string) error) Calls {
	table := reflect.ValueOf(&c).Elem()
	for i := range table.NumField() {
		field := table.Field(i)
		name, call := table.Type().Field(i).Name, reflect.ValueOf(field.Interface())
		field.Set(reflect.MakeFunc(call.Type(), func(args []reflect.Value) []reflect.Value {
			full, last := name, args[len(args)-1].Interface()
			if a, ok := last.(Advice); ok {
				full += " " + a.String()
			} else if name == "Map" && last != 0 {
				full += " hugetlb"
			}
			if err := hook(full); err != nil {
				out := make([]reflect.Value, call.Type().NumOut())
				for i := range out {
					out[i] = reflect.Zero(call.Type().Out(i))
				}
				out[len(out)-1] = reflect.ValueOf(&err).Elem()
				return out
			}
			return call.Call(args)
		}))
	}
	return c
}

func (a Advice) String() string {
	return [...]string{
		AdviseHuge: "huge", AdviseNoHuge: "nohuge", AdviseDontFork: "dontfork", AdviseDontDump: "dontdump",
		AdvisePopulate: "populate", AdvisePopulateRead: "populate read",
		AdviseCollapse: "collapse",
	}[a]
}
