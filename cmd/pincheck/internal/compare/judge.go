package compare

import (
	"errors"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// Judge compares a run with a reference: of each series with what expect returns, which is nil for none. A series
// is worse if it is lower by more than the share threshold, and better above the inverse of what remains. A run of
// which nothing is expected is an error.
func Judge(run Run, reference string, threshold float64, expect func(*result.Series) *result.Expected) (*Comparison, error) {
	c := &Comparison{Runs: []Run{{Name: "reference", Tool: reference, Complete: true}, run}, Threshold: threshold, Verdict: Same}
	least := 1 - threshold
	for i := range run.series {
		s := &run.series[i]
		e := expect(&s.Series)
		if e == nil || e.Value <= 0 {
			c.Unjudged++
			continue
		}
		r := Row{Bench: s.bench, Name: s.Name, Labels: s.Labels, Unit: s.Unit, Better: s.Better, Verdict: Same, Ratio: ratio(s.Median, e.Value), Source: e.Source,
			Values: []*Value{{Median: e.Value}, {Median: s.Median, Samples: len(s.Samples)}}}
		switch {
		case s.Median < least*e.Value:
			r.Verdict = direction(s.Better, false)
		case least*s.Median > e.Value:
			r.Verdict = direction(s.Better, true)
		}
		if r.Verdict == Worse {
			c.Verdict = Worse
		}
		c.Rows = append(c.Rows, r)
	}
	if len(c.Rows) == 0 {
		return nil, errors.New("the reference has no row for any series of the run")
	}
	return c, nil
}
