package compare

import (
	"cmp"
	"math"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// driftFreedom are the degrees of freedom of drift: it is known from few runs, and large drifts
// are more frequent than those of a normal distribution.
const driftFreedom = 8

// A variance is that of an estimate, and how well it is known itself.
type variance struct{ value, freedom float64 }

// sum returns the variance of a sum of independent estimates, with the degrees of freedom of Welch
// and Satterthwaite.
func sum(all ...variance) variance {
	total, weighted := 0.0, 0.0
	for _, v := range all {
		total += v.value
		weighted += v.value * v.value / max(v.freedom, 1)
	}
	if weighted == 0 {
		return variance{total, driftFreedom}
	}
	return variance{total, total * total / weighted}
}

// An estimate is the centre of the samples of a run, with its variance.
type estimate struct {
	center float64
	variance
}

// trimmed is the share of the samples that is left out on either side.
const trimmed = 0.2

// estimated returns the trimmed mean of samples, which a sample that something disturbed does not
// move, and its variance (K. K. Yuen, The two-sample trimmed t for unequal population
// variances, 1974). One sample has none.
func estimated(samples []float64) estimate {
	sorted := slices.Sorted(slices.Values(samples))
	n := len(sorted)
	cut := int(trimmed * float64(n))
	retained := sorted[cut : n-cut]
	e := estimate{center: mean(retained)}
	if n < 2 {
		return e
	}
	for i := range cut { // winsorized
		sorted[i], sorted[n-1-i] = retained[0], retained[len(retained)-1]
	}
	middle, squares := mean(sorted), 0.0
	for _, v := range sorted {
		squares += (v - middle) * (v - middle)
	}
	h := float64(len(retained))
	e.variance = variance{squares / (h * (h - 1)), h - 1}
	return e
}

func mean(values []float64) float64 {
	m := 0.0
	for _, v := range values {
		m += v / float64(len(values))
	}
	return m
}

// A scale maps the samples of a series to where distances count: to logarithms, as changes of times
// and rates are factors; ratios and counts, and what is not positive, as they are, in
// units of at least 1 or of the largest.
type scale struct {
	log  bool
	unit float64
}

func scaleOf(unit result.Unit, values []*Value) scale {
	lowest, highest, smallest := math.Inf(1), 0.0, math.Inf(1)
	for _, v := range values {
		if v == nil {
			continue
		}
		for _, x := range v.samples {
			lowest, highest = min(lowest, x), max(highest, math.Abs(x))
		}
		smallest = min(smallest, math.Abs(v.Median))
	}
	switch {
	case unit == result.Ratio || unit == result.Count:
		return scale{unit: max(smallest, 1)}
	case lowest > 0:
		return scale{log: true}
	}
	return scale{unit: cmp.Or(highest, 1)}
}

func (s scale) of(samples []float64) []float64 {
	out := slices.Clone(samples)
	for i, v := range out {
		if s.log {
			out[i] = math.Log(v)
		} else {
			out[i] = v / s.unit
		}
	}
	return out
}

// probability returns how likely two estimates are at least this far apart by chance.
func probability(distance float64, v variance) float64 {
	switch {
	case distance == 0:
		return 1
	case v.value == 0:
		return 0
	case math.IsNaN(distance/v.value) || math.IsInf(v.value, 1): // beyond what numbers hold
		return 1
	}
	return student(math.Abs(distance)/math.Sqrt(v.value), v.freedom)
}

// student returns the two-sided tail of Student's distribution: the probability of values of at
// least t away from 0.
func student(t, freedom float64) float64 {
	return incompleteBeta(freedom/(freedom+t*t), freedom/2, 0.5)
}

// incompleteBeta is the regularized incomplete beta function, by its continued fraction
// (Press et al., Numerical Recipes, 6.4).
func incompleteBeta(x, a, b float64) float64 {
	switch {
	case x <= 0:
		return 0
	case x >= 1:
		return 1
	case x > (a+1)/(a+b+2):
		return 1 - incompleteBeta(1-x, b, a)
	}
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	front := math.Exp(lab-la-lb+a*math.Log(x)+b*math.Log1p(-x)) / a
	const tiny, enough, rounds = 1e-300, 1e-12, 1000
	c, d := 1.0, 1/nonZero(1-(a+b)*x/(a+1), tiny)
	fraction := d
	for m := 1.0; m < rounds; m++ {
		before := fraction
		for _, k := range []float64{
			m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m)),
			-(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1)),
		} {
			d = 1 / nonZero(1+k*d, tiny)
			c = nonZero(1+k/c, tiny)
			fraction *= c * d
		}
		if math.Abs(fraction-before) < enough*math.Abs(fraction) {
			break
		}
	}
	return front * fraction
}

func nonZero(v, tiny float64) float64 {
	if math.Abs(v) < tiny {
		return tiny
	}
	return v
}

// holm returns the p-values adjusted for their number by Holm's method: the chance that
// any of those below alpha is one by accident is at most alpha.
func holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return cmp.Compare(p[i], p[j]) })
	out := make([]float64, len(p))
	highest := 0.0
	for k, i := range order {
		highest = max(highest, min(1, p[i]*float64(len(p)-k)))
		out[i] = highest
	}
	return out
}
