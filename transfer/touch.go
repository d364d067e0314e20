package transfer

// copyIn copies into a caller's memory, of which nobody tells whether it has
// pages.
func copyIn(to, from []byte) {
	if resident(to) {
		copy(to, from)
	} else {
		copyFresh(to, from)
	}
}

// copyFresh copies into memory that has no pages yet. They are made resident a
// piece ahead: one call for all of them is faster than a fault each, and they
// are still in the cache when they are written.
func copyFresh(to, from []byte) {
	const piece = 256 * kib
	for n := 0; n < len(from); n += piece {
		part := to[n:min(n+piece, len(from))]
		populate(part)
		copy(part, from[n:])
	}
}
