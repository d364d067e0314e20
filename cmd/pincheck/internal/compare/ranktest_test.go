package compare

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Values from the documentations of scipy and R, and by hand.
func TestRankTestByTheBook(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		a, b []float64
		want float64
		tol  float64
	}{
		// The example of scipy.stats.mannwhitneyu, from R. Shier, Statistics: 2.3 The
		// Mann-Whitney U Test (2004): method="exact" prints 0.1111111111111111.
		{"scipy, exact", []float64{19, 22, 16, 29, 24}, []float64{20, 11, 17, 12}, 0.1111111111111111, 1e-12},
		// Separated samples: p = 2 / (n over k).
		{"3 and 3", []float64{1, 2, 3}, []float64{4, 5, 6}, 2.0 / 20, 1e-12},
		{"4 and 4", []float64{2, 1, 3, 5}, []float64{12, 11, 13, 15}, 2.0 / 70, 1e-12},
		{"9 and 9", []float64{1, 2, 3, 4, 5, 6, 7, 8, 9}, []float64{11, 12, 13, 14, 15, 16, 17, 18, 19}, 2.0 / 48620, 1e-12},
		// Hollander and Wolfe (1973), p. 69, which is the example of R's wilcox.test:
		// W = 35, p = 0.1272 on one side; without ties both are equally likely.
		{"R, wilcox.test", []float64{0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46}, []float64{1.15, 0.88, 0.90, 0.74, 1.21}, 2 * 0.1272, 1e-4},
		{"all equal", []float64{7, 7, 7}, []float64{7, 7}, 1, 0},
		{"interleaved", []float64{1, 4}, []float64{2, 3}, 1, 1e-12},
		{"none", nil, []float64{1}, 1, 0},
		{"ties, by hand: of 15 ways to choose 2 of 0 1 1 1 2 2, 10 are as far away", []float64{1, 2}, []float64{0, 1, 1, 2}, 10.0 / 15, 1e-12},
	} {
		assert.InDelta(t, c.want, rankTest(c.a, c.b), c.tol, c.name)
		assert.InDelta(t, c.want, rankTest(c.b, c.a), c.tol, c.name+", the other way round")
	}
}

// u is the U statistic as it is defined: the pairs that a wins.
func u(a, b []float64) float64 {
	sum := 0.0
	for _, x := range a {
		for _, y := range b {
			switch {
			case x > y:
				sum++
			case x == y:
				sum += 0.5
			}
		}
	}
	return sum
}

// The test counts permutations. Here they are all made, one by one.
func TestRankTestCountsPermutations(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 150 {
		n1, n2 := 1+r.IntN(5), 1+r.IntN(5)
		values := make([]float64, n1+n2)
		kinds := 1 + r.IntN(7) // of values: the fewer, the more ties
		for i := range values {
			values[i] = float64(r.IntN(kinds))
		}
		middle := float64(n1*n2) / 2
		away := math.Abs(u(values[:n1], values[n1:]) - middle)
		all, far := 0.0, 0.0
		for chosen := range uint(1) << len(values) {
			if bits.OnesCount(chosen) != n1 {
				continue
			}
			var a, b []float64
			for i, v := range values {
				if chosen>>i&1 == 1 {
					a = append(a, v)
				} else {
					b = append(b, v)
				}
			}
			all++
			if math.Abs(u(a, b)-middle) >= away {
				far++
			}
		}
		assert.InDelta(t, far/all, rankTest(values[:n1], values[n1:]), 1e-12, "%v, %v", values[:n1], values[n1:])
	}
}

// With more samples the normal approximation takes over.
func TestRankTestOfManySamples(t *testing.T) {
	t.Parallel()
	// The example of scipy.stats.mannwhitneyu again, U = 17 of 20: method="asymptotic"
	// prints 0.11134688653314041.
	assert.InDelta(t, 0.11134688653314041, approximate(5, 4, 0, 17-10), 1e-12)
	// {1, 2, 2} and {2, 3, 4} by hand: U = 1 of 9, three ties, a variance of
	// 9/12 · (7 - 24/30) = 4.65.
	assert.InDelta(t, math.Erfc(3/math.Sqrt(2*4.65)), approximate(3, 3, 24, 4.5-1), 1e-12)
	assert.InDelta(t, 1, approximate(40, 40, 0, 0), 0)
	assert.InDelta(t, 1, approximate(40, 40, 80*80*80-80, 0), 0, "all are equal")

	r := rand.New(rand.NewPCG(3, 4))
	for _, grain := range []float64{1e-9, 0.25} { // without ties and with many
		for _, shift := range []float64{0, 0.3, 0.6} {
			a, b := make([]float64, exactSamples/2), make([]float64, exactSamples/2)
			for i := range a {
				a[i] = math.Round(r.NormFloat64()/grain) * grain
				b[i] = math.Round((r.NormFloat64()+shift)/grain) * grain
			}
			_, ties := doubledRanks(a, b)
			away := math.Abs(u(a, b) - float64(len(a)*len(b))/2)
			assert.InDelta(t, rankTest(a, b), approximate(len(a), len(b), ties, away), 0.003, "grain %v, shift %v", grain, shift)
		}
	}
	a, b := make([]float64, 1000), make([]float64, 900)
	for i := range a {
		a[i] = r.Float64()
	}
	for i := range b {
		b[i] = r.Float64()
	}
	assert.Greater(t, rankTest(a, b), 0.001)
	for i := range b {
		b[i] += 0.2
	}
	assert.Less(t, rankTest(a, b), 1e-9)
	for i := range a {
		a[i] = 1
	}
	assert.InDelta(t, 1, rankTest(a, a), 1e-12)
	assert.InDelta(t, 1, rankTest(a[:100], a[:100]), 0)
}

// If nothing differs the test says so as often as it promises, and no oftener.
func TestRankTestKeepsItsLevel(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(5, 6))
	const rounds = 2000
	low := 0
	for range rounds {
		a, b := make([]float64, 7), make([]float64, 9)
		for i := range a {
			a[i] = math.Floor(r.ExpFloat64() * 4)
		}
		for i := range b {
			b[i] = math.Floor(r.ExpFloat64() * 4)
		}
		if rankTest(a, b) <= 0.05 {
			low++
		}
	}
	assert.Less(t, low, rounds*65/1000)
	assert.Greater(t, low, rounds*25/1000)
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
