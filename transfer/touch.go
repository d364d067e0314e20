package transfer

// piece is how much is copied at a time. From 1 MiB on Go's copy writes past the
// caches, from which the GPU's copy engine, or the caller, reads next.
const piece = 256 * kib

// copyPieces copies all of from.
func copyPieces(to, from []byte) {
	for n := 0; n < len(from); n += piece {
		copy(to[n:], from[n:min(n+piece, len(from))])
	}
}

// copyFresh copies into memory that has no pages yet. They are made resident a
// piece ahead: one call for all of them is faster than a fault each, and they
// are still in the cache when they are written.
func copyFresh(to, from []byte) {
	for n := 0; n < len(from); n += piece {
		part := to[n:min(n+piece, len(from))]
		populate(part)
		copy(part, from[n:])
	}
}

// copyIn copies into a caller's memory, of which nobody tells whether it has
// pages.
func copyIn(to, from []byte) {
	if resident(to) {
		copyPieces(to, from)
	} else {
		copyFresh(to, from)
	}
}
