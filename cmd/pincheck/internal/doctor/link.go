package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// linkChecks judge the PCI Express link, and the copies over it.
var linkChecks = []Check{
	{ID: "narrow_link", Device: narrowLink},
	{ID: "slow_link", Device: slowLink},
	{ID: "narrow_upstream", Device: upstream},
	{ID: "busy", Suppresses: []string{"slow_copies", "asymmetric_copies", "unsteady_copies"}, Device: busyCopies},
	{ID: "slow_copies", Suppresses: []string{"asymmetric_copies"}, Device: slowCopies},
	{ID: "asymmetric_copies", Device: asymmetricCopies},
	{ID: "impossible_rate", Device: impossibleRate},
	{ID: "link_errors", Host: loggedLinkErrors, Device: linkErrors},
	{ID: "unsteady_copies", Device: unsteadyCopies},
	{ID: "unjudged_copies", Device: unjudgedCopies},
	{ID: "slot_below_card", Device: slotBelowGPU},
	{ID: "slow_together", Host: slowTogether},
	{ID: "shared_switch", Host: sharedSwitch},
}

const (
	// lopsided is the share of the faster direction that the slower one reaches at least
	// if nothing is wrong.
	lopsided = 0.75
	// impossible is how far copies are above a link's rate if that cannot be true: the rate is
	// an upper bound.
	impossible = 1.02
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

// pci returns what the host shows of a GPU on its PCI bus.
func (f *Facts) pci(d *Device) (pci hostinfo.PCIDevice, shown bool) {
	if f.Host == nil {
		return hostinfo.PCIDevice{}, false
	}
	return f.Host.GPU(d.PCIBusID)
}

// made returns the link for which card and slot are made; zero if unknown, as of a slot that does not show its
// maximum.
func (f *Facts) made(d *Device) hostinfo.PCIe {
	pci, shown := f.pci(d)
	if !shown || len(pci.Upstream) > 0 && pci.Upstream[0].Best().Rate() == 0 {
		return hostinfo.PCIe{}
	}
	return pci.Made()
}

// underLoad returns the link as it was under load. A link that was read too late, when it
// slept again, carries less than what was measured: it counts as it is made.
func (f *Facts) underLoad(d *Device) hostinfo.PCIe {
	l := d.Link
	switch {
	case l == nil:
		return f.made(d)
	case l.Rate == 0: // it does not show, and may be less than it is made for
		return hostinfo.PCIe{}
	case d.fastest() > impossible*l.Rate:
		return f.made(d)
	}
	return l.Now()
}

// boundedBy returns the link that bounds the copies of a GPU, as card and slot are made. It is zero if that is
// unknown, as of GPUs that have another way to the host's memory. madeUp is whether the host may show links that
// are not real: virtual machines do, and Thunderbolt's bridges show one of 2.5 GT/s.
func (f *Facts) boundedBy(d *Device) (link hostinfo.PCIe, madeUp bool) {
	if f.Host == nil || f.nameOf(d) == "" || reference.Coherent(f.nameOf(d)) || !d.overLink() {
		return hostinfo.PCIe{}, false
	}
	link = f.made(d)
	return link, f.Host.Virt.VM || link.Speed <= slowestLink
}

// slowestLink is the speed of PCIe 1.0 in GT/s, which is shown where none is known.
const slowestLink = 2.5

// Refused is why no GPU can reach what --expect-bandwidth asks for: a sentence for each link that carries less,
// with its GPUs. Unknown are the numbers of the GPUs whose links do not show, or that may be made up: there
// the expectation stands.
func (f *Facts) Refused(rate float64) (refused []string, unknown []int) {
	var links []hostinfo.PCIe
	below := map[hostinfo.PCIe][]*Device{}
	for i := range f.Devices {
		d := &f.Devices[i]
		link, _ := f.boundedBy(d)
		if pci, shown := f.pci(d); shown && link.Rate() > 0 {
			for _, up := range pci.Upstream {
				if best := up.Best(); best.Speed > slowestLink && best.Rate() > 0 && best.Rate() < link.Rate() {
					link = best
				}
			}
		}
		switch {
		case link.Rate() == 0 || link.Speed <= slowestLink || d.fastest() > impossible*link.Rate():
			unknown = append(unknown, d.Ordinal)
		case rate > link.Rate():
			if below[link] == nil {
				links = append(links, link)
			}
			below[link] = append(below[link], d)
		}
	}
	for _, link := range links {
		who := "GPU " + ordinals(below[link])
		if len(below[link]) > 1 {
			who = "GPUs " + ordinals(below[link])
		}
		refused = append(refused, fmt.Sprintf("%v, the link of %s, carries %s each way at most", link, who, units.Rate(link.Rate())))
	}
	return refused, unknown
}

// Reference returns what a series of copies should reach over the path as it is, or nil. A
// link that is narrower than it should be has a finding of its own.
func (f *Facts) Reference(d *Device, s *result.Series) *result.Expected {
	if f.ExpectedRate > 0 {
		return &result.Expected{Value: f.ExpectedRate, Source: "--expect-bandwidth", Brief: "--expect-bandwidth", Of: fmt.Sprintf("the %s of --expect-bandwidth", units.Rate(f.ExpectedRate))}
	}
	return f.Expected(reference.Builtin(), d, s)
}

// Machine returns the type of machine of a GPU, with its link as it was under load.
func (f *Facts) Machine(d *Device) reference.Machine {
	return reference.MachineOf(f.Host, d.Name, f.underLoad(d))
}

// Expected returns what a series of copies should reach by a reference table over the path as it is, or nil.
func (f *Facts) Expected(table *reference.Table, d *Device, s *result.Series) *result.Expected {
	if f.confidential() || f.Host != nil && f.Host.Virt.Confidential != "" {
		return nil // copies go through encrypted bounce buffers, of which no figure is known
	}
	e := table.Expect(f.Machine(d), s)
	path := 0.0
	if l := d.Link; l != nil && l.Bottleneck != nil {
		path = l.Bottleneck.Rate
	}
	if e == nil {
		return nil
	}
	if carries := payloadShare * path; path > 0 && carries < e.Value {
		return &result.Expected{Value: carries, Source: fmt.Sprintf("the bridge above carries %s", units.Rate(path)), Brief: "what the bridge above the GPU carries", Of: "what the bridge above carries"}
	}
	return e
}

// payloadShare is the share of a link's rate that large copies reach with the smallest
// packets.
const payloadShare = 128.0 / 152

// compared reports whether the copies of a GPU were compared with a reference.
func (f *Facts) compared(d *Device) bool {
	return slices.ContainsFunc(d.copies(), func(s result.Series) bool { return f.Reference(d, &s) != nil })
}

// asMade is what a finding on the link says of what card and slot are made for.
func asMade(l hostinfo.PCIe) string { return fmt.Sprintf("Card and slot support %v", l) }

// linkSeverity is that of a link below its maximum. A virtual machine does not show the
// slot, which may be made for less, as in small instances of a cloud.
func (f *Facts) linkSeverity(d *Device) Severity {
	pci, ok := f.pci(d)
	switch {
	case f.partial() && len(pci.Upstream) == 0: // the slot is not in the text
		return Warning
	case !ok || !f.Host.Virt.VM || len(pci.Upstream) > 0:
		return Problem
	case f.nameOf(d) == "" || soldNarrow.MatchString(f.nameOf(d)):
		return Note
	}
	return Warning
}

// pageTables reports whether the GPU uses the host's page tables, as those that are coherent with it do; nil is
// unknown.
func (d *Device) pageTables() *bool {
	if d.Attributes == nil {
		return nil
	}
	return &d.Attributes.UsesHostPageTables
}

// nameOf returns what a GPU is called: by CUDA, or else by the kernel module or NVML. Empty is unknown.
func (f *Facts) nameOf(d *Device) string {
	if d.Name != "" {
		return d.Name
	}
	for _, b := range f.Host.NVIDIA.Boards {
		if hostinfo.SamePCI(b.Address, d.PCIBusID) {
			return b.Model
		}
	}
	if d.Health != nil {
		return d.Health.Name
	}
	return ""
}

// soldNarrow matches GPUs that clouds give half of the lanes: whole ones, and fractions of them.
var soldNarrow = regexp.MustCompile(`\b(?:L4|T4|A10G?|P4|M60)\b`)

// narrowLink needs no load: the width of a link is the same when it is idle.
func narrowLink(f *Facts, d *Device) []Finding {
	made, l := f.made(d), d.Link
	if l == nil || l.Width == 0 || l.Width >= made.Width || d.misread() || !d.overLink() {
		return nil
	}
	out := Finding{
		Severity: f.linkSeverity(d),
		Summary:  fmt.Sprintf("the PCIe link uses %d of %d lanes", l.Width, made.Width),
		Evidence: []string{fmt.Sprintf("current_link_width is %d", l.Width), asMade(made)},
		because:  f.chassis(d),
	}
	if pci, _ := f.pci(d); f.partial() && len(pci.Upstream) == 0 {
		out.Certainty, out.Evidence = Possible, []string{out.Evidence[0], fmt.Sprintf("The card supports %v; the slot is not shown", made)}
		if out.because == "laptop" || 2*l.Width >= made.Width { // as slots and laptops of half the lanes have it
			out.Severity = Note
		}
	}
	speed := l.Speed
	if f.partial() { // the link may be idle: its speed says nothing
		speed = made.Speed
	}
	out.values = findings.Values{"rate": units.Rate(hostinfo.PCIe{Speed: speed, Width: l.Width}.Rate()), "full rate": units.Rate(hostinfo.PCIe{Speed: speed, Width: made.Width}.Rate())}
	return finding(out)
}

// slowLink needs load: an idle link is trained down.
func slowLink(f *Facts, d *Device) []Finding {
	made, l := f.made(d), d.Link
	if l == nil || !d.measured() || l.Rate == 0 || l.Speed >= made.Speed || d.misread() || !d.overLink() {
		return nil
	}
	out := Finding{
		Severity: f.linkSeverity(d),
		Summary:  fmt.Sprintf("under load the PCIe link runs at %s of %s", l.Now().Version(), made.Version()),
		Evidence: []string{fmt.Sprintf("current_link_speed is %g GT/s after copies at %s", l.Speed, units.Rate(d.fastest())), asMade(made)},
		because:  f.chassis(d),
		values:   findings.Values{"rate": units.Rate(l.Rate), "full rate": units.Rate(hostinfo.PCIe{Speed: made.Speed, Width: l.Width}.Rate())},
	}
	if f.Host.Power.ASPM != "" && f.Host.Power.ASPM != "default" {
		out.Evidence = append(out.Evidence, "/sys/module/pcie_aspm/parameters/policy is "+f.Host.Power.ASPM)
	}
	if pci, _ := f.pci(d); isTrue(pci.Link.Sleeps) {
		out.Evidence = append(out.Evidence, pci.Dir()+"/link: ASPM is on")
	}
	switch at, target := f.heldTo(d, made); {
	case at != "":
		out.because, out.values["ADDRESS"] = "target_speed", word(at)
		out.values["G"] = strconv.Itoa(made.Generation())
		out.Evidence = append(out.Evidence, fmt.Sprintf("/sys/bus/pci/devices/%s/config: Link Control 2 has a target of %g GT/s", at, target))
	case isTrue(f.Host.Power.OnBattery):
		out.because, out.Severity = "battery", Warning
		out.Evidence = append(out.Evidence, "/sys/class/power_supply: a battery supplies the host")
	}
	return finding(out)
}

// heldTo returns the end of the link that is set to train to less than the link is made for: the GPU or its slot.
func (f *Facts) heldTo(d *Device, made hostinfo.PCIe) (address string, speed float64) {
	pci, _ := f.pci(d)
	ends := append([]hostinfo.Link{pci.Link}, pci.Upstream[:min(1, len(pci.Upstream))]...)
	ends[0].Address = pci.Address
	for _, end := range ends {
		if end.TargetSpeed > 0 && end.TargetSpeed < made.Speed && end.TargetSpeed <= d.Link.Speed {
			return end.Address, end.TargetSpeed
		}
	}
	return "", 0
}

// chassis returns the cause of the pages of links where the GPU is soldered, and nobody can seat it better. It is
// empty for cards.
func (f *Facts) chassis(d *Device) string {
	switch {
	case f.Host.Power.Laptop, strings.Contains(d.Name, "Laptop GPU"), strings.Contains(d.Name, "Max-Q"):
		return "laptop"
	case f.Host.Virt.VM: // whose virtual slot is not that of the GPU
	case strings.Contains(d.Name, "SXM"), f.Host.NVIDIA.NVSwitches > 0, f.Host.NVIDIA.HasNode("/dev/nvidia-nvswitchctl"):
		return "board"
	}
	return ""
}

// overLink reports whether copies of a GPU go over the PCI Express link that the host shows. What is part of the
// processor, or coherent with it, has another way, and shows a link that is a placeholder.
func (d *Device) overLink() bool {
	return !reference.Coherent(d.Name) && !isTrue(d.pageTables()) && (d.Attributes == nil || !d.Attributes.Integrated)
}

// LinkRate returns what the path to a GPU carries, in GB/s, for its copies to be shares of. A link that was read
// when it slept again counts as it is made. It is 0 where copies do not go over the link, and where the link carries
// less than they reached.
func (d *Device) LinkRate() float64 {
	if d.Link == nil || !d.overLink() {
		return 0
	}
	for _, rate := range []float64{d.Link.PathRate(), d.Link.MaxRate} {
		if rate > 0 && d.fastest() <= impossible*rate {
			return rate
		}
	}
	return 0
}

// misread reports whether copies were faster than the link as it was read: it was read when
// it slept again, or it is not the truth.
func (d *Device) misread() bool {
	return d.Link != nil && d.Link.Rate > 0 && d.fastest() > impossible*d.Link.Rate
}

func upstream(_ *Facts, d *Device) []Finding {
	if d.Link == nil || d.Link.Bottleneck == nil || !d.measured() || d.fastest() > impossible*d.Link.Bottleneck.Rate {
		return nil
	}
	b := d.Link.Bottleneck
	out := Finding{
		Summary:  fmt.Sprintf("bridge %s above the GPU carries %s, less than the GPU's link", b.Address, units.Rate(b.Rate)),
		Evidence: []string{fmt.Sprintf("It runs at %v", b.Now())},
		values:   findings.Values{"rate": units.Rate(b.Rate)},
	}
	if b.MaxWidth > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("It supports %v", b.Best()))
	}
	if b.Speed >= b.MaxSpeed && b.Width >= b.MaxWidth {
		out.Severity, out.because = Note, "made_so"
	}
	return finding(out)
}

