package compare

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// measured is a series of large copies, whose drift is little.
func measured(name string, better result.Better, samples ...float64) result.Series {
	return result.Series{Name: "bandwidth", Unit: result.GBPerSecond, Better: better, Samples: samples, Stats: result.Summarize(samples),
		Labels: result.Labels{{Key: "name", Value: name}, {Key: result.Memory, Value: "registered"}, {Key: result.Size, Value: "67108864"}}}
}

func runsOf(t *testing.T, hosts ...[]result.Series) []Run {
	t.Helper()
	var files []File
	for i, s := range hosts {
		files = append(files, File{Name: fmt.Sprintf("%d.json", i), Documents: []Document{{
			Tool: "pincheck", Host: fmt.Sprintf("h%d", i), Complete: true, Benches: []result.Bench{{Name: "bandwidth", Series: s, Complete: true}}}}})
	}
	return Runs(files)
}

func noise(r *rand.Rand, center, scatter float64, n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = center * (1 + scatter*r.NormFloat64())
	}
	return out
}

func find(t *testing.T, c *Comparison, name string) *Row {
	t.Helper()
	for i := range c.Rows {
		if c.Rows[i].Labels.Get("name") == name {
			return &c.Rows[i]
		}
	}
	require.Fail(t, "no series "+name)
	return nil
}

func TestTwoRuns(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 1))
	up, down := noise(r, 55, 0.005, 9), noise(r, 44, 0.005, 9)
	runs := runsOf(t, []result.Series{
		measured("lower", result.Higher, up...), measured("higher", result.Higher, down...),
		measured("lower time", result.Lower, up...), measured("higher time", result.Lower, down...),
		measured("neither", "", up...), measured("same", result.Higher, up...),
		measured("slightly", result.Higher, 100, 100, 100, 100, 100, 100, 100, 100),
		measured("few", result.Higher, 55, 55, 55), measured("single", result.Higher, 55),
		measured("scattered", result.Higher, 10, 20, 30, 40, 50, 60, 70),
		measured("zero", result.Higher, 0, 0, 0, 0, 0, 0, 0, 0),
		measured("gone", result.Higher, 1, 2, 3),
	}, []result.Series{
		measured("lower", result.Higher, down...), measured("higher", result.Higher, up...),
		measured("lower time", result.Lower, down...), measured("higher time", result.Lower, up...),
		measured("neither", "", down...), measured("same", result.Higher, noise(r, 55, 0.005, 25)...),
		measured("slightly", result.Higher, 98, 98, 98, 98, 98, 98, 98, 98),
		measured("few", result.Higher, 40, 40, 40), measured("single", result.Higher, 56),
		measured("scattered", result.Higher, 15, 25, 35, 45, 55, 65, 75),
		measured("zero", result.Higher, 1, 1, 1, 1, 1, 1, 1, 1),
		measured("new", result.Higher, 1, 2, 3),
	})
	c, err := Compare(runs, 0.03)
	require.NoError(t, err)
	for name, want := range map[string]Verdict{
		"lower": Worse, "higher": Better, "lower time": Better, "higher time": Worse, "neither": Different, "same": Same,
		"slightly": Same, // 2% for sure
		"few":      Untested, "single": Same, "scattered": Unclear, "zero": Better, "gone": Missing, "new": Missing,
	} {
		assert.Equal(t, want, find(t, c, name).Verdict, name)
	}
	assert.Equal(t, Worse, c.Verdict)
	assert.InDelta(t, 0.8, *find(t, c, "lower").Ratio, 0.01)
	assert.Nil(t, find(t, c, "zero").Ratio)
	assert.Nil(t, find(t, c, "few").P)
	assert.Less(t, *find(t, c, "lower").P, 1e-6)
	assert.Nil(t, find(t, c, "gone").Values[1])
	assert.Nil(t, find(t, c, "new").Values[0])
	assert.Equal(t, 9, find(t, c, "lower").Values[0].Samples)

	wide, err := Compare(runs, 0.5)
	require.NoError(t, err)
	assert.Equal(t, Same, wide.Verdict)
}

