package doctor

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// copyChecks judge the short measurements beside the bandwidth.
var copyChecks = []Check{
	{ID: "launch_blocking", Host: launchesBlock},
	{ID: "slow_small_copies", Device: slowSmallCopies},
	{ID: "slow_pageable", Device: slowPageable},
	{ID: "write_combined_slow", Device: writeCombinedSlow},
}

// Names of the series of [Device.Trials], beside those of the experiments of the same
// names.
const (
	// TrialLatency is the time of one small copy with its wait, in seconds; TrialPinRate
	// the rate of pinning, by [result.Method]; the rates of copies are TrialBandwidth, by
	// [result.Memory] and [result.Direction], and TrialByNode, by TrialNode, the NUMA node
	// of the host memory, and [result.Direction].
	TrialLatency   = "latency"
	TrialPinRate   = "pin_rate"
	TrialBandwidth = "bandwidth"
	TrialByNode    = "bandwidth_by_node"
	TrialNode      = "numa_node"

	TrialCUDA     = "cuda_host_alloc" // cudaHostAlloc
	TrialOurs     = "hostmem"         // populated by several threads, then registered
	TrialPageable = "pageable"
)

// trial returns a series of the trials, or nil.
func (d *Device) trial(name string, where ...result.Label) *result.Series {
	if d.Trials == nil {
		return nil
	}
	s := d.Trials.Find(name, where...)
	if s == nil || s.Median <= 0 {
		return nil
	}
	return s
}

// maxLatency is more than a small copy takes on any host that was measured; 6 µs are
// usual.
const maxLatency = 40e-6

func slowSmallCopies(f *Facts, d *Device) []Finding {
	s := d.trial(TrialLatency)
	if s == nil || s.Median <= maxLatency {
		return nil
	}
	out := Finding{
		Severity: noteIf(f.byDesign(d)),
		Summary:  fmt.Sprintf("a copy of a few bytes takes %s", units.Seconds(s.Median)),
		Evidence: []string{fmt.Sprintf("Median of %d; usual are 5 to 15 µs", len(s.Samples))},
	}
	switch source := f.Host.Kernel.ClockSource; {
	case f.blocking():
		out.because = "blocking"
		out.Evidence = append(out.Evidence, launchBlocking+"="+f.Host.Env[launchBlocking])
	case slices.Contains(slowClocks, source):
		out.because, out.values = "clock_source", findings.Values{"clock": source}
		out.Evidence = append(out.Evidence, "/sys/devices/system/clocksource/clocksource0/current_clocksource is "+source)
	}
	return finding(out)
}

// slowClocks are sources of the time that are read over a bus, in a microsecond or more.
var slowClocks = []string{"hpet", "acpi_pm", "refined-jiffies", "jiffies"}

func slowPageable(_ *Facts, d *Device) []Finding {
	var out Finding
	worst := 1.0
	for _, s := range d.copies() {
		direction := s.Labels.Get(result.Direction)
		p := d.trial(TrialBandwidth, result.Label{Key: result.Memory, Value: TrialPageable}, result.Label{Key: result.Direction, Value: direction})
		if p == nil || s.Median <= 0 || p.Median >= 0.6*s.Median {
			continue
		}
		worst = min(worst, p.Median/s.Median)
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s: %s pageable, %s pinned", capital(directionText(&s)), units.Rate(p.Median), units.Rate(s.Median)))
	}
	if len(out.Evidence) == 0 {
		return nil
	}
	out.Summary = fmt.Sprintf("copies from pageable memory reach %s of pinned speed", units.Share(worst))
	out.values = findings.Values{"several times": units.Times(1 / worst)}
	return finding(out)
}

func writeCombinedSlow(_ *Facts, d *Device) []Finding {
	if !reference.Coherent(d.Name) {
		return nil
	}
	return seen(d.Name + ": on a GH200, 47 GiB/s instead of 97 GiB/s were measured")
}
