//go:build !((amd64 || arm64) && gc && !purego && !noasm && !race && !msan && !asan)

package ntcopy

import "unsafe"

// blocks copies len(dst) bytes. len(src) is at least as large.
func blocks(dst, src []byte) { copy(dst, src) }

// gathers reports whether gather may be called.
func gathers() bool { return false }

func gather([]byte, []unsafe.Pointer, int) { panic("no gather") }
