package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/verify"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func testdata(elem ...string) string {
	return filepath.Join(append([]string{"..", "..", "testdata"}, elem...)...)
}

func capturedHost(t *testing.T, name string) fs.FS {
	t.Helper()
	fsys, err := hosttest.Load(testdata("hosts", name+".txtar"))
	require.NoError(t, err)
	return fsys
}

// on is a machine whose host is a captured one; libraries are the real ones of
// the machine that the test runs on. What a run has found when it is ended is in its result, also
// where the machine stands still meanwhile: tests of the grace period set releaseGrace.
func on(t *testing.T, host string, environ ...string) system {
	t.Helper()
	return system{environ: environ, root: capturedHost(t, host), open: cudart.Open, adjust: tiny,
		releaseGrace: time.Hour,
		after:        (&skippedTime{}).after,
		hostname:     func() (string, error) { return "host-7", nil }}
}

// tiny makes plans that tests have time for, with round trips of few sizes.
func tiny(p probe.Plans) probe.Plans {
	p = small(p)
	p.Verify.Sizes = []int{1, 4097, 65537}
	return p
}

// small has all sizes up to 64 KiB and a byte: for outputs that show how many there are.
func small(p probe.Plans) probe.Plans {
	p.Verify.Variants = 1
	p.Verify.MaxBytes = 65537
	p.Verify.NoStale = true
	p.Bandwidth = bench.LinkPlan{SizeBytes: 16 << 20, Copies: 2, Samples: 3}
	p.Together = bench.LinkPlan{SizeBytes: 1 << 20, Copies: 2, Samples: 3}
	return p
}

// failing is the same machine, on which opening a library fails.
func failing(t *testing.T, host string, err error, environ ...string) system {
	t.Helper()
	s := on(t, host, environ...)
	s.open = func(context.Context, cudart.Options) (*cudart.Runtime, error) { return nil, err }
	return s
}

type outcome struct {
	stdout, stderr string
	code           int
}

func call(t *testing.T, sys system, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	defer endSims(t)
	code := run(t.Context(), args, &stdout, &stderr, sys)
	return outcome{stdout.String(), stderr.String(), code}
}

func needsSim(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the simulated GPU runs on Linux only")
	}
}

// took is a time as units.Seconds writes it, on one line or broken: slow hosts take minutes.
const took = `[0-9.]+\s+(?:[nµm]?s|min\s+[0-9]+\s+s|h\s+[0-9]+\s+min)`

// volatile are the parts of outputs that differ from run to run.
var volatile = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`("started": )"[^"]*"`), `${1}"T"`},
	{regexp.MustCompile(`host-7, 20[0-9: -]+ UTC`), "host-7, T"},
	{regexp.MustCompile(`reached between [0-9]+% and [0-9]+%`), "reached between S% and S%"}, // by which copies, of a link that varies
	{regexp.MustCompile(`\.\s+` + took + `\.\n`), ". T.\n"},                                  // wherever the line of the machine is broken
	{regexp.MustCompile(`("(?:took_s|share_of_link|duration_ns|verified_gb_per_s|median|min|max|mean|spread|cv|p10|p90|p99|cpu_s_per_gb|stale_before_bytes)": )[-+.0-9e]+`), "${1}0"},
	{regexp.MustCompile(`("samples": \[)[^\]]*\]`), "${1}]"},
	{regexp.MustCompile(`("(?:version|revision|go|platform)": )"(?:devel|v[0-9][^"]*|go[0-9][^"]*|[0-9a-f]{12}(?:\+dirty)?|[a-z]+/[a-z0-9]+)"`), `${1}"X"`},
	{regexp.MustCompile(`(?m)^ *"revision": "X",\n`), ""},
	{regexp.MustCompile(`(?m)^pincheck \S+  \S+$`), "pincheck X  X/X"},
	{regexp.MustCompile(`verified +time  wrong`), "verified  time  wrong"},
	{regexp.MustCompile(`verified in ` + took), "verified in T"},
	{regexp.MustCompile(`( (?:[KMG]?i?B|[kMG]B)) +` + took + ` `), "${1} T "},
	{regexp.MustCompile(`[0-9.,]+ GB/s, [0-9.,]+ % of the link \(median of 3,\s+[0-9.,]+\s+to\s+[0-9.,]+\)`), "R GB/s, P% of the link (median of 3, R to R)"},
	{regexp.MustCompile(`(0 (?:Simulated GPU|NVIDIA H200) .*) +[0-9.]+ GB/s +[0-9.]+ GB/s +[0-9]+%( .* MB)`), "${1}  R  R  P%${2}"},
	{regexp.MustCompile(`copies reach [0-9.,]+ %`), "copies reach P %"},
	{regexp.MustCompile(`synchronising: [0-9]+ of`), "synchronising: N of"},
	{regexp.MustCompile(`(medians)(\s+)[0-9.]+(\s+)GB/s(\s+)to(\s+)[0-9.]+(\s+)GB/s`), "${1}${2}R${3}GB/s${4}to${5}R${6}GB/s"}, // by which copies, of a link that varies
}

