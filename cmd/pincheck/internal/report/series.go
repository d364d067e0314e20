package report

import (
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A listed series is one of an experiment, or what check and verify measured, in its form.
type listed struct {
	bench string // or "check", "verify"
	*result.Series
}

// series lists all that was measured.
func (r *Result) series() []listed {
	var out []listed
	if r.Facts != nil {
		for i := range r.Devices {
			d := &r.Devices[i]
			device := result.Label{Key: result.Device, Value: strconv.Itoa(d.Ordinal)}
			if d.Verify != nil {
				for _, p := range d.Verify.Paths {
					labels := result.Labels{device, {Key: "path", Value: string(p.Path)}}
					add := func(name string, unit result.Unit, v float64) {
						s := result.Single(name, labels, unit, v)
						out = append(out, listed{"verify", &s})
					}
					add("round_trips", result.Count, float64(p.Cases))
					add("verified", result.Bytes, float64(p.VerifiedBytes))
					add("mismatches", result.Count, float64(p.MismatchCount))
					add("failures", result.Count, float64(p.FailureCount))
				}
			}
			if d.Bandwidth == nil {
				continue
			}
			for j := range d.Bandwidth.Series {
				out = append(out, listed{"check", &d.Bandwidth.Series[j]})
			}
		}
	}
	for i := range r.Benches {
		for j := range r.Benches[i].Series {
			out = append(out, listed{r.Benches[i].Name, &r.Benches[i].Series[j]})
		}
	}
	return out
}
