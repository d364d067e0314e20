package verify

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// A Pattern generates the bytes of a round trip. The byte at any offset is computed, so that
// bytes which come back are compared with the pattern itself, and never with a second copy
// of the sent bytes.
type Pattern string

const (
	// Zeros has no bit set.
	Zeros Pattern = "zeros"
	// Ones has every bit set.
	Ones Pattern = "ones"
	// Alternating is 0x55 at even offsets and 0xAA at odd ones.
	Alternating Pattern = "alternating"
	// WalkingBit is one bit of each 8-byte word, moving up.
	WalkingBit Pattern = "walking_bit"
	// Counter has its own byte offset in each 8-byte word, so that a misplaced word shows
	// its place.
	Counter Pattern = "counter"
	// Random is seeded, and different in every case.
	Random Pattern = "random"
)

const (
	wordBytes   = 8
	blockBytes  = 32 << 10 // generated and compared at a time: stays in the first cache
	lowBytes    = 0x0101010101010101
	goldenGamma = 0x9E3779B97F4A7C15
)

// patterns returns all patterns.
func patterns() []Pattern {
	return []Pattern{Zeros, Ones, Alternating, WalkingBit, Counter, Random}
}

// positional reports whether some of the pattern's bytes show their offset.
func (p Pattern) positional() bool { return p == Counter || p == Random }

// A content is a pattern with its seed: a function from offset to byte. mask is
// exclusive-ored into every byte: with a mask other than 0 the bytes differ from the
// pattern's at every offset, as poison must.
type content struct {
	pattern Pattern
	seed    uint64
	mask    byte
}

func (c content) masked(mask byte) content {
	c.mask = mask
	return c
}

// word returns the 8 bytes at offset 8*i, little endian.
func (c content) word(i uint64) uint64 {
	x := uint64(c.mask) * lowBytes
	switch c.pattern {
	case Ones:
		return ^x
	case Alternating:
		return 0xAA55AA55AA55AA55 ^ x
	case WalkingBit:
		return bits.RotateLeft64(1, int(i&63)) ^ x
	case Counter:
		return i*wordBytes ^ x
	case Random:
		return mix(c.seed+i*goldenGamma) ^ x
	default:
		return x
	}
}

// mix is the finaliser of splitmix64: a bijection whose outputs look random
// even for inputs in sequence, so any offset can be generated on its own.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// fill writes the bytes at offsets [off, off+len(dst)). off must not be negative.
func (c content) fill(dst []byte, off int) {
	var word [wordBytes]byte
	if r := off % wordBytes; r != 0 {
		binary.LittleEndian.PutUint64(word[:], c.word(uint64(off/wordBytes)))
		n := copy(dst, word[r:])
		dst, off = dst[n:], off+n
	}
	i := uint64(off / wordBytes)
	whole := len(dst) &^ (wordBytes - 1)
	c.fillWords(dst[:whole], i)
	if tail := dst[whole:]; len(tail) > 0 {
		binary.LittleEndian.PutUint64(word[:], c.word(i+uint64(whole/wordBytes)))
		copy(tail, word[:])
	}
}

// fillWords writes whole words from word i on. The choice of pattern stays
// outside the loops: they run at several GB/s a core.
func (c content) fillWords(dst []byte, i uint64) {
	x := uint64(c.mask) * lowBytes
	switch c.pattern {
	case Counter:
		for v := i * wordBytes; len(dst) >= wordBytes; v += wordBytes {
			binary.LittleEndian.PutUint64(dst, v^x)
			dst = dst[wordBytes:]
		}
	case Random:
		for z := c.seed + i*goldenGamma; len(dst) >= wordBytes; z += goldenGamma {
			binary.LittleEndian.PutUint64(dst, mix(z)^x)
			dst = dst[wordBytes:]
		}
	case WalkingBit:
		for v := c.masked(0).word(i); len(dst) >= wordBytes; v = bits.RotateLeft64(v, 1) {
			binary.LittleEndian.PutUint64(dst, v^x)
			dst = dst[wordBytes:]
		}
	default:
		for v := c.word(i); len(dst) >= wordBytes; dst = dst[wordBytes:] {
			binary.LittleEndian.PutUint64(dst, v)
		}
	}
}

// equals reports whether found holds the bytes at offsets [off, off+len(found)).
func (c content) equals(found []byte, off int) bool {
	var block [blockBytes]byte
	for len(found) > 0 {
		want := block[:min(len(found), blockBytes)]
		c.fill(want, off)
		if !bytes.Equal(want, found[:len(want)]) {
			return false
		}
		found, off = found[len(want):], off+len(want)
	}
	return true
}
