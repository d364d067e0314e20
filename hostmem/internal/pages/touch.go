//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"sync/atomic"
	"unsafe"
)

// touch adds zero to the first word of every step bytes. That is a write fault
// for the kernel and leaves the bytes as they are.
//
// The scheduler does not see that a fault blocks the goroutine, so a stop of the
// world waits for it: 50 to 100 us a huge page of 2 MiB. Between faults the loop
// can be preempted like any other.
func touch(p unsafe.Pointer, n, step int) error {
	return Access(func() {
		for off := 0; off < n; off += step {
			atomic.AddUint32((*uint32)(unsafe.Add(p, off)), 0)
		}
	})
}
