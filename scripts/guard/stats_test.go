package main

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Wilcoxon's table: the largest sum of ranks that is significant at 1 %, two-sided. The means outside are one more.
func TestBoundsAreThoseOfTheSignedRankTable(t *testing.T) {
	t.Parallel()
	for n, sum := range map[int]int{7: -1, 8: 0, 9: 1, 10: 3, 12: 7, 15: 15, 20: 37, 25: 68} {
		assert.Equal(t, sum+1, meansOutside(n), "%d pairs", n)
	}
	assert.Positive(t, meansOutside(minPairs))
	assert.Zero(t, meansOutside(minPairs-1))
}

func TestEstimateIgnoresAFewSamplesThatAreFarOut(t *testing.T) {
	t.Parallel()
	e := estimateOf([]float64{1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 40})
	assert.InDelta(t, 1.2, e.median, 1e-9)
	assert.InDelta(t, 1.2, e.low, 1e-9)
	few := estimateOf([]float64{1, 2, 3})
	assert.Zero(t, few.low)
	assert.Equal(t, math.Inf(1), few.high)
	assert.False(t, few.decided())
}

// The interval contains the true ratio in 99 % of all cases, whatever the noise is.
func TestIntervalsContainTheTrueRatio(t *testing.T) {
	t.Parallel()
	const tries, truth = 3000, 1.07
	for name, noise := range map[string]func(*rand.Rand) float64{
		"normal":   func(random *rand.Rand) float64 { return math.Exp(0.05 * random.NormFloat64()) },
		"outliers": outliers,
	} {
		random := rand.New(rand.NewPCG(1, 2))
		for _, n := range []int{8, 13, 30} {
			missed := 0
			for range tries {
				ratios := make([]float64, n)
				for i := range ratios {
					ratios[i] = truth * noise(random) / noise(random)
				}
				if e := estimateOf(ratios); truth < e.low || truth > e.high {
					missed++
				}
			}
			assert.Less(t, missed, tries/50, "%s, %d pairs", name, n)
		}
	}
}

// outliers is noise of 3 %, and in one of 20 samples something else runs on the host.
func outliers(random *rand.Rand) float64 {
	v := math.Exp(0.03 * random.NormFloat64())
	if random.IntN(20) == 0 {
		v *= 1.2 + 2*random.Float64()
	}
	return v
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	around := func(center, spread float64) []float64 {
		var all []float64
		for i := range 10 {
			all = append(all, center*(1+spread*(float64(i)-4.5)/4.5))
		}
		return all
	}
	for name, c := range map[string]struct {
		want   verdict
		rounds [][]float64
	}{
		"the same":                      {same, [][]float64{around(1, 0.05)}},
		"slower by less than the limit": {same, [][]float64{around(1.06, 0.02)}},
		"slower by more":                {worse, [][]float64{around(1.15, 0.03)}},
		"slower, its interval has 1":    {unclear, [][]float64{around(1.12, 0.3)}},
		"the same, but not known well":  {unclear, [][]float64{around(1, 0.4)}},
		"faster":                        {better, [][]float64{around(0.8, 0.05)}},
		"slower in all processes":       {worse, [][]float64{around(1.2, 0.03), around(1.12, 0.03), around(1.1, 0.03)}},
		"slower in two of three":        {unclear, [][]float64{around(1.3, 0.03), around(1.25, 0.03), around(0.99, 0.005)}},
		"slower in the first alone":     {same, [][]float64{around(1.15, 0.03), around(1.0, 0.03), around(0.98, 0.03)}},
		"fewer pairs than it takes":     {unclear, [][]float64{around(1.5, 0.01)[:minPairs-1]}},
	} {
		_, got := evaluate(c.rounds)
		assert.Equal(t, c.want, got, name)
	}
	require.Less(t, estimateOf(around(1, 0.01)).high, limit)
}
