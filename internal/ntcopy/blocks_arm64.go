//go:build gc && !purego && !noasm && !race && !msan && !asan

package ntcopy

// blocks copies len(dst) bytes with non-temporal stores. len(dst) is a positive
// multiple of block and at most len(src); dst is aligned to line.
//
//go:noescape
func blocks(dst, src []byte)

// prefetch asks for the cache lines of mem, which is not empty.
//
//go:noescape
func prefetch(mem []byte)
