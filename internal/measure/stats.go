package measure

import "slices"

// Stats are statistics of the samples of one series, in GB/s.
type Stats struct {
	Median float64 `json:"median_gb_per_s"`
	Min    float64 `json:"min_gb_per_s"`
	Max    float64 `json:"max_gb_per_s"`
	// Spread is (Max - Min) / Median: 0.02 is 2 %.
	Spread float64 `json:"spread"`
}

// Summarize returns the statistics of samples, zeros if there are none.
func Summarize(samples []float64) Stats {
	n := len(samples)
	if n == 0 {
		return Stats{}
	}
	sorted := slices.Sorted(slices.Values(samples))
	s := Stats{Min: sorted[0], Max: sorted[n-1], Median: sorted[n/2]}
	if n%2 == 0 {
		s.Median = (sorted[n/2-1] + sorted[n/2]) / 2
	}
	if s.Median > 0 {
		s.Spread = (s.Max - s.Min) / s.Median
	}
	return s
}
