//go:build gc && !purego && !noasm && !race && !msan && !asan

package ntcopy

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// avx2 selects the implementation. Every amd64 CPU has SSE2.
var avx2 = cpu.X86.HasAVX2

// blocks copies len(dst) bytes with non-temporal stores. len(dst) is a positive
// multiple of block and at most len(src); dst is aligned to line.
func blocks(dst, src []byte) {
	if avx2 {
		blocksAVX2(dst, src)
	} else {
		blocksSSE2(dst, src)
	}
}

//go:noescape
func blocksAVX2(dst, src []byte)

//go:noescape
func blocksSSE2(dst, src []byte)

// prefetch asks for the cache lines of mem, which is not empty.
//
//go:noescape
func prefetch(mem []byte)

// gathers reports whether gather may be called.
func gathers() bool { return avx2 }

// gather copies rows of size bytes, one after the other, with non-temporal stores. size is a
// positive multiple of line, dst is aligned to line and as long as all rows.
func gather(dst []byte, rows []unsafe.Pointer, size int) { gatherAVX2(dst, rows, size) }

//go:noescape
func gatherAVX2(dst []byte, rows []unsafe.Pointer, size int)
