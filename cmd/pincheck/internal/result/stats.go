package result

import (
	"math"
	"slices"
	"strconv"
)

// Stats are statistics of samples, in their unit.
type Stats struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Mean   float64 `json:"mean"`
	// Spread is (Max - Min) / Median: 0.02 is 2 %. CV is the coefficient of variation:
	// the standard deviation of the samples over their mean.
	Spread float64 `json:"spread"`
	CV     float64 `json:"cv"`
	P10    float64 `json:"p10"`
	P90    float64 `json:"p90"`
	P99    float64 `json:"p99"`
}

// Summarize returns the statistics of samples, zeros if there are none. Samples that are
// no numbers, or infinite, do not count.
func Summarize(samples []float64) (s Stats) {
	var sorted []float64
	for _, v := range samples {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			sorted = append(sorted, v)
		}
	}
	if len(sorted) == 0 {
		return Stats{}
	}
	slices.Sort(sorted)
	n := float64(len(sorted))
	defer func() { // of values whose differences are no numbers any more
		for _, v := range []*float64{&s.CV, &s.Spread} {
			if math.IsInf(*v, 0) || math.IsNaN(*v) {
				*v = math.MaxFloat64
			}
		}
	}()
	s = Stats{Min: sorted[0], Max: sorted[len(sorted)-1], Median: quantile(sorted, 0.5), P10: quantile(sorted, 0.1), P90: quantile(sorted, 0.9), P99: quantile(sorted, 0.99)}
	for _, v := range sorted {
		s.Mean += v / n
	}
	if len(sorted) > 1 && s.Mean != 0 {
		sum := 0.0
		for _, v := range sorted {
			sum += (v - s.Mean) * (v - s.Mean)
		}
		s.CV = math.Sqrt(sum/(n-1)) / math.Abs(s.Mean)
	}
	if s.Median != 0 {
		s.Spread = (s.Max - s.Min) / math.Abs(s.Median)
	}
	return s
}

// quantile interpolates between the two nearest of sorted values.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low == len(sorted)-1 {
		return sorted[low]
	}
	part := at - float64(low)
	if step := sorted[low+1] - sorted[low]; !math.IsInf(step, 0) {
		return sorted[low] + part*step
	}
	return (1-part)*sorted[low] + part*sorted[low+1]
}

// FourDigits rounds a number to four digits.
func FourDigits(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	return v
}

// Single returns a series of one value.
func Single(name string, labels Labels, unit Unit, v float64) Series {
	return Series{Name: name, Labels: labels, Unit: unit, Samples: []float64{v}, Stats: Summarize([]float64{v})}
}
