package compare

import (
	"math"
	"slices"
)

// exactSamples is the most samples of both sides together for which the test is exact,
// which takes milliseconds.
const exactSamples = 60

// rankTest returns the two-sided p-value of the Mann-Whitney U test: how likely ranks at
// least as uneven are if both samples come from one distribution. Up to [exactSamples] it
// is exact, by counting permutations, also with ties: those that are at least as far from
// the middle count. For more samples it is the normal approximation with corrections for
// ties and continuity. It is 1 for an empty sample and where all values are equal.
//
// It is not that of github.com/aclements/go-moremath/stats, on which benchstat stands,
// because with ties that one doubles the wrong tail: 0.4 in place of 0.67 for
// {1, 2} and {0, 1, 1, 2}.
func rankTest(a, b []float64) float64 {
	if len(a) == 0 || len(b) == 0 {
		return 1
	}
	ranks, ties := doubledRanks(a, b)
	n1, n2 := len(a), len(b)
	n := n1 + n2
	sum := 0 // of a's ranks, doubled
	for _, r := range ranks[:n1] {
		sum += r
	}
	middle := n1 * (n + 1) // its expectation
	away := max(sum-middle, middle-sum)
	if n <= exactSamples {
		return exact(ranks, n1, middle, away)
	}
	return approximate(n1, n2, ties, float64(away)/2)
}

// approximate returns the p-value by the normal approximation, for a sum of ranks this
// far from its expectation.
func approximate(n1, n2 int, ties, away float64) float64 {
	n := n1 + n2
	variance := float64(n1*n2) / 12 * (float64(n+1) - ties/float64(n*(n-1)))
	if variance <= 0 {
		return 1
	}
	z := max(away-0.5, 0) / math.Sqrt(variance)
	return math.Erfc(z / math.Sqrt2)
}

// exact returns the share of the ways to choose n1 ranks whose sum is at least this far
// from the middle.
func exact(ranks []int, n1, middle, away int) float64 {
	total := 0
	for _, r := range ranks {
		total += r
	}
	ways := make([][]float64, n1+1) // by number of ranks and their sum
	for k := range ways {
		ways[k] = make([]float64, total+1)
	}
	ways[0][0] = 1
	highest := 0 // sum so far
	for i, r := range ranks {
		highest += r
		for k := min(i+1, n1); k > 0; k-- {
			for s := r; s <= highest; s++ {
				ways[k][s] += ways[k-1][s-r]
			}
		}
	}
	all, far := 0.0, 0.0
	for s, w := range ways[n1] {
		all += w
		if max(s-middle, middle-s) >= away {
			far += w
		}
	}
	return far / all
}

// doubledRanks returns twice the rank of each value, those of a first, in which ties
// share the mean of their ranks, and the sum of t³ - t over the groups of t ties.
func doubledRanks(a, b []float64) (ranks []int, ties float64) {
	values := slices.Concat(a, b)
	order := make([]int, len(values))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		switch {
		case values[i] < values[j]:
			return -1
		case values[i] > values[j]:
			return 1
		}
		return 0
	})
	ranks = make([]int, len(values))
	for from := 0; from < len(order); {
		to := from + 1
		for to < len(order) && values[order[to]] == values[order[from]] {
			to++
		}
		for _, i := range order[from:to] {
			ranks[i] = from + 1 + to // first and last rank together
		}
		t := float64(to - from)
		ties += t*t*t - t
		from = to
	}
	return ranks, ties
}

// holm returns the p-values adjusted for their number by Holm's method: the chance that
// any of those below alpha is one by accident is at most alpha.
func holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		switch {
		case p[i] < p[j]:
			return -1
		case p[i] > p[j]:
			return 1
		}
		return 0
	})
	out := make([]float64, len(p))
	highest := 0.0
	for k, i := range order {
		highest = max(highest, min(1, p[i]*float64(len(p)-k)))
		out[i] = highest
	}
	return out
}
