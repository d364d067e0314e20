//go:build !((amd64 || arm64) && gc && !purego && !noasm && !race && !msan && !asan)

package ntcopy

// blocks copies len(dst) bytes. len(src) is at least as large.
func blocks(dst, src []byte) { copy(dst, src) }

func prefetch([]byte) {}
