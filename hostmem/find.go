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
	CopyToHost(s *cudart.Stream, off int, src cudart.DevPtr, n int) error
	Len() int
	Spans() []Span
}

// Find returns the pinned memory that all of mem lies in, and at which offset, so
// that a function which is given some bytes can copy them directly. ok is false for
// no bytes, and for memory that was not pinned through this package or was closed.
// Find takes some tens of nanoseconds and makes no call into CUDA.
func Find(mem []byte) (p Pinned, off int, ok bool) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	m, base := index.find(start, start+uintptr(len(mem)))
	if m == nil {
		return nil, 0, false
	}
	return m, int(start - base), true
}

// index has the addresses of the process's pinned memory.
var index addressIndex

// An addressIndex is sorted by address. It keeps no memory's owner from being
// garbage collected. What was collected leaves it, because other memory may get its
// addresses.
type addressIndex struct {
	mu  sync.RWMutex
	all []indexed
}

type indexed struct {
	start, end uintptr
	id         uint64 // in the ledger
	owner      weak.Pointer[pinnedMem]
}

func byStart(p indexed, start uintptr) int { return cmp.Compare(p.start, start) }

func (x *addressIndex) insert(m *pinnedMem) {
	start := uintptr(m.regs.base)
	x.mu.Lock()
	defer x.mu.Unlock()
	i, _ := slices.BinarySearchFunc(x.all, start, byStart)
	x.all = slices.Insert(x.all, i, indexed{start: start, end: start + uintptr(m.n), id: m.entry.id, owner: weak.Make(m)})
}

func (x *addressIndex) remove(start uintptr, id uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	i, _ := slices.BinarySearchFunc(x.all, start, byStart)
	for ; i < len(x.all) && x.all[i].start == start; i++ {
		if x.all[i].id == id {
			x.all = slices.Delete(x.all, i, i+1)
			return
		}
	}
}

func (x *addressIndex) find(start, end uintptr) (m *pinnedMem, base uintptr) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	i, exact := slices.BinarySearchFunc(x.all, start, byStart)
	if !exact {
		i--
	}
	if i < 0 || end > x.all[i].end || start == end {
		return nil, 0
	}
	return x.all[i].owner.Value(), x.all[i].start
}
