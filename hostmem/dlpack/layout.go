package dlpack

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostos"
)

// The structs of dlpack.h. Pointers are integers to Go: they refer to C's memory, or to
// memory outside Go's heap.

// cTensor is DLTensor.
type cTensor struct {
	data       uintptr
	deviceType DeviceType
	deviceID   int32
	ndim       int32
	dtype      DataType
	shape      uintptr // of ndim int64
	strides    uintptr // the same
	byteOffset uint64
}

// cUnversioned is DLManagedTensor, of DLPack before 1.0.
type cUnversioned struct {
	tensor           cTensor
	context, deleter uintptr
}

// cVersioned is DLManagedTensorVersioned. All up to flags stays as it is in later major
// versions.
type cVersioned struct {
	major, minor     uint32
	context, deleter uintptr
	flags            uint64
	tensor           cTensor
}

// majorVersion is that of the layout. Minor versions add types and flags only.
const majorVersion = 1

// flagReadOnly is DLPACK_FLAG_BITMASK_READ_ONLY.
const flagReadOnly = 1 << 0

// A cell has the structs that C reads of an exported tensor, and the arrays that they refer
// to.
type cell struct {
	unversioned    cUnversioned
	versioned      cVersioned
	shape, strides [maxDims]int64
}

// exports has the tensors whose deleters were not called, by the address that C has, and
// the cells, in memory outside Go's heap. That memory is never unmapped and never cleared,
// and the cell that was freed last is used again last. So a consumer that calls a deleter
// twice calls a function that is still there, and almost never deletes another tensor.
var exports = struct {
	mu   sync.Mutex
	live map[uintptr]exported
	free []*cell
}{live: make(map[uintptr]exported)}

// An exported tensor refers to its memory, so that it is not lost.
type exported struct {
	cell    *cell
	owner   hostmem.Pinned
	release func()
}

// cellsAtOnce are mapped together.
const cellsAtOnce = 64

// takeCell takes a free cell. It needs exports.mu.
func takeCell() (*cell, error) {
	if len(exports.free) == 0 {
		const size = int(unsafe.Sizeof(cell{}))
		mem, _, err := hostos.Map(cellsAtOnce*size, 0)
		if err != nil {
			return nil, fmt.Errorf("memory for the DLTensor: %w", err)
		}
		for i := range cellsAtOnce {
			exports.free = append(exports.free, (*cell)(unsafe.Pointer(&mem[i*size])))
		}
	}
	c := exports.free[0]
	exports.free = exports.free[1:]
	return c, nil
}

// at returns what is at an address outside Go's heap.
func at[T any](address uintptr) *T { return *(**T)(unsafe.Pointer(&address)) }
