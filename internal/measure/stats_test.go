package measure

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSummarize(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		samples []float64
		want    Stats
	}{
		{nil, Stats{}},
		{[]float64{5}, Stats{Median: 5, Min: 5, Max: 5}},
		{[]float64{4, 2}, Stats{Median: 3, Min: 2, Max: 4, Spread: 2.0 / 3}},
		{[]float64{3, 1, 2}, Stats{Median: 2, Min: 1, Max: 3, Spread: 1}},
		{[]float64{1, 100, 2, 3}, Stats{Median: 2.5, Min: 1, Max: 100, Spread: 99 / 2.5}},
		{[]float64{0, 0}, Stats{}},
	} {
		before := append([]float64(nil), c.samples...)
		assert.Equal(t, c.want, Summarize(c.samples), "%v", c.samples)
		assert.Equal(t, before, c.samples, "the samples keep their order")
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	p, err := Plan{}.normal()
	assert.NoError(t, err)
	assert.Equal(t, Plan{Directions: Directions(), SizeBytes: defaultSize, Copies: defaultCopies,
		Samples: defaultSamples, WarmUp: defaultWarmUp, Budget: defaultBudget}, p)

	for says, bad := range map[string]Plan{
		"size -1":                     {SizeBytes: -1},
		"copies -2":                   {Copies: -2},
		"samples -3":                  {Samples: -3},
		"warm-up copies -4":           {WarmUp: -4},
		"negative budget":             {Budget: -1},
		`unknown direction "upwards"`: {Directions: []Direction{"upwards"}},
	} {
		_, err := bad.normal()
		assert.ErrorContains(t, err, says)
	}
}
