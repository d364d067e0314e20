package compare

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

// A keptSeries is a series of a kept run, with what its samples differ from their median by.
type keptSeries struct {
	bench string
	result.Series
	drift     float64
	residuals []float64 // as logarithms of factors, or differences where the scale is none
}

// keptFiles are kept runs on H200s: with the series of experiments, and of two days before with what the check
// measured alone.
var (
	keptFiles  = []string{"report-two-h200-2026-11-22", "report-h200-2026-11-22", "bench-h200-2026-11-22"}
	keptChecks = []string{"h200-2026-11-21", "two-h200-2026-11-21", "report-two-h200-2026-11-22", "report-h200-2026-11-22"}
)

// A keptDrift is by how many times the assumed drift a series differs between two GPUs of a host, in one run or two,
// or between hosts of a kind.
type keptDrift struct {
	runs    [2]string
	assumed float64
	z       float64
}

// of reports whether the pair is of a run and another one.
func (d keptDrift) of(run string) bool {
	return d.runs[0] != d.runs[1] && slices.Contains(d.runs[:], run)
}

// keptRuns reads the results of real GPUs: what was measured, and the drifts between all runs and GPUs.
func keptRuns(t *testing.T) (all []keptSeries, drifts []keptDrift) {
	t.Helper()
	type measured struct {
		run string
		s   result.Series
	}
	known := map[string][]measured{}
	pair := func(run, bench string, s result.Series) {
		if s.Labels.Get(result.Device) == "all" {
			return
		}
		anywhere := series{bench, 1, s}
		anywhere.Labels = slices.DeleteFunc(slices.Clone(s.Labels), func(l result.Label) bool { return l.Key == result.Device })
		key := anywhere.key()
		for _, other := range known[key] {
			scale := (&keptSeries{Series: s}).scale()
			if (&keptSeries{Series: other.s}).scale() == scale {
				a, e := estimated(scale.of(s.Samples)), estimated(scale.of(other.s.Samples))
				d := drift(bench, &s)
				drifts = append(drifts, keptDrift{[2]string{run, other.run}, d, (a.center - e.center) / (math.Sqrt2 * d)})
			}
		}
		known[key] = append(known[key], measured{run, s})
	}
	read := func(file string, to any) {
		text, err := os.ReadFile(filepath.Join("../../../../testdata/results", file+".json"))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, to))
	}
	for _, file := range keptFiles {
		var d struct{ Benches []result.Bench }
		read(file, &d)
		for _, b := range d.Benches {
			for _, s := range b.Series {
				if len(s.Samples) == 0 {
					continue
				}
				k := keptSeries{bench: b.Name, Series: s, drift: drift(b.Name, &s)}
				scale := k.scale()
				median := scale.of([]float64{s.Median})[0]
				for _, v := range scale.of(s.Samples) {
					k.residuals = append(k.residuals, v-median)
				}
				all = append(all, k)
				pair(file, b.Name, s)
			}
		}
	}
	for _, file := range keptChecks { // of two versions of the form
		var d struct {
			Devices []struct{ Bandwidth json.RawMessage }
		}
		read(file, &d)
		for _, device := range d.Devices {
			var old []struct {
				Direction string
				Samples   []float64 `json:"samples_gb_per_s"`
			}
			var now result.Bench
			if json.Unmarshal(device.Bandwidth, &old) != nil {
				require.NoError(t, json.Unmarshal(device.Bandwidth, &now))
			}
			for _, s := range now.Series {
				pair(file, "check", s)
			}
			for _, o := range old {
				s := result.Series{Name: "bandwidth", Unit: result.GBPerSecond, Samples: o.Samples, Labels: result.Labels{
					{Key: result.Memory, Value: "registered"}, {Key: result.Direction, Value: o.Direction}, {Key: result.Size, Value: "67108864"}}}
				s.Stats = result.Summarize(s.Samples)
				pair(file, "check", s)
			}
		}
	}
	return all, drifts
}

