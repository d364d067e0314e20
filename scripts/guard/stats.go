package main

import (
	"math"
	"slices"
)

const (
	// limit is the largest accepted ratio of the new cost to the old.
	limit = 1.10
	// confidence of intervals.
	confidence = 0.99
	// minPairs is the smallest number of pairs whose interval has that confidence.
	minPairs = 8
)

func median(values []float64) float64 { return medianOfSorted(slices.Sorted(slices.Values(values))) }

func medianOfSorted(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// An estimate is how many times the old cost the new build has, with its interval.
type estimate struct{ median, low, high float64 }

// estimateOf takes the ratios of pairs: in logarithms, the median of the means of all two of them (Hodges and
// Lehmann), and the interval of Wilcoxon's signed-rank test. Fewer than minPairs have an infinite interval.
func estimateOf(ratios []float64) estimate {
	var means []float64
	for i, a := range ratios {
		for _, b := range ratios[:i+1] {
			means = append(means, (math.Log(a)+math.Log(b))/2)
		}
	}
	slices.Sort(means)
	e := estimate{math.Exp(medianOfSorted(means)), 0, math.Inf(1)}
	if outside := meansOutside(len(ratios)); outside > 0 {
		e.low, e.high = math.Exp(means[outside-1]), math.Exp(means[len(means)-outside])
	}
	return e
}

// meansOutside returns the rank, from either end, of the means that bound the interval of n pairs: the
// largest k for which the signed-rank statistic is below k with a probability of at most half of what the
// confidence leaves.
func meansOutside(n int) int {
	// The statistic is the sum of those of the ranks 1 to n at which a fair coin shows heads.
	probability := []float64{1}
	for rank := 1; rank <= n; rank++ {
		next := make([]float64, len(probability)+rank)
		for sum, p := range probability {
			next[sum] += p / 2
			next[sum+rank] += p / 2
		}
		probability = next
	}
	k, below := 0, 0.0
	for k < len(probability) && below+probability[k] <= (1-confidence)/2 {
		below += probability[k]
		k++
	}
	return k
}

// decided reports whether the processes that were measured need no more pairs: the estimate is not worse, or is worse,
// which only other processes can confirm.
func (e estimate) decided() bool { return e.high <= limit || e.isWorse() }

func (e estimate) isWorse() bool { return e.median > limit && e.low > 1 }

// suspicious reports whether the new build is more likely to be worse than not to be.
func (e estimate) suspicious() bool { return e.high > limit && e.median > math.Sqrt(limit) }

// A verdict says what is known of a figure.
type verdict string

const (
	same    verdict = "same"    // not worse by more than the limit
	better  verdict = "better"  // by more than the limit and the interval
	worse   verdict = "worse"   // by more than the limit and the interval
	unclear verdict = "unclear" // could be worse by more than the limit
)

// evaluate takes the ratios of one or several rounds, each of other processes. If one of these found the
// new build no slower, it is not worse: the others had their memory in worse places.
func evaluate(rounds [][]float64) (estimate, verdict) {
	e := estimateOf(slices.Concat(rounds...))
	slower := !slices.ContainsFunc(rounds, func(r []float64) bool { return median(r) <= 1 })
	switch {
	case e.isWorse() && slower:
		return e, worse
	case e.high > limit:
		return e, unclear
	case e.median < 1/limit && e.high < 1:
		return e, better
	}
	return e, same
}