func normal(s string) string {
	for _, v := range volatile {
		s = v.pattern.ReplaceAllString(s, v.with)
	}
	return s
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	goldenText(t, name, normal(got))
}

// goldenText compares text with a golden file as it is.
func goldenText(t *testing.T, name, got string) {
	t.Helper()
	file := testdata("golden", name)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "run the test with -update to make it")
	assert.Equal(t, string(want), got, "%s differs; run the test with -update if that is meant", name)
}

func withAllSizes(sys system) system {
	sys.adjust = small
	return sys
}

func TestSimulatedCheck(t *testing.T) {
	t.Parallel()
	needsSim(t)
	got := call(t, withAllSizes(on(t, "no-gpu-cgroup-v1")), "--sim", "--quiet")
	assert.Equal(t, exitOK, got.code, got.stdout)
	assert.Empty(t, got.stderr)
	assert.Contains(t, got.stdout, "Simulated GPU: nothing here was measured on hardware.")
	golden(t, "pincheck-sim.txt", got.stdout)

	got = call(t, withAllSizes(on(t, "no-gpu-cgroup-v1")), "--sim", "--quiet", "--verbose")
	assert.Equal(t, exitOK, got.code, got.stdout)
	golden(t, "pincheck-sim-verbose.txt", got.stdout)
}

func TestSimulatedCheckJSON(t *testing.T) {
	t.Parallel()
	needsSim(t)
	got := call(t, withAllSizes(on(t, "no-gpu-cgroup-v1")), "--sim", "--quiet", "--format", "json", "--device", "0")
	assert.Equal(t, exitOK, got.code, got.stdout)
	assert.Empty(t, got.stderr)
	golden(t, "pincheck-sim.json", got.stdout)

	var r report.Result
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
	assert.True(t, r.Simulated)
	assert.Equal(t, "check", r.Command)
	assert.Equal(t, doctor.Healthy, r.Verdict)
	require.Len(t, r.Devices, 1)
	d := r.Devices[0]
	require.NotNil(t, d.Verify)
	assert.NoError(t, d.Verify.Err())
	require.NotNil(t, d.Bandwidth)
	for _, s := range d.Bandwidth.Series {
		assert.Len(t, s.Samples, 3)
		assert.InDelta(t, 54, s.Median, 4, "the simulated link moves 55 GB/s: %v", s.Labels)
		assert.True(t, s.Verified)
	}
	require.NotNil(t, d.Link)
	assert.InDelta(t, 63.0, d.Link.Rate, 0.05)
}

func TestSimulatedVerify(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.adjust = func(p probe.Plans) probe.Plans { // small, but for the stale read
		p.Verify = small(p).Verify
		p.Verify.NoStale = false
		return p
	}
	got := call(t, sys, "verify", "--sim", "--quiet")
	assert.Equal(t, exitOK, got.code, got.stdout)
	golden(t, "pincheck-verify-sim.txt", got.stdout)
	assert.Empty(t, got.stderr)
	assert.NotContains(t, got.stdout, "pinned host to device", "verify measures no bandwidth")
}

func TestSimulatedDevices(t *testing.T) {
	t.Parallel()
	needsSim(t)
	got := call(t, on(t, "h200-vm"), "devices", "--sim")
	assert.Equal(t, exitOK, got.code)
	assert.Empty(t, got.stderr)
	assert.Contains(t, got.stdout, "Simulated GPU: nothing here was measured on hardware.")
	assert.NotContains(t, got.stdout, "580.159.04", "nothing of the host's own GPU is shown beside a simulated one")
	golden(t, "pincheck-devices-sim.txt", got.stdout)
}

