package stage

import "github.com/gopinned/pinned/internal/ntcopy"

// leastPast is how many bytes are written past the caches. Fewer take longer so: it seems
// that the driver reads them itself, and waits for memory.
const leastPast = 32 * kib

// Put copies into pinned memory that is on its way to a device: past the caches, from
// which the device would have to fetch it.
func Put(to, from []byte) {
	if len(from) < leastPast {
		copy(to, from)
	} else {
		ntcopy.Copy(to, from)
	}
}
