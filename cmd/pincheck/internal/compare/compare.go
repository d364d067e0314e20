package compare

import (
	"errors"
	"fmt"
	"math"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// Options are what differences must be to count.
type Options struct {
	// Threshold is the least relevant difference, as a share: 0.03 is 3 %. Smaller
	// ones are the same, however sure they are.
	Threshold float64
}

// alpha is the chance that two equal runs are taken for different in any series.
const alpha = 0.05

// minSamples is the fewest a side with which a test can be sure: of two times three
// samples the most uneven ranks have a chance of 0.1.
const minSamples = 4

// A Verdict is what a comparison comes to.
type Verdict string

// The verdicts. Same, Worse, Better and Different are of a series of two runs, Different
// where neither direction is better, and of a host in a fleet.
const (
	Same      Verdict = "same"
	Worse     Verdict = "worse"
	Better    Verdict = "better"
	Different Verdict = "different"
	// Unclear: the medians differ by more than the threshold, but the samples scatter
	// so much that it may be an accident.
	Unclear Verdict = "unclear"
	// Untested: the medians differ by more than the threshold, and there are too few
	// samples for any test.
	Untested Verdict = "untested"
	// Divided: the hosts of a fleet differ by more than the threshold, but none of them
	// is out of line with the others.
	Divided Verdict = "divided"
	// Missing: fewer runs have the series than are needed to compare.
	Missing Verdict = "missing"
)

// A Comparison is what differs between runs.
type Comparison struct {
	Runs      []Run   `json:"runs"`
	Threshold float64 `json:"threshold"`
	Alpha     float64 `json:"alpha"`
	// Verdict is Worse if a series of the second run is, or a host of a fleet is out of
	// line for the worse or, where neither direction is better, out of line at all.
	Verdict Verdict `json:"verdict"`
	Rows    []Row   `json:"series"`
	Hosts   []Host  `json:"hosts,omitempty"` // of a fleet, one a run
}

// A Row is the series of the runs that measured the same.
type Row struct {
	Bench   string        `json:"bench"`
	Name    string        `json:"name"`
	Labels  result.Labels `json:"labels"`
	Unit    result.Unit   `json:"unit"`
	Better  result.Better `json:"better,omitempty"`
	Values  []*Value      `json:"values"` // one a run, nil where it has no such series
	Verdict Verdict       `json:"verdict"`
	// Ratio is the second median over the first, nil if that is 0. P is the p-value of
	// the Mann-Whitney U test, adjusted by Holm's method for the number of series; nil
	// if there was none. Both are of two runs.
	Ratio *float64 `json:"ratio,omitempty"`
	P     *float64 `json:"p,omitempty"`
	// Center and Deviation are the median of the hosts and their median absolute
	// deviation from it. Both are of a fleet.
	Center    *float64 `json:"center,omitempty"`
	Deviation *float64 `json:"deviation,omitempty"`
}

// A Value is the series of one run.
type Value struct {
	Median  float64 `json:"median"`
	Samples int     `json:"samples"`
	// Verdict is that of a host in a fleet, empty if it is in line with the others.
	Verdict Verdict `json:"verdict,omitempty"`
	samples []float64
}

// Compare compares two runs, the first of which is the measure for the second, or the
// hosts of a fleet of three or more runs. Fewer runs, runs that have no series in common,
// and a threshold below 0 are errors.
func Compare(runs []Run, o Options) (*Comparison, error) {
	if len(runs) < 2 {
		return nil, fmt.Errorf("%d run: two or more are needed", len(runs))
	}
	if !(o.Threshold >= 0) || math.IsInf(o.Threshold, 1) {
		return nil, fmt.Errorf("threshold %v: must not be negative", o.Threshold)
	}
	c := &Comparison{Runs: runs, Threshold: o.Threshold, Alpha: alpha, Verdict: Same, Rows: rows(runs)}
	minimum := 2
	if len(runs) > 2 {
		minimum = 3
	}
	var common []*Row
	for i := range c.Rows {
		r := &c.Rows[i]
		have := 0
		for _, v := range r.Values {
			if v != nil {
				have++
			}
		}
		if r.Verdict = Missing; have >= minimum {
			common = append(common, r)
		}
	}
	if len(common) == 0 {
		return nil, errors.New("the runs have no series in common: compare runs of the same benches with the same options")
	}
	if len(runs) == 2 {
		c.pair(common)
	} else {
		c.fleet(common)
	}
	return c, nil
}

// rows joins the series of the runs, in the order in which they are met first.
func rows(runs []Run) []Row {
	var out []Row
	at := map[string]int{}
	for i := range runs {
		for j := range runs[i].series {
			s := &runs[i].series[j]
			key := s.key()
			k, ok := at[key]
			if !ok {
				k = len(out)
				at[key] = k
				out = append(out, Row{Bench: s.bench, Name: s.Name, Labels: s.Labels, Unit: s.Unit, Better: s.Better, Values: make([]*Value, len(runs))})
			}
			out[k].Values[i] = &Value{Median: s.Median, Samples: len(s.Samples), samples: s.Samples}
		}
	}
	return out
}

// pair judges the second run by the first.
func (c *Comparison) pair(common []*Row) {
	var tested []*Row
	var p []float64
	for _, r := range common {
		a, b := r.Values[0], r.Values[1]
		if a.Median != 0 {
			ratio := b.Median / a.Median
			r.Ratio = &ratio
		}
		if min(a.Samples, b.Samples) >= minSamples {
			tested = append(tested, r)
			p = append(p, rankTest(a.samples, b.samples))
		}
	}
	for i, adjusted := range holm(p) {
		tested[i].P = &adjusted
	}
	for _, r := range common {
		a, b := r.Values[0].Median, r.Values[1].Median
		switch {
		case math.Abs(b-a) <= c.Threshold*math.Abs(a):
			r.Verdict = Same
		case r.P == nil:
			r.Verdict = Untested
		case *r.P > alpha:
			r.Verdict = Unclear
		default:
			r.Verdict = direction(r.Better, b > a)
		}
		if r.Verdict == Worse {
			c.Verdict = Worse
		}
	}
}

// direction returns what it means that a value is higher, or lower.
func direction(better result.Better, higher bool) Verdict {
	switch better {
	case result.Higher:
		if higher {
			return Better
		}
		return Worse
	case result.Lower:
		if higher {
			return Worse
		}
		return Better
	}
	return Different
}
