package compare

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// alpha is the chance that runs of one machine are taken for different in any series.
const alpha = 0.01

// minSamples is the fewest of a run that show how much its samples scatter.
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
	// Unclear: the medians differ by more than the threshold, but by no more than runs of
	// one machine may.
	Unclear Verdict = "unclear"
	// Untested: the medians differ by more than the threshold, and there are too few
	// samples for any test.
	Untested Verdict = "untested"
	// Divided: the hosts of a fleet differ by more than the threshold, but none of them
	// is out of line with the others.
	Divided Verdict = "divided"
	// Simulated: a run is of the simulated GPU, and no series has a verdict. The simulated copies take the time of the host's
	// processors, so that runs differ by what else the host does, and never by a GPU or a link.
	Simulated Verdict = "simulated"
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
	// Unjudged is the number of series without a reference, of a run that was compared with one.
	Unjudged int `json:"without_reference,omitempty"`
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
	// Ratio is the second median over the first, nil if that is 0. P is how likely two runs
	// of one machine differ as much, by the scatter of the samples and by what such runs
	// differ anyway, adjusted by Holm's method for the number of series, with four digits; nil
	// if there are too few samples. Both are of two runs.
	Ratio *float64 `json:"ratio,omitempty"`
	P     *float64 `json:"p,omitempty"`
	// Center and Deviation are the median of the hosts and their median absolute
	// deviation from it. Both are of a fleet.
	Center    *float64 `json:"center,omitempty"`
	Deviation *float64 `json:"deviation,omitempty"`
	// Source is where the first value is from, which is a reference.
	Source string `json:"source,omitempty"`
}

// A Value is the series of one run.
type Value struct {
	Median  float64 `json:"median"`
	Samples int     `json:"samples"`
	// Verdict is that of a host in a fleet, empty if it is in line with the others.
	Verdict Verdict `json:"verdict,omitempty"`
	samples []float64
	drift   variance // of the run, which its samples do not show
}

// Compare compares two runs, the first of which is the measure for the second, or the
// hosts of a fleet of three or more runs. The threshold is the least relevant difference, as a share: 0.03 is 3 %. Smaller
// ones are the same, however sure they are. Fewer runs, runs that have no series in common,
// and a threshold below 0 are errors.
func Compare(runs []Run, threshold float64) (*Comparison, error) {
	if len(runs) < 2 {
		return nil, fmt.Errorf("%d run: two or more are needed", len(runs))
	}
	if !(threshold >= 0) || math.IsInf(threshold, 1) {
		return nil, fmt.Errorf("threshold %v: must not be negative", threshold)
	}
	c := &Comparison{Runs: runs, Threshold: threshold, Alpha: alpha, Verdict: Same, Rows: rows(runs)}
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
	for i := range runs {
		addUnrest(common, i)
	}
	if len(runs) == 2 {
		c.pair(common)
	} else {
		c.fleet(common)
	}
	if slices.ContainsFunc(runs, func(r Run) bool { return r.Simulated }) {
		c.withoutVerdict(common)
	}
	return c, nil
}

// withoutVerdict makes the verdict of all series, and of the comparison, Simulated.
func (c *Comparison) withoutVerdict(common []*Row) {
	c.Verdict = Simulated
	for _, r := range common {
		r.Verdict, r.P = Simulated, nil
		for _, v := range r.Values {
			if v != nil {
				v.Verdict = ""
			}
		}
	}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		h.OutOfLine, h.Worse, h.Farthest = 0, 0, nil
	}
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
			d := drift(s.bench, &s.Series)
			out[k].Values[i] = &Value{Median: s.Median, Samples: len(s.Samples), samples: s.Samples, drift: variance{d * d / float64(s.runs), driftFreedom}}
		}
	}
	return out
}

// pair compares the second run with the first.
func (c *Comparison) pair(common []*Row) {
	var tested []*Row
	var p []float64
	for _, r := range common {
		a, b := r.Values[0], r.Values[1]
		r.Ratio = ratio(b.Median, a.Median)
		if min(a.Samples, b.Samples) >= minSamples {
			tested = append(tested, r)
			scale := scaleOf(r.Unit, r.Values)
			x, y := estimated(scale.of(a.samples)), estimated(scale.of(b.samples))
			p = append(p, probability(y.center-x.center, sum(x.variance, y.variance, a.drift, b.drift)))
		}
	}
	for i, adjusted := range holm(p) {
		p := result.FourDigits(adjusted) // the last bits of math.Exp differ between processors
		tested[i].P = &p
	}
	for _, r := range common {
		a, b := r.Values[0].Median, r.Values[1].Median
		switch {
		case math.Abs(b-a) <= c.relevant(r, a):
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

// ratio returns a over b, nil if that is no number.
func ratio(a, b float64) *float64 {
	r := a / b
	if math.IsInf(r, 0) || math.IsNaN(r) {
		return nil
	}
	return &r
}

// relevant returns the least difference from a value that counts. Ratios below 1 are shares of
// something: they differ by parts of 1.
func (c *Comparison) relevant(r *Row, value float64) float64 {
	value = math.Abs(value)
	if r.Unit == result.Ratio {
		value = max(value, 1)
	}
	return c.Threshold * value
}

// direction returns what it means that a value is higher, or lower.
func direction(better result.Better, higher bool) Verdict {
	switch {
	case better != result.Higher && better != result.Lower:
		return Different
	case higher == (better == result.Higher):
		return Better
	}
	return Worse
}

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
