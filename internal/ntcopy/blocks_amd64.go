//go:build gc && !purego && !noasm && !race && !msan && !asan

package ntcopy

import "golang.org/x/sys/cpu"

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
