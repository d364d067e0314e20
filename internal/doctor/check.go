package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/result"
)

// Severity is what a finding means for the verdict.
type Severity string

// The severities.
const (
	Problem Severity = "problem" // something is wrong, or slower than it should be
	Note    Severity = "note"    // worth knowing
)

// Finding is one thing that a check found.
type Finding struct {
	ID       string   `json:"id"`
	Severity Severity `json:"severity"`
	Device   *int     `json:"device,omitempty"` // absent if it is about the host
	Summary  string   `json:"summary"`          // what is wrong
	Cause    string   `json:"cause,omitempty"`  // why, as far as is known
	Remedy   string   `json:"remedy,omitempty"`
}

// Verdict is the conclusion of a run.
type Verdict string

// The verdicts.
const (
	Healthy    Verdict = "healthy"    // judged, and nothing is wrong
	Measured   Verdict = "measured"   // nothing failed, and speeds were not judged
	Problems   Verdict = "problems"   // something is wrong, or slower than it should be
	NoGPU      Verdict = "no_gpu"     // there is no usable GPU
	Incomplete Verdict = "incomplete" // stopped before its end
	Failed     Verdict = "failed"     // the command did not run, such as for wrong usage
)

const (
	// fairShare is the share of the link's rate that pinned copies reach if
	// nothing is wrong. It is 88 % on PCIe 5.0, and 76 to 80 % on links and hosts
	// with small packets (128 bytes of payload, as on most PCIe 3.0 hosts).
	fairShare = 0.75
	// unsteady is the spread of samples, relative to their median, above which
	// something disturbs the copies.
	unsteady = 0.15
)

// Check judges the facts, the devices one after the other. Without a device the
// findings are the requirements that are missing.
func Check(f *Facts) (Verdict, []Finding) {
	if len(f.Devices) == 0 {
		return NoGPU, noGPU(f)
	}
	var all []Finding
	for i := range f.Devices {
		d := &f.Devices[i]
		for _, check := range deviceChecks {
			for _, finding := range check(d) {
				finding.Device = &d.Ordinal
				all = append(all, finding)
			}
		}
	}
	verdict := Healthy
	for i := range f.Devices {
		// A speed without a yardstick is no sign of health.
		if d := &f.Devices[i]; d.Bandwidth != nil && d.Link.PathRate() == 0 {
			verdict = Measured
		}
	}
	for _, finding := range all {
		if finding.Severity == Problem {
			verdict = Problems
		}
	}
	return verdict, all
}

// deviceChecks are the checks of a device, those about wrong bytes first.
var deviceChecks = []func(*Device) []Finding{
	wrongBytes, wrongCopies, failedRoundTrips, skippedRoundTrips, errorsOf, trainedDown, upstream, slowCopies, unsteadyCopies,
}

func noGPU(f *Facts) []Finding {
	var out []Finding
	for _, r := range f.Requirements {
		if r.State == Missing {
			out = append(out, Finding{
				ID: "no_" + r.ID, Severity: Problem,
				Summary: r.Name + " missing", Cause: r.Detail, Remedy: r.Remedy,
			})
		}
	}
	if f.Host != nil {
		if v, ok := f.Host.Env["CUDA_VISIBLE_DEVICES"]; ok && hidesDevices(v) {
			out = append(out, Finding{
				ID: "hidden_gpu", Severity: Problem,
				Summary: "CUDA_VISIBLE_DEVICES hides GPUs from this process",
				Cause:   fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", v),
				Remedy:  "unset it, or name devices that exist",
			})
		}
	}
	if len(out) == 0 {
		out = append(out, Finding{
			ID: "no_device", Severity: Problem,
			Summary: "everything is there, and yet CUDA shows no device",
			Remedy:  "run nvidia-smi, look into dmesg for NVRM messages, and see whether a MIG instance or another user's exclusive mode holds the GPU",
		})
	}
	return out
}

// hidesDevices reports whether a value of CUDA_VISIBLE_DEVICES hides all devices: if it
// is empty, or starts with an ordinal below 0.
func hidesDevices(v string) bool {
	v = strings.TrimSpace(v)
	return v == "" || strings.HasPrefix(v, "-") || strings.EqualFold(v, "NoDevFiles")
}

