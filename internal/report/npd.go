package report

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/measure"
)

// The exit statuses of a plugin of Kubernetes' node-problem-detector.
const (
	NPDOK      = 0
	NPDNotOK   = 1
	NPDUnknown = 2
)

// npdBytes is the longest message that node-problem-detector keeps by default.
const npdBytes = 80

// NPD returns what a plugin of node-problem-detector says of a result: one line of at
// most 80 bytes, and its exit status. Unknown are runs that came to no verdict, and hosts
// that show no NVIDIA GPU on the PCI bus: nodes without a GPU are not broken.
func NPD(r *Result) (message string, status int) {
	switch r.Verdict {
	case doctor.Healthy:
		return npdLine(healthyLine(r)), NPDOK
	case doctor.Problems:
		return npdLine(problemLine(r)), NPDNotOK
	case doctor.NoGPU:
		if r.Facts != nil && r.Host != nil && len(r.Host.GPUs) > 0 {
			return npdLine("no usable GPU: " + problemLine(r)), NPDNotOK
		}
		return npdLine("no NVIDIA GPU on the PCI bus of this host"), NPDUnknown
	}
	// What an incomplete run found may come from being incomplete, but for wrong bytes.
	if slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return f.ID == "wrong_bytes" }) {
		return npdLine(problemLine(r)), NPDNotOK
	}
	return npdLine(fmt.Sprintf("no verdict (%s)", r.Verdict)), NPDUnknown
}

// NPDError returns the message of a run that failed, whose status is NPDUnknown.
func NPDError(err error) string { return npdLine("check failed: " + err.Error()) }

func healthyLine(r *Result) string {
	slowest := map[measure.Direction]float64{}
	for _, d := range r.Devices {
		if d.Bandwidth == nil {
			continue
		}
		for _, s := range d.Bandwidth.Series {
			if old, ok := slowest[s.Direction]; !ok || s.Median < old {
				slowest[s.Direction] = s.Median
			}
		}
	}
	text := plural(len(r.Devices), "GPU", "GPUs") + " healthy"
	if r.Simulated {
		text = "simulated: " + text
	}
	for _, d := range measure.Directions() {
		if v, ok := slowest[d]; ok {
			text += fmt.Sprintf(", %s %.1f GB/s", map[measure.Direction]string{measure.HostToDevice: "H2D", measure.DeviceToHost: "D2H"}[d], v)
		}
	}
	return text
}

// problemLine is the first problem, and how many others there are.
func problemLine(r *Result) string {
	first, others := "", 0
	for _, f := range r.Findings {
		switch {
		case f.Severity != doctor.Problem:
		case first != "":
			others++
		default:
			if first = f.Summary; f.Device != nil {
				first = fmt.Sprintf("GPU %d: %s", *f.Device, f.Summary)
			}
		}
	}
	if first == "" {
		first = "problems found"
	}
	if others > 0 {
		first = fmt.Sprintf("(+%d) %s", others, first) // in front, where it is not cut off
	}
	return first
}

// npdLine makes one printable line of at most 80 bytes.
func npdLine(s string) string {
	s = plain(s)
	if len(s) <= npdBytes {
		return s
	}
	const dots = "..."
	end := npdBytes - len(dots)
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return strings.TrimRight(s[:end], " ") + dots
}