func asymmetricCopies(f *Facts, d *Device) []Finding {
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
	if slow == nil {
		return nil
	}
	if e := f.Reference(d, slow); e != nil && f.ExpectedRate == 0 && slow.Median >= LowShare*e.Value {
		return nil // it is made so
	}
	if slow == fast || slow.Median <= 0 || slow.Median >= lopsided*fast.Median || slow.Labels.Get(result.Direction) == fast.Labels.Get(result.Direction) {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(f.byDesign(d)),
		Summary:  fmt.Sprintf("copies %s are much slower than %s", directionText(slow), directionText(fast)),
		Evidence: []string{fmt.Sprintf("%s %s, %s %s", capital(directionText(slow)), units.Rate(slow.Median), directionText(fast), units.Rate(fast.Median))},
		values:   findings.Values{"several times": units.Times(fast.Median / max(slow.Median, 0.001))},
	})
}

func impossibleRate(f *Facts, d *Device) []Finding {
	link, madeUp := f.boundedBy(d)
	if link.Rate() == 0 || d.fastest() <= impossible*link.Rate() {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(madeUp),
		Summary:  fmt.Sprintf("copies are faster than the reported link: %s over %s", units.Rate(d.fastest()), units.Rate(link.Rate())),
		Evidence: []string{fmt.Sprintf("The host reports at most %v", link)},
	})
}

