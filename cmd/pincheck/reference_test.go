package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// copying is an experiment bandwidth whose copies of 64 MiB reach this rate host to device.
func copying(rate float64) measure.Experiment {
	return measure.Experiment{Name: "bandwidth", Question: "How fast?",
		Plan: func(env measure.Env) ([]measure.Group, error) {
			g := measure.Group{Name: "copies", Open: func(context.Context) error { return nil }, Close: func() error { return nil }}
			for range env.Devices {
				g.Cases = append(g.Cases, measure.Case{
					Series: result.Series{Name: "bandwidth", Unit: result.GBPerSecond, Better: result.Higher, Labels: result.Labels{{Key: result.Device, Value: "0"},
						{Key: result.Memory, Value: "registered"}, {Key: result.Direction, Value: result.HostToDevice}, {Key: result.Size, Value: "67108864"}}},
					Samples: 4, Budget: time.Hour,
					Sample: func(ctx context.Context) (float64, error) { return rate, context.Cause(ctx) },
				})
			}
			return []measure.Group{g}, nil
		},
		Explain: func(measure.Env, *result.Bench) ([]string, []result.Table) { return nil, nil },
	}
}

// at is a machine with a simulated GPU, whose copies reach this rate.
func at(t *testing.T, rate float64) system {
	t.Helper()
	sys := on(t, "h200-vm")
	sys.experiments = []measure.Experiment{copying(rate), counting("memory", none)}
	return sys
}

// written writes a file of this test.
func written(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// What bench writes with --format reference is a file of the table, by which compare --reference judges.
func TestReferenceOfThisMachine(t *testing.T) {
	t.Parallel()
	needsSim(t)
	got := call(t, at(t, 50), "bench", "bandwidth", "--sim", "--quiet", "--format", "reference")
	require.Equal(t, exitOK, got.code, got.stderr)
	f, err := reference.Read("mine.json", []byte(got.stdout))
	require.NoError(t, err)
	assert.Equal(t, reference.Machine{GPU: "Simulated GPU", Link: "PCIe 5.0 x16", CPU: "Intel(R) Xeon(R) Processor", Sockets: 1, Host: "virtual machine", Driver: "simulated", Kernel: "6.18.0"}, f.Machine)
	require.Len(t, f.Rows, 1)
	assert.Equal(t, 4, f.Rows[0].N)
	assert.InDelta(t, 50, f.Rows[0].Median, 0)
	mine := written(t, "mine.json", got.stdout)

	for rate, want := range map[float64]struct {
		code    int
		verdict string
	}{50: {exitOK, "same"}, 46: {exitOK, "same"}, 44: {exitProblems, "worse"}, 60: {exitOK, "better"}} {
		run := call(t, at(t, rate), "bench", "bandwidth", "--sim", "--quiet", "--format", "json")
		require.Equal(t, exitOK, run.code, run.stderr)
		got := call(t, system{}, "compare", "--reference", "--format", "json", mine, written(t, "run.json", run.stdout))
		assert.Equal(t, want.code, got.code, got.stderr)
		var c struct {
			Series []struct{ Verdict, Source string }
		}
		require.NoError(t, json.Unmarshal([]byte(got.stdout), &c), got.stdout)
		require.Len(t, c.Series, 1)
		assert.Equal(t, want.verdict, c.Series[0].Verdict)
		assert.Contains(t, c.Series[0].Source, mine+": Simulated GPU on PCIe 5.0 x16, host to device, 64 MiB, measured 20")
		assert.Contains(t, c.Series[0].Source, ": median of 4, 50.0 to 50.0 GB/s (pincheck ")
	}
}

// The labels of the real experiment are those that the table is about.
func TestReferenceOfTheRealExperiment(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.experiments = bench.All()
	got := call(t, sys, "bench", "bandwidth", "--sim", "--quiet", "--sizes", "4MiB", "--format", "reference")
	require.Equal(t, exitOK, got.code, got.stderr)
	f, err := reference.Read("mine.json", []byte(got.stdout))
	require.NoError(t, err)
	var directions []string
	for _, r := range f.Rows {
		directions = append(directions, r.Direction)
		assert.Equal(t, 4<<20, r.Size)
	}
	assert.ElementsMatch(t, []string{"host_to_device", "device_to_host", "both"}, directions)
}

// A reference tells nothing of the machine but its type.
func TestReferenceIsAnonymous(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := at(t, 50)
	sys.environ = []string{"USER=alice", "HOME=/home/alice", "LD_LIBRARY_PATH=/home/alice/lib"}
	got := call(t, sys, "bench", "all", "--sim", "--quiet", "--format", "reference")
	require.Equal(t, exitOK, got.code, got.stderr)
	assert.NotRegexp(t, regexp.MustCompile(`(?i)host-7|alice|/|GPU-|[0-9a-f]{8}-|0000:`), regexp.MustCompile(`"unit": "[^"]*"`).ReplaceAllString(got.stdout, ""))
}

func TestReferenceThatCannotBe(t *testing.T) {
	t.Parallel()
	needsSim(t)
	two := func(second cudasim.DeviceConfig) system {
		sys := at(t, 50)
		sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}, second}})
		return sys
	}
	noGPU := failing(t, "no-gpu-cgroup-v1", noLibrary(cudart.DriverFacts{}))
	noGPU.experiments = []measure.Experiment{copying(50)}
	for _, c := range []struct {
		sys  system
		args string
		code int
		want string
	}{
		{at(t, 50), "memory --format reference", exitUsage, "--format reference belongs to bench bandwidth"},
		{noGPU, "bandwidth --format reference", exitUnusable, "no reference is written: there is no GPU (run pincheck to learn why)"},
		{at(t, 70), "bandwidth --sim --format reference", exitProblems, "no reference is written: row 1: 70 GB/s are more than PCIe 5.0 x16 carries (63 GB/s)"},
		{two(cudasim.DeviceConfig{PCIBusID: "0000:00:06.0", Name: "Other"}), "bandwidth --format reference", exitProblems, "no reference is written: GPU 0 is Simulated GPU on PCIe 5.0 x16, and GPU 1 Other on PCIe 5.0 x16: name those of one type with --device"},
		{two(cudasim.DeviceConfig{PCIBusID: "0000:00:09.0"}), "bandwidth --device 1 --format reference", exitProblems, `no reference is written: machine: link "": want one such as`},
	} {
		got := call(t, c.sys, append([]string{"bench", "--quiet"}, strings.Fields(c.args)...)...)
		assert.Equal(t, c.code, got.code, c.args)
		assert.Contains(t, got.stderr, c.want)
		assert.Empty(t, got.stdout, c.args)
	}
	for _, command := range []string{"check", "verify", "report", "devices", "version", "compare --reference x"} {
		got := call(t, system{}, append(strings.Fields(command), "--format", "reference")...)
		assert.Equal(t, exitUsage, got.code, command)
		assert.Contains(t, got.stderr, "--format reference: only bench bandwidth writes it", command)
	}
}

