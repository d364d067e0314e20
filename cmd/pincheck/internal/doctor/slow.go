package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// Shares of the expected rate. LowShare and slowShare do not hold for --expect-bandwidth, which is
// a limit itself.
const (
	// LowShare is the share below which copies are slow, and slowShare the one below which that is
	// a problem. Gates of operators are at 0.83 to 0.87.
	LowShare  = 0.90
	slowShare = 0.80
	// halfShare is the share below which copies are slow by half: the link has half of its lanes,
	// or is of an older generation. No neighbour takes as much for long, so that a few measurements
	// apart would add nothing. It leaves a margin above a half, as links do not all reach the same
	// share of their rate.
	halfShare = 0.55
)

// Repeats are several measurements of the bandwidth of a GPU, the first and those that followed
// because its copies were slow.
type Repeats struct {
	Benches []*result.Bench `json:"measurements"` // in their order
	Seconds float64         `json:"took_s"`       // from the end of the first to the end of the last
}

// add adds a measurement, and before it the first one.
func (r *Repeats) add(first, b *result.Bench) *Repeats {
	if r == nil {
		r = &Repeats{Benches: []*result.Bench{first}}
	}
	r.Benches = append(r.Benches, b)
	return r
}

// measurements returns all measurements of the bandwidth.
func (d *Device) measurements() []*result.Bench {
	all := []*result.Bench{d.Bandwidth, d.Slower}
	if d.Repeats != nil { // these two are among them
		all = slices.Clone(d.Repeats.Benches)
	}
	return slices.DeleteFunc(all, func(b *result.Bench) bool { return b == nil })
}

// Measurements returns the number of measurements of the bandwidth.
func (d *Device) Measurements() int { return len(d.measurements()) }

// A reach is what repeated copies of a direction reached, in GB/s: the medians of the measurements,
// and single samples.
type reach struct {
	n                           int
	lowestMedian, highestMedian float64
	lowestSample, highestSample float64
}

// reached returns what the repeated copies of a direction reached; zero for a single measurement.
func (d *Device) reached(direction string) (r reach) {
	if d.Repeats == nil {
		return r
	}
	for _, b := range d.Repeats.Benches {
		for i := 0; b != nil && i < len(b.Series); i++ {
			s := &b.Series[i]
			if s.Labels.Get(result.Direction) != direction || s.Median <= 0 {
				continue
			}
			if r.n == 0 {
				r = reach{0, s.Median, s.Median, s.Min, s.Max}
			}
			r.n++
			r.lowestMedian, r.highestMedian = min(r.lowestMedian, s.Median), max(r.highestMedian, s.Median)
			r.lowestSample, r.highestSample = min(r.lowestSample, s.Min), max(r.highestSample, s.Max)
		}
	}
	return r
}

// A comparison is a series of copies beside what is expected of it.
type comparison struct {
	*result.Series
	*result.Expected
	reach
	// rate is what counts: the median, or the best sample of repeated measurements. The best shows
	// what the hardware can do, and the spread how busy the host is.
	rate float64
	// low and problem are the rates below which copies are slow, and a problem.
	low, problem float64
}

func (c *comparison) share() float64 { return c.rate / c.Value }

// comparisons returns the copies of a GPU for which a rate is expected.
func (f *Facts) comparisons(d *Device) (all []comparison) {
	copies := d.copies()
	for i := range copies {
		s := &copies[i]
		e := f.Reference(d, s)
		if e == nil || e.Value <= 0 || s.Median <= 0 {
			continue
		}
		c := comparison{Series: s, Expected: e, reach: d.reached(s.Labels.Get(result.Direction)), low: LowShare * e.Value, problem: slowShare * e.Value}
		if f.ExpectedRate > 0 {
			c.low, c.problem = e.Value, e.Value
		}
		c.rate = max(s.Median, c.highestSample)
		all = append(all, c)
	}
	return all
}

// slow returns the copies that are slow, the slowest first.
func (f *Facts) slow(d *Device) []comparison {
	all := slices.DeleteFunc(f.comparisons(d), func(c comparison) bool { return c.rate >= c.low })
	slices.SortStableFunc(all, func(a, b comparison) int {
		if a.share() < b.share() {
			return -1
		}
		return 1
	})
	return all
}

// Slow reports whether copies of a GPU are below what can be expected of it.
func (f *Facts) Slow(d *Device) bool { return len(f.slow(d)) > 0 }

