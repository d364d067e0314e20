// Package content computes bytes from their positions: what package gpukernels' kernels, and the Go
// functions that stand for them on simulated devices, fill memory with.
package content

import (
	"encoding/binary"
	"math/bits"
)

// The kinds of contents. internal/gpukernels/src/memory.cu has the same functions.
const (
	Hash uint32 = iota
	Constant
	WalkingBit
	Counter
	Random
)

// A Content is a kind with its parameters.
type Content struct {
	Kind uint32
	Seed uint64
	Mask uint64 // exclusive-ored into each word of 8 bytes
}

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

// Fill writes the bytes at positions [at, at+len(dst)).
func (c Content) Fill(dst []byte, at uint64) {
	var word [8]byte
	if skip := at % 8; skip != 0 {
		binary.LittleEndian.PutUint64(word[:], c.Word(at/8))
		n := copy(dst, word[skip:])
		dst, at = dst[n:], at+uint64(n)
	}
	i := at / 8
	for ; len(dst) >= 8; i++ {
		binary.LittleEndian.PutUint64(dst, c.Word(i))
		dst = dst[8:]
	}
	if len(dst) > 0 {
		binary.LittleEndian.PutUint64(word[:], c.Word(i))
		copy(dst, word[:])
	}
}
