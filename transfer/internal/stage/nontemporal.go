package stage

import "github.com/gopinned/pinned/internal/ntcopy"

// minNonTemporal is the size of the smallest copies with non-temporal stores. Smaller copies
// take longer with them, presumably because the driver's CPU thread reads the bytes itself.
const minNonTemporal = 32 * kib

// Put copies into pinned memory that is copied to a device next. It uses non-temporal stores,
// because the device would have to fetch the bytes from the CPU's caches.
func Put(to, from []byte) {
	if len(from) < minNonTemporal {
		copy(to, from)
	} else {
		ntcopy.Copy(to, from)
	}
}

// MaxNonTemporal is the size of the largest upload whose chunks are filled with non-temporal
// stores. The chunks of a larger upload are overwritten in the caches again and again, and
// mostly do not reach memory. At the beginning and the end of an upload they are slow, because the GPU
// fetches lines that a core's own cache has: on a Xeon of 2023 that weighed more for up to 128 MiB. (To
// use such stores for both ends alone is no quicker: what is between them finds no lines in the caches.)
const MaxNonTemporal = 128 * mib

// maxNonTemporalChunk is the size of the largest chunks of such an upload of n bytes: with those of
// 8 MiB the GPU would wait for the first pieces of all workers.
func maxNonTemporalChunk(n int) int { return max(n/16, 2*mib) }

// Upload describes an upload of the caller's memory.
func Upload(src []byte) Copy {
	fill := func(mem []byte, off int) error {
		copy(mem, src[off:])
		return nil
	}
	nonTemporal := len(src) <= MaxNonTemporal
	if nonTemporal {
		fill = func(mem []byte, off int) error {
			Put(mem, src[off:off+len(mem)])
			return nil
		}
	}
	return Copy{N: len(src), NonTemporal: nonTemporal, Host: Memory(fill)}
}
