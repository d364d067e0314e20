package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// counting is an experiment that measures sizes, and calls at before each sample.
func counting(name string, at func()) measure.Experiment {
	return measure.Experiment{
		Name: name, Group: "Copies:", Question: "How many?", Long: "Counts, for " + name + ".",
		Views: []result.View{{Title: "By size", Series: "counted", X: result.Size, Lines: []string{result.Device}, Main: true}},
		Plan: func(env measure.Env) ([]measure.Group, error) {
			sizes := []int{4096, 65536, 1 << 20}
			if env.Quick {
				sizes = sizes[:1]
			}
			if env.Sizes != nil {
				sizes = env.Sizes
			}
			g := measure.Group{Name: name, Open: func(context.Context) error { return nil }, Close: func() error { return nil }}
			for _, n := range sizes {
				g.Footprint.Pinned = max(g.Footprint.Pinned, n)
				for i := range max(1, len(env.Devices)) {
					g.Cases = append(g.Cases, measure.Case{
						Series:  result.Series{Name: "counted", Unit: result.GBPerSecond, Labels: result.Labels{{Key: result.Device, Value: fmt.Sprint(i)}, {Key: result.Size, Value: fmt.Sprint(n)}}},
						Samples: 4, Budget: time.Hour,
						Sample: func(ctx context.Context) (float64, error) {
							at()
							return float64(n) / 1e3, context.Cause(ctx)
						},
					})
				}
			}
			return []measure.Group{g}, nil
		},
		Explain: func(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
			return []string{fmt.Sprintf("%d series", len(b.Series))}, []result.Table{{Title: "t", Columns: []string{"n"}, Rows: []result.Row{{Name: "r", Cells: []*result.Quantity{{Value: float64(len(b.Series)), Unit: result.Count}}}}}}
		},
	}
}

// benches is a machine with two experiments and a simulated GPU.
func benches(t *testing.T, at func()) system {
	t.Helper()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}})
	sys.experiments = []measure.Experiment{counting("bandwidth", at), counting("memory", at)}
	return sys
}

func none() {}

func TestBenchLists(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("a list must not open a library"))
	sys.experiments = []measure.Experiment{counting("bandwidth", none), counting("memory", none)}
	got := call(t, sys, "bench")
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Contains(t, got.stdout, "\nCopies:\n  bandwidth   How many?\n  memory      How many?\n\n  all         every experiment\n\nFlags:\n")
	assert.Equal(t, "all\tevery experiment\nbandwidth\tHow many?\nmemory\tHow many?\n:4\n", call(t, sys, "__complete", "bench", "").stdout)
	got = call(t, sys, "bench", "--quick")
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "name an experiment, or all")
}

func TestBench(t *testing.T) {
	t.Parallel()
	got := call(t, benches(t, none), "bench", "memory", "bandwidth", "--format", "json")
	assert.Equal(t, exitOK, got.code, got.stdout)
	assert.Contains(t, got.stderr, "2 experiments: about ")
	assert.Contains(t, got.stderr, ", at most 1 MiB pinned\n")
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	assert.Equal(t, "bench", r.Command)
	assert.Equal(t, "host-7", r.HostName)
	assert.Equal(t, doctor.Measured, r.Verdict)
	assert.True(t, r.Complete)
	require.Len(t, r.Devices, 1)
	require.Len(t, r.Benches, 2)
	assert.Equal(t, "bandwidth", r.Benches[0].Name, "in the order of the list")
	require.Len(t, r.Benches[0].Series, 3)
	assert.Len(t, r.Benches[0].Series[2].Samples, 4)
	assert.InDelta(t, 1048.576, r.Benches[0].Series[2].Median, 1e-9)

	got = call(t, benches(t, none), "bench", "all", "--quick", "--quiet", "--no-host-name", "--format", "csv")
	assert.Equal(t, exitOK, got.code)
	assert.Empty(t, got.stderr)
	rows, err := csv.NewReader(strings.NewReader(got.stdout)).ReadAll()
	require.NoError(t, err)
	assert.Len(t, rows, 3, "a row of heads, and one a series")
	assert.NotContains(t, got.stdout, "host-7")

	sys := benches(t, none)
	sys.expect = func(measure.Env) func(*result.Series) *result.Expected {
		return func(*result.Series) *result.Expected { return &result.Expected{Value: 5, Source: "a table"} }
	}
	got = call(t, sys, "bench", "bandwidth", "--sizes", "8K, 4KiB,8192", "--sizes=1M")
	assert.Equal(t, exitOK, got.code)
	assert.Regexp(t, `(?m)^ +4 KiB +4\.10\n +8 KiB +8\.19\n +1 MiB +1,049\n +reference, 1 MiB +5\.00\n(?s).*^Reference: a table$`, got.stdout)
	assert.Contains(t, got.stdout, "3 series")
}

