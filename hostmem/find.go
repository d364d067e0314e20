package hostmem

import (
	"cmp"
	"slices"
	"unsafe"
	"weak"

	"github.com/gopinned/pinned/cudart"
)

// Pinned is what a [Buffer], a [Registration] and a [File] have in common.
type Pinned interface {
	CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	CopyToHost(s *cudart.Stream, off int, src cudart.DevPtr, n int) error
	Len() int
	Spans() []Span
}

// Find returns the pinned memory that contains all of mem, and the offset of mem in it, so
// that a function which is given some bytes can copy them directly. ok is false for
// no bytes, and for memory that was not pinned through this package or was closed.
// Find takes some tens of nanoseconds and makes no call into CUDA.
func Find(mem []byte) (p Pinned, off int, ok bool) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	m, base := process.find(start, start+uintptr(len(mem)))
	if m == nil {
		return nil, 0, false
	}
	return m, int(start - base), true
}

// indexed is an element of ledger.index. It keeps no memory's owner from being garbage
// collected. What was collected leaves the index, because other memory may get its
// addresses.
type indexed struct {
	start, end uintptr
	id         uint64
	owner      weak.Pointer[pinnedMem]
}

// search returns the first element that starts at an address, or the one before which
// such a one would be. It needs l.mu.
func (l *ledger) search(start uintptr) (i int, exact bool) {
	return slices.BinarySearchFunc(l.index, start, func(p indexed, start uintptr) int { return cmp.Compare(p.start, start) })
}

func (l *ledger) find(start, end uintptr) (m *pinnedMem, base uintptr) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i, exact := l.search(start)
	if !exact {
		i--
	}
	if i < 0 || end > l.index[i].end || start == end {
		return nil, 0
	}
	return l.index[i].owner.Value(), l.index[i].start
}

// hide removes memory from the index. It needs l.mu.
func (l *ledger) hide(e entry) {
	for i, _ := l.search(e.start); i < len(l.index) && l.index[i].start == e.start; i++ {
		if l.index[i].id == e.id {
			l.index = slices.Delete(l.index, i, i+1)
			return
		}
	}
}
