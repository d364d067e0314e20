package report

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
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
	if len(r.Errors) > 0 { // of the run itself: nothing is known of the node
		return npdLine("check failed: " + r.Errors[0]), NPDUnknown
	}
	switch r.Verdict {
	case doctor.Healthy:
		return npdLine(healthyLine(r, "healthy")), NPDOK
	case doctor.Measured: // on hardware of which no speed is known
		return npdLine(healthyLine(r, "work, speed not judged")), NPDUnknown
	case doctor.Warnings:
		return npdLine(worstLine(r)), NPDOK
	case doctor.Problems:
		return npdLine(worstLine(r)), NPDNotOK
	case doctor.Unusable:
		if r.Facts != nil && r.Host != nil && len(r.Host.GPUs) > 0 {
			return npdLine("no usable GPU: " + worstLine(r)), NPDNotOK
		}
		return npdLine("no NVIDIA GPU on the PCI bus of this host"), NPDUnknown
	}
	// What an incomplete run found may come from being incomplete, but for wrong bytes.
	if slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return f.ID == "wrong_bytes" || f.ID == "peer_path_loses_bytes" }) {
		return npdLine(worstLine(r)), NPDNotOK
	}
	if r.Stopped != "" {
		return npdLine("no verdict: " + r.Stopped), NPDUnknown
	}
	return npdLine(fmt.Sprintf("no verdict (%s)", r.Verdict)), NPDUnknown
}

// NPDError returns the message of a run that failed, whose status is NPDUnknown.
func NPDError(err error) string { return npdLine("check failed: " + err.Error()) }

// healthyLine returns the message for a node of which nothing is wrong: its state, the number of GPUs and the slowest rate of each
// direction.
func healthyLine(r *Result, state string) string {
	slowest := map[string]float64{}
	for _, d := range r.Devices {
		if d.Bandwidth == nil {
			continue
		}
		for _, s := range d.Bandwidth.Series {
			direction := s.Labels.Get(result.Direction)
			if old, ok := slowest[direction]; !ok || s.Median < old {
				slowest[direction] = s.Median
			}
		}
	}
	text := units.Things(len(r.Devices), "GPU", "GPUs") + " " + state
	if r.Simulated {
		text = "simulated: " + text
	}
	for _, direction := range []struct{ direction, name string }{{result.HostToDevice, "H2D"}, {result.DeviceToHost, "D2H"}} {
		if v, ok := slowest[direction.direction]; ok {
			text += fmt.Sprintf(", %s %s", direction.name, units.Rate(v))
		}
	}
	return text
}

// worstLine is the first of the gravest findings with its id, and how many others of its
// severity there are.
func worstLine(r *Result) string {
	if len(r.Findings) == 0 {
		return "problems found"
	}
	f := r.Findings[0] // they are sorted
	text := f.Summary
	if f.Device != nil {
		text = fmt.Sprintf("GPU %d: %s", *f.Device, text)
	}
	if f.ID != "" {
		text = f.ID + ": " + text
	}
	if f.Severity != doctor.Problem {
		text = string(f.Severity) + ": " + text
	}
	if others := r.count(f.Severity) - 1; others > 0 {
		text = fmt.Sprintf("(+%d) %s", others, text) // in front, where it is not cut off
	}
	return text
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