// An experiment that fails in part is an error of the result, with all that was measured.
func TestBenchThatFailsInPart(t *testing.T) {
	t.Parallel()
	sys := benches(t, none)
	broken := counting("broken", none)
	plan := broken.Plan
	broken.Plan = func(env measure.Env) ([]measure.Group, error) {
		groups, err := plan(env)
		groups[0].Cases[1].Sample = func(context.Context) (float64, error) { return 0, errors.New("copy: invalid argument") }
		return groups, err
	}
	sys.experiments = append(sys.experiments, broken)
	got := call(t, sys, "bench", "broken")
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stdout, "Error      broken: counted, 64 KiB: copy: invalid argument")
	assert.Contains(t, got.stdout, "2 series")
	assert.Contains(t, got.stdout, "Problem: 1 measurement failed.")
}

func TestBenchInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	sys := benches(t, func() {
		if n++; n == 7 { // the third sample of the second series
			cancel()
		}
	})
	file := filepath.Join(t.TempDir(), "out.json")
	var stdout, stderr bytes.Buffer
	assert.Equal(t, exitInterrupted, run(ctx, []string{"bench", "all", "--format", "json", "--output", file}, &stdout, &stderr, sys))
	assert.Empty(t, stdout.String())
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	r, err := report.Read(text)
	require.NoError(t, err)
	assert.Equal(t, doctor.Incomplete, r.Verdict)
	require.Len(t, r.Benches, 1)
	assert.False(t, r.Benches[0].Complete)
	require.Len(t, r.Benches[0].Series, 2)
	assert.Len(t, r.Benches[0].Series[1].Samples, 2)
	assert.Equal(t, []string{"2 series"}, r.Benches[0].Answers)
}

func TestBenchTimeout(t *testing.T) {
	t.Parallel()
	sys := benches(t, none)
	waiting := counting("waiting", none)
	plan := waiting.Plan
	waiting.Plan = func(env measure.Env) ([]measure.Group, error) {
		groups, err := plan(env)
		groups[0].Cases[1].Sample = func(ctx context.Context) (float64, error) {
			<-ctx.Done()
			return 0, context.Cause(ctx)
		}
		return groups, err
	}
	sys.experiments = append(sys.experiments, waiting)
	got := call(t, sys, "bench", "waiting", "--timeout", "100ms")
	assert.Equal(t, exitIncomplete, got.code)
	assert.Contains(t, got.stdout, "Incomplete: stopped: not done after 100ms (--timeout).")
}

func TestBenchWithoutGPU(t *testing.T) {
	t.Parallel()
	sys := failing(t, "no-gpu-cgroup-v1", noLibrary(cudart.DriverFacts{}))
	sys.experiments = []measure.Experiment{counting("bandwidth", none), counting("memory", none)}
	got := call(t, sys, "bench", "bandwidth")
	assert.Equal(t, exitUnusable, got.code)
	assert.Contains(t, got.stdout, " no_gpu\n")

	// A process is read without a GPU, and without a library.
	sys = failing(t, "h200-vm", errors.New("must not be opened"))
	sys.experiments = []measure.Experiment{counting("bandwidth", none), counting("memory", none)}
	sys.root = os.DirFS("/")
	got = call(t, sys, "bench", "memory", "--pid", strconv.Itoa(os.Getpid()), "--format", "json")
	assert.Equal(t, exitOK, got.code, got.stdout+got.stderr)
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	assert.Nil(t, r.Facts)
	require.Len(t, r.Benches, 1)
	assert.Contains(t, r.Benches[0].Question, fmt.Sprintf("process %d ", os.Getpid()))
	got = call(t, sys, "bench", "memory", "--pid", strconv.Itoa(os.Getpid()), "--watch", "1h", "--timeout", "100ms")
	assert.Equal(t, exitIncomplete, got.code)
	assert.Regexp(t, `In \d\.\d s \([\d,]+ looks?\) the process pinned`, strings.Join(strings.Fields(got.stdout), " ")) // tests beside it may pin
	got = call(t, sys, "bench", "memory", "--pid", strconv.Itoa(math.MaxInt32))
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stdout, "no such process")
}

