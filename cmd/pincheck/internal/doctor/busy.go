package doctor

import (
	"fmt"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

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
// kernels, and no copies. What was looked at and is idle is said if nothing explains them.
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