func TestVersion(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("version must not open a library"))
	got := call(t, sys, "version")
	assert.Equal(t, exitOK, got.code)
	assert.Regexp(t, `(?s)^pincheck \S+\n.*go +go1\.\S+\nplatform +\S+/\S+\n$`, got.stdout)

	got = call(t, sys, "version", "--format=json")
	var r report.Result
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
	assert.Equal(t, report.SchemaVersion, r.SchemaVersion)
	assert.Equal(t, runtime.Version(), r.Tool.Go)
	assert.Nil(t, r.Facts)
	assert.False(t, r.Started.IsZero())
}

// devices has something to say in every format, and version in all but that of a page.
func TestDevicesAndVersionInAllFormats(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, format := range report.Formats() {
		got := call(t, on(t, "h200-vm"), "devices", "--sim", "--format", string(format))
		assert.Equal(t, exitOK, got.code, format)
		assert.Contains(t, got.stdout, "Simulated", format)
		got = call(t, system{}, "version", "--format", string(format))
		if format == report.HTML {
			assert.Equal(t, exitUsage, got.code, format)
			assert.Contains(t, got.stderr, "--format html: want text, json, jsonl, prometheus or csv")
			continue
		}
		assert.Equal(t, exitOK, got.code, format)
		assert.Contains(t, got.stdout, tool().Version, format)
	}
}

// Errors of flags are in words of the command.
func TestFlagErrors(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--expect-gpus x":                    `--expect-gpus "x": want a whole number`,
		"--expect-gpus 99999999999999999999": `--expect-gpus "99999999999999999999": the number is too large`,
		"--expect-bandwidth x":               `--expect-bandwidth "x": want a number, such as 2.5`,
		"--timeout 5":                        `--timeout "5": want a time with its unit, such as 500ms, 30s or 2m`,
		"--sim=maybe":                        `--sim "maybe": want true or false`,
		"bench --sizes x":                    `--sizes: "x" is not a size`,
	} {
		got := call(t, system{}, strings.Fields(args)...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stderr, ": "+want, args)
		assert.NotContains(t, got.stderr, "strconv", args)
	}
	var stderr strings.Builder
	assert.Equal(t, exitOutput, run(t.Context(), []string{"completion", "bash"}, fullDisk{}, &stderr, system{}))
	assert.Contains(t, stderr.String(), "no space left on device")
}

func TestWrongUsage(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	sys := failing(t, "h200-vm", errors.New("a wrong call must not open a library"))
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--format", "xml"}, "--format xml: want text, json, jsonl, prometheus, csv, html or ticket"},
		{[]string{"version", "--format", "xml"}, "--format xml: want text, json, jsonl, prometheus or csv"},
		{[]string{"devices", "--format", ""}, "--format : want text"},
		{[]string{"--no-such-flag"}, "unknown flag --no-such-flag"},
		{[]string{"verify", "--no-such-flag"}, "unknown flag --no-such-flag"},
		{[]string{"--full"}, "no flag --full.\nCommands with --full: report, verify\n"},
		{[]string{"-x"}, "unknown shorthand flag"},
		{[]string{"frobnicate"}, `unknown command "frobnicate"`},
		{[]string{"verfy"}, `unknown command "verfy". Did you mean verify?`},
		{[]string{"help", "nope"}, `unknown command "nope"`},
		{[]string{"help", "verify", "nope"}, `verify takes no argument`},
		{[]string{"completion", "tcsh"}, `unknown command "tcsh"`},
		{[]string{"completion"}, "name a shell"},
		{[]string{"verify", "extra"}, `verify takes no argument, and got "extra"`},
		{[]string{"--device", "x"}, `"x" is not a GPU: want all, a number, a UUID (GPU-…) or a PCI address`},
		{[]string{"--device", "-1"}, `"-1" is not a GPU`},
		{[]string{"--device", ""}, `"" is not a GPU`},
		{[]string{"--device", "99999999999999999999"}, `"99999999999999999999" is not a GPU`},
		{[]string{"--timeout", "-1s"}, "--timeout -1s: must not be negative"},
		{[]string{"--timeout", "soon"}, "--timeout \"soon\": want a time"},
		{[]string{"--library", "/nonexistent"}, "--library: stat /nonexistent"},
		{[]string{"--library", directory}, "is a directory, not a library"},
		{[]string{"--library", "libcudart.so.13", "--sim"}, "--library and --sim exclude each other"},
	} {
		if runtime.GOOS == "windows" && c.args[0] == "--library" {
			continue // other paths, other messages
		}
		got := call(t, sys, c.args...)
		assert.Equal(t, exitUsage, got.code, c.args)
		assert.Empty(t, got.stdout, c.args)
		assert.Contains(t, got.stderr, c.says, c.args)
		if !strings.Contains(got.stderr, "Did you mean") && !strings.Contains(c.says, "\n") {
			assert.Contains(t, got.stderr, "\nFor help, run: pincheck", c.args)
		}
	}
}

