// Package pattern computes bytes from their positions, on the host as on the GPU, so that memory can
// be filled on one side and checked on the other.
package pattern

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// A Kind is a function from a position to a byte.
type Kind uint32

// The kinds of contents. internal/gpukernels/src/memory.cu has the same functions.
const (
	Hash       Kind = iota // seeded; cheap enough for the speed of device memory
	Constant               // Seed is repeated as a little-endian word of 8 bytes
	WalkingBit             // one bit of each word of 8 bytes, moving up
	Counter                // each word of 8 bytes is its own position in bytes
	Random                 // seeded: splitmix64
	numKinds
)

// String returns the name of the kind.
func (k Kind) String() string {
	names := [...]string{"hash", "constant", "walking bit", "counter", "random"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("content kind %d", uint32(k))
}

// A Content is a kind with its parameters. The zero Content is Hash with seed 0.
type Content struct {
	Kind Kind
	Seed uint64
	Mask uint64 // exclusive-ored into each word of 8 bytes
}

const gamma = 0x9E3779B97F4A7C15 // of splitmix64

// Word returns the 8 bytes at position 8*i, little endian. Kinds that do not exist are Constant.
func (c Content) Word(i uint64) uint64 {
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
		return Mix(c.Seed+i*gamma) ^ c.Mask
	}
	return c.Seed ^ c.Mask
}

func hash32(i, seed, high uint32) uint32 {
	x := i*0x9E3779B1 + seed
	x ^= x >> 15
	return x*0x85EBCA77 ^ high
}

// Mix is the finaliser of splitmix64: a bijection whose outputs look random even for inputs in
// sequence, so any word can be computed on its own.
func Mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// Fill writes the bytes at positions [at, at+len(dst)).
func (c Content) Fill(dst []byte, at uint64) {
	var word [8]byte
	if skip := at % 8; skip != 0 {
		binary.LittleEndian.PutUint64(word[:], c.Word(at/8))
		n := copy(dst, word[skip:])
		dst, at = dst[n:], at+uint64(n)
	}
	whole := len(dst) &^ 7
	writes(dst[:whole])
	c.fillWords(dst[:whole], at/8)
	if tail := dst[whole:]; len(tail) > 0 {
		binary.LittleEndian.PutUint64(word[:], c.Word((at+uint64(whole))/8))
		copy(tail, word[:])
	}
}

// fillWords writes whole words from word i on. The choice of kind stays outside the loops: they
// run at several GB/s a core. The race detector would see eight writes a word: writes tells it of all at once.
//
//go:norace
func (c Content) fillWords(dst []byte, i uint64) {
	switch c.Kind {
	case Hash:
		for ; len(dst) >= 8; dst = dst[8:] {
			binary.LittleEndian.PutUint64(dst, c.Word(i))
			i++
		}
	case WalkingBit:
		for v := bits.RotateLeft64(1, int(i&63)); len(dst) >= 8; v = bits.RotateLeft64(v, 1) {
			binary.LittleEndian.PutUint64(dst, v^c.Mask)
			dst = dst[8:]
		}
	case Counter:
		for v := 8 * i; len(dst) >= 8; v += 8 {
			binary.LittleEndian.PutUint64(dst, v^c.Mask)
			dst = dst[8:]
		}
	case Random:
		for z := c.Seed + i*gamma; len(dst) >= 8; z += gamma {
			binary.LittleEndian.PutUint64(dst, Mix(z)^c.Mask)
			dst = dst[8:]
		}
	default:
		for v := c.Word(i); len(dst) >= 8; dst = dst[8:] {
			binary.LittleEndian.PutUint64(dst, v)
		}
	}
}
