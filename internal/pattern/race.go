//go:build race

package pattern

import (
	"runtime"
	"unsafe"
)

// writes tells the race detector that dst is written.
func writes(dst []byte) { runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(dst)), len(dst)) }
