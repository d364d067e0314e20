package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A fakeHost has builds whose samples come from distributions, and a clock of its own.
type fakeHost struct {
	rows    []rowInfo
	oldRows []rowInfo // nil for the same
	now     time.Time
	random  *rand.Rand
	noise   func(*rand.Rand) float64
	process float64                   // the spread between processes
	slower  [2]float64                // how many times the cost of the row each build has
	answer  func(build, string) error // to a command, in place of a sample
	asked   []string
	started int
}

func (h *fakeHost) comparison() *comparison {
	return &comparison{
		start: func(_ context.Context, b build, v variant) (side, error) {
			h.started++
			return &fakeSide{h, b, v, map[string]float64{}}, nil
		},
		load: func() (func() error, error) { return func() error { return nil }, nil },
		c:    func(context.Context, string) ([]line, error) { return nil, errors.New("no C here") },
		now:  func() time.Time { return h.now },
		log:  io.Discard,
		rows: regexp.MustCompile(""), pairs: minPairs, budget: time.Duration(len(h.rows)) * 4 * time.Second,
	}
}

func (h *fakeHost) run(t *testing.T) *report {
	t.Helper()
	result, err := h.comparison().run(t.Context())
	require.NoError(t, err)
	return reportOf(result, hostFacts{})
}

type fakeSide struct {
	*fakeHost
	build   build
	variant variant
	effects map[string]float64 // of this process on rows
}

func (s *fakeSide) hello() *hello {
	if s.build == oldBuild && s.oldRows != nil {
		return &hello{Commit: "old", Rows: s.oldRows}
	}
	return &hello{Commit: s.build.String(), Rows: s.rows}
}

func (s *fakeSide) request(_ context.Context, command string) (*sample, error) {
	s.asked = append(s.asked, fmt.Sprintf("%s%v %s", s.variant.prefix, s.build, command))
	if s.answer != nil {
		if err := s.answer(s.build, command); err != nil {
			return nil, err
		}
	}
	what, name, _ := strings.Cut(command, " ")
	if what != "sample" && what != "once" {
		return nil, nil
	}
	s.now = s.now.Add(80 * time.Millisecond)
	if s.effects[name] == 0 {
		s.effects[name] = math.Exp(s.process * s.random.NormFloat64())
	}
	drift := 1 + 0.1*math.Sin(float64(s.now.UnixMilli())/30e3)
	cost := drift * s.effects[name] * s.noise(s.random) * s.slower[s.build]
	return &sample{Figures: []figure{{Value: cost, Unit: "µs"}, {Name: "rate", Value: 1 / cost, Unit: "GB/s"}}}, nil
}

func (s *fakeSide) close() error {
	if s.answer == nil {
		return nil
	}
	return s.answer(s.build, "end")
}

// fake returns a host with so many rows, and builds that are the same.
func fake(rows int, noise func(*rand.Rand) float64) *fakeHost {
	h := &fakeHost{now: time.Unix(0, 0), random: rand.New(rand.NewPCG(3, 4)), noise: noise, slower: [2]float64{1, 1}}
	for i := range rows {
		h.rows = append(h.rows, rowInfo{Name: fmt.Sprintf("row/%d", i)})
	}
	return h
}

// onGPUs returns noise that is resampled from benchmarks of H200s: the samples of each divided by their median.
func onGPUs(t *testing.T) func(*rand.Rand) float64 {
	var ratios []float64
	files, err := filepath.Glob("../../testdata/results/copies-*h200*.txt")
	require.NoError(t, err)
	for _, name := range files {
		file, err := os.Open(name)
		require.NoError(t, err)
		defer file.Close()
		text, err := io.ReadAll(bufio.NewReader(file))
		require.NoError(t, err)
		byName := map[string][]float64{}
		for _, l := range parseLines(text) {
			if v := l.values["ns/op"]; v > 0 {
				byName[l.name] = append(byName[l.name], v)
			}
		}
		for _, all := range byName {
			for _, v := range all {
				if len(all) >= 3 {
					ratios = append(ratios, v/median(all))
				}
			}
		}
	}
	require.Greater(t, len(ratios), 100)
	return func(random *rand.Rand) float64 { return ratios[random.IntN(len(ratios))] }
}

func noises(t *testing.T) map[string]func(*rand.Rand) float64 {
	return map[string]func(*rand.Rand) float64{
		"resampled": onGPUs(t),
		"outliers":  outliers,
		"broad":     func(random *rand.Rand) float64 { return math.Exp(0.08 * random.NormFloat64()) },
	}
}

// Of 1,000 rows of two runs of one build not one percent is named, in all.
func TestOneBuildIsNotNamed(t *testing.T) {
	t.Parallel()
	for name, noise := range noises(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := fake(1000/3, noise)
			h.process = 0.02
			r := h.run(t)
			assert.LessOrEqual(t, len(r.Worse), len(h.rows)/100, "%v", r.Worse)
			t.Logf("%d figures named, %d unclear", len(r.Worse), len(r.Unclear))
		})
	}
}