func TestNoSuchDevice(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, args := range [][]string{{"--device", "7", "--sim"}, {"verify", "--device=7", "--sim"}, {"devices", "--device", "7", "--sim"}} {
		got := call(t, on(t, "no-gpu-cgroup-v1"), args...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Empty(t, got.stdout, args)
		assert.Contains(t, got.stderr, "--device 7: no such GPU. This process sees only GPU 0 (GPU-", args)
	}
}

func noLibrary(d cudart.DriverFacts) error {
	return &cudart.OpenError{
		Err:      cudart.ErrNoLibrary,
		Driver:   d,
		Searched: []string{"$CUDA_PATH (not set)", "/usr/local/cuda/{lib64,lib,targets/*/lib}"},
		Attempts: []cudart.Attempt{{
			Path: "libcudart.so.13", Found: "loader path", Runtime: 13000,
			Err: errors.New("dlopen: libcudart.so.13: cannot open shared object file: No such file or directory"),
		}},
	}
}

func TestNoGPU(t *testing.T) {
	t.Parallel()
	libcuda := cudart.DriverFacts{LibPath: "/usr/lib/x86_64-linux-gnu/libcuda.so.1"}
	for _, c := range []struct {
		name, host string
		err        error
		environ    []string
		says       []string
	}{
		{"nothing", "no-gpu-cgroup-v1", noLibrary(cudart.DriverFacts{}), nil,
			[]string{" no_gpu\n", "kernel module    MISSING"}},
		{"no-libcudart", "h200-vm", noLibrary(libcuda), nil, []string{" no_runtime_library\n", "looked in: $CUDA_PATH (not set)"}},
		{"musl", "alpine-musl", noLibrary(cudart.DriverFacts{}), nil, []string{"no_c_library"}},
		{"wsl", "wsl2", noLibrary(libcuda), nil, []string{"not needed under WSL"}},
		{"no-uvm", "container-cgroup-v1", &cudart.OpenError{Err: cudart.ErrNoDriver, Driver: libcuda, Attempts: []cudart.Attempt{
			{Path: "/usr/lib64/libcudart.so.11.0", Found: "/usr/lib64", Runtime: 11080, Err: cudart.ErrNoDriver},
		}}, nil, []string{"no /dev/nvidia-uvm", "/usr/lib64/libcudart.so.11.0 (11.8)"}},
	} {
		for _, format := range []report.Format{report.Text, report.JSON} {
			got := call(t, failing(t, c.host, c.err, c.environ...), "--format", string(format))
			assert.Equal(t, exitUnusable, got.code, c.name)
			assert.Empty(t, got.stderr, c.name)
			if format == report.Text {
				golden(t, "pincheck-nogpu-"+c.name+".txt", got.stdout)
				assert.Contains(t, got.stdout, "--sim", "%s: the way out", c.name)
				got = call(t, failing(t, c.host, c.err, c.environ...), "--verbose")
				for _, part := range c.says {
					assert.Contains(t, got.stdout, part, c.name)
				}
				continue
			}
			var r report.Result
			require.NoError(t, json.Unmarshal([]byte(got.stdout), &r), c.name)
			assert.Equal(t, doctor.Unusable, r.Verdict, c.name)
			assert.NotEmpty(t, r.Requirements, c.name)
			assert.NotEmpty(t, r.Findings, c.name)
			assert.Contains(t, got.stdout, `"devices": []`, c.name)
		}
		for _, command := range []string{"verify", "devices"} {
			got := call(t, failing(t, c.host, c.err), command)
			assert.Equal(t, exitUnusable, got.code, "%s: %s", c.name, command)
			assert.Contains(t, got.stdout, "No usable GPU: ", "%s: %s", c.name, command)
		}
	}
}

// A file that is not a library goes through the real Open.
func TestLibraryThatIsNone(t *testing.T) {
	t.Parallel()
	needsSim(t) // where the simulated GPU runs, libraries can be opened
	file := filepath.Join(t.TempDir(), "libcudart.so.12")
	require.NoError(t, os.WriteFile(file, []byte("not a library"), 0o644))
	got := call(t, on(t, "h200-vm"), "--library", file)
	assert.Equal(t, exitUnusable, got.code)
	assert.Contains(t, got.stdout, " library_unusable\n")
	assert.Contains(t, got.stdout, "--library PATH")
}

// A library that shows no device is reported differently from one that does not exist.
func TestNoDevices(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm", "CUDA_VISIBLE_DEVICES=")
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{}})
	got := call(t, sys, "--device", "3")
	assert.Equal(t, exitUnusable, got.code)
	assert.Contains(t, got.stdout, `CUDA_VISIBLE_DEVICES=""`)
	assert.Contains(t, got.stdout, " hidden_gpu\n")
}