// bySize returns the drifts that a condition takes, by the assumed one.
func bySize(drifts []keptDrift, takes func(keptDrift) bool) map[float64][]float64 {
	out := map[float64][]float64{}
	for _, d := range drifts {
		if takes(d) {
			out[d.assumed] = append(out[d.assumed], d.z)
		}
	}
	return out
}

func (k *keptSeries) scale() scale {
	return scaleOf(k.Unit, []*Value{{Median: k.Median, samples: k.Samples}})
}

// again returns a run of the series on the same machine, of n samples, or of as many as were kept
// if n is 0: with a drift of its own, and times a factor.
func (k *keptSeries) again(r *rand.Rand, drifts []float64, n int, factor float64) result.Series {
	s := k.Series
	scale := k.scale()
	offset := k.drift * drifts[r.IntN(len(drifts))]
	if r.IntN(2) == 0 {
		offset = -offset
	}
	median := scale.of([]float64{k.Median})[0]
	if n == 0 {
		n = len(k.Samples)
	}
	s.Samples = make([]float64, n)
	for i := range s.Samples {
		v := median + offset + k.residuals[r.IntN(len(k.residuals))]
		if scale.log {
			s.Samples[i] = math.Exp(v) * factor
		} else {
			s.Samples[i] = max(v, 0) * scale.unit * factor
		}
	}
	s.Stats = result.Summarize(s.Samples)
	return s
}

// The assumed drifts are no less than those of kept runs.
func TestDriftCoversKeptRuns(t *testing.T) {
	t.Parallel()
	_, pairs := keptRuns(t)
	drifts := bySize(pairs, func(keptDrift) bool { return true })
	for _, d := range slices.Sorted(maps.Keys(drifts)) {
		squares, widest := 0.0, 0.0
		for _, z := range drifts[d] {
			squares += z * z / float64(len(drifts[d]))
			widest = max(widest, math.Abs(z))
		}
		t.Logf("drift %.3f: %d pairs, root mean square %.2f of it, at most %.2f", d, len(drifts[d]), math.Sqrt(squares), widest)
		assert.Less(t, math.Sqrt(squares), 1.2, "drift %v", d)
	}
}

// long reports whether sweeps try all combinations.
func long() bool { return os.Getenv("PINNED_SOAK") != "" }

// machine returns runs of one machine: those of a report, with noise and drift of kept runs.
type machine struct {
	t        *testing.T
	r        *rand.Rand
	retained []keptSeries
	drifts   map[float64][]float64
}

func newMachine(t *testing.T, seed uint64, file func(k *keptSeries) bool) *machine {
	t.Helper()
	all, drifts := keptRuns(t)
	m := &machine{t: t, r: rand.New(rand.NewPCG(seed, 1)), drifts: bySize(drifts, func(keptDrift) bool { return true })}
	known := map[string]bool{}
	for i := range all {
		s := series{all[i].bench, 1, all[i].Series}
		if !known[s.key()] && file(&all[i]) {
			known[s.key()] = true
			m.retained = append(m.retained, all[i])
		}
	}
	return m
}

// run is one run, of which one series is different by a factor; none for a negative index.
func (m *machine) run(host, n, different int, factor float64) Run {
	r := Run{Name: fmt.Sprintf("run %d", host), Tool: "pincheck", Complete: true, index: map[string]int{}}
	for i := range m.retained {
		f := 1.0
		if i == different {
			f = factor
		}
		k := &m.retained[i]
		r.series = append(r.series, series{k.bench, 1, k.again(m.r, m.drifts[k.drift], n, f)})
	}
	return r
}

func all(*keptSeries) bool { return true }

// differs reports whether a comparison says that anything differs.
func differs(c *Comparison) bool {
	return slices.ContainsFunc(c.Rows, func(r Row) bool { return r.Verdict == Worse || r.Verdict == Better || r.Verdict == Different })
}

