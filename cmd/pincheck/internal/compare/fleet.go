package compare

import (
	"math"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A Host sums up one host of a fleet.
type Host struct {
	Name   string `json:"name"`
	Series int    `json:"series"` // that were compared
	// OutOfLine is the number of outliers, Worse the number of those that are worse, or
	// in a quantity of which neither direction is better.
	OutOfLine int `json:"out_of_line"`
	Worse     int `json:"worse"`
	Missing   int `json:"missing"` // series that other hosts have
	// Farthest is the index of the series, in the comparison's, in which the host is
	// farthest from the others for the worse, nil for none.
	Farthest *int `json:"farthest_series,omitempty"`
}

const (
	// normalDeviance times the median absolute deviation is the standard deviation of normal values.
	normalDeviance = 1.4826
	// outOfLine is the multiple of that deviation that a host of a divided fleet must be away from the middle
	// (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
	outOfLine = 3.5
)

// A hostValue is the value of a host in a series.
type hostValue struct {
	row  *Row
	host int
}

// probabilities returns how likely each host is as far from the middle of the others as it is by
// chance, adjusted for the number of series and hosts.
func (c *Comparison) probabilities(common []*Row) map[hostValue]float64 {
	var cells []hostValue
	var p []float64
	for _, r := range common {
		scale := scaleOf(r.Unit, r.Values)
		var hosts []int
		var all []estimate
		for i, v := range r.Values {
			if v != nil {
				e := estimated(scale.of(v.samples))
				e.variance = sum(e.variance, v.drift)
				hosts, all = append(hosts, i), append(all, e)
			}
		}
		for i, e := range all {
			others := all
			if len(all) <= manyHosts {
				others = slices.Delete(slices.Clone(all), i, i+1)
			}
			middle, own, between := middleOf(others)
			switch { // few samples that are equal by accident do not make a host sure
			case between.value > max(e.value, own.value):
				e.variance = between
			case own.value > e.value:
				e.variance = own
			}
			// The middle is a median: of normal values its variance is that.
			ofMiddle := variance{math.Pi / 2 / float64(len(others)) * max(between.value, own.value), own.freedom}
			cells = append(cells, hostValue{r, hosts[i]})
			p = append(p, probability(e.center-middle, sum(e.variance, ofMiddle)))
		}
	}
	out := make(map[hostValue]float64, len(p))
	for i, adjusted := range holm(p) {
		out[cells[i]] = adjusted
	}
	return out
}

// manyHosts is from how many hosts on one of them does not move the middle.
const manyHosts = 16

// middleOf returns the median of hosts, the variance that each has of its own, and the variance
// between them, if that is more than equal hosts may show.
func middleOf(hosts []estimate) (middle float64, own, between variance) {
	var centers, owns, away []float64
	freedom := float64(driftFreedom)
	for _, e := range hosts {
		centers, owns = append(centers, e.center), append(owns, e.value)
		freedom = min(freedom, e.freedom) // busy hosts have heavy tails
	}
	middle, own = result.Summarize(centers).Median, variance{result.Summarize(owns).Median, freedom}
	for _, center := range centers {
		away = append(away, math.Abs(center-middle))
	}
	deviation := normalDeviance * result.Summarize(away).Median
	if widening := 1 + 6/math.Sqrt(float64(len(hosts))); deviation*deviation > widening*own.value {
		between = variance{deviation * deviation, freedom}
	}
	return middle, own, between
}

// fleet names the hosts that are out of line with the others. The middle and the scatter
// of the hosts are medians, which a minority of odd hosts does not move.
func (c *Comparison) fleet(common []*Row) {
	c.Hosts = make([]Host, len(c.Runs))
	for i, r := range c.Runs {
		c.Hosts[i].Name = r.Name
	}
	index := map[*Row]int{}
	for i := range c.Rows {
		index[&c.Rows[i]] = i
		for j, v := range c.Rows[i].Values {
			if v == nil {
				c.Hosts[j].Missing++
			}
		}
	}
	likely := c.probabilities(common)
	farthest := make([]float64, len(c.Runs))
	for _, r := range common {
		center, deviation := r.middle()
		r.Center, r.Deviation, r.Verdict = &center, &deviation, Same
		relevant := c.relevant(r, center)
		least := relevant // distance of a host that is out of line
		if normalDeviance*deviation > relevant {
			r.Verdict = Divided
			least = max(least, outOfLine*normalDeviance*deviation)
		}
		for i, v := range r.Values {
			if v == nil {
				continue
			}
			c.Hosts[i].Series++
			if math.Abs(v.Median-center) <= least || likely[hostValue{r, i}] > alpha {
				continue
			}
			if share := c.mark(r, i); share > farthest[i] {
				farthest[i] = share
				at := index[r]
				c.Hosts[i].Farthest = &at
			}
		}
	}
}

// middle returns the median of the hosts, and their median absolute deviation from it.
func (r *Row) middle() (center, deviation float64) {
	var medians []float64
	for _, v := range r.Values {
		if v != nil {
			medians = append(medians, v.Median)
		}
	}
	center = result.Summarize(medians).Median
	for i, m := range medians {
		medians[i] = math.Abs(m - center)
	}
	return center, min(result.Summarize(medians).Median, math.MaxFloat64)
}

// mark records that a host is out of line in a row. It returns its distance as a share of the middle, 0 if the host
// is better.
func (c *Comparison) mark(r *Row, host int) float64 {
	h, v := &c.Hosts[host], r.Values[host]
	v.Verdict = direction(r.Better, v.Median > *r.Center)
	h.OutOfLine++
	if r.Verdict != Worse {
		r.Verdict = v.Verdict
	}
	if v.Verdict == Better {
		return 0
	}
	c.Verdict = Worse
	h.Worse++
	if *r.Center == 0 {
		return math.MaxFloat64
	}
	return min(math.Abs(v.Median-*r.Center)/math.Abs(*r.Center), math.MaxFloat64)
}