// The threshold is a share of the first run's value, which is the measure for the second.
func TestThresholdIsAShareOfTheFirstRun(t *testing.T) {
	t.Parallel()
	steady := func(v float64) []float64 { return []float64{v, v, v, v, v, v, v, v} }
	for _, c := range []struct {
		first, second float64
		want          Verdict
	}{
		{100, 103.05, Better}, // 2.96% of the second
		{100, 102.95, Same},
		{100, 97.05, Same}, // 3.04% of the second
		{100, 96.95, Worse},
	} {
		runs := runsOf(t, []result.Series{measured("s", result.Higher, steady(c.first)...)}, []result.Series{measured("s", result.Higher, steady(c.second)...)})
		got, err := Compare(runs, 0.03)
		require.NoError(t, err)
		assert.Equal(t, c.want, find(t, got, "s").Verdict, "%v", c)
	}
}

func TestTheSameDataNeverDiffer(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(2, 2))
	for n := range 15 {
		var series []result.Series
		for i := range 10 {
			series = append(series, measured(fmt.Sprint(i), result.Higher, noise(r, 50*r.Float64(), 0.1, n+1)...))
		}
		c, err := Compare(runsOf(t, series, series), 0)
		require.NoError(t, err)
		assert.Equal(t, Same, c.Verdict)
		for _, row := range c.Rows {
			assert.Equal(t, Same, row.Verdict)
			if row.P != nil {
				assert.InDelta(t, 1, *row.P, 1e-9)
			}
		}
		c, err = Compare(runsOf(t, series, series, series, series), 0)
		require.NoError(t, err)
		assert.Equal(t, Same, c.Verdict)
	}
}

func TestFleet(t *testing.T) {
	t.Parallel()
	host := func(up, pin float64, more ...result.Series) []result.Series {
		return append([]result.Series{measured("up", result.Higher, up), measured("latency", result.Lower, 1/up), measured("pin", result.Higher, pin)}, more...)
	}
	c, err := Compare(runsOf(t,
		host(55.3, 16, measured("odd", "", 7)), host(55.4, 26, measured("odd", "", 7)),
		host(41, 17, measured("odd", "", 7)), host(55.5, 25, measured("odd", "", 9)),
		host(70, 21, measured("lone", "", 1)),
	), 0.03)
	require.NoError(t, err)
	assert.Equal(t, Worse, c.Verdict)

	up := find(t, c, "up")
	assert.Equal(t, Worse, up.Verdict)
	assert.InDelta(t, 55.4, *up.Center, 1e-9)
	assert.InDelta(t, 0.1, *up.Deviation, 1e-9)
	verdicts := func(r *Row) (out []Verdict) {
		for _, v := range r.Values {
			if v == nil {
				out = append(out, Missing)
			} else {
				out = append(out, v.Verdict)
			}
		}
		return out
	}
	assert.Equal(t, []Verdict{"", "", Worse, "", Better}, verdicts(up))
	assert.Equal(t, []Verdict{"", "", Worse, "", Better}, verdicts(find(t, c, "latency")))
	pin := find(t, c, "pin")
	assert.Equal(t, Divided, pin.Verdict, "16, 17, 21, 25, 26: none stands out")
	assert.Equal(t, make([]Verdict, 5), verdicts(pin))
	odd := find(t, c, "odd")
	assert.Equal(t, Different, odd.Verdict)
	assert.Equal(t, []Verdict{"", "", "", Different, Missing}, verdicts(odd))
	assert.Equal(t, Missing, find(t, c, "lone").Verdict)

	require.Len(t, c.Hosts, 5)
	three := 3
	assert.Equal(t, Host{Name: "h0", Series: 4, Missing: 1}, c.Hosts[0])
	assert.Equal(t, 2, c.Hosts[2].Worse)
	assert.Equal(t, 2, c.Hosts[2].OutOfLine)
	assert.Contains(t, []int{0, 1}, *c.Hosts[2].Farthest)
	assert.Equal(t, Host{Name: "h3", Series: 4, OutOfLine: 1, Worse: 1, Missing: 1, Farthest: &three}, c.Hosts[3])
	assert.Equal(t, Host{Name: "h4", Series: 3, OutOfLine: 2, Missing: 1}, c.Hosts[4])

	ahead, err := Compare(runsOf(t, host(55, 20), host(55, 20), host(70, 20)), 0.03)
	require.NoError(t, err)
	assert.Equal(t, Same, ahead.Verdict, "a host that is better is named, and is no failure")
	assert.Equal(t, Better, find(t, ahead, "up").Verdict)

	within, err := Compare(runsOf(t, host(55, 20), host(55, 20), host(54, 20)), 0.03)
	require.NoError(t, err)
	assert.Equal(t, Same, find(t, within, "up").Verdict, "2% are less than the threshold")
}

