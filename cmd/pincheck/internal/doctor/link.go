package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cmd/pincheck/internal/yardstick"
	"github.com/gopinned/pinned/internal/units"
)

// linkChecks judge the PCI Express link, and the copies over it.
var linkChecks = []Check{
	{ID: "narrow_link", Title: "the link has fewer lanes than card and slot", Severity: Problem, Device: narrowLink},
	{ID: "slow_link", Title: "the link runs at a lower generation under load", Severity: Problem, Device: slowLink},
	{ID: "narrow_upstream", Title: "a bridge above the GPU is narrower", Severity: Problem, Device: upstream},
	{ID: "busy", Title: "others use the GPU or the host, and copies are slow", Severity: Warning,
		Implies: []string{"slow_copies", "asymmetric_copies", "unsteady_copies"}, Device: busyCopies},
	{ID: "slow_copies", Title: "pinned copies are slow", Severity: Problem, Implies: []string{"asymmetric_copies"}, Device: slowCopies},
	{ID: "asymmetric_copies", Title: "one direction is much slower", Severity: Warning, Device: asymmetricCopies},
	{ID: "impossible_rate", Title: "copies are faster than the link that is shown", Severity: Warning, Device: impossibleRate},
	{ID: "link_errors", Title: "the link has errors", Severity: Warning, Device: linkErrors},
	{ID: "unsteady_copies", Title: "the samples spread", Severity: Note, Device: unsteadyCopies},
	{ID: "unjudged_copies", Title: "no yardstick for the copies", Severity: Note, Device: unjudgedCopies},
	{ID: "slot_below_card", Title: "the slot is made for less than the card", Severity: Note, Device: slotBelowCard},
	{ID: "slow_together", Title: "GPUs slow each other down", Severity: Warning, Host: slowTogether},
	{ID: "shared_switch", Title: "several GPUs share a link", Severity: Note, Host: sharedSwitch},
}

const (
	// slowShare and lowShare are the shares of the lowest figure reported of such
	// hardware, below which copies are slow for sure, or slower than they should be.
	// Gates of operators are at 0.83 to 0.87.
	slowShare = 0.80
	lowShare  = 0.90
	// lopsided is the share of the faster direction that the slower one reaches at least
	// if nothing is wrong.
	lopsided = 0.75
	// lies is how far copies are above a link's rate if that cannot be true: the rate is
	// an upper bound.
	lies = 1.02
	// unsteady and wild are spreads of samples, relative to their median: something
	// disturbs the copies, or the result means little.
	unsteady = 0.15
	wild     = 1.00
)

// copies returns the series of the copies that measured the bandwidth.
func (d *Device) copies() []result.Series {
	if d.Bandwidth == nil {
		return nil
	}
	return d.Bandwidth.Series
}

// measured reports whether copies have put load on the link.
func (d *Device) measured() bool { return len(d.copies()) > 0 }

// Slowest returns the lowest median of the copies that measured the bandwidth, in GB/s; 0
// if there are none.
func (d *Device) Slowest() (rate float64) {
	for i, s := range d.copies() {
		if i == 0 || s.Median < rate {
			rate = s.Median
		}
	}
	return rate
}

// fastest returns the highest median, in GB/s.
func (d *Device) fastest() (rate float64) {
	for _, s := range d.copies() {
		rate = max(rate, s.Median)
	}
	return rate
}

// made returns the link for which card and slot are made; zero if unknown.
func (d *Device) made(h *hostinfo.Host) yardstick.Link {
	if h != nil {
		if pci, ok := h.GPU(d.PCIBusID); ok {
			return yardstick.LinkOf(pci)
		}
	}
	return yardstick.Link{}
}

// under returns the link as it was under load. A link that was read too late, when it
// slept again, carries less than what was measured: it counts as it is made.
func (d *Device) under(h *hostinfo.Host) yardstick.Link {
	l := d.Link
	if l == nil || l.Rate == 0 || d.fastest() > lies*l.Rate {
		return d.made(h)
	}
	return yardstick.Link{Speed: l.Speed, Width: l.Width}
}

// expected returns what a series of copies should reach over the path as it is, or nil. A
// link that is narrower than it should be has a finding of its own.
func (f *Facts) expected(d *Device, s *result.Series) *result.Expected {
	if f.ExpectedRate > 0 {
		return &result.Expected{Value: f.ExpectedRate, Source: "--expect-bandwidth"}
	}
	e := yardstick.Expect(d.Name, d.under(f.Host), s)
	path := 0.0
	if l := d.Link; l != nil && l.Bottleneck != nil {
		path = l.Bottleneck.Rate
	}
	if e == nil {
		return nil
	}
	if carries := payloadShare * path; path > 0 && carries < e.Value {
		return &result.Expected{Value: carries, Source: fmt.Sprintf("the bridge above carries %s", units.Rate(path))}
	}
	return e
}