func TestBenchWrongUsage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args string
		says string
	}{
		{"bandwith", "no experiment \"bandwith\". Did you mean bandwidth?\nFor a list, run: pincheck bench"},
		{"bandwidth nonsense", "no experiment \"nonsense\".\nFor a list, run: pincheck bench"},
		{"bandwidth --sizes 0", `"0": must be at least 1 byte`},
		{"bandwidth --sizes 64KB", `unknown unit "KB": want B, K, M, G, T`},
		{"bandwidth --sizes 1.5M", `"1.5M" is not a size`},
		{"bandwidth --sizes -4K", `"-4K" is not a size`},
		{"bandwidth --sizes 4K,,8K", `"" is not a size`},
		{"bandwidth --sizes=", `"" is not a size`},
		{"bandwidth --sizes 99999999999999999999G", "must be at most 1 TiB"},
		{"bandwidth --sizes 2T", "must be at most 1 TiB"},
		{"bandwidth --sizes 1T", "it takes 1 TiB of host memory, and"},
		{"bandwidth --duration 0s", "--duration 0s: must be at least 100ms"},
		{"bandwidth --duration -1s", "--duration -1s: must be at least 100ms"},
		{"bandwidth --duration long", "--duration \"long\": want a time"},
		{"bandwidth --duration 1ns", "--duration 1ns: must be at least 100ms"},
		{"bandwidth --pid 7", "pincheck bench bandwidth: no flag --pid: it belongs to bench memory\nFor help, run: pincheck bench bandwidth --help"},
		{"memory bandwidth --pid 7", "--pid: run bench memory alone"},
		{"memory --pid 0", "--pid 0: must be the number of a process"},
		{"memory --watch 5s", "--watch needs --pid"},
		{"memory --pid 1 --watch 999ms", "--watch 999ms: must be from 1s to 24h0m0s"},
		{"memory --pid 1 --watch 25h", "--watch 25h0m0s: must be from 1s"},
		{"bandwidth --python sh", "no flag --python: it belongs to bench memory"},
		{"memory --pid 1 --python sh", "--python: run bench memory alone, without --pid"},
		{"memory --sim --python sh", "--python and --sim exclude each other"},
		{"memory --python /nowhere/python3", "--python: exec: \"/nowhere/python3\""},
		{"bandwidth --device 0,7", "--device 7: no such GPU"},
		{"bandwidth --device GPU-ffffffff", "--device GPU-ffffffff: no such GPU"},
		{"bandwidth --batch 2", "no flag --batch: it belongs to bench frames"},
		{"frames memory --warmup 0", "--warmup: run bench frames alone"},
		{"frames --batch 0", "--batch 0: must be at least 1"},
		{"frames --batch -1", "--batch -1: must be at least 1"},
		{"frames --batch many", `--batch "many": want a whole number`},
		{"frames --shape 3x0", "--shape: want dimensions from 1 on, such as 3x3840x2160"},
		{"frames --shape 3,3840,2160", "--shape: want dimensions from 1 on"},
		{"frames --shape=", "--shape: want dimensions from 1 on"},
		{"frames --shape 2147483647x2147483647x2147483647", "--shape 2147483647x2147483647x2147483647 of float32: a frame must be at most 1 TiB"},
		{"frames --dtype float", "--dtype float: want uint8, int8"},
		{"frames --batch 12000", "--batch 12000 of frames of 3x3840x2160 float32: must be at most 1 TiB"},
		{"frames --repeats 0", "--repeats 0: must be from 1 to 100000"},
		{"frames --warmup -1", "--warmup -1: must be from 0"},
		{"frames --repeats 3 --duration 1s", "--repeats and --duration exclude each other"},
		{"frames --batch 3 --sizes 4K", "--sizes excludes --batch, --shape and --dtype"},
		{"--format json", "name an experiment, or all"},
	} {
		measuredNothing := true
		sys := benches(t, func() { measuredNothing = false })
		sys.experiments = append(sys.experiments, counting("frames", func() { measuredNothing = false }))
		got := call(t, sys, append([]string{"bench"}, strings.Fields(c.args)...)...)
		assert.Equal(t, exitUsage, got.code, c.args)
		assert.Contains(t, got.stderr, c.says, c.args)
		assert.True(t, measuredNothing, c.args)
		if !strings.Contains(c.args, "json") {
			assert.Empty(t, got.stdout, c.args)
		}
	}

	// Programs that asked for JSON get JSON.
	got := call(t, benches(t, none), "bench", "nonsense", "--format", "jsonl")
	assert.Equal(t, exitUsage, got.code)
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	assert.Equal(t, doctor.Failed, r.Verdict)
	assert.Contains(t, r.Errors[0], `no experiment "nonsense"`)

	// Of all, one that does not fit is an error, and the others run.
	sys := benches(t, none)
	large := counting("large", none)
	large.Plan = func(measure.Env) ([]measure.Group, error) {
		return []measure.Group{{Footprint: measure.Footprint{Pinned: 1 << 60}}}, nil
	}
	sys.experiments = append(sys.experiments, large)
	got = call(t, sys, "bench", "all")
	assert.Equal(t, exitProblems, got.code)
	assert.Regexp(t, `(?s)^Problem: 1 measurement failed.*\nbandwidth  3 series\n.*\nmemory     3 series\n.*Error +large: it takes`, got.stdout)
}