// A host is out of line if it is farther from the others than these scatter, as normal values, and
// than runs of one machine differ.
func TestDeviationOfAFleetIsScaled(t *testing.T) {
	t.Parallel()
	compare := func(threshold, last float64, of func(string, result.Better, ...float64) result.Series) (*Row, Verdict) {
		var hosts [][]result.Series
		for _, v := range []float64{99, 99, 100, 100, 101, 101, last} {
			hosts = append(hosts, []result.Series{of("s", result.Higher, v)})
		}
		c, err := Compare(runsOf(t, hosts...), threshold)
		require.NoError(t, err)
		r := find(t, c, "s")
		assert.InDelta(t, 100, *r.Center, 1e-9)
		assert.InDelta(t, 1, *r.Deviation, 1e-9)
		return r, r.Values[6].Verdict
	}
	for distance, want := range map[float64]Verdict{3.4: "", 4: "", 10: Better} { // the deviation of the others is 1.48
		_, got := compare(0, 100+distance, measured)
		assert.Equal(t, want, got, distance)
	}
	drifting := func(name string, better result.Better, samples ...float64) result.Series {
		s := measured(name, better, samples...)
		s.Name = "something"
		return s
	}
	for distance, want := range map[float64]Verdict{10: "", 50: "", 200: Better} {
		_, got := compare(0, 100+distance, drifting)
		assert.Equal(t, want, got, distance)
	}
	for threshold, want := range map[float64]Verdict{0.009: Divided, 0.012: Divided, 0.016: Same} { // of 100: 1.48 counts
		r, _ := compare(threshold, 101, measured)
		assert.Equal(t, want, r.Verdict, threshold)
	}
}

// Values at the end of what numbers can be give no infinities, which JSON cannot hold.
func TestComparisonsAreFinite(t *testing.T) {
	t.Parallel()
	extremes := [][]float64{{0, 0, 0, 0}, {1e308, 1e308, 1e308, 1.7e308}, {-1e308, -1e308, 1e308, 1e308}, {5e-324, 5e-324, 5e-324, 5e-324}, {1, 1, 1, 1}}
	for _, unit := range []result.Unit{result.GBPerSecond, result.Ratio, result.Count, result.Seconds} {
		host := func(shift int) (out []result.Series) {
			for i := range extremes {
				s := measured(fmt.Sprint(i), result.Higher, extremes[(i+shift)%len(extremes)]...)
				s.Unit = unit
				out = append(out, s)
			}
			return out
		}
		for _, hosts := range [][][]result.Series{{host(0), host(1)}, {host(1), host(0)}, {host(0), host(3)}, {host(0), host(1), host(2), host(3)}} {
			c, err := Compare(runsOf(t, hosts...), 0.03)
			require.NoError(t, err)
			_, err = json.Marshal(c)
			require.NoError(t, err)
			for _, r := range c.Rows {
				if r.P != nil {
					assert.False(t, math.IsNaN(*r.P), "%v", r)
				}
			}
		}
	}
}

// Several runs of a side in one file say more than one: what a run has of its own counts less.
func TestMoreRunsAreSurer(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(4, 4))
	p := func(runs int) float64 {
		var files []File
		for i, center := range []float64{100, 130} {
			f := File{Name: fmt.Sprint(i)}
			for range runs {
				s := measured("s", result.Higher, noise(r, center, 0.01, 9)...)
				s.Name = "something"
				f.Documents = append(f.Documents, Document{Tool: "pincheck", Host: fmt.Sprint(i), Benches: []result.Bench{{Name: "b", Series: []result.Series{s}}}})
			}
			files = append(files, f)
		}
		c, err := Compare(Runs(files), 0.03)
		require.NoError(t, err)
		return *c.Rows[0].P
	}
	assert.Greater(t, p(1), alpha)
	assert.Less(t, p(6), alpha)
}

func TestRunsThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	a, b := []result.Series{measured("a", "", 1)}, []result.Series{measured("b", "", 1)}
	for want, run := range map[string]func() (*Comparison, error){
		"1 run: two or more":   func() (*Comparison, error) { return Compare(runsOf(t, a), 0) },
		"no series in common":  func() (*Comparison, error) { return Compare(runsOf(t, a, b), 0) },
		"have no series in":    func() (*Comparison, error) { return Compare(runsOf(t, a, a, b), 0) },
		"threshold -1: must":   func() (*Comparison, error) { return Compare(runsOf(t, a, a), -1) },
		"threshold NaN: must":  func() (*Comparison, error) { return Compare(runsOf(t, a, a), math.NaN()) },
		"threshold +Inf: must": func() (*Comparison, error) { return Compare(runsOf(t, a, a), math.Inf(1)) },
	} {
		c, err := run()
		assert.ErrorContains(t, err, want)
		assert.Nil(t, c)
	}
}

func TestSeriesAreTheSameByAllTheirLabels(t *testing.T) {
	t.Parallel()
	labelled := func(unit result.Unit, labels ...result.Label) result.Series {
		return result.Series{Name: "x", Unit: unit, Labels: labels, Samples: []float64{1}}
	}
	a, b := result.Label{Key: "a", Value: "1"}, result.Label{Key: "b", Value: "2"}
	runs := runsOf(t, []result.Series{labelled("s", a, b), labelled("bytes", a, b), labelled("s", a)}, []result.Series{labelled("s", b, a)})
	c, err := Compare(runs, 0)
	require.NoError(t, err)
	require.Len(t, c.Rows, 3)
	assert.Equal(t, []Verdict{Same, Missing, Missing}, []Verdict{c.Rows[0].Verdict, c.Rows[1].Verdict, c.Rows[2].Verdict})
}

func TestRunsAndTheirNames(t *testing.T) {
	t.Parallel()
	document := func(host string, samples ...float64) Document {
		return Document{Tool: "pincheck", Host: host, Complete: true, Benches: []result.Bench{{Name: "b", Series: []result.Series{measured("s", "", samples...)}}}}
	}
	name := func(runs []Run) (out []string) {
		for _, r := range runs {
			out = append(out, r.Name)
		}
		return out
	}
	runs := Runs([]File{{Name: "fleet.jsonl", Documents: []Document{document("x", 1), document("y", 2), document("x", 3)}}})
	assert.Equal(t, []string{"x", "y"}, name(runs))
	assert.Equal(t, []float64{1, 3}, runs[0].series[0].Samples, "the samples of both documents")
	assert.InDelta(t, 2, runs[0].series[0].Median, 0)
	runs = Runs([]File{{Name: "d/before.json", Documents: []Document{document("x", 1)}}, {Name: "after.json", Documents: []Document{document("x", 3)}}})
	assert.Equal(t, []string{"before", "after"}, name(runs))
	runs = Runs([]File{{Name: "a.json", Documents: []Document{document("", 1), document("", 3)}}, {Name: "b/a.json", Documents: []Document{document("", 1)}}})
	assert.Equal(t, []string{"a", "a (2)", "a (3)"}, name(runs))
}

// Runs of the simulated GPU differ by what else the host does: no series gets a verdict, however much they differ.
func TestSimulatedRunsGetNoVerdict(t *testing.T) {
	t.Parallel()
	steady := func(v float64) []result.Series {
		return []result.Series{measured("s", result.Higher, v, v, v, v, v, v, v, v)}
	}
	for _, hosts := range [][][]result.Series{{steady(55), steady(20)}, {steady(55), steady(55), steady(20), steady(55)}} {
		runs := runsOf(t, hosts...)
		c, err := Compare(runs, 0.03)
		require.NoError(t, err)
		require.Equal(t, Worse, c.Verdict)
		runs[1].Simulated = true
		c, err = Compare(runs, 0.03)
		require.NoError(t, err)
		assert.Equal(t, Simulated, c.Verdict)
		for _, r := range c.Rows {
			assert.Equal(t, Simulated, r.Verdict)
			assert.Nil(t, r.P)
			for _, v := range r.Values {
				assert.Empty(t, v.Verdict)
			}
		}
		for _, h := range c.Hosts {
			assert.Zero(t, h.OutOfLine+h.Worse)
			assert.Nil(t, h.Farthest)
		}
	}
}