// payloadShare is the share of a link's rate that large copies reach with the smallest
// packets.
const payloadShare = 128.0 / 152

// judged reports whether the copies of a GPU were compared with a yardstick.
func (f *Facts) judged(d *Device) bool {
	return slices.ContainsFunc(d.copies(), func(s result.Series) bool { return f.expected(d, &s) != nil })
}

// Generation returns the generation of a link speed in GT/s: "PCIe 5.0".
func Generation(speed float64) string {
	if g := hostinfo.Generation(speed); g > 0 {
		return fmt.Sprintf("PCIe %d.0", g)
	}
	return fmt.Sprintf("%g GT/s", speed)
}

// asMade is what a finding on the link says of what card and slot are made for.
func asMade(l yardstick.Link) string { return fmt.Sprintf("card and slot are made for %v", l) }

// linkSeverity is that of a link below its maximum. A virtual machine does not show the
// slot, which may be made for less, as in small instances of a cloud.
func (f *Facts) linkSeverity(d *Device) Severity {
	if pci, ok := f.Host.GPU(d.PCIBusID); ok && f.Host.Virt.VM && len(pci.Upstream) == 0 {
		return Warning
	}
	return Problem
}

// narrowLink needs no load: the width of a link is the same when it is idle.
func narrowLink(f *Facts, d *Device) []Finding {
	made, l := d.made(f.Host), d.Link
	if l == nil || l.Width == 0 || l.Width >= made.Width || d.lied() {
		return nil
	}
	return finding(Finding{
		Severity: f.linkSeverity(d),
		Summary:  fmt.Sprintf("the PCIe link runs at x%d of x%d", l.Width, made.Width),
		Evidence: []string{fmt.Sprintf("current_link_width is %d", l.Width), asMade(made)},
		Cause:    "lanes that do not train: a card that is not seated well, a riser, dirt, or lanes that the firmware gives to another slot; a virtual machine may be made so",
		Cost:     fmt.Sprintf("%s are left of %s each way", units.Rate(l.Rate), units.Rate(hostinfo.LinkRate(l.Speed, made.Width))),
		Remedy:   "put the card into a slot with all lanes wired, reseat it, and look for lane sharing (bifurcation) in the firmware's setup",
	})
}

// slowLink needs load: an idle link is trained down.
func slowLink(f *Facts, d *Device) []Finding {
	made, l := d.made(f.Host), d.Link
	if l == nil || !d.measured() || l.Speed == 0 || l.Speed >= made.Speed || d.lied() {
		return nil
	}
	return finding(Finding{
		Severity: f.linkSeverity(d),
		Summary:  fmt.Sprintf("under load the PCIe link runs at %s of %s", Generation(l.Speed), Generation(made.Speed)),
		Evidence: []string{fmt.Sprintf("current_link_speed is %g GT/s after copies at %s", l.Speed, units.Rate(d.fastest())), asMade(made)},
		Cause:    "the ends could not agree on more: a riser or cable of an older generation, a limit in the firmware's setup, or errors on the link; a virtual machine may be made so",
		Cost:     fmt.Sprintf("%s are left of %s each way", units.Rate(l.Rate), units.Rate(hostinfo.LinkRate(made.Speed, l.Width))),
		Remedy:   "look for a slower slot or riser, a speed limit in the firmware's setup, and PCIe errors in dmesg (AER)",
	})
}

// lied reports whether copies were faster than the link as it was read: it was read when
// it slept again, or it is not the truth.
func (d *Device) lied() bool {
	return d.Link != nil && d.Link.Rate > 0 && d.fastest() > lies*d.Link.Rate
}

