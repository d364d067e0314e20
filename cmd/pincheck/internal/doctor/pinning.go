package doctor

import (
	"fmt"
	"slices"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

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
	return finding(Finding{
		Summary:  fmt.Sprintf("pinning all memory in one call would block other CUDA programs for %s", units.Duration(stall)),
		Evidence: []string{fmt.Sprintf("%s at %s (%s)", units.Bytes(left), units.Rate(cuda.Median), source)},
	})
}
