package report

import (
	"math"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A scale maps values to places from 0 to 1, with marks at round values.
type scale struct {
	log      bool
	min, max float64
	marks    []float64  // candidates; draw leaves out what does not fit
	unit     units.Unit // in which marks of a linear scale are written
}

// at returns the position of a value, within the scale.
func (s scale) at(v float64) float64 { return min(max(s.position(v), 0), 1) }

// position returns the position of a value: 0 at the low end of the scale, 1 at the high end, and more or
// less beyond them.
func (s scale) position(v float64) float64 {
	low, high := s.min, s.max
	if s.log {
		v, low, high = math.Log(v), math.Log(low), math.Log(high)
	}
	return (v - low) / (high - low)
}

// unitName returns the unit for the label of the axis.
func (s scale) unitName(u result.Unit) string {
	switch {
	case u == result.Ratio:
		return "ratio"
	case s.log && u == result.Seconds:
		return "seconds"
	case s.log && u == result.Bytes:
		return "bytes"
	}
	return s.unit.Name
}

// text returns the text at a mark.
func (s scale) text(v float64, u result.Unit) string {
	if s.log {
		return round(v, u)
	}
	return round(v/s.unit.Factor, result.Count)
}

// linearScale is for values: from 0, unless some are below. Whole counts have marks at whole numbers.
func linearScale(values []float64, u result.Unit) scale {
	low, high := 0.0, 0.0
	for _, v := range values {
		low, high = min(low, v), max(high, v)
	}
	if low == high {
		high = 1
	}
	if -low < high/100 { // is noise around 0
		low = 0
	}
	s := scale{unit: scaleOf(u).Unit(max(high, -low), rounded)}
	step := roundStep((high-low)/s.unit.Factor/7) * s.unit.Factor
	if u == result.Count && isWhole(values) {
		step = max(step, 1)
	}
	s.marks = marks(math.Floor(low/step+1e-9), math.Ceil(high/step-1e-9), step)
	s.min, s.max = min(s.marks[0], low), max(s.marks[len(s.marks)-1], high)
	return s
}

// fewMarks is how many values along an axis each have a mark of their own.
const fewMarks = 8

// linearRange is for numbers along the axis, sorted: from the least to the greatest. A few have a mark each,
// unless they are too close together.
func linearRange(xs []float64) scale {
	low, high := xs[0], xs[len(xs)-1]
	s := scale{min: low, max: high, unit: units.Unit{Factor: 1}}
	apart := len(xs) <= fewMarks
	for i := range len(xs) - 1 {
		apart = apart && xs[i+1]-xs[i] >= (high-low)/14
	}
	if apart {
		s.marks = xs
		return s
	}
	step := roundStep((high - low) / 6)
	if isWhole(xs) {
		step = max(step, 1)
	}
	s.marks = marks(math.Ceil(low/step-1e-9), math.Floor(high/step+1e-9), step)
	return s
}

// isWhole reports whether all values are whole numbers.
func isWhole(values []float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return v != math.Trunc(v) })
}

// marks returns the multiples of step from first to last.
func marks(first, last, step float64) []float64 {
	var out []float64
	for i := range min(int(last-first), 20) + 1 {
		out = append(out, (first+float64(i))*step)
	}
	return out
}

// roundStep returns 1, 2 or 5 times a power of ten, not below v.
func roundStep(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= v*(1-1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// logScale has its marks at powers of base. low must be positive. It ends at marks if
// outwards is set, else at low and high.
func logScale(low, high, base float64, outwards bool) scale {
	s := scale{log: true, min: low, max: high, unit: units.Unit{Factor: 1}}
	first, last := math.Floor(math.Log(low)/math.Log(base)+1e-9), math.Ceil(math.Log(high)/math.Log(base)-1e-9)
	for i := first; i <= last; i++ {
		s.marks = append(s.marks, math.Pow(base, i))
	}
	if outwards {
		s.min, s.max = s.marks[0], s.marks[len(s.marks)-1]
	}
	return s
}

// markTolerance lets sizes such as 512 MiB + 1 have the mark of 512 MiB.
const markTolerance = 0.005

// every returns every n-th mark within the scale, so that at most limit are left.
func (s scale) every(limit int) []float64 {
	inside := slices.DeleteFunc(slices.Clone(s.marks), func(m float64) bool {
		return s.position(m) < -markTolerance || s.position(m) > 1+markTolerance
	})
	n := 1
	for (len(inside)+n-1)/n > limit {
		n++
	}
	var out []float64
	for i := max(slices.Index(inside, 0), 0) % n; i < len(inside); i += n { // 0 is one of them
		out = append(out, inside[i])
	}
	return out
}