func upstream(_ *Facts, d *Device) []Finding {
	if d.Link == nil || d.Link.Bottleneck == nil || !d.measured() || d.fastest() > lies*d.Link.Bottleneck.Rate {
		return nil
	}
	b := d.Link.Bottleneck
	out := Finding{
		Summary:  fmt.Sprintf("the bridge above the GPU, %s, carries %s, less than the GPU's own link", b.Address, units.Rate(b.Rate)),
		Evidence: []string{fmt.Sprintf("it runs at %s x%d", Generation(b.Speed), b.Width)},
		Cause:    "its link is trained down",
		Cost:     fmt.Sprintf("copies of all devices below it share %s each way", units.Rate(b.Rate)),
		Remedy:   "move the card to a slot of the processor itself, or the bridge to a wider one",
	}
	if b.MaxWidth > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("it could run at %s x%d", Generation(b.MaxSpeed), b.MaxWidth))
	}
	if b.Speed >= b.MaxSpeed && b.Width >= b.MaxWidth {
		out.Severity, out.Cause = Note, "it is made so"
	}
	return finding(out)
}

func slowCopies(f *Facts, d *Device) []Finding {
	var slow []string
	severity := Warning
	least := 1.0
	for _, s := range d.copies() {
		e := f.expected(d, &s)
		low, slowBelow := lowShare, slowShare
		if f.ExpectedRate > 0 {
			low, slowBelow = 1, 1 // it is a limit, not what others reached
		}
		if e == nil || e.Value <= 0 || s.Median >= low*e.Value {
			continue
		}
		if s.Median < slowBelow*e.Value {
			severity = Problem
		}
		least = min(least, s.Median/e.Value)
		slow = append(slow, fmt.Sprintf("%s %s; %s can be expected (%s)", directionText(&s), units.Rate(s.Median), units.Rate(e.Value), e.Source))
	}
	if len(slow) == 0 {
		return nil
	}
	if d.Link.PathRate() > 0 {
		slow = append(slow, fmt.Sprintf("the link as it is carries %s", units.Rate(d.Link.PathRate())))
	}
	out := Finding{
		Severity: severity,
		Summary:  fmt.Sprintf("pinned copies reach %s of what such a GPU reaches on such a link", units.Share(least)),
		Evidence: slow,
		Cause:    "another user of the GPU or of the link, memory of another NUMA node, an IOMMU that translates, power limits, or errors on the link",
		Cost:     fmt.Sprintf("copies take %s as long", units.Times(1/max(least, 0.01))),
		Remedy: "stop other users of the GPU and of the link; bind the process to the GPU's NUMA node (numactl --cpunodebind --membind); " +
			"look at the IOMMU (iommu=pt), power limits and PCIe errors in dmesg (AER)",
	}
	if seen, disturbed := f.others(d); !disturbed || f.ExpectedRate > 0 { // else busyCopies says it
		out.Evidence = append(out.Evidence, seen...)
	}
	if f.Host != nil {
		if pci, ok := f.Host.GPU(d.PCIBusID); ok && strings.HasPrefix(pci.IOMMU, "DMA") {
			out.Evidence = append(out.Evidence, "the IOMMU translates this GPU's accesses (iommu_group/type is "+pci.IOMMU+")")
		}
	}
	return finding(out)
}

func asymmetricCopies(_ *Facts, d *Device) []Finding {
	var slow, fast *result.Series
	all := d.copies()
	for i := range all {
		s := &all[i]
		if slow == nil || s.Median < slow.Median {
			slow = s
		}
		if fast == nil || s.Median > fast.Median {
			fast = s
		}
	}
	if slow == fast || slow.Median >= lopsided*fast.Median || slow.Labels.Get(result.Direction) == fast.Labels.Get(result.Direction) {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("copies %s are much slower than %s", directionText(slow), directionText(fast)),
		Evidence: []string{fmt.Sprintf("%s against %s", units.Rate(slow.Median), units.Rate(fast.Median))},
		Cause:    "memory of another NUMA node, a processor that sends or takes small packets only, or errors on the link in one direction",
		Cost:     fmt.Sprintf("copies that way take %s as long", units.Times(fast.Median/max(slow.Median, 0.001))),
		Remedy:   "bind the process to the GPU's NUMA node (numactl --cpunodebind --membind), update the firmware, see dmesg for PCIe errors (AER), and compare with nvbandwidth",
	})
}

func impossibleRate(f *Facts, d *Device) []Finding {
	made := d.made(f.Host)
	rate := hostinfo.LinkRate(made.Speed, made.Width)
	if rate == 0 || d.fastest() <= lies*rate || yardstick.Coherent(d.Name) {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("copies are faster than the link: %s of %s", units.Rate(d.fastest()), units.Rate(rate)),
		Evidence: []string{fmt.Sprintf("the host shows %v at most", made)},
		Cause:    "the host shows a link that is not the true one, as virtual machines do, or time runs at a wrong rate here",
		Cost:     "the speed cannot be judged by the link",
		Remedy:   "compare with nvbandwidth, and with the link that the host of the virtual machine shows (lspci -vv); see the clock source (/sys/devices/system/clocksource)",
	})
}

