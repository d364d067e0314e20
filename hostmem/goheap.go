package hostmem

import (
	"errors"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"unsafe"
)

// ErrGoMemory is returned for memory of the Go heap: the garbage collector
// would hand it out anew while it is registered.
var ErrGoMemory = errors.New("hostmem: memory of the Go heap cannot be registered: use Alloc, or map it with the mmap call")

// goMemory tells whether part of mem, which lies in the given mappings, belongs
// to the Go heap or a goroutine's stack.
//
// The heap is private anonymous memory, so a file's pages and shared memory
// never are. For the rest no documented call answers, and addresses have no
// fixed place (Go 1.26 chooses them at random). Three things do tell, any of
// which suffices:
//
//   - The runtime names its mappings, "[anon: Go: heap]", where the kernel can
//     (CONFIG_ANON_VMA_NAME).
//   - runtime.Pinner records a pointer that it pinned and ignores one that is
//     none of Go's; the record is a field that reflection can count. It knows
//     every arena, but no freed memory and no stacks. A Go release that names
//     the field differently takes this one away, which a test notices.
//   - The heap grows by arenas without gaps for as long as nothing is in its
//     way, at an address where the kernel puts nothing unasked. So memory in the
//     same row of mappings as a new object is the heap's. A second row, begun
//     because something was in the way, is missed by this rule; somebody else's
//     memory that was placed right beside the heap on purpose is refused.
//
// Globals are not the heap's: they stay where they are and may be registered.
func goMemory(all []mapping, mem []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	low, high := heapRow(all)
	for _, m := range within(all, start, start+uintptr(len(mem))) {
		if m.shared || m.file {
			continue
		}
		at := max(m.start, start) - start
		if strings.HasPrefix(m.name, "[anon: Go: ") || m.start < high && low < m.end || pinnable(unsafe.Pointer(&mem[at])) {
			return true
		}
	}
	return false
}

// pinnable tells whether the runtime takes p for a pointer into a heap object.
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

// heapRow returns the bounds of the anonymous mappings that follow on each
// other around something of Go's, 0 and 0 if that is not found.
func heapRow(all []mapping) (low, high uintptr) {
	object := new([64]byte) // wherever it is, a stack is part of the heap as well
	return rowAround(all, uintptr(unsafe.Pointer(object)))
}

func rowAround(all []mapping, at uintptr) (low, high uintptr) {
	i := slices.IndexFunc(all, func(m mapping) bool { return m.start <= at && at < m.end })
	if i < 0 {
		return 0, 0
	}
	joined := func(a, b mapping) bool {
		return a.end == b.start && !a.shared && !b.shared && !a.file && !b.file
	}
	from, to := i, i
	for from > 0 && joined(all[from-1], all[from]) {
		from--
	}
	for to+1 < len(all) && joined(all[to], all[to+1]) {
		to++
	}
	return all[from].start, all[to].end
}