// sims has the simulator that the opening of a test has started. A process has few, and a
// test that holds one must not wait for another: so it ends with the call that used it.
var sims sync.Map // *testing.T to *cudasim.Sim

// opening returns a function that opens one simulated library, again and again during one
// call of pincheck. The test fails if anything is not released.
func opening(t *testing.T, cfg cudasim.Config) func(context.Context, cudart.Options) (*cudart.Runtime, error) {
	t.Cleanup(func() { endSims(t) })
	var mu sync.Mutex
	var sim *cudasim.Sim
	return func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
		mu.Lock()
		defer mu.Unlock()
		if mine, _ := sims.Load(t); mine != sim {
			endSims(t) // that of an earlier call
			var err error
			if sim, err = cudasim.New(cfg); err != nil {
				return nil, err
			}
			sims.Store(t, sim)
		}
		return cudart.Open(ctx, cudart.Options{Source: sim})
	}
}

// endSims ends the simulator that opening has started for a test, if there is one.
func endSims(t *testing.T) {
	t.Helper()
	if sim, ok := sims.LoadAndDelete(t); ok {
		testgpu.End(t, sim.(*cudasim.Sim))
	}
}

// A GPU whose copies are slower than its link allows is a problem with a
// remedy. The GPU has the PCI address of the host's own.
func TestSlowGPUIsAProblem(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	slow := cudasim.Speed{Rate: 20}
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{
		PCIBusID: "0000:00:06.0", Link: cudasim.Link{HostToDevice: slow, DeviceToHost: slow},
	}}})
	got := call(t, sys, "--format", "json")
	assert.Equal(t, exitProblems, got.code)
	var r report.Result
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
	assert.Equal(t, doctor.Problems, r.Verdict)
	require.NotEmpty(t, r.Findings)
	assert.Equal(t, "slow_copies", r.Findings[0].ID)
	assert.NotEmpty(t, r.Findings[0].Remedy)
}

func TestSeveralDevices(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.open = opening(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
	got := call(t, sys, "devices")
	assert.Equal(t, exitOK, got.code)
	assert.Equal(t, 3, strings.Count(got.stdout, "Simulated GPU, "))
	got = call(t, sys, "devices", "--device", "2")
	assert.Equal(t, 1, strings.Count(got.stdout, "Simulated GPU, "))
	assert.Contains(t, got.stdout, "GPU 2")
	got = call(t, sys, "devices", "--device", "3")
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "This process sees GPUs 0 to 2")
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, command := range []string{"check", "verify"} {
		got := call(t, on(t, "h200-vm"), command, "--sim", "--timeout", "1ms")
		assert.Equal(t, exitIncomplete, got.code, got.stdout)
		assert.Contains(t, got.stdout, "Incomplete: stopped: not done after 1ms (--timeout).")
		assert.NotContains(t, got.stdout, "Problem ", "that the time was over is no fault of a GPU")
	}
}