// A build that takes 15 % longer is named in 95 % of all rows.
func TestASlowerBuildIsNamed(t *testing.T) {
	t.Parallel()
	for name, noise := range noises(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := fake(200, noise)
			h.slower[newBuild], h.process = 1.15, 0.01
			r := h.run(t)
			assert.GreaterOrEqual(t, len(r.Worse), 2*len(h.rows)*95/100)
			assert.Equal(t, exitWorse, r.exitCode())
			t.Logf("%d of %d figures named", len(r.Worse), len(r.Rows))
		})
	}
}

// No test of these has noise.
func quiet(*rand.Rand) float64 { return 1 }

func TestSamplesAlternate(t *testing.T) {
	t.Parallel()
	h := fake(1, quiet)
	h.rows = append(h.rows, rowInfo{Name: "row/0/plain", Of: "row/0"})
	h.run(t)
	text := strings.Join(h.asked, "\n")
	assert.Contains(t, text, "new prepare row/0\nold prepare row/0\nnew prepare row/0/plain\n"+
		"new sample row/0\nold sample row/0\nnew sample row/0/plain\n"+ // to warm up
		"new sample row/0\nold sample row/0\nnew sample row/0/plain\nold sample row/0\nnew sample row/0\n"+
		"new sample row/0\nold sample row/0\nold sample row/0\nnew sample row/0\nnew sample row/0/plain\n")
	assert.True(t, strings.HasSuffix(text, "new close row/0\nold close row/0\nnew close row/0/plain"), text)
}

func TestRowsThatLookWorseAreMeasuredInNewProcesses(t *testing.T) {
	t.Parallel()
	h := fake(3, quiet)
	h.rows[2].TwoCores = true
	started := 0
	h.answer = func(_ build, command string) error {
		if command == "prepare row/1" {
			started++ // the first pair of processes finds it slower
		}
		h.slower[newBuild] = 1
		if strings.HasSuffix(command, "row/1") && started <= 2 {
			h.slower[newBuild] = 1.3
		}
		return nil
	}
	r := h.run(t)
	assert.Empty(t, r.Worse)
	assert.Equal(t, exitSame, r.exitCode())
	assert.Equal(t, 2*(2+1), h.started, "for all rows on all cores and on two, and row/1 again")
	for _, row := range r.Rows {
		assert.Equal(t, map[bool]int{true: 2, false: 1}[strings.HasPrefix(row.Row, "row/1")], row.Rounds, row.Row)
	}
}

func TestVariantsHaveTheirRows(t *testing.T) {
	t.Parallel()
	h := fake(3, quiet)
	h.rows[1].TwoCores, h.rows[2].Busy, h.rows[2].Quick = true, true, true
	names := func(c *comparison) (all []string) {
		result, err := c.run(t.Context())
		require.NoError(t, err)
		for _, m := range result.measurements {
			all = append(all, m.fullName())
		}
		return all
	}
	c := h.comparison()
	assert.Equal(t, []string{"row/0", "row/1", "row/2", "two-cores/row/1", "busy/row/2"}, names(c))
	c.quick = true
	assert.Equal(t, []string{"row/2"}, names(c))
	c.quick, c.rows = false, regexp.MustCompile("^two-cores|row/0")
	assert.Equal(t, []string{"row/0", "two-cores/row/1"}, names(c))
	c.rows = regexp.MustCompile("none")
	_, err := c.run(t.Context())
	assert.ErrorContains(t, err, "no row matches")
}

func TestRowsThatFailAreNeverSkippedInSilence(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		command string
		err     error
		want    int
	}{
		{"prepare row/1", replyError{text: "verify: byte 7"}, exitFailed},
		{"sample row/1", replyError{text: "out of memory"}, exitFailed},
		{"close row/1", replyError{text: "in use"}, exitFailed},
		{"sample row/1", errors.New("the process has ended"), exitFailed},
		{"end", errors.New("something was not released"), exitFailed},
		{"prepare row/1", replyError{"needs 2 GPUs", true}, exitSame},
	} {
		h := fake(3, quiet)
		h.answer = func(_ build, command string) error {
			if command == c.command {
				return c.err
			}
			return nil
		}
		r := h.run(t)
		assert.Equal(t, c.want, r.exitCode(), "%v", c)
		if c.command == "end" {
			assert.NotEmpty(t, r.Failed)
		} else if c.want == exitFailed {
			assert.Contains(t, r.Failed["row/1"], c.err.Error())
		} else {
			assert.Contains(t, r.LeftOut["row/1"], c.err.Error())
		}
		var text strings.Builder
		r.writeText(&text)
		assert.Contains(t, text.String(), c.err.Error())
		measured := map[string]bool{}
		for _, row := range r.Rows {
			measured[row.Row] = row.Verdict == same
		}
		assert.True(t, measured["row/0"] && measured["row/2"], "the others were measured: %v", measured)
	}
}