// The flags of frames reach the experiment; those that are not given leave it its own.
func TestBenchFramesOfAShape(t *testing.T) {
	t.Parallel()
	none := 0
	for args, want := range map[string]measure.Frames{
		"":                  {},
		"--batch 50":        {Batch: 50, Bytes: 3 * 3840 * 2160 * 4},
		"--shape 3x224x224": {Bytes: 3 * 224 * 224 * 4},
		"--dtype uint8":     {Bytes: 3 * 3840 * 2160},
		"--batch 10 --shape 3x2x2 --dtype bfloat16 --repeats 100 --warmup 0": {Batch: 10, Bytes: 24, Repeats: 100, WarmUp: &none},
	} {
		var got measure.Frames
		e := counting("frames", func() {})
		plan := e.Plan
		e.Plan = func(env measure.Env) ([]measure.Group, error) {
			got = env.Frames
			return plan(env)
		}
		sys := benches(t, func() {})
		sys.experiments = []measure.Experiment{e}
		out := call(t, sys, append([]string{"bench", "frames"}, strings.Fields(args)...)...)
		assert.Equal(t, exitOK, out.code, "%s: %s", args, out.stderr)
		assert.Equal(t, want, got, args)
	}
}

func TestDeviceNames(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{
		{PCIBusID: "0000:06:00.0", UUID: [16]byte{0xab, 1}}, {PCIBusID: "0001:07:00.0", UUID: [16]byte{0xab, 2}}, {PCIBusID: "0000:c1:00.0", UUID: [16]byte{0xcd}},
	}})
	for args, want := range map[string][]string{
		"--device 2,0":                             {"GPU 2", "GPU 0"},
		"--device 2 --device 0 --device 2":         {"GPU 2", "GPU 0"},
		"--device all":                             {"GPU 0", "GPU 1", "GPU 2"},
		"--device 1,all":                           {"GPU 0", "GPU 1", "GPU 2"},
		"--device gpu-CD":                          {"GPU 2"},
		"--device GPU-ab01,C1:00":                  {"GPU 0", "GPU 2"},
		"--device 00000001:07:00.0,0000:06:00.0":   {"GPU 1", "GPU 0"},
		"--device c1:00.0 --device=GPU-ab02,--sim": nil,
	} {
		got := call(t, sys, append([]string{"devices"}, strings.Fields(args)...)...)
		var seen []string
		for line := range strings.Lines(got.stdout) {
			if strings.HasPrefix(line, "GPU ") {
				seen = append(seen, line[:5])
			}
		}
		assert.Equal(t, want, seen, args)
	}
	got := call(t, sys, "devices", "--device", "GPU-ab")
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "--device GPU-ab: fits 2 GPUs: give more of the UUID")
	got = call(t, sys, "devices", "--device", "07:00.0")
	assert.Equal(t, exitUsage, got.code, "a domain that is left out is 0")
}