// An interruption during the copies releases everything: opening's cleanup fails the test
// for what is left. What was verified until then is in the result.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, after := range []int{0, 1, 7, 100} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		sys := on(t, "h200-vm")
		sys.open = opening(t, cudasim.Config{})
		reached := -1
		sys.adjust = func(p probe.Plans) probe.Plans {
			p = small(p)
			p.Verify.Progress = func(at verify.Progress) {
				reached = at.CasesDone
				if reached == after {
					cancel()
				}
			}
			return p
		}
		var stdout, stderr bytes.Buffer
		code := run(ctx, []string{"--format", "json"}, &stdout, &stderr, sys)
		endSims(t)
		assert.Equal(t, exitInterrupted, code, "after %d cases", after)
		assert.Equal(t, after, reached, "no case is begun after the interruption")
		r, err := report.Read(stdout.Bytes())
		require.NoError(t, err)
		assert.Equal(t, doctor.Incomplete, r.Verdict)
		assert.False(t, r.Complete)
		assert.Equal(t, "interrupted", r.Stopped)
		assert.Empty(t, r.Findings)
		assert.Empty(t, r.Errors)
		require.Len(t, r.Devices, 1)
		if after == 0 {
			assert.Nil(t, r.Devices[0].Verify)
		} else {
			assert.Equal(t, after, r.Devices[0].Verify.Cases)
		}
	}
}

// What was found before an interruption is reported: here, copies that fail.
func TestInterruptedKeepsFindings(t *testing.T) {
	t.Parallel()
	needsSim(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sim, _ := testgpu.Sim(t, cudasim.Config{})
	sys := on(t, "h200-vm")
	sys.open = func(context.Context, cudart.Options) (*cudart.Runtime, error) {
		return cudart.Open(context.Background(), cudart.Options{Source: sim})
	}
	sys.adjust = func(p probe.Plans) probe.Plans {
		p = small(p)
		p.Verify.Progress = func(at verify.Progress) {
			switch at.CasesDone {
			case 5:
				sim.Fail("cudaMemcpyAsync", cudasim.Fault{Times: 1, Code: cudart.ErrUnknown})
			case 40:
				cancel()
			}
		}
		return p
	}
	var stdout, stderr bytes.Buffer
	assert.Equal(t, exitInterrupted, run(ctx, nil, &stdout, &stderr, sys))
	assert.Contains(t, stdout.String(), "1 round trip failed")
	assert.Contains(t, stdout.String(), "Incomplete: stopped: interrupted; 1 problem (GPU 0) found so far.")
}

func TestInterruptedBeforeItBegan(t *testing.T) {
	t.Parallel()
	needsSim(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var stdout, stderr bytes.Buffer
	assert.Equal(t, exitInterrupted, run(ctx, []string{"--sim", "--format", "jsonl"}, &stdout, &stderr, on(t, "h200-vm")))
	r, err := report.Read(stdout.Bytes())
	require.NoError(t, err)
	assert.Equal(t, doctor.Incomplete, r.Verdict)
	assert.Equal(t, 1, strings.Count(stdout.String(), "\n"))
}

func TestUnsupportedPlatform(t *testing.T) {
	t.Parallel()
	got := call(t, failing(t, "no-gpu-cgroup-v1", fmt.Errorf("open: Linux only: %w", errors.ErrUnsupported)))
	assert.Equal(t, exitUnusable, got.code)
	assert.Contains(t, got.stdout, "Linux only")
	if runtime.GOOS != "linux" {
		for _, args := range [][]string{nil, {"--sim"}, {"verify"}, {"devices"}} {
			got := call(t, on(t, "no-gpu-cgroup-v1"), args...)
			assert.Equal(t, exitUnusable, got.code, args)
			assert.Contains(t, got.stdout, "unsupported", args)
		}
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestOutputThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"devices"}, fullDisk{}, &stderr, failing(t, "h200-vm", noLibrary(cudart.DriverFacts{})))
	assert.Equal(t, exitOutput, code)
	assert.Contains(t, stderr.String(), "no space left on device")
}

func TestHelp(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("help must not open a library"))
	for _, args := range [][]string{{"--help"}, {"verify", "--help"}, {"devices", "--help"}} {
		got := call(t, sys, args...)
		assert.Equal(t, exitOK, got.code, args)
		assert.Empty(t, got.stderr, args)
		for _, part := range []string{"Exit status: 0 ", "pincheck help exit-status", "Examples:\n", "--sim", "--format", "--device", "--library", "--timeout"} {
			assert.Contains(t, got.stdout, part, args)
		}
	}
	golden(t, "pincheck-help.txt", call(t, sys, "--help").stdout)

	// The document has the same exit codes.
	document, err := os.ReadFile(filepath.Join("..", "..", "docs", "output.md"))
	require.NoError(t, err)
	for line := range strings.Lines(exitStatus) {
		code, meaning, ok := strings.Cut(strings.TrimSpace(line), " ")
		require.True(t, ok)
		assert.Contains(t, strings.ReplaceAll(string(document), "`", ""), "| "+code+" | "+strings.TrimSpace(meaning)+" |")
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("completion must not open a library"))
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		got := call(t, sys, "completion", shell)
		assert.Equal(t, exitOK, got.code, shell)
		assert.Contains(t, got.stdout, "pincheck", shell)
	}
	got := call(t, sys, "__complete", "--format", "")
	assert.Contains(t, got.stdout, "text\njson\njsonl\nprometheus\ncsv\n")
	got = call(t, sys, "__complete", "devices", "--device", "")
	assert.Equal(t, "all\n:4\n", got.stdout)
	sys.experiments = bench.All()
	for flag, experiment := range map[string]string{"--timeout": "all", "--duration": "calls", "--sizes": "alloc", "--pid": "memory", "--watch": "memory", "--batch": "frames", "--shape": "frames"} {
		assert.Equal(t, ":4\n", call(t, sys, "__complete", "bench", experiment, flag, "").stdout, "no files for %s", flag)
	}
	assert.NotContains(t, call(t, sys, "__complete", "bench", "-").stdout, "`")
}

