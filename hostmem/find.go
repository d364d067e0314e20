package hostmem

import (
	"cmp"
	"slices"
	"sync"
	"unsafe"
	"weak"

	"github.com/gopinned/pinned/cudart"
)

// Pinned is what a [Buffer], a [Registration] and a [File] have in common.
type Pinned interface {
	CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	CopyFromDevice(s *cudart.Stream, off int, src cudart.DevPtr, n int) error
	Len() int
	Spans() []Span
}

// Find returns the pinned memory that all of mem lies in, and at which offset:
// what is given some bytes can so copy them without a detour. It is false for
// memory that was not pinned through this package, or was closed. It takes some
// tens of nanoseconds.
func Find(mem []byte) (p Pinned, off int, ok bool) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	m, base := atlas.find(start, start+uintptr(len(mem)))
	if m == nil {
		return nil, 0, false
	}
	return m, int(start - base), true
}

// atlas is where pinned memory of the process is.
var atlas placeList

// A placeList is sorted by address, and keeps nothing from being lost. What is
// lost leaves it: nobody can say any more what becomes of its addresses.
type placeList struct {
	mu  sync.RWMutex
	all []place
}

type place struct {
	start, end uintptr
	id         uint64 // of the holding
	owner      weak.Pointer[pinnedMem]
}

func byStart(p place, start uintptr) int { return cmp.Compare(p.start, start) }

func (l *placeList) add(m *pinnedMem) {
	start := uintptr(m.pinned.base)
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.all, start, byStart)
	l.all = slices.Insert(l.all, i, place{start: start, end: start + uintptr(m.n), id: m.id, owner: weak.Make(m)})
}

func (l *placeList) remove(start uintptr, id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.all, start, byStart)
	for ; i < len(l.all) && l.all[i].start == start; i++ {
		if l.all[i].id == id {
			l.all = slices.Delete(l.all, i, i+1)
			return
		}
	}
}

func (l *placeList) find(start, end uintptr) (m *pinnedMem, base uintptr) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i, exact := slices.BinarySearchFunc(l.all, start, byStart)
	if !exact {
		i--
	}
	if i < 0 || end > l.all[i].end || start == end {
		return nil, 0
	}
	return l.all[i].owner.Value(), l.all[i].start
}