func TestParseSize(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{
		"1": 1, "7B": 7, "64K": 64 << 10, "64KiB": 64 << 10, "1M": 1 << 20, "1MiB": 1 << 20, "4G": 4 << 30, "4GiB": 4 << 30, "1T": 1 << 40, "1TiB": 1 << 40, "1099511627776": 1 << 40,
	} {
		got, err := parseSize(text)
		assert.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, bad := range []string{"", "K", "-1", "+1K", "1 K", "0x10", "1e3", "1.5M", "64KB", "64k", "64kib", "64Ki", "MiB", "0G", "1025G", "1099511627777", "2T", "18446744073709551616", "１K"} {
		_, err := parseSize(bad)
		assert.Error(t, err, bad)
	}
}

// A file appears whole or not at all, and is checked before anything is measured.
func TestOutputFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "result.prom")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o604))
	got := call(t, benches(t, none), "bench", "bandwidth", "--format", "prometheus", "-o", file)
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Empty(t, got.stdout)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(text), `pincheck_verdict{verdict="measured"} 1`)
	info, err := os.Stat(file)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o604), info.Mode().Perm(), "its permissions stay")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, entries, 1, "nothing is left beside it")

	for _, bad := range []string{filepath.Join(dir, "none", "x"), dir, filepath.Join(file, "x")} {
		measuredNothing := true
		got := call(t, benches(t, func() { measuredNothing = false }), "bench", "bandwidth", "--output", bad)
		assert.Equal(t, exitOutput, got.code, bad)
		assert.Contains(t, got.stderr, "pincheck bench bandwidth: --output: ", bad)
		assert.Contains(t, got.stderr, bad)
		assert.NotContains(t, got.stderr, ".tmp", "the name that was given, not the one beside it")
		assert.True(t, measuredNothing, bad)
	}
	if runtime.GOOS == "linux" {
		got := call(t, benches(t, none), "bench", "bandwidth", "--output", "/dev/full")
		assert.Equal(t, exitOutput, got.code)
		assert.Contains(t, got.stderr, "no space left on device")
		info, err := os.Stat("/dev/full")
		require.NoError(t, err)
		assert.NotZero(t, info.Mode()&os.ModeDevice, "a device is not replaced by a file")
	}
}

func TestVersionFlag(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("version must not open a library"))
	assert.Equal(t, call(t, sys, "version").stdout, call(t, sys, "--version").stdout)
}

// A GPU whose memory cannot be read is listed, and that is no success.
func TestDevicesThatFail(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sim, err := cudasim.New(cudasim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { testgpu.End(t, sim) })
	sim.Fail("cudaMemGetInfo", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	sys := on(t, "h200-vm")
	sys.open = func(context.Context, cudart.Options) (*cudart.Runtime, error) {
		return cudart.Open(context.Background(), cudart.Options{Source: sim})
	}
	got := call(t, sys, "devices")
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stdout, "cudaMemGetInfo")
}

// Estimates are not mixed with the progress of what came before, which is shown again after them.
func TestEstimatesAreWrittenAlone(t *testing.T) {
	t.Parallel()
	var s *session
	written := 0
	cmd := &cobra.Command{}
	cmd.SetErr(writer(func(text []byte) (int, error) {
		written++
		assert.Nil(t, s.progress)
		return len(text), nil
	}))
	s = &session{options: &options{}, cmd: cmd}
	s.show(report.At{What: "GPU 0"})
	require.NotNil(t, s.progress)
	nothing := measure.Experiment{Name: "nothing", Plan: func(measure.Env) ([]measure.Group, error) { return nil, nil }}
	_, _, err := s.estimate([]measure.Experiment{nothing}, measure.Env{}, true)
	require.NoError(t, err)
	assert.Equal(t, 1, written)
	s.show(report.At{})
	s.end()
	assert.Nil(t, s.progress)
	s.show(report.At{})
	assert.Nil(t, s.progress, "nothing is shown after the end")
	s.result = &report.Result{}
	s.change(func(r *report.Result) { r.Command = "late" })
	assert.Empty(t, s.result.Command, "nothing changes after the end")
}

type writer func([]byte) (int, error)

func (w writer) Write(text []byte) (int, error) { return w(text) }
