package compare

import (
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// Runs of one machine differ by more than their samples scatter: pages lie elsewhere, clocks and
// other work of the host change. drift is the standard deviation of what a run has of its own, as a
// share, or of 1 for ratios and counts. The samples of a run do not show it.
//
// The figures are of the kept runs on H200s in testdata/results, of 2026-11-22: how far GPUs of one
// host, and hosts of one kind, differ in the same series. That is more than one machine
// differs from itself. TestDriftCoversKeptRuns compares them, and TestOneMachineDiffersSeldomWithTheDriftOfEachRun
// what comes of it.
func drift(bench string, s *result.Series) float64 {
	switch {
	case s.Name == "kept_per_byte": // counted, not timed
		return 0.005
	case s.Name == "call_allocations": // and those of other goroutines
		return 0.05
	case isLink(s): // the link and the GPU alone decide
		if s.Labels.Get(result.Direction) == result.Both {
			return 0.01
		}
		return 0.004
	case s.Unit == result.Ratio:
		return 0.05
	case s.Name == "bandwidth_all_devices":
		return 0.02
	case s.Name == "stage_time": // some are short
		return 0.4
	}
	switch bench {
	case "calls", "alloc":
		return 0.3
	case "overlap":
		switch {
		case s.Name == "call_time" && s.Labels.Get(result.Memory) == "pinned":
			return 0.7 // some microseconds
		case s.Labels.Get(result.Memory) == "pageable": // the call copies, and begins late or early
			return 0.3
		}
	}
	return 0.12
}

// largeCopy is the size from which on the link decides how long a copy takes, and not the call.
const largeCopy = 4 << 20

// isLink reports whether a series is of large copies that the processor has no part in.
func isLink(s *result.Series) bool {
	switch s.Name {
	case "device_memory", "device_memory_checked":
		return true
	case "bandwidth", "bandwidth_by_node":
		return sizeOf(s.Labels) >= largeCopy && slices.Contains([]string{"registered", "cuda_host_alloc", "write_combined", "mapped"}, s.Labels.Get(result.Memory))
	case "round_trip":
		return s.Labels.Get(result.Method) == "reused"
	case "stage_time":
		return s.Labels.Get(result.Method) == "reused" && strings.HasSuffix(s.Labels.Get("stage"), "load")
	}
	return false
}
