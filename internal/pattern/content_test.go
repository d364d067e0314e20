package pattern

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A part of a content is the same whatever is filled around it, and kinds, seeds, masks and
// positions all matter.
func TestContentIsAFunctionOfThePosition(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for kind := range numKinds {
		for _, c := range []Content{{Kind: kind}, {Kind: kind, Seed: 7}, {Kind: kind, Mask: 0x9393939393939393}} {
			if (kind == WalkingBit || kind == Counter) && c.Seed != 0 {
				continue // not seeded
			}
			for _, at := range []uint64{0, 1, 1 << 20, 1<<34 + 8} {
				if kind == Constant && at != 0 || kind == WalkingBit && at > 1 {
					continue // the same everywhere, and every 512 bytes
				}
				whole := make([]byte, 100)
				c.Fill(whole, at)
				name := fmt.Sprintf("%+v at %d", c, at)
				assert.Empty(t, seen[string(whole)], name)
				seen[string(whole)] = name
				for off := range 20 {
					for _, n := range []int{0, 1, 7, 8, 9, 33} {
						part := bytes.Repeat([]byte{0xEE}, n)
						c.Fill(part, at+uint64(off))
						assert.Equal(t, whole[off:off+n], part, name)
					}
				}
			}
		}
	}
	assert.Equal(t, "content kind 9", Kind(9).String())
	assert.Equal(t, "hash", Hash.String())
}

// The words of Hash do not repeat where an address bit may have been lost.
func TestHashDiffersAcrossAddressBits(t *testing.T) {
	t.Parallel()
	var c Content
	words := map[uint64]uint64{}
	for _, base := range []uint64{0, 12345} {
		for bit := range 40 {
			i := base ^ 1<<bit
			if other, ok := words[c.Word(i)]; ok && other != i {
				t.Errorf("words %d and %d are the same", i, other)
			}
			words[c.Word(i)] = i
		}
	}
}
