package hostmem

import (
	"errors"
	"reflect"
	"runtime"
	"strings"
	"unsafe"

	"github.com/gopinned/pinned/internal/linux"
)

// ErrGoMemory is returned for memory of the Go heap, which the garbage collector
// would use for other objects while it is registered.
var ErrGoMemory = errors.New("memory of the Go heap cannot be registered (use Alloc, or map it with mmap)")

// goMemory reports whether part of mem belongs to the Go heap or a goroutine's
// stack. covered are the mappings that overlap mem.
//
// The heap is private anonymous memory, so a file's pages and shared memory
// never belong to it. For the rest there is no documented call, and addresses have no
// fixed range (Go 1.26 chooses them at random). There are three signs, any of which
// suffices:
//
//   - The runtime names its mappings, "[anon: Go: heap]", where the kernel can
//     (CONFIG_ANON_VMA_NAME).
//   - runtime.Pinner records a pointer that it pinned and ignores one that is
//     not Go's; the record is a field that reflection can count. It finds
//     every arena, but no freed memory and no stacks. A Go release that renames
//     the field takes this sign away, which a test notices.
//   - The heap grows by arenas without gaps for as long as nothing is in its
//     way, at an address where the kernel puts nothing unasked. So memory in the
//     same row of mappings as a new object is the heap's. A second row, begun
//     because something was in the way, is missed by this rule; memory of
//     another owner that was placed right beside the heap on purpose is refused.
//
// Globals are not part of the heap: they stay where they are and may be registered.
func goMemory(maps *linux.Maps, covered []linux.Mapping, mem []byte) (bool, error) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	object := new([64]byte) // on a stack or not: stacks are part of the heap as well
	var outside uintptr     // a row that is not the heap's goes on until here
	for _, m := range covered {
		if !inRow(m) {
			continue
		}
		at := max(m.Start, start) - start
		if strings.HasPrefix(m.Name, "[anon: Go: ") || pinnable(unsafe.Pointer(&mem[at])) {
			return true, nil
		}
		if m.Start != outside {
			heap, err := sameRow(maps, m.Start, uintptr(unsafe.Pointer(object)))
			if heap || err != nil {
				return heap, err
			}
		}
		outside = m.End
	}
	return false, nil
}

// pinnable reports whether the runtime takes p for a pointer into a heap object.
func pinnable(p unsafe.Pointer) (heap bool) {
	// Pin panics for memory of the runtime's arena experiment, which is heap too.
	defer func() { heap = heap || recover() != nil }()
	var pinner runtime.Pinner
	pinner.Pin(p)
	defer pinner.Unpin()
	inner := reflect.ValueOf(&pinner).Elem().Field(0).Elem()
	if inner.Kind() != reflect.Struct {
		return false
	}
	refs := inner.FieldByName("refs")
	return refs.Kind() == reflect.Slice && refs.Len() > 0
}

// sameRow reports whether both addresses are in one row: in private anonymous
// mappings that follow on each other without a gap.
func sameRow(maps *linux.Maps, a, b uintptr) (bool, error) {
	at, last := min(a, b), max(a, b)
	for {
		m, ok, err := maps.Find(at)
		switch {
		case err != nil, !ok, m.Start > at, !inRow(m):
			return false, err
		case m.End > last:
			return true, nil
		}
		at = m.End
	}
}

// inRow reports whether the mapping can be part of the Go heap's row.
func inRow(m linux.Mapping) bool { return !m.Shared && !m.File }