// trustNothing is the remedy for bytes that are wrong.
const trustNothing = "trust no result of this machine: test its memory and the GPU (nvidia-smi -q -d ECC), reseat the card, check risers and cables"

func wrongBytes(d *Device) []Finding {
	v := d.Verify
	if v == nil {
		return nil
	}
	stale := v.Stale != nil && v.Stale.BadAfter > 0
	if v.MismatchCount == 0 && !stale {
		return nil
	}
	f := Finding{
		ID: "wrong_bytes", Severity: Problem,
		Summary: fmt.Sprintf("bytes came back wrong in %d of %d round trips", v.MismatchCount, v.Cases),
		Remedy:  trustNothing,
	}
	if len(v.Mismatches) > 0 {
		f.Cause = v.Mismatches[0].String()
	} else if stale {
		f.Cause = v.Stale.String()
	}
	return []Finding{f}
}

func wrongCopies(d *Device) []Finding {
	if d.Bandwidth == nil {
		return nil
	}
	var out []Finding
	for _, s := range d.Bandwidth.Series {
		if s.Mismatch != "" {
			out = append(out, Finding{
				ID: "wrong_bytes", Severity: Problem,
				Summary: fmt.Sprintf("the copies that measured the bandwidth %s arrived wrong", directionText(&s)),
				Cause:   s.Mismatch,
				Remedy:  trustNothing,
			})
		}
	}
	return out
}

// bandwidthErrors returns why the bandwidth was not measured, or not in full. Wrong bytes
// have a finding of their own.
func bandwidthErrors(b *result.Bench) []string {
	if b == nil {
		return nil
	}
	errs := slices.DeleteFunc(slices.Clone(b.Errors), func(e string) bool {
		return slices.ContainsFunc(b.Series, func(s result.Series) bool { return s.Mismatch != "" && strings.HasSuffix(e, s.Mismatch) })
	})
	if len(b.Series) == 0 {
		errs = append(errs, b.Notes...)
	}
	return errs
}

// measured reports whether copies have put load on the link.
func (d *Device) measured() bool { return d.Bandwidth != nil && len(d.Bandwidth.Series) > 0 }

func failedRoundTrips(d *Device) []Finding {
	v := d.Verify
	if v == nil || v.FailureCount == 0 && v.Cases > 0 {
		return nil
	}
	f := Finding{
		ID: "failed_round_trips", Severity: Problem,
		Summary: fmt.Sprintf("round trips that failed: %d", v.FailureCount),
		Remedy:  "see the error; where it speaks of memory, free some on the host or the GPU, or raise the container's limit",
	}
	if v.Cases == 0 && v.FailureCount == 0 {
		f.Summary = "no round trip was made"
	}
	if len(v.Failures) > 0 {
		f.Cause = v.Failures[0].String()
	}
	return []Finding{f}
}

// skippedRoundTrips says what was not proved.
func skippedRoundTrips(d *Device) []Finding {
	v := d.Verify
	if v == nil || v.SkippedCases == 0 {
		return nil
	}
	f := Finding{
		ID: "skipped_round_trips", Severity: Note,
		Summary: fmt.Sprintf("%d of %d round trips were left out, and prove nothing", v.SkippedCases, v.CasesPlanned),
		Remedy:  "see the reasons; where they speak of memory, free some on the host or the GPU, or raise the container's limit",
	}
	var reasons []string
	for _, s := range v.Skipped {
		if !slices.Contains(reasons, s.Reason) {
			reasons = append(reasons, s.Reason)
		}
	}
	f.Cause = strings.Join(reasons, "; ")
	return []Finding{f}
}

func errorsOf(d *Device) []Finding {
	var out []Finding
	for _, e := range slices.Concat(d.Errors, bandwidthErrors(d.Bandwidth)) {
		out = append(out, Finding{
			ID: "failed_call", Severity: Problem, Summary: "could not be examined in full", Cause: e,
			Remedy: "see the error, and run nvidia-smi",
		})
	}
	return out
}

