package report

import (
	"fmt"
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// taken returns a series with these samples.
func taken(name string, unit result.Unit, labels result.Labels, samples ...float64) result.Series {
	return result.Series{Name: name, Unit: unit, Labels: labels, Samples: samples, Stats: result.Summarize(samples)}
}

// benched is a result of bench with a view of numbers, one of names, and series in none.
func benched(f *doctor.Facts) *Result {
	node, cpu := 0, 0.012
	speeds := result.Bench{
		Name: "speeds", Question: "How fast are copies of which size, and what limits them?",
		Answers: []string{"Copies of 64 MiB from pinned memory reach 55.4 GB/s.", "Pageable memory reaches 17% of that."},
		Notes:   []string{"mapped: not measured: the device cannot map host memory"},
		Errors:  []string{}, Complete: true, Started: started, Seconds: 12.34,
		Views: []result.View{
			{Title: "Bandwidth by size", Series: "bandwidth", Where: result.Labels{{Key: result.Device, Value: "0"}}, X: result.Size, Lines: []string{result.Direction, result.Memory}},
			{Title: "Time to pin 1 GiB", Series: "pin", X: result.Method},
			{Title: "Nothing has this", Series: "none", X: result.Method},
		},
	}
	for i, size := range []int{4 << 10, 64 << 10, 1 << 20, 64 << 20} {
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
			for _, memory := range []string{"registered", "pageable"} {
				v := []float64{1.1, 13.4, 45.5, 55.4}[i]
				if memory == "pageable" {
					v /= 6
				}
				s := taken("bandwidth", result.GBPerSecond, result.Labels{{Key: result.Device, Value: "0"}, {Key: result.Direction, Value: direction},
					{Key: result.Size, Value: strconv.Itoa(size)}, {Key: result.Memory, Value: memory}}, v, 1.01*v, 0.99*v)
				s.Better, s.BytesPerSample, s.Verified, s.NUMANode, s.CPUSecondsPerGB = result.Higher, 8*size, true, &node, &cpu
				if memory == "registered" && size >= 64<<20 {
					s.Expected = &result.Expected{Value: 55.48, Source: "nvbandwidth 0.8 on an H200"}
				}
				speeds.Series = append(speeds.Series, s)
			}
		}
	}
	for i, method := range []string{"register", "cudaHostAlloc"} {
		speeds.Series = append(speeds.Series, taken("pin", result.Seconds, result.Labels{{Key: result.Method, Value: method}}, 0.04+0.3*float64(i)))
	}
	speeds.Series = append(speeds.Series, taken("kept", result.Ratio, nil, 1.0001, 2), taken("calls", result.Count, nil, 1234))
	r := &Result{Command: "bench", Tool: testTool, HostName: "host-7", Started: started, Seconds: 13, Complete: true, Facts: f, Benches: []result.Bench{speeds}}
	for i := range r.Devices {
		r.Devices[i].Verify, r.Devices[i].Bandwidth = nil, nil
	}
	r.Conclude(false)
	return r
}

// stopped is a result of bench that was interrupted after a case had failed.
func stopped(f *doctor.Facts) *Result {
	r := benched(f)
	b := &r.Benches[0]
	b.Series, b.Complete, b.Answers = b.Series[:5], false, []string{}
	b.Errors = []string{fmt.Sprintf("speeds: %s 4 KiB: cudaMemcpyAsync: cudaErrorInvalidValue (1): invalid argument", result.HostToDevice)}
	r.Complete, r.Stopped = false, "not done after 2s (--timeout)"
	r.Conclude(false)
	return r
}
