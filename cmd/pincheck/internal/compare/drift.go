package compare

import (
	"math"
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
		return s.Labels.Size() >= largeCopy && slices.Contains([]string{"registered", "cuda_host_alloc", "write_combined", "mapped"}, s.Labels.Get(result.Memory))
	case "round_trip":
		return s.Labels.Get(result.Method) == "reused"
	case "stage_time":
		return s.Labels.Get(result.Method) == "reused" && strings.HasSuffix(s.Labels.Get("stage"), "load")
	}
	return false
}

// Other work on a machine lasts for longer than a sample: it covers all samples of some series, which then look
// steady, and none of the same series in another run. The samples of one series do not show that; those of a whole
// run do. A run whose series scatter more than those of a quiet machine is of a busy one: then a series of it is
// known no better than single samples of such series are.
//
// The figures are those at which TestABusyMachineDiffersInOneOfAHundredComparisonsAtMost and
// TestDifferencesOfALinkAreFound both hold.
const (
	// quietLink and quietOther are the scatter of samples on a quiet machine, in units of the drift: of the
	// series of a link, and of others. Of the runs kept in testdata/results it is 1.9, and 0.9 at most.
	quietLink, quietOther = 2.5, 1
	// busyFactor is how far series of a busy machine differ, in units of the scatter of samples.
	busyFactor = 3
	// busyFreedom are the degrees of freedom of that: its tails are heavy.
	busyFreedom = 2
	// wildest is the number of series of a class for which the one that scatters most does not count: it
	// shows nothing of the others.
	wildest = 8
	// runWeight is the weight of all series of a run in a class of few series, as a number of series.
	runWeight = 4
)

// largestLinkDrift is the largest drift of a series of a link: see drift.
const largestLinkDrift = 0.01

// quiet returns the variance of the samples of a quiet machine in series of a class, which its drift names.
func quiet(class float64) float64 {
	if class <= largestLinkDrift*largestLinkDrift {
		return quietLink * quietLink * class
	}
	return quietOther * quietOther * class
}

// scatter returns the variance of samples; ok is false if they are too few, or beyond what numbers hold.
func scatter(samples []float64) (value float64, ok bool) {
	if len(samples) < minSamples {
		return 0, false
	}
	middle := mean(samples)
	for _, v := range samples {
		value += (v - middle) * (v - middle) / float64(len(samples)-1)
	}
	return value, !math.IsNaN(value) && !math.IsInf(value, 0)
}

// addUnrest widens the drift of the values of a run by what the run itself shows of other work on the machine.
// Classes are the series that are assumed to drift as much.
func addUnrest(common []*Row, run int) {
	classes := map[float64][]float64{}
	for _, r := range common {
		if v := r.Values[run]; v != nil {
			if s, ok := scatter(scaleOf(r.Unit, r.Values).of(v.samples)); ok {
				classes[v.drift.value] = append(classes[v.drift.value], s)
			}
		}
	}
	ofRun, n := 0.0, 0
	for class, all := range classes {
		slices.Sort(all)
		all = all[:len(all)-len(all)/wildest]
		classes[class] = all
		ofRun += sumOf(all) / quiet(class)
		n += len(all)
	}
	for _, r := range common {
		v := r.Values[run]
		if v == nil || n == 0 {
			continue
		}
		class := v.drift.value
		all := classes[class]
		busy := (sumOf(all) + runWeight*quiet(class)*ofRun/float64(n)) / float64(len(all)+runWeight)
		if busy > quiet(class) {
			v.drift = variance{busyFactor * busyFactor * busy, busyFreedom}
		}
	}
}

func sumOf(values []float64) (sum float64) {
	for _, v := range values {
		sum += v
	}
	return sum
}