func TestABuildThatCannotBeStartedFailsItsRows(t *testing.T) {
	t.Parallel()
	h := fake(2, quiet)
	h.rows[1].TwoCores = true
	c := h.comparison()
	start := c.start
	c.start = func(ctx context.Context, b build, v variant) (side, error) {
		if v.cpus > 0 {
			return nil, errors.New("no two cores")
		}
		return start(ctx, b, v)
	}
	result, err := c.run(t.Context())
	require.NoError(t, err)
	r := reportOf(result, hostFacts{})
	assert.Equal(t, exitFailed, r.exitCode())
	assert.Contains(t, r.Failed["two-cores/row/1"], "no two cores")
	assert.Len(t, r.Rows, 4, "two figures of each row on all cores")
}

func TestABuildThatCannotBeStartedAgainFailsItsRows(t *testing.T) {
	t.Parallel()
	h := fake(3, quiet)
	h.answer = func(b build, command string) error {
		if b == newBuild && command == "sample row/1" {
			return errors.New("the process has ended")
		}
		return nil
	}
	c := h.comparison()
	start := c.start
	c.start = func(ctx context.Context, b build, v variant) (side, error) {
		if h.started >= 2 {
			return nil, errors.New("no GPU any more")
		}
		return start(ctx, b, v)
	}
	result, err := c.run(t.Context())
	require.NoError(t, err)
	r := reportOf(result, hostFacts{})
	assert.Equal(t, exitFailed, r.exitCode())
	assert.NotContains(t, r.Failed, "row/0")
	assert.Contains(t, r.Failed["row/1"], "no GPU any more")
	assert.Contains(t, r.Failed["row/2"], "no GPU any more")
}

func TestARowThatIsNewIsComparedWithCAlone(t *testing.T) {
	t.Parallel()
	h := fake(2, quiet)
	h.oldRows = h.rows[:1]
	h.slower[newBuild] = 1
	h.rows[1].C = map[string]string{"": "ring Copy/", "rate": "ring Copy/"}
	c := h.comparison()
	c.c = func(_ context.Context, program string) ([]line, error) {
		assert.Equal(t, "ring", program)
		return parseLines([]byte("BenchmarkCopy/threads=1\t1\t4000 ns/op\t0.25 GB/s\nBenchmarkCopy/threads=8\t1\t2000 ns/op\t0.50 GB/s\nBenchmarkOther\t1\t1 ns/op\n")), nil
	}
	result, err := c.run(t.Context())
	require.NoError(t, err)
	r := reportOf(result, hostFacts{})
	require.Len(t, r.Rows, 4)
	own := r.Rows[2]
	assert.Equal(t, "row/1", own.Row)
	assert.True(t, own.OldLacks)
	assert.Empty(t, own.Verdict)
	require.Len(t, own.Beside, 1)
	assert.Equal(t, "C Copy/threads=8", own.Beside[0].Name)
	assert.InDelta(t, 2, own.Beside[0].Value, 1e-9)
	assert.InDelta(t, 0.5, r.Rows[3].Beside[0].Value, 1e-9)
	assert.Equal(t, exitSame, r.exitCode())
	var text strings.Builder
	r.writeText(&text)
	assert.Contains(t, text.String(), "not in old")
}

// Rates are worse if they are lower, times if they are higher.
func TestWorseIsByTheUnit(t *testing.T) {
	t.Parallel()
	h := fake(1, quiet)
	h.slower[newBuild] = 1.2
	r := h.run(t)
	assert.Equal(t, []string{"row/0", "row/0 rate"}, r.Worse)
	assert.InDelta(t, 1.2, r.Rows[0].Slowdown.Estimate, 0.05)
	assert.InDelta(t, 1.2, r.Rows[1].Slowdown.Estimate, 0.05)
	assert.Greater(t, r.Rows[0].Ratio, 1.1)
	assert.Less(t, r.Rows[1].Ratio, 0.9)
	assert.Equal(t, rounds, r.Rows[0].Rounds)
}

func TestFiguresThatAreNoNumbersFail(t *testing.T) {
	t.Parallel()
	m := &measurement{}
	for _, v := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		assert.Error(t, m.add(newBuild, &sample{Figures: []figure{{Value: v, Unit: "µs"}}}))
	}
	assert.Error(t, m.add(newBuild, nil))
	require.NoError(t, m.add(newBuild, &sample{Figures: []figure{{Value: 1, Unit: "µs"}}}))
	assert.Error(t, m.add(oldBuild, &sample{Figures: []figure{{Value: 1, Unit: "ns"}}}), "the builds measure different things")
	assert.Error(t, m.add(oldBuild, &sample{}))
}

func TestTimeIsForRowsThatAreNotSettled(t *testing.T) {
	t.Parallel()
	h := fake(20, quiet)
	h.noise = func(random *rand.Rand) float64 {
		if strings.HasSuffix(h.asked[len(h.asked)-1], "row/7") {
			return math.Exp(0.15 * random.NormFloat64())
		}
		return 1
	}
	r := h.run(t)
	for _, row := range r.Rows {
		if strings.HasPrefix(row.Row, "row/7") {
			assert.Greater(t, len(row.NewSamples), 2*minPairs)
		} else {
			assert.Len(t, row.NewSamples, minPairs)
		}
	}
	assert.LessOrEqual(t, r.Seconds, 1.1*h.comparison().budget.Seconds())
}
