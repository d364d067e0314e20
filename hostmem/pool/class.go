package pool

import "math/bits"

// Classes group sizes, so that a released block serves another request:
// multiples of 64 bytes up to 512, then eight steps to each doubling. A request
// is rounded up by less than 64 bytes, or by less than an eighth of itself.
const (
	granule  = 64 // smallest block and its alignment in bytes: a cache line
	steps    = 8  // of size to a doubling
	minShift = 9  // steps of granule up to 1 << minShift
	maxShift = 46 // 64 TiB: more than an address space has
	classes  = steps * (maxShift - minShift + 1)
	maxBlock = 1 << maxShift
)

// classOf returns the class of n bytes, from 1 to maxBlock.
func classOf(n int) int {
	if n <= 1<<minShift {
		return (n+granule-1)/granule - 1
	}
	shift := bits.Len(uint(n-1)) - 1 - 3
	return (shift-minShift+4)*steps + (n-1)>>shift&(steps-1)
}

// classSize returns the largest size in bytes of a class.
func classSize(class int) int {
	if class < steps {
		return (class + 1) * granule
	}
	octave := class/steps - 1
	return (steps + class%steps + 1) << (minShift - 3 + octave)
}