// Counts that DCGM allows in a run.
const (
	maxCorrectable = 480
	maxReplays     = 80
)

func linkErrors(f *Facts, d *Device) []Finding {
	out := Finding{Summary: "the PCIe link has errors"}
	if pci, ok := f.pci(d); ok && pci.Errors != nil {
		e := pci.Errors
		if e.Fatal > 0 || e.NonFatal > 0 || e.Correctable > maxCorrectable {
			out.Evidence = append(out.Evidence, fmt.Sprintf("Since boot: %d correctable, %d non-fatal, %d fatal (aer_dev_*)", e.Correctable, e.NonFatal, e.Fatal))
		}
		if e.Fatal > 0 {
			out.Severity = Problem
		}
	}
	if h := d.Health; h != nil && h.PCIeReplays != nil && *h.PCIeReplays > maxReplays {
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
			Summary:  fmt.Sprintf("copies %s vary by %s of the median", directionText(&s), units.Share(s.Spread)),
			Evidence: []string{fmt.Sprintf("%s to %s", units.Rate(s.Min), units.Rate(s.Max))},
			because:  "samples",
		}
		if s.Spread > wild {
			one.Severity = Warning
		}
		out = append(out, one)
	}
	if slower, better, ok := d.twice(); ok {
		out = append(out, Finding{
			Summary:  "two measurements of copies differ",
			Evidence: []string{fmt.Sprintf("The slower direction reached %s in one and %s in the other", units.Rate(slower), units.Rate(better))},
			because:  "measurements",
		})
	}
	return out
}

func unjudgedCopies(f *Facts, d *Device) []Finding {
	if !d.measured() || f.compared(d) {
		return nil
	}
	var rates []string
	for _, s := range d.copies() {
		rates = append(rates, fmt.Sprintf("%s %s", capital(directionText(&s)), units.Rate(s.Median)))
	}
	because := "hidden_link"
	if f.Simulated {
		because = "simulated"
	} else if d.Link != nil && d.Link.Rate > 0 {
		because = "no_figure"
	}
	return finding(Finding{Summary: "there is no reference for this GPU and link", Evidence: rates, because: because})
}

func slotBelowGPU(f *Facts, d *Device) []Finding {
	made, l := f.made(d), d.Link
	if l == nil || made.Width == 0 || made.Rate() >= l.MaxRate {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("the slot supports %v, the card %v", made, l.Best()),
		Evidence: []string{"max_link_speed and max_link_width of the card and of the bridge above it"},
		values:   findings.Values{"rate": units.Rate(made.Rate()), "full rate": units.Rate(l.MaxRate)},
	})
}

func directionText(s *result.Series) string { return result.Words(s.Labels.Get(result.Direction)) }
