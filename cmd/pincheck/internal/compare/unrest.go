package compare

import (
	"math"
	"slices"
)

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
