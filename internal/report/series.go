package report

import (
	"strconv"

	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/internal/result"
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
						out = append(out, listed{"verify", single(name, labels, unit, v)})
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
			for _, s := range d.Bandwidth.Series {
				labels := result.Labels{device, {Key: result.Direction, Value: string(s.Direction)},
					{Key: result.Size, Value: strconv.Itoa(d.Bandwidth.SizeBytes)}, {Key: result.Memory, Value: "registered"}}
				out = append(out, listed{"check", bandwidthSeries(labels, s, d.Bandwidth)})
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

func single(name string, labels result.Labels, unit result.Unit, v float64) *result.Series {
	return &result.Series{Name: name, Labels: labels, Unit: unit, Samples: []float64{v}, Stats: result.Summarize([]float64{v})}
}

func bandwidthSeries(labels result.Labels, s measure.Series, r *measure.Result) *result.Series {
	return &result.Series{
		Name: "bandwidth", Labels: labels, Unit: result.GBPerSecond, Better: result.Higher, Samples: s.Samples,
		Stats: result.Summarize(s.Samples), BytesPerSample: r.SizeBytes * r.CopiesPerSample,
	}
}