// A run on an H200 of this repository is judged by the table of pincheck.
func TestCompareWithTheTable(t *testing.T) {
	t.Parallel()
	for _, run := range []string{"report-h200-2026-11-22", "report-two-h200-2026-11-22", "bench-h200-2026-11-22"} {
		got := call(t, system{}, "compare", "--reference", filepath.Join("..", "..", "testdata", "results", run+".json"))
		assert.Equal(t, exitOK, got.code, got.stdout+got.stderr)
		assert.NotRegexp(t, `worse$`, got.stdout, run)
		assert.Contains(t, strings.Join(strings.Fields(got.stdout), " "), "reference/nvidia-h200-pcie5-x16.json: NVIDIA H200 on PCIe 5.0 x16, host to device, ")
	}
}

func TestCompareWithABadReference(t *testing.T) {
	t.Parallel()
	results := filepath.Join("..", "..", "testdata", "results")
	run, other := filepath.Join(results, "bench-h200-2026-11-22.json"), filepath.Join(results, "report-h200-2026-11-22.json")
	table := filepath.Join("internal", "reference")
	h200, gh200 := filepath.Join(table, "nvidia-h200-pcie5-x16.json"), filepath.Join(table, "gh200.json")
	text, err := os.ReadFile(h200)
	require.NoError(t, err)
	malformed := written(t, "malformed.json", strings.Replace(string(text), `"n": 9`, `"count": 9`, 1))
	simulated := written(t, "simulated.json", strings.Replace(benchJSON("a", 50), `"complete"`, `"simulated": true, "host": {}, "devices": [{"device": 0}], "complete"`, 1))
	for _, c := range []struct {
		args string
		want string
	}{
		{gh200 + " " + run, run + ": NVIDIA H200 on PCIe 5.0 x16: the reference has no row for any series of the run"},
		{malformed + " " + run, malformed + `: document 1: not a file of the reference table: json: unknown field "count"`},
		{h200 + " " + h200 + " " + run, h200 + " and " + h200 + " are both of NVIDIA H200 on PCIe 5.0 x16: only one file may be"},
		{run + " " + other, "--reference compares one run of pincheck bench --format json, and these files have 2"},
		{h200, "--reference compares one run of pincheck bench --format json, and these files have 0"},
		{filepath.Join(table, "schema.json"), "not a result of pincheck"},
		{simulated, simulated + ": is of a simulated GPU, which the reference table does not have"},
		{written(t, "none.json", benchJSON("a", 50)), "it has no GPU"},
		{"--threshold 5 " + run, "--threshold and --reference exclude each other"},
		{filepath.Join(results, "h200-2026-11-21.json"), "it has no measurements"},
	} {
		got := call(t, system{}, append([]string{"compare", "--reference"}, strings.Fields(c.args)...)...)
		assert.Equal(t, exitUsage, got.code, c.args)
		assert.Contains(t, got.stderr, c.want, c.args)
		assert.Equal(t, 2, strings.Count(got.stderr, "\n"), "%s: one sentence, and where help is", got.stderr)
		assert.Empty(t, got.stdout, c.args)
	}
	got := call(t, system{}, "compare", h200, run)
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, h200+": document 1: a file of the reference table: compare --reference judges by it")
}

// The link of a GPU that slept again when it was read is the one that its copies show.
func TestCompareOfALinkThatWasReadAsleep(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "testdata", "results", "bench-h200-2026-11-22.json"))
	require.NoError(t, err)
	slept := string(text)
	for old, asleep := range map[string]string{`"gt_per_s": 32,`: `"gt_per_s": 2.5,`, `"gb_per_s": 63.01538461538462,`: `"gb_per_s": 4,`} {
		require.Equal(t, 1, strings.Count(slept, old), old)
		slept = strings.Replace(slept, old, asleep, 1)
	}
	got := call(t, system{}, "compare", "--reference", written(t, "run.json", slept))
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Contains(t, got.stdout, "NVIDIA H200 on PCIe 5.0 x16")
	assert.NotContains(t, got.stdout, "PCIe 1.0")
}
