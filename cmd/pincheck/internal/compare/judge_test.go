package compare

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

func TestJudgeTellsWhatIsBelowTheReference(t *testing.T) {
	t.Parallel()
	run := runsOf(t, []result.Series{
		measured("low", result.Higher, 44), measured("fine", result.Higher, 46, 45.5, 46), measured("high", result.Higher, 56), measured("unknown", result.Higher, 1),
		measured("endless", result.Higher, 1e308),
	})[0]
	rates := map[string]float64{"low": 50, "fine": 50, "high": 50, "endless": 1e-300}
	expect := func(s *result.Series) *result.Expected {
		if rate, ok := rates[s.Labels.Get("name")]; ok {
			return &result.Expected{Value: rate, Source: "a file"}
		}
		return nil
	}
	c, err := Judge(run, "a table", 0.1, expect)
	require.NoError(t, err)
	assert.Equal(t, Worse, c.Verdict)
	assert.Equal(t, 1, c.Unjudged)
	assert.InDelta(t, 0.1, c.Threshold, 0)
	assert.Equal(t, []string{"a table", "pincheck"}, []string{c.Runs[0].Tool, c.Runs[1].Tool})
	require.Len(t, c.Rows, 4)
	for name, want := range map[string]Verdict{"low": Worse, "fine": Same, "high": Better, "endless": Better} {
		r := find(t, c, name)
		assert.Equal(t, want, r.Verdict, name)
		assert.Equal(t, "a file", r.Source)
		assert.InDelta(t, rates[name], r.Values[0].Median, 0)
	}
	assert.InDelta(t, 0.92, *find(t, c, "fine").Ratio, 1e-12)
	assert.Equal(t, 3, find(t, c, "fine").Values[1].Samples)
	_, err = json.Marshal(c)
	require.NoError(t, err)

	delete(rates, "low")
	c, err = Judge(run, "a table", 0.1, expect)
	require.NoError(t, err)
	assert.Equal(t, Same, c.Verdict)
	_, err = Judge(run, "a table", 0.1, func(*result.Series) *result.Expected { return nil })
	assert.ErrorContains(t, err, "no row for any series")
}