// trainedDown checks the device's own link. Its width is the same idle or loaded; its
// speed counts only after a measurement, as an idle link is trained down.
func trainedDown(d *Device) []Finding {
	l := d.Link
	if l == nil {
		return nil
	}
	var out []Finding
	if l.Width > 0 && l.Width < l.MaxWidth {
		out = append(out, Finding{
			ID: "narrow_link", Severity: Problem,
			Summary: fmt.Sprintf("the PCIe link runs at x%d of x%d", l.Width, l.MaxWidth),
			Cause:   fmt.Sprintf("%.1f GB/s are left of %.1f GB/s each way", l.Rate, hostinfo.LinkRate(l.Speed, l.MaxWidth)),
			Remedy:  "put the card into a slot with all lanes wired, reseat it, and look for lane sharing (bifurcation) in the firmware's setup",
		})
	}
	if d.measured() && l.Speed > 0 && l.Speed < l.MaxSpeed {
		out = append(out, Finding{
			ID: "slow_link", Severity: Problem,
			Summary: fmt.Sprintf("under load the PCIe link runs at %s of %s", Generation(l.Speed), Generation(l.MaxSpeed)),
			Cause:   fmt.Sprintf("%.1f GB/s are left of %.1f GB/s each way", l.Rate, hostinfo.LinkRate(l.MaxSpeed, l.Width)),
			Remedy:  "look for a slower slot or riser, a speed limit in the firmware's setup, and PCIe errors in dmesg (AER)",
		})
	}
	return out
}

// Generation returns the generation of a link speed in GT/s: "PCIe 5.0".
func Generation(speed float64) string {
	if g := hostinfo.Generation(speed); g > 0 {
		return fmt.Sprintf("PCIe %d.0", g)
	}
	return fmt.Sprintf("%g GT/s", speed)
}

func upstream(d *Device) []Finding {
	if d.Link == nil || d.Link.Bottleneck == nil || !d.measured() {
		return nil
	}
	b := d.Link.Bottleneck
	cause := fmt.Sprintf("it runs at %s x%d", Generation(b.Speed), b.Width)
	if b.Width < b.MaxWidth {
		cause += fmt.Sprintf(", and could at x%d", b.MaxWidth)
	}
	return []Finding{{
		ID: "narrow_upstream", Severity: Problem,
		Summary: fmt.Sprintf("the bridge above the GPU, %s, carries %.1f GB/s, less than the GPU's own link", b.Address, b.Rate),
		Cause:   cause,
		Remedy:  "move the card to a slot of the processor itself, or the bridge to a wider one",
	}}
}

func slowCopies(d *Device) []Finding {
	rate := d.Link.PathRate()
	if d.Bandwidth == nil || rate == 0 {
		return nil
	}
	var slow []string
	for _, s := range d.Bandwidth.Series {
		if s.Median < fairShare*rate {
			slow = append(slow, fmt.Sprintf("%s %.1f GB/s (%.0f %%)", directionText(&s), s.Median, 100*s.Median/rate))
		}
	}
	if len(slow) == 0 {
		return nil
	}
	return []Finding{{
		ID: "slow_copies", Severity: Problem,
		Summary: fmt.Sprintf("pinned copies reach less than %.0f %% of the link's %.1f GB/s", 100*fairShare, rate),
		Cause:   strings.Join(slow, ", "),
		Remedy: "stop other users of the GPU and of the link; bind the process to the GPU's NUMA node (numactl --cpunodebind --membind); " +
			"look at the IOMMU (iommu=pt), power limits and PCIe errors in dmesg (AER)",
	}}
}

func unsteadyCopies(d *Device) []Finding {
	if d.Bandwidth == nil {
		return nil
	}
	var out []Finding
	for _, s := range d.Bandwidth.Series {
		if s.Spread > unsteady {
			out = append(out, Finding{
				ID: "unsteady_copies", Severity: Note,
				Summary: fmt.Sprintf("%s: samples spread over %.0f %% of their median", directionText(&s), 100*s.Spread),
				Cause:   fmt.Sprintf("%.1f to %.1f GB/s", s.Min, s.Max),
				Remedy:  "something else uses the GPU, the link or the memory: measure again on a quiet machine",
			})
		}
	}
	return out
}

func directionText(s *result.Series) string {
	return strings.ReplaceAll(s.Labels.Get(result.Direction), "_", " ")
}
