package report

import (
	"fmt"
	"io"
	"strings"

	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/htmlreport"
	"github.com/gopinned/pinned/internal/result"
)

// WriteHTML writes one HTML file about results, which needs nothing else. The error is
// that of w.
func WriteHTML(w io.Writer, all ...*Result) error {
	runs := make([]htmlreport.Run, len(all))
	for i, r := range all {
		runs[i] = htmlRun(finite(r))
	}
	return htmlreport.Write(w, runs...)
}

func htmlRun(r *Result) htmlreport.Run {
	label, reason, color := verdictText(r)
	run := htmlreport.Run{
		Host: r.HostName, Tool: strings.TrimSpace(r.Tool.Name + " " + r.Tool.Version), Started: r.Started,
		Verdict: label, Reason: reason, Benches: append(checkedBenches(r), r.Benches...),
	}
	switch {
	case color == red:
		run.Tone = htmlreport.Bad
	case r.Verdict == doctor.Healthy:
		run.Tone = htmlreport.Good
	}
	for _, e := range r.Errors {
		run.Findings = append(run.Findings, htmlreport.Finding{Severity: string(doctor.Problem), Summary: e})
	}
	for _, f := range r.Findings {
		subject := ""
		if f.Device != nil {
			subject = fmt.Sprintf("GPU %d: ", *f.Device)
		}
		run.Findings = append(run.Findings, htmlreport.Finding{Severity: string(f.Severity), Summary: subject + f.Summary, Cause: f.Cause, Remedy: f.Remedy})
	}
	if r.Facts == nil {
		return run
	}
	if r.Simulated {
		run.Warning = "A simulated GPU: nothing here was measured on hardware."
	}
	fact := func(name, value string) {
		if value != "" {
			run.Facts = append(run.Facts, htmlreport.Fact{Name: name, Value: value})
		}
	}
	var names []string
	for i := range r.Devices {
		d := &r.Devices[i]
		memory := ""
		if d.MemoryTotal > 0 {
			memory = binary(d.MemoryTotal)
		}
		fact(fmt.Sprintf("GPU %d", d.Ordinal), joined(d.Name, memory, prefixed("compute capability ", d.ComputeCapability)))
		fact(fmt.Sprintf("GPU %d, connection", d.Ordinal), joined(prefixed("PCI ", d.PCIBusID), numaText(d), linkText(d.Link)))
		for _, e := range d.Errors {
			run.Findings = append(run.Findings, htmlreport.Finding{Severity: string(doctor.Problem), Summary: fmt.Sprintf("GPU %d: %s", d.Ordinal, e)})
		}
		names = append(names, d.Name)
	}
	if run.Host == "" {
		run.Host = joined(names...)
	}
	if h := r.Host; h != nil {
		fact("Host", machineText(h))
		fact("System", systemText(h))
	}
	if l := r.Library; l != nil {
		fact("CUDA", fmt.Sprintf("runtime %s, driver for CUDA up to %s, %s", l.RuntimeVersion, l.DriverVersion, l.Path))
	}
	return run
}

// checkedBenches are what check and verify measured, in the form of experiments.
func checkedBenches(r *Result) []result.Bench {
	benches := []result.Bench{
		{Name: "verify", Question: "Do bytes survive the round trip to the GPU?", Views: []result.View{
			{Title: "Bytes verified", Series: "verified", X: "path", Lines: []string{result.Device}},
		}},
		{Name: "check", Question: "How fast are copies of pinned memory?", Views: []result.View{
			{Title: "Copies of pinned memory", Series: "bandwidth", X: result.Direction, Lines: []string{result.Device}},
		}},
	}
	experiments := map[string]bool{}
	for i := range r.Benches {
		experiments[r.Benches[i].Name] = true
	}
	var out []result.Bench
	for _, b := range benches {
		for _, s := range r.series() {
			if s.bench == b.Name && !experiments[b.Name] {
				b.Series = append(b.Series, *s.Series)
			}
		}
		if b.Complete = r.Complete; len(b.Series) > 0 {
			out = append(out, b)
		}
	}
	return out
}
