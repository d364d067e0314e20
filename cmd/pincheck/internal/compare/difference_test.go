package compare

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Quantiles of Student's distribution, of any table.
func TestStudent(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ t, freedom, want float64 }{
		{12.706, 1, 0.05}, {2.776, 4, 0.05}, {2.228, 10, 0.05}, {4.587, 10, 0.001}, {3.850, 20, 0.001}, {1.960, 1e7, 0.05}, {0, 3, 1},
	} {
		assert.InEpsilon(t, c.want, student(c.t, c.freedom), 2e-3, "%v", c)
	}
	assert.InEpsilon(t, 2*(0.5-math.Atan(1e6)/math.Pi), student(1e6, 1), 1e-6, "Cauchy's")
	assert.Zero(t, student(math.Inf(1), 5))
	assert.Greater(t, student(40, 20), 0.0)
}

// By hand: 2 to 4 of 1 to 5 are kept, of a winsorized 2 2 3 4 4, whose squares are 4.
func TestEstimated(t *testing.T) {
	t.Parallel()
	e := estimated([]float64{5, 1, 4, 2, 300})
	assert.InDelta(t, (2+4+5)/3.0, e.center, 1e-12, "the largest is left out")
	e = estimated([]float64{5, 1, 4, 2, 3})
	assert.InDelta(t, 3, e.center, 1e-12)
	assert.InDelta(t, 4.0/(3*2), e.value, 1e-12)
	assert.InDelta(t, 2, e.freedom, 0)
	e = estimated([]float64{7})
	assert.Equal(t, estimate{center: 7}, e)
}

// By hand: 4 · 0.01, 3 · 0.02, 2 · 0.03, and 0.04, which may not be lower than the one
// before it.
func TestHolm(t *testing.T) {
	t.Parallel()
	assert.InDeltaSlice(t, []float64{0.04, 0.06, 0.06, 0.06}, holm([]float64{0.01, 0.02, 0.03, 0.04}), 1e-12)
	assert.InDeltaSlice(t, []float64{0.06, 0.04, 0.06, 0.06}, holm([]float64{0.04, 0.01, 0.03, 0.02}), 1e-12)
	assert.Equal(t, []float64{1, 1}, holm([]float64{0.9, 0.8}))
	assert.Empty(t, holm(nil))
}
