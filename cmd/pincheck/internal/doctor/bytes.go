package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

// byteChecks judge whether the bytes arrived.
var byteChecks = []Check{
	{ID: "peer_path_loses_bytes", Host: lostBetweenGPUs},
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

// lostBetweenGPUs finds direct paths between GPUs that lose bytes: of those that were proved, and of round
// trips whose only wrong bytes are of copies from GPU to GPU.
func lostBetweenGPUs(f *Facts) []Finding {
	var out Finding
	var lost []string
	at := map[int]bool{}
	for _, p := range f.PeerPaths {
		if p.LostBytes > 0 {
			lost = append(lost, fmt.Sprintf("from GPU %d to GPU %d", p.From, p.To))
			out.Evidence = append(out.Evidence, fmt.Sprintf("The copy succeeded, but %d of %d bytes from GPU %d to GPU %d did not arrive", p.LostBytes, p.ProofBytes, p.From, p.To))
			at[p.From], at[p.To] = true, true
		}
	}
	for i := range f.Devices {
		d := &f.Devices[i]
		if d.Verify == nil || !onlyPeerPaths(d.Verify) {
			continue
		}
		if !at[d.Ordinal] { // the proofs of its paths arrived, or there was none
			lost = append(lost, fmt.Sprintf("between GPU %d and another GPU", d.Ordinal))
			at[d.Ordinal] = true
		}
		for _, m := range d.Verify.Mismatches[:min(len(d.Verify.Mismatches), 1)] {
			out.Evidence = append(out.Evidence, fmt.Sprintf("GPU %d: %v", d.Ordinal, m))
		}
	}
	if len(lost) == 0 {
		return nil
	}
	out.Summary = "copies " + strings.Join(lost[:min(len(lost), 3)], ", ") + " lose data without an error"
	if len(lost) > 3 {
		out.Summary = fmt.Sprintf("copies on %d paths between GPUs lose data without an error", len(lost))
	}
	for i := range f.Devices {
		d := &f.Devices[i]
		if pci, ok := f.pci(d); ok && at[d.Ordinal] && strings.HasPrefix(pci.IOMMU, "DMA") {
			out.because = "translated"
			out.Evidence = append(out.Evidence, fmt.Sprintf("The IOMMU translates accesses of GPU %d (iommu_group/type is %s)", d.Ordinal, pci.IOMMU))
		}
	}
	switch {
	case out.because != "":
	case f.Host.Virt.VM:
		out.because = "guest"
	default:
		out.because = "acs"
	}
	return finding(out)
}

// onlyPeerPaths reports whether round trips brought wrong bytes back, and only those through another GPU.
func onlyPeerPaths(v *verify.Report) bool {
	others := v.MismatchCount
	for _, p := range v.Paths {
		if p.Path == "peer" || p.Path == "fanout" {
			others -= p.MismatchCount
		}
	}
	return v.MismatchCount > 0 && others == 0 && (v.Stale == nil || v.Stale.BadAfter == 0)
}

func corruptedBytes(_ *Facts, d *Device) (out []Finding) {
	if v := d.Verify; v != nil && !onlyPeerPaths(v) {
		stale := v.Stale != nil && v.Stale.BadAfter > 0
		if v.MismatchCount > 0 || stale {
			f := Finding{Summary: fmt.Sprintf("data came back corrupted in %d of %d round trips", v.MismatchCount, v.Cases)}
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
				Summary:  fmt.Sprintf("copies %s that measured the bandwidth arrived corrupted", directionText(&s)),
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
			out = append(out, Finding{Summary: fmt.Sprintf("copies of all GPUs at once, %s, arrived corrupted", directionText(&s)), Evidence: []string{s.Mismatch}})
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
	out := Finding{Summary: units.Things(v.FailureCount, "round trip", "round trips") + " failed", Evidence: evidence[:min(len(evidence), 3)]}
	if v.Cases == 0 && v.VerifiedBytes > 0 {
		return nil // it was not counted
	}
	if v.Cases == 0 && v.FailureCount == 0 {
		if v.SkippedCases > 0 {
			return nil // skipped_round_trips says why
		}
		out.Summary = "no round trip ran"
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
	out := Finding{Summary: fmt.Sprintf("%d of %d round trips were skipped", v.SkippedCases, v.CasesPlanned)}
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