// SlowByHalf reports whether they are by so much that it needs no more measurements.
func (f *Facts) SlowByHalf(d *Device) bool {
	slow := f.slow(d)
	return len(slow) > 0 && slow[0].share() < halfShare
}

// expectation is the evidence of what is expected of copies.
func (c *comparison) expectation(f *Facts) string {
	if f.ExpectedRate > 0 {
		return fmt.Sprintf("%s is %s", c.Source, units.Rate(c.Value))
	}
	return fmt.Sprintf("%s expected (%s)", units.Rate(c.Value), cmp.Or(c.Brief, c.Source))
}

// repeats is the evidence of repeated measurements.
func (f *Facts) repeats(d *Device) (evidence []string) {
	for _, c := range f.comparisons(d) {
		if c.n > 1 {
			evidence = append(evidence, fmt.Sprintf("%s, %s: medians %s, samples %s", capital(directionText(c.Series)), d.Repeats.text(c.n),
				fromTo(c.lowestMedian, c.highestMedian), fromTo(c.lowestSample, c.highestSample)))
		}
	}
	return evidence
}

// text returns how often, and for how long, copies were measured.
func (r *Repeats) text(n int) string {
	text := "measured " + units.Things(n, "time", "times")
	if r.Seconds >= 0.1 {
		text += " in " + units.Seconds(r.Seconds)
	}
	return text
}

// fromTo returns two rates, or one if they read the same.
func fromTo(low, high float64) string {
	from, to := units.Rate(low), units.Rate(high)
	if from == to {
		return to
	}
	return from + " to " + to
}

func slowCopies(f *Facts, d *Device) []Finding {
	slow := f.slow(d)
	if len(slow) == 0 {
		return nil
	}
	worst := &slow[0]
	out := Finding{Severity: Warning, because: "unknown"}
	verb := "reach"
	if d.Repeats != nil && worst.share() >= halfShare {
		verb, out.because = "now reach", "now" // others may take the rest for longer than was measured
	}
	out.Summary = fmt.Sprintf("pinned copies %s %s of %s", verb, units.Share(worst.share()), worst.Of)
	out.values = findings.Values{"several times": units.Times(1 / max(worst.share(), 0.01))}
	for _, c := range slow {
		best := ""
		if c.n > 0 {
			best = " at best"
		}
		// Samples that differ much are of a busy host, whatever else is wrong with it.
		steady := f.ExpectedRate > 0 || out.because != "now" || c.lowestSample >= (1-unsteady)*c.highestSample
		if c.rate < c.problem && steady {
			out.Severity = Problem
		}
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s %s%s, %s", capital(directionText(c.Series)), units.Rate(c.rate), best, c.expectation(f)))
	}
	out.Evidence = append(out.Evidence, f.repeats(d)...)
	if d.Link.PathRate() > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("The link now carries %s", units.Rate(d.Link.PathRate())))
	}
	if seen, disturbed := f.others(d); !disturbed || f.ExpectedRate > 0 { // else busyCopies says it
		out.Evidence = append(out.Evidence, seen...)
	}
	if pci, ok := f.pci(d); ok && strings.HasPrefix(pci.IOMMU, "DMA") {
		out.Evidence = append(out.Evidence, "The IOMMU translates accesses of this GPU (iommu_group/type is "+pci.IOMMU+")")
	}
	return finding(out)
}

// busyCopies finds slow copies beside others that use the GPU or the host, and copies that are slow
// at times. A limit that the user has set counts all the same.
func busyCopies(f *Facts, d *Device) []Finding {
	slow := slowCopies(f, d)
	if len(slow) == 0 {
		return slowAtTimes(f, d)
	}
	seen, disturbed := f.others(d)
	if !disturbed || f.ExpectedRate > 0 {
		return nil
	}
	return finding(Finding{
		Summary:  slow[0].Summary + " while other programs use the GPU or the host",
		Evidence: append(seen, slow[0].Evidence...),
		because:  "others",
	})
}

// slowAtTimes finds copies that were slow, and as fast as they should be when they were measured
// again: nothing is wrong with the GPU or its link.
func slowAtTimes(f *Facts, d *Device) []Finding {
	var lowest, best *comparison
	all := f.comparisons(d)
	var evidence []string
	for i := range all {
		c := &all[i]
		if c.n < 2 || c.lowestMedian >= c.low {
			continue
		}
		evidence = append(evidence, fmt.Sprintf("%s %s at best, %s", capital(directionText(c.Series)), units.Rate(c.rate), c.expectation(f)))
		if lowest == nil || c.lowestMedian/c.Value < lowest.lowestMedian/lowest.Value {
			lowest = c
		}
		if best == nil || c.share() < best.share() {
			best = c
		}
	}
	if lowest == nil {
		return nil
	}
	seen, _ := f.others(d)
	return finding(Finding{
		Severity: Note,
		Summary: fmt.Sprintf("pinned copies reached between %s and %s of %s, %s: other programs use the link or host memory at times",
			units.Share(lowest.lowestMedian/lowest.Value), units.Share(best.share()), lowest.Of, d.Repeats.text(lowest.n)),
		Evidence: slices.Concat(evidence, f.repeats(d), seen),
		because:  "at_times",
	})
}

