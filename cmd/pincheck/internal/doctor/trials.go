package doctor

import (
	"fmt"
	"slices"
	"time"

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

// pinningChecks find why pinning memory takes long.
var pinningChecks = []Check{
	{ID: "slow_pinning", Device: slowPinning},
	{ID: "fragmented_memory", Suppresses: []string{"thp_defrag_always"}, Host: fragmented},
	{ID: "thp_off", Host: thpOff},
	{ID: "thp_defrag_always", Host: thpDefrag},
	{ID: "pinning_stalls_others", Device: stallsOthers},
}

const (
	// minCUDARate is the rate of cudaHostAlloc, in GB/s, below which pinning is slow even
	// for one thread of an old processor; 1.3 to 3.3 were reported.
	minCUDARate = 1.0
	// muchFaster is how many times faster pinning by several threads is where it is worth
	// a change.
	muchFaster = 3.0
)

func slowPinning(f *Facts, d *Device) []Finding {
	by := func(method string) *result.Series {
		return d.trial(TrialPinRate, result.Label{Key: result.Method, Value: method})
	}
	cuda, ours := by(TrialCUDA), by(TrialOurs)
	if cuda == nil {
		return nil
	}
	out := Finding{
		Summary:  "cudaHostAlloc pins 64 GB in " + units.Seconds(64/cuda.Median),
		Evidence: []string{fmt.Sprintf("cudaHostAlloc pins %s", units.Rate(cuda.Median))},
		values:   findings.Values{"seconds": units.Seconds(64 / cuda.Median)},
	}
	if ours != nil {
		out.Evidence = append(out.Evidence, fmt.Sprintf("Populated by several threads, then registered: %s", units.Rate(ours.Median)))
		out.Summary += ", threads in " + units.Seconds(64/ours.Median)
		out.values["seconds"] += " instead of " + units.Seconds(64/ours.Median)
	}
	switch {
	case cuda.Median < minCUDARate:
		out.Severity = noteIf(f.byDesign(d))
		if text, often := throttledText(f.Host.Cgroup); often {
			out.because = "quota"
			out.Evidence = append(out.Evidence, text)
		}
		if share, ok := hugeShare(f); ok {
			out.Evidence = append(out.Evidence, fmt.Sprintf("%s of free memory is in blocks of 2 MiB and more", units.Share(share)))
		}
	case ours != nil && ours.Median >= muchFaster*cuda.Median:
		out.Severity = Note
	default:
		return nil
	}
	return finding(out)
}

// hugeShare returns which share of the free memory is in blocks of at least 512 pages.
func hugeShare(f *Facts) (share float64, ok bool) {
	pages, huge := 0, 0
	for _, z := range f.Host.Memory.Free {
		pages += z.Pages
		huge += z.Huge
	}
	if pages == 0 {
		return 0, false
	}
	return float64(huge) / float64(pages), true
}

const (
	// minHugeShare is the share of free memory in huge blocks below which memory is
	// fragmented.
	minHugeShare = 0.10
	// oftenInVain is the share of page faults that got no huge page, above which that
	// costs; of at least manyFaults.
	oftenInVain = 0.25
	manyFaults  = 10000
)

// fragmented asks for both: little is free in huge blocks, and faults went without. Free
// memory alone is small on every host that caches files.
func fragmented(f *Facts) []Finding {
	if f.Host.Memory.Stalls == nil {
		return nil
	}
	share, ok := hugeShare(f)
	s := f.Host.Memory.Stalls
	faults := s.HugeFaults + s.HugeFallback
	if !ok || share >= minHugeShare || faults < manyFaults || float64(s.HugeFallback) < oftenInVain*float64(faults) {
		return nil
	}
	return finding(Finding{
		Summary: "memory is fragmented, so few huge pages are available",
		Evidence: []string{
			fmt.Sprintf("/proc/buddyinfo: %s of free memory is in blocks of 2 MiB and more", units.Share(share)),
			fmt.Sprintf("/proc/vmstat since boot: thp_fault_fallback %d of %d, compact_stall %d, compact_fail %d", s.HugeFallback, faults, s.Compact, s.CompactFail),
		},
	})
}

func thpOff(f *Facts) []Finding {
	if f.Host.Memory.THP.Enabled != "never" {
		return nil
	}
	// It costs something if pinning is slow.
	slow := slices.ContainsFunc(f.Devices, func(d Device) bool {
		s := d.trial(TrialPinRate, result.Label{Key: result.Method, Value: TrialCUDA})
		return s != nil && s.Median < minCUDARate
	})
	return finding(Finding{Severity: noteIf(!slow), Evidence: []string{"/sys/kernel/mm/transparent_hugepage/enabled is never"}})
}

func thpDefrag(f *Facts) []Finding {
	if f.Host.Memory.THP.Defrag != "always" || f.Host.Memory.THP.Enabled == "never" {
		return nil
	}
	return seen("/sys/kernel/mm/transparent_hugepage/defrag is always")
}

// longStall is how long others may wait for the driver before their watchdogs act.
const longStall = 60 * time.Second

func stallsOthers(f *Facts, d *Device) []Finding {
	cuda := d.trial(TrialPinRate, result.Label{Key: result.Method, Value: TrialCUDA})
	left, source, ok := f.headroom()
	if cuda == nil || !ok || d != &f.Devices[0] {
		return nil
	}
	stall := time.Duration(float64(left) / cuda.Median)
	if stall < longStall {
		return nil
	}
	return summarized(fmt.Sprintf("pinning all memory in one call would block other CUDA programs for %s", units.Duration(stall)),
		fmt.Sprintf("%s at %s (%s)", units.Bytes(left), units.Rate(cuda.Median), source))
}

const launchBlocking = "CUDA_LAUNCH_BLOCKING"

// blocking reports whether each launch waits for its end.
func (f *Facts) blocking() bool {
	value := f.Host.Env[launchBlocking]
	return value != "" && value != "0"
}

func launchesBlock(f *Facts) []Finding {
	if len(f.Devices) == 0 || !f.blocking() {
		return nil
	}
	return summarized("each kernel launch waits for its end ("+launchBlocking+")", launchBlocking+"="+f.Host.Env[launchBlocking])
}