// Counts that DCGM allows in a run.
const (
	mostCorrectable = 480
	mostReplays     = 80
)

func linkErrors(f *Facts, d *Device) []Finding {
	out := Finding{
		Summary: "the PCIe link had errors",
		Cause:   "a card that is not seated well, a riser or a cable, or a slot that cannot carry this generation",
		Cost:    "what arrives wrong is sent again, which takes time; an error that cannot be corrected ends programs",
		Remedy:  "reseat the card, replace the riser or cable, or set a lower generation in the firmware's setup; see dmesg for AER lines",
	}
	if f.Host != nil {
		if pci, ok := f.Host.GPU(d.PCIBusID); ok && pci.Errors != nil {
			e := pci.Errors
			if e.Fatal > 0 || e.NonFatal > 0 || e.Correctable > mostCorrectable {
				out.Evidence = append(out.Evidence, fmt.Sprintf("since boot: %d correctable, %d non-fatal, %d fatal (aer_dev_*)", e.Correctable, e.NonFatal, e.Fatal))
			}
			if e.Fatal > 0 {
				out.Severity = Problem
			}
		}
	}
	if h := d.Health; h != nil && h.PCIeReplays != nil && *h.PCIeReplays > mostReplays {
		out.Evidence = append(out.Evidence, fmt.Sprintf("NVML: %d replays since the driver was loaded", *h.PCIeReplays))
	}
	if len(out.Evidence) == 0 {
		return nil
	}
	return finding(out)
}

func unsteadyCopies(_ *Facts, d *Device) (out []Finding) {
	for _, s := range d.copies() {
		if s.Spread <= unsteady {
			continue
		}
		one := Finding{
			Summary:  fmt.Sprintf("%s: samples spread over %s of their median", directionText(&s), units.Share(s.Spread)),
			Evidence: []string{fmt.Sprintf("%s to %s", units.Rate(s.Min), units.Rate(s.Max))},
			Cause:    "something else uses the GPU, the link or the memory",
			Cost:     "the median says little",
			Remedy:   "measure again on a quiet machine",
		}
		if s.Spread > wild {
			one.Severity = Warning
		}
		out = append(out, one)
	}
	if slower, better, ok := d.twice(); ok {
		out = append(out, Finding{
			Summary:  "two measurements of the copies differ",
			Evidence: []string{fmt.Sprintf("the slower direction reached %s in one and %s in the other", units.Rate(slower), units.Rate(better))},
			Cause:    "something else used the GPU, the link or the memory",
			Cost:     "programs meet the same",
			Remedy:   "see what else runs here (nvidia-smi, top)",
		})
	}
	return out
}

func unjudgedCopies(f *Facts, d *Device) []Finding {
	if !d.measured() || f.judged(d) {
		return nil
	}
	var rates []string
	for _, s := range d.copies() {
		rates = append(rates, fmt.Sprintf("%s %s", directionText(&s), units.Rate(s.Median)))
	}
	cause := "the host does not show the GPU's link, and there is no public figure"
	if f.Simulated {
		cause = "the GPU is simulated"
	} else if d.Link != nil && d.Link.Rate > 0 {
		cause = "there is no public figure of such a GPU on such a link"
	}
	return finding(Finding{
		Summary:  "nothing is known of what this GPU should reach here, so its speed was not judged",
		Evidence: rates,
		Cause:    cause,
		Cost:     "a slow link would not be noticed",
		Remedy:   "compare with another machine of this kind (pincheck compare)",
	})
}

func slotBelowCard(f *Facts, d *Device) []Finding {
	made, l := d.made(f.Host), d.Link
	if l == nil || made.Width == 0 || hostinfo.LinkRate(made.Speed, made.Width) >= l.MaxRate {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("the slot is made for %v, and the card for %s x%d", made, Generation(l.MaxSpeed), l.MaxWidth),
		Evidence: []string{"max_link_speed and max_link_width of the card and of the bridge above it"},
		Cost:     fmt.Sprintf("%s each way of %s that the card could", units.Rate(hostinfo.LinkRate(made.Speed, made.Width)), units.Rate(l.MaxRate)),
		Remedy:   "use a faster slot, if the machine has one",
	})
}

func directionText(s *result.Series) string { return wayText(s.Labels.Get(result.Direction)) }

func wayText(way string) string { return strings.ReplaceAll(way, "_", " ") }
