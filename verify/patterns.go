package verify

import (
	"bytes"
	"encoding/hex"

	"github.com/gopinned/pinned/internal/pattern"
)

// A Pattern generates the bytes of a round trip. The byte at any offset is computed, so that
// bytes which come back are compared with the pattern itself, and never with a second copy
// of the sent bytes.
//
//	zeros        no bit is set
//	ones         every bit is set
//	alternating  0x55 at even offsets and 0xAA at odd ones
//	walking_bit  one bit of each 8-byte word, moving up
//	counter      each 8-byte word has its own byte offset, so that a misplaced word shows its place
//	random       seeded, and different in every case
type Pattern string

const (
	patternZeros       Pattern = "zeros"
	patternOnes        Pattern = "ones"
	patternAlternating Pattern = "alternating"
	patternWalkingBit  Pattern = "walking_bit"
	patternCounter     Pattern = "counter"
	patternRandom      Pattern = "random"
)

const (
	wordBytes  = 8
	blockBytes = 32 << 10 // generated and compared at a time: stays in the first cache
	lowBytes   = 0x0101010101010101
)

// patterns returns all patterns.
func patterns() []Pattern {
	return []Pattern{patternZeros, patternOnes, patternAlternating, patternWalkingBit, patternCounter, patternRandom}
}

// positional reports whether some of the pattern's bytes show their offset.
func (p Pattern) positional() bool { return p == patternCounter || p == patternRandom }

// content returns the bytes of a pattern. Only the random pattern uses the seed.
func (p Pattern) content(seed uint64) content {
	c := pattern.Content{Kind: pattern.Constant}
	switch p {
	case patternOnes:
		c.Seed = ^uint64(0)
	case patternAlternating:
		c.Seed = 0xAA55AA55AA55AA55
	case patternWalkingBit:
		c.Kind = pattern.WalkingBit
	case patternCounter:
		c.Kind = pattern.Counter
	case patternRandom:
		c = pattern.Content{Kind: pattern.Random, Seed: seed}
	}
	return content{c}
}

// A content is the bytes of a case, or poison: a function from offset to byte.
type content struct{ pattern.Content }

// fill writes the bytes at offsets [off, off+len(dst)). off must not be negative.
func (c content) fill(dst []byte, off int) { c.Fill(dst, uint64(off)) }

// hex returns n bytes from offset off on as digits.
func (c content) hex(off, n int) string {
	b := make([]byte, n)
	c.fill(b, off)
	return hex.EncodeToString(b)
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
