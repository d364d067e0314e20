package kernel

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// A ContentKind is a function from a position to a byte.
type ContentKind uint32

// The kinds of contents. src/memory.cu has the same functions.
const (
	Hash       ContentKind = iota // seeded; cheap enough for the speed of device memory
	Constant                      // Seed is repeated as a little-endian word of 8 bytes
	WalkingBit                    // one bit of each word of 8 bytes, moving up
	Counter                       // each word of 8 bytes is its own position in bytes
	Random                        // seeded: splitmix64
	numKinds
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

// word returns the 8 bytes at position 8*i, little endian.
func (c Content) word(i uint64) uint64 {
	switch c.Kind {
	case Hash:
		high := uint32(i>>31)*0xC2B2AE3D + uint32(c.Seed>>32)
		a, b := hash32(uint32(2*i), uint32(c.Seed), high), hash32(uint32(2*i+1), uint32(c.Seed), high)
		return (uint64(b)<<32 | uint64(a)) ^ c.Mask
	case WalkingBit:
		return bits.RotateLeft64(1, int(i&63)) ^ c.Mask
	case Counter:
		return 8*i ^ c.Mask
	case Random:
		z := c.Seed + i*0x9E3779B97F4A7C15
		z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
		z = (z ^ z>>27) * 0x94D049BB133111EB
		return z ^ z>>31 ^ c.Mask
	}
	return c.Seed ^ c.Mask
}

func hash32(i, seed, high uint32) uint32 {
	x := i*0x9E3779B1 + seed
	x ^= x >> 15
	return x*0x85EBCA77 ^ high
}

// Fill writes the bytes at positions [at, at+len(dst)) to host memory. It does not block.
func (c Content) Fill(dst []byte, at uint64) {
	var word [8]byte
	if skip := at % 8; skip != 0 {
		binary.LittleEndian.PutUint64(word[:], c.word(at/8))
		n := copy(dst, word[skip:])
		dst, at = dst[n:], at+uint64(n)
	}
	i := at / 8
	for ; len(dst) >= 8; i++ {
		binary.LittleEndian.PutUint64(dst, c.word(i))
		dst = dst[8:]
	}
	if len(dst) > 0 {
		binary.LittleEndian.PutUint64(word[:], c.word(i))
		copy(dst, word[:])
	}
}
