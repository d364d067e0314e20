package result

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSummarize(t *testing.T) {
	assert.Equal(t, Stats{}, Summarize(nil))
	assert.Equal(t, Stats{}, Summarize([]float64{math.NaN(), math.Inf(1)}))
	one := Summarize([]float64{7})
	assert.Equal(t, Stats{Median: 7, Min: 7, Max: 7, Mean: 7, P10: 7, P90: 7, P99: 7}, one)
	s := Summarize([]float64{4, 1, 3, 2, math.NaN()})
	assert.InDelta(t, 2.5, s.Median, 1e-12)
	assert.InDelta(t, 2.5, s.Mean, 1e-12)
	assert.InDelta(t, 1.3, s.P10, 1e-12)
	assert.InDelta(t, 3.7, s.P90, 1e-12)
	assert.InDelta(t, 3.97, s.P99, 1e-12)
	assert.InDelta(t, 3/2.5, s.Spread, 1e-12)
	assert.InDelta(t, math.Sqrt(5.0/3)/2.5, s.CV, 1e-12)
	for _, extreme := range [][]float64{{-math.MaxFloat64, math.MaxFloat64}, {5e-324, 1e308}, {0, math.MaxFloat64, math.MaxFloat64}, {-1e308, 1e-308, 1e308}} {
		text, err := json.Marshal(Summarize(extreme))
		require.NoError(t, err, "%v %s", extreme, text)
	}
}

func TestLabelsKeepTheirOrder(t *testing.T) {
	l := Labels{{"size_bytes", "4096"}, {"a", "<\"x\">\n"}}
	text, err := json.Marshal(l)
	require.NoError(t, err)
	var back Labels
	require.NoError(t, json.Unmarshal(text, &back))
	assert.Equal(t, l, back)
	assert.Equal(t, "4096", back.Get(Size))
	assert.Empty(t, back.Get("b"))
	assert.Equal(t, Labels{{"a", "<\"x\">\n"}, {"size_bytes", "1"}}, l.With(Size, "1"))
	assert.Len(t, l, 2)
	for _, bad := range []string{`[1]`, `{"a":1}`, `{"a":{"b":"c"}}`, `{"a":["b"]}`, `"a"`, `7`} {
		assert.Error(t, json.Unmarshal([]byte(bad), &back), bad)
	}
	require.NoError(t, json.Unmarshal([]byte("null"), &back))
	assert.Nil(t, back)
}

func TestViewsSelect(t *testing.T) {
	b := Bench{Series: []Series{
		{Name: "bandwidth", Labels: Labels{{Direction, Both}, {Size, "1"}}},
		{Name: "bandwidth", Labels: Labels{{Direction, HostToDevice}, {Size, "2"}}},
		{Name: "other", Labels: Labels{{Direction, Both}}},
	}}
	assert.Len(t, b.Select(View{Series: "bandwidth"}), 2)
	require.Len(t, b.Select(View{Series: "bandwidth", Where: Labels{{Direction, Both}}}), 1)
	assert.Same(t, &b.Series[1], b.Find("bandwidth", Label{Size, "2"}))
	assert.Nil(t, b.Find("bandwidth", Label{Size, "3"}))
}