func TestColorIsForcedOrNot(t *testing.T) {
	t.Parallel()
	err := noLibrary(cudart.DriverFacts{})
	assert.NotContains(t, call(t, failing(t, "h200-vm", err)).stdout, "\x1b")
	assert.Contains(t, call(t, failing(t, "h200-vm", err, "CLICOLOR_FORCE=1")).stdout, "\x1b[")
	assert.NotContains(t, call(t, failing(t, "h200-vm", err, "CLICOLOR_FORCE=1", "NO_COLOR=1")).stdout, "\x1b")
	assert.NotContains(t, call(t, failing(t, "h200-vm", err, "CLICOLOR_FORCE=1"), "--format=json").stdout, "\x1b")
}

// On a real GPU the whole check is right, and done in time.
func TestRealGPU(t *testing.T) {
	if !testgpu.Real() {
		t.Skipf("needs a real GPU: set %s=1", testgpu.Env)
	}
	sys := system{environ: os.Environ(), root: os.DirFS("/"), open: cudart.Open}
	start := time.Now()
	got := call(t, sys, "--format", "json")
	took := time.Since(start)
	var r report.Result
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &r), got.stderr)
	assert.False(t, r.Simulated)
	require.NotEmpty(t, r.Devices)
	for _, d := range r.Devices {
		require.NotNil(t, d.Verify)
		assert.NoError(t, d.Verify.Err())
		assert.NotNil(t, d.Bandwidth)
		assert.Empty(t, d.Errors)
	}
	assert.Contains(t, []int{exitOK, exitWarnings, exitProblems}, got.code)
	assert.Less(t, took, time.Duration(len(r.Devices))*5*time.Second)
	for _, f := range r.Findings {
		t.Logf("%s: %s (%s)", f.ID, f.Summary, f.Cause)
	}
}

// Closing is the last thing that examine does, so its error must reach the caller: here
// the runtime has an event that cannot be destroyed.
func TestLeakReachesTheExitCode(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sim, err := cudasim.New(cudasim.Config{})
	require.NoError(t, err)
	defer sim.Close() // its error is about the event, which is meant
	sys := on(t, "h200-vm")
	sys.open = func(context.Context, cudart.Options) (*cudart.Runtime, error) {
		return cudart.Open(context.Background(), cudart.Options{Source: sim})
	}
	sim.Fail("cudaEventDestroy", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	got := call(t, sys)
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stdout+got.stderr, "cudaEventDestroy")
}
