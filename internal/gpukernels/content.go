package gpukernels

import (
	"fmt"

	"github.com/gopinned/pinned/internal/content"
)

// A ContentKind is a function from a position to a byte.
type ContentKind uint32

// The kinds of contents.
const (
	Hash       = ContentKind(content.Hash)       // seeded; cheap enough for the speed of device memory
	Constant   = ContentKind(content.Constant)   // Seed is repeated as a little-endian word of 8 bytes
	WalkingBit = ContentKind(content.WalkingBit) // one bit of each word of 8 bytes, moving up
	Counter    = ContentKind(content.Counter)    // each word of 8 bytes is its own position in bytes
	Random     = ContentKind(content.Random)     // seeded: splitmix64
	numKinds   = Random + 1
)

// String returns the name of the kind.
func (k ContentKind) String() string {
	names := [...]string{"hash", "constant", "walking bit", "counter", "random"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("content kind %d", uint32(k))
}

// A Content computes the byte at any position, on the GPU as in Go, so that memory can be filled on
// one side and checked on the other. The zero Content is Hash with seed 0.
type Content struct {
	Kind ContentKind
	Seed uint64
	Mask uint64 // exclusive-ored into each word of 8 bytes
}

// Fill writes the bytes at positions [at, at+len(dst)) to host memory. It does not block.
func (c Content) Fill(dst []byte, at uint64) {
	content.Content{Kind: uint32(c.Kind), Seed: c.Seed, Mask: c.Mask}.Fill(dst, at)
}
