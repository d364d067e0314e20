package loader

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

// The product of a sample's number or count and its size may overflow.
func TestCopySamplesRefusesWhatIsOutsideOfItsArguments(t *testing.T) {
	t.Parallel()
	from := make([]byte, 512)
	for _, index := range []int{-1, 4, 1 << 57, math.MaxInt, math.MinInt} {
		assert.ErrorContains(t, CopySamples(make([]byte, 128), from, 128, []int{index}), "of 4", "index %d", index)
		assert.ErrorContains(t, CopySamples(make([]byte, 256), from, 128, []int{0, index}), "of 4", "index %d", index)
	}
	assert.ErrorContains(t, CopySamples(nil, from, 1<<62, make([]int, 4)), "into 0 bytes", "the product is 0")
	assert.NoError(t, CopySamples(make([]byte, 256), from, 128, []int{3, 0}))
	assert.NoError(t, CopySamples(nil, from, 128, nil))
}
