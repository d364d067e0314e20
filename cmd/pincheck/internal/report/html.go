package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// WriteHTML writes one HTML file about results, which needs nothing else. The error is
// that of w.
func WriteHTML(w io.Writer, all ...*Result) error {
	runs := make([]pageRun, len(all))
	for i, r := range all {
		runs[i] = htmlRun(finite(r))
	}
	return writePage(w, runs...)
}

// htmlRun returns what the page shows of a result.
func htmlRun(r *Result) pageRun {
	label, reason, color := verdictText(r)
	run := pageRun{
		Host: r.HostName, Tool: strings.TrimSpace(r.Tool.Name + " " + r.Tool.Version), Started: r.Started,
		Verdict: label, Reason: reason, Benches: append(checkedBenches(r), r.Benches...),
	}
	switch {
	case color == red:
		run.Tone = toneBad
	case r.Verdict == doctor.Healthy:
		run.Tone = toneGood
	}
	for _, e := range r.Errors {
		run.Findings = append(run.Findings, pageFinding{Severity: string(doctor.Problem), Summary: e})
	}
	for _, same := range grouped(r.Findings) {
		f := same[0]
		run.Findings = append(run.Findings, pageFinding{Severity: string(f.Severity), Summary: subject(gpusOf(same)) + f.Summary, Evidence: seen(same),
			Cause: f.Because(), Settle: f.Settle, Cost: f.Cost, Remedy: f.Remedy, ID: f.ID})
	}
	if r.Facts == nil {
		return run
	}
	if r.Simulated {
		run.Warning = "A simulated GPU: nothing here was measured on hardware."
	}
	fact := func(name, value string) {
		if value != "" {
			run.Facts = append(run.Facts, pageFact{Name: name, Value: value})
		}
	}
	var names []string
	for i := range r.Devices {
		d := &r.Devices[i]
		memory := ""
		if d.MemoryTotal > 0 {
			memory = units.Bytes(d.MemoryTotal)
		}
		fact(fmt.Sprintf("GPU %d", d.Ordinal), joined(d.Name, memory, prefixed("compute capability ", d.ComputeCapability)))
		fact(fmt.Sprintf("GPU %d, connection", d.Ordinal), joined(prefixed("PCI ", d.PCIBusID), numaText(d), linkText(d.Link)))
		for _, e := range unexplained(r, d) {
			run.Findings = append(run.Findings, pageFinding{Severity: string(doctor.Problem), Summary: fmt.Sprintf("GPU %d: %s", d.Ordinal, e)})
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
		fact("CUDA", strings.TrimPrefix(versionsText(l), "CUDA ")+", "+l.Path)
	}
	return run
}

// seen returns what was seen of findings that say the same of several GPUs: of which, unless it is the same of all.
func seen(same []doctor.Finding) []string {
	if !slices.ContainsFunc(same, func(f doctor.Finding) bool { return !slices.Equal(f.Evidence, same[0].Evidence) }) {
		return same[0].Evidence
	}
	var out []string
	for _, f := range same {
		for _, e := range f.Evidence {
			out = append(out, subject(gpusOf([]doctor.Finding{f}))+e)
		}
	}
	return out
}

// checkedBenches are what check and verify measured, in the form of experiments.
func checkedBenches(r *Result) []result.Bench {
	// Bytes verified are a table: as bars they would be a screen of equal ones.
	verified := result.Bench{Name: "verify", Question: "Do bytes survive the round trip to the GPU?", Complete: r.Complete, Views: []result.View{
		{Title: "Bytes verified", Series: "verified", Lines: []string{"path", result.Device}},
	}}
	checked := result.Bench{Name: "check", Question: "How fast are copies of pinned memory?", Complete: r.Complete, Views: []result.View{
		{Title: "Copies of pinned memory", Series: "bandwidth", X: result.Direction, Lines: []string{result.Device}},
	}}
	for _, s := range (&Result{Facts: r.Facts}).series() {
		switch {
		case s.bench == checked.Name:
			checked.Series = append(checked.Series, *s.Series)
		case s.Name == "verified" || s.Name != "round_trips" && s.Median > 0: // trips are counted below
			verified.Series = append(verified.Series, *s.Series)
		}
	}
	if r.Facts != nil {
		for i := range r.Devices {
			d := &r.Devices[i]
			if v := d.Verify; v != nil {
				wrong := "no byte was wrong"
				if v.MismatchCount > 0 || v.FailureCount > 0 {
					wrong = fmt.Sprintf("%s, %s", units.Things(v.MismatchCount, "mismatch", "mismatches"), units.Things(v.FailureCount, "failure", "failures"))
				}
				verified.Answers = append(verified.Answers, fmt.Sprintf("GPU %d: %s of %s, %s: %s.", d.Ordinal,
					units.Count(v.Cases), units.Things(v.CasesPlanned, "round trip", "round trips"), units.Data(v.VerifiedBytes), wrong))
			}
			if d.Bandwidth == nil {
				continue
			}
			var rates []string
			for _, s := range d.Bandwidth.Series {
				rates = append(rates, measured(result.GBPerSecond, s.Median)+" "+directionText(&s))
			}
			checked.Answers = append(checked.Answers, fmt.Sprintf("GPU %d: %s.", d.Ordinal, joined(rates...)))
		}
	}
	var out []result.Bench
	for _, b := range []result.Bench{verified, checked} {
		if len(b.Series) > 0 {
			out = append(out, b)
		}
	}
	return out
}
