package doctor

import (
	"fmt"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"slices"

	"github.com/gopinned/pinned/internal/units"
)

// byteChecks judge whether the bytes arrived.
var byteChecks = []Check{
	{ID: "wrong_bytes", Host: corruptedTogether, Device: corruptedBytes},
	{ID: "failed_round_trips", Device: failedRoundTrips},
	{ID: "skipped_round_trips", Device: skippedRoundTrips},
}

// proved reports whether bytes came back, and the round trips came to their end: they did not where a call did
// not return.
func (d *Device) proved() bool {
	v := d.Verify
	return v != nil && (v.Cases > 0 || v.VerifiedBytes > 0) && v.Cases+v.FailureCount+v.SkippedCases >= v.CasesPlanned
}

func corruptedBytes(_ *Facts, d *Device) (out []Finding) {
	if v := d.Verify; v != nil {
		stale := v.Stale != nil && v.Stale.BadAfter > 0
		if v.MismatchCount > 0 || stale {
			f := Finding{Summary: fmt.Sprintf("bytes came back wrong in %d of %d round trips", v.MismatchCount, v.Cases)}
			for _, m := range v.Mismatches[:min(len(v.Mismatches), 3)] {
				f.Evidence = append(f.Evidence, m.String())
			}
			if stale {
				f.Evidence = append(f.Evidence, v.Stale.String())
			}
			out = append(out, f)
		}
	}
	var all []result.Series
	for _, b := range d.measurements() {
		all = append(all, b.Series...)
	}
	for _, s := range all {
		if s.Mismatch != "" {
			out = append(out, Finding{
				Summary:  fmt.Sprintf("the copies that measured the bandwidth %s arrived wrong", directionText(&s)),
				Evidence: []string{s.Mismatch},
			})
		}
	}
	return out
}

// corruptedTogether returns the findings of copies of all GPUs at once.
func corruptedTogether(f *Facts) (out []Finding) {
	if f.Together == nil {
		return nil
	}
	for _, s := range f.Together.Series {
		if s.Mismatch != "" {
			out = append(out, Finding{
				Summary:  fmt.Sprintf("the copies of all GPUs at once, %s, arrived wrong", directionText(&s)),
				Evidence: []string{s.Mismatch},
			})
		}
	}
	return out
}

// failedRoundTrips are those of which no check of a code says more.
func failedRoundTrips(f *Facts, d *Device) []Finding {
	v := d.Verify
	if v == nil || v.FailureCount == 0 && v.Cases > 0 {
		return nil
	}
	var evidence []string
	for _, one := range v.Failures {
		if classify(f, d, one.Error) == "failed_call" {
			evidence = append(evidence, one.String())
		}
	}
	if len(evidence) == 0 && len(v.Failures) > 0 {
		return nil
	}
	out := Finding{
		Summary:  units.Things(v.FailureCount, "round trip", "round trips") + " failed",
		Evidence: evidence[:min(len(evidence), 3)],
	}
	if v.Cases == 0 && v.VerifiedBytes > 0 {
		return nil // it was not counted
	}
	if v.Cases == 0 && v.FailureCount == 0 {
		if v.SkippedCases > 0 {
			return nil // skipped_round_trips says why
		}
		out.Summary = "no round trip was made"
	}
	if len(evidence) > 0 {
		out.means = meaningIn(evidence[0])
	}
	return finding(out)
}

// skippedRoundTrips says what was not proved.
func skippedRoundTrips(f *Facts, d *Device) []Finding {
	v := d.Verify
	if v == nil || v.SkippedCases == 0 {
		return nil
	}
	out := Finding{
		Summary: fmt.Sprintf("%d of %d round trips were left out, and prove nothing", v.SkippedCases, v.CasesPlanned),
	}
	if v.SkippedCases > v.CasesPlanned/2 && !f.byDesign(d) {
		out.Severity = Warning
	}
	for _, s := range v.Skipped {
		if !slices.Contains(out.Evidence, s.Reason) {
			out.Evidence = append(out.Evidence, s.Reason)
		}
	}
	return finding(out)
}