const (
	// busyGPU is the utilization of a GPU, in percent, from which on it was at work before it
	// was examined.
	busyGPU = 10
	// busyCPUs is the share of the host's CPUs that other programs keep busy from which on they
	// take memory bandwidth from copies.
	busyCPUs = 0.25
	// contextBytes and contextShare are more memory than a GPU has in use for pincheck alone.
	contextBytes = 2 << 30
	contextShare = 0.05
)

// others returns what else used a GPU or the host while its copies were measured, as far as that
// shows, and whether that explains slow copies. That a process has memory on the GPU does not, as
// it may do nothing; it does where copies were of different speeds, too. NVML's utilization counts
// kernels, and no copies. If nothing explains slow copies, seen lists what was idle.
func (f *Facts) others(d *Device) (seen []string, disturbed bool) {
	present, active, varied := false, false, false
	var idle []string
	note := func(at bool, text string) {
		if at {
			active = true
			seen = append(seen, text)
		} else {
			idle = append(idle, text)
		}
	}
	if h := d.Health; h != nil {
		if n := len(h.Processes); n > 0 {
			present = true
			seen = append(seen, units.Things(n, "other process uses", "other processes use")+" this GPU (NVML)")
		}
		if u := h.Utilization; u != nil {
			note(*u >= busyGPU, fmt.Sprintf("Kernels ran for %d%% of the last second before the examination (NVML)", *u))
		}
	}
	if used := d.MemoryTotal - d.MemoryFree; d.MemoryTotal > 0 && used > max(contextBytes, int(contextShare*float64(d.MemoryTotal))) {
		present = true
		seen = append(seen, units.Bytes(used)+" of GPU memory is in use")
	}
	if d.OtherCPUs != nil && f.Host.CPU.Threads > 0 {
		all := float64(f.Host.CPU.Threads)
		note(*d.OtherCPUs >= max(1, busyCPUs*all), fmt.Sprintf("Other programs kept %s of %d CPUs busy (/proc/stat)", units.Number(*d.OtherCPUs, 2), f.Host.CPU.Threads))
	}
	if text, ok := throttledText(f.Host.Cgroup); ok {
		seen = append(seen, text) // since the group was made: it may be over
	}
	for _, s := range d.copies() {
		if s.Spread > unsteady {
			varied = true
			seen = append(seen, fmt.Sprintf("%s: %s to %s in one measurement", capital(directionText(&s)), units.Rate(s.Min), units.Rate(s.Max)))
		}
	}
	if slower, better, ok := d.twice(); ok {
		varied = true
		if d.Repeats == nil { // else the finding has all measurements
			seen = append(seen, fmt.Sprintf("In two measurements the slower direction reached %s and %s", units.Rate(slower), units.Rate(better)))
		}
	}
	if active || present && varied {
		return seen, true
	}
	return append(seen, idle...), false
}

// oftenThrottled is the share of periods in which a group used its CPU quota up, from which on that slows its programs
// down, of at least manyPeriods.
const (
	oftenThrottled = 0.25
	manyPeriods    = 100
)

// throttledText says how often the CPU quota was used up.
func throttledText(g hostinfo.Cgroup) (text string, often bool) {
	return fmt.Sprintf("The CPU quota of %s was used up in %d of %d periods (cpu.stat)", units.Number(g.CPUQuota, 2), g.Throttled, g.Periods),
		g.CPUQuota > 0 && g.Periods >= manyPeriods && float64(g.Throttled) >= oftenThrottled*float64(g.Periods)
}

// twice returns what the slower direction reached in two measurements. ok is false if there was
// one only, and where they agree.
func (d *Device) twice() (slower, better float64, ok bool) {
	if d.Slower == nil {
		return 0, 0, false
	}
	slower, better = (&Device{Bandwidth: d.Slower}).Slowest(), d.Slowest()
	return slower, better, slower > 0 && slower < (1-unsteady)*better
}
