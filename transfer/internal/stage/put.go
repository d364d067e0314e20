package stage

import "github.com/gopinned/pinned/internal/ntcopy"

// leastPast is how many bytes are written past the caches. Of fewer the driver does not
// leave the copy to the device: it reads them itself, and would wait for them.
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