// Of 1,000 comparisons of one machine with itself at most 1% find a difference in any series: in
// pairs and in fleets, of all experiments and of one, with the samples of quick runs and of
// others.
func TestOneMachineDiffersInOneOfAHundredComparisonsAtMost(t *testing.T) {
	t.Parallel()
	bandwidth := func(k *keptSeries) bool { return k.bench == "bandwidth" }
	rounds, widening := 100, 30
	if long() {
		rounds, widening = 1000, 1000
	}
	for _, c := range hosttest.Sample([]struct {
		name    string
		hosts   int
		samples int
		of      func(*keptSeries) bool
		rounds  int
	}{
		{"pair, report", 2, 0, all, widening},
		{"pair, report, 25 samples", 2, 25, all, widening},
		{"pair, bandwidth", 2, 0, bandwidth, rounds},
		{"pair, bandwidth, 25 samples", 2, 25, bandwidth, rounds},
		{"fleet of 4, report", 4, 0, all, widening},
		{"fleet of 4, bandwidth", 4, 0, bandwidth, rounds},
		{"fleet of 16, bandwidth", 16, 0, bandwidth, rounds},
	}) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, 7, c.of)
			wrong := 0
			for range c.rounds {
				var runs []Run
				for i := range c.hosts {
					runs = append(runs, m.run(i, c.samples, -1, 1))
				}
				got, err := Compare(runs, 0.03)
				require.NoError(t, err)
				if differs(got) {
					wrong++
				}
			}
			t.Logf("%d series: %d of %d comparisons differ", len(m.retained), wrong, c.rounds)
			assert.LessOrEqual(t, wrong, c.rounds/100)
		})
	}
}

// The same with the drift of one kept run from all others alone, for each in turn: what is assumed of drift holds for a
// run that it was not taken from.
func TestOneMachineDiffersSeldomWithTheDriftOfEachRun(t *testing.T) {
	t.Parallel()
	rounds := 40
	if long() {
		rounds = 1000
	}
	for _, run := range hosttest.Sample(keptChecks) { // the run of benches alone has no series of another one
		t.Run(run, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, 9, all)
			_, drifts := keptRuns(t)
			pairs := 0
			for size, z := range bySize(drifts, func(d keptDrift) bool { return d.of(run) }) {
				m.drifts[size] = z
				pairs += len(z)
			}
			require.Positive(t, pairs)
			wrong := 0
			for range rounds {
				c, err := Compare([]Run{m.run(0, 25, -1, 1), m.run(1, 25, -1, 1)}, 0.03)
				require.NoError(t, err)
				if differs(c) {
					wrong++
				}
			}
			t.Logf("%d pairs with other runs, %d series: %d of %d comparisons differ", pairs, len(m.retained), wrong, rounds)
			assert.LessOrEqual(t, wrong, rounds/100)
		})
	}
}

// A large copy of pinned memory that is 5% slower is found in nine of ten comparisons, among all
// other series, with the samples of a run by default. In a fleet of four it is found too.
func TestDifferencesOfALinkAreFound(t *testing.T) {
	t.Parallel()
	m := newMachine(t, 8, all)
	for _, samples := range []int{25, 0} {
		if samples == 0 && !long() {
			continue
		}
		for _, hosts := range hosttest.Sample([]int{2, 4}) {
			found, rounds := 0, 0
			for i := range m.retained {
				k := &m.retained[i]
				if !isLink(&k.Series) || k.Name != "bandwidth" || k.Labels.Get(result.Direction) == result.Both {
					continue
				}
				for range 2 {
					runs := []Run{m.run(0, samples, -1, 1), m.run(1, samples, i, 0.95)}
					for h := 2; h < hosts; h++ {
						runs = append(runs, m.run(h, samples, -1, 1))
					}
					c, err := Compare(runs, 0.03)
					require.NoError(t, err)
					rounds++
					if c.Rows[i].Verdict == Worse {
						found++
					}
				}
			}
			t.Logf("%s samples, %d runs: 5 %% found in %d of %d", cmpOr(samples), hosts, found, rounds)
			if samples > 0 {
				assert.GreaterOrEqual(t, found*10, rounds*9, "%d samples, %d runs", samples, hosts)
			}
		}
	}
}

func cmpOr(n int) string {
	if n == 0 {
		return "as many as a quick run's"
	}
	return strconv.Itoa(n)
}
