//go:build !(amd64 && gc && !purego && !noasm && !race && !msan && !asan)

package ntcopy

import "unsafe"

// gathers reports whether gather may be called.
func gathers() bool { return false }

func gather([]byte, []unsafe.Pointer, int) { panic("no gather") }
