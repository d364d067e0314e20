package hostmem

import (
	"iter"
	"slices"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// Pinned is a [Buffer] for code that does not own it: it can use the memory, but not close it.
type Pinned interface {
	// CopyToDevice queues a copy of n bytes at offset off to dst in device memory.
	CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error
	// CopyFromDevice queues a copy of n bytes at src in device memory to offset off.
	CopyFromDevice(s *cudart.Stream, src cudart.DevPtr, off, n int) error
	// Use calls queue, which queues work on s that accesses the memory by other means.
	Use(s *cudart.Stream, write bool, queue func() error) error
	// Len returns the size in bytes.
	Len() int
	// Info returns how the memory was pinned.
	Info() Info
	// Spans yields the parts of n bytes at offset off that are within one registration each.
	Spans(off, n int) iter.Seq[Span]
}

// Find returns the pinned memory that contains all of mem, and the offset of mem in it, so
// that a function which is given some bytes can copy them directly. ok is false for
// no bytes, and for memory that was not pinned through this package or was closed.
// Find does not block, and makes no call into CUDA.
func Find(mem []byte) (p Pinned, off int, ok bool) {
	m, off := process.at(mem)
	if m == nil || !m.background.covered(off, len(mem)) {
		return nil, 0, false
	}
	return m, off, true
}

// at returns the open memory that contains all of mem, and the offset of mem in it; nil if none does.
func (l *ledger) at(mem []byte) (m *Buffer, off int) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	m, base := l.find(start, start+uintptr(len(mem)))
	return m, int(start - base)
}

// after returns the index of the first memory that starts after an address. It needs l.mu.
func (l *ledger) after(address uintptr) int {
	i, _ := slices.BinarySearchFunc(l.index, address, func(h *holding, address uintptr) int {
		if h.start <= address {
			return -1
		}
		return 1
	})
	return i
}

func (l *ledger) find(start, end uintptr) (m *Buffer, base uintptr) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i := l.after(start) - 1
	for i >= 0 && l.index[i].hidden {
		i--
	}
	if i < 0 || start == end {
		return nil, 0
	}
	h := l.index[i]
	if m = h.owner.Value(); m == nil || end > h.start+uintptr(m.n) {
		return nil, 0
	}
	return m, h.start
}
