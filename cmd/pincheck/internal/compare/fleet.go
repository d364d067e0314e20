package compare

import (
	"math"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A Host sums up one host of a fleet.
type Host struct {
	Name   string `json:"name"`
	Series int    `json:"series"` // that were compared
	// OutOfLine is how many of them are out of line, Worse how many for the worse, or
	// in a quantity of which neither direction is better.
	OutOfLine int `json:"out_of_line"`
	Worse     int `json:"worse"`
	Missing   int `json:"missing"` // series that other hosts have
	// Farthest is the index of the series, in the comparison's, in which the host is
	// farthest from the others for the worse, nil for none.
	Farthest *int `json:"farthest_series,omitempty"`
}

// outOfLine is how many times the deviation of its fleet, scaled to be the standard
// deviation of normal values, a host must be away from the middle to be out of line
// (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
const (
	outOfLine      = 3.5
	normalDeviance = 1.4826
)

// fleet names the hosts that are out of line with the others. The middle and the scatter
// of the hosts are medians, which a minority of odd hosts does not move.
func (c *Comparison) fleet(common []*Row) {
	c.Hosts = make([]Host, len(c.Runs))
	farthest := make([]float64, len(c.Runs))
	for i, r := range c.Runs {
		c.Hosts[i].Name = r.Name
	}
	for i := range c.Rows {
		for j, v := range c.Rows[i].Values {
			if v == nil {
				c.Hosts[j].Missing++
			}
		}
	}
	index := map[*Row]int{}
	for i := range c.Rows {
		index[&c.Rows[i]] = i
	}
	for _, r := range common {
		var medians []float64
		for _, v := range r.Values {
			if v != nil {
				medians = append(medians, v.Median)
			}
		}
		center := result.Summarize(medians).Median
		away := make([]float64, len(medians))
		for i, m := range medians {
			away[i] = math.Abs(m - center)
		}
		deviation := result.Summarize(away).Median
		r.Center, r.Deviation, r.Verdict = &center, &deviation, Same
		relevant := c.Threshold * math.Abs(center)
		if normalDeviance*deviation > relevant {
			r.Verdict = Divided
		}
		for i, v := range r.Values {
			if v == nil {
				continue
			}
			h := &c.Hosts[i]
			h.Series++
			distance := math.Abs(v.Median - center)
			if distance <= relevant || distance <= outOfLine*normalDeviance*deviation {
				continue
			}
			v.Verdict = direction(r.Better, v.Median > center)
			h.OutOfLine++
			if r.Verdict != Worse {
				r.Verdict = v.Verdict
			}
			if v.Verdict == Better {
				continue
			}
			c.Verdict = Worse
			h.Worse++
			share := math.Inf(1)
			if center != 0 {
				share = distance / math.Abs(center)
			}
			if share > farthest[i] {
				farthest[i] = share
				at := index[r]
				h.Farthest = &at
			}
		}
	}
}
