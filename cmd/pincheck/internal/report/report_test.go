package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/verify"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var testdata = filepath.Join("..", "..", "..", "..", "testdata")

// golden compares with a file below testdata, or writes it with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join(testdata, name)
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "run the test with -update to make it")
	assert.Equal(t, string(want), got, "%s differs; run the test with -update if that is meant", name)
}

func host(t *testing.T, name string) *hostinfo.Host {
	t.Helper()
	fsys, err := hosttest.Load(filepath.Join(testdata, "hosts", name+".txtar"))
	require.NoError(t, err)
	return hostinfo.Read(fsys, nil)
}

var started = time.Date(2026, 11, 21, 20, 30, 0, 0, time.UTC)

var testTool = Tool{Name: "pincheck", Version: "v0.1.0", Revision: "0123456789ab", Go: "go1.26.0", Platform: "linux/amd64"}

func series(direction string, samples ...float64) result.Series {
	return result.Series{Name: "bandwidth", Labels: result.Labels{{Key: result.Device, Value: "0"}, {Key: result.Memory, Value: "registered"},
		{Key: result.Direction, Value: direction}, {Key: result.Size, Value: "67108864"}},
		Unit: result.GBPerSecond, Better: result.Higher, Samples: samples, Stats: result.Summarize(samples), BytesPerSample: 512 << 20, Verified: true}
}

// quickCheck is what the quick check of a device measured.
func quickCheck(all ...result.Series) *result.Bench {
	return &result.Bench{Name: "link", Question: "How fast?", Answers: []string{}, Notes: []string{}, Errors: []string{}, Series: all,
		Complete: true, Started: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC), Seconds: 0.25}
}

// h200 is a device with facts and measurements as on the host h.
func h200(h *hostinfo.Host) *doctor.Facts {
	f := &doctor.Facts{
		Host: h,
		Library: &doctor.Library{
			Path: "/usr/local/cuda-13.0/lib64/libcudart.so.13.0.96", Found: "/usr/local/cuda-*", RuntimeVersion: "13.0", DriverVersion: "13.0",
			Attempts: []doctor.Attempt{
				{Path: "/opt/venv/lib/libcudart.so.13.2", Found: "wheel in $VIRTUAL_ENV", RuntimeVersion: "13.2", Error: "cudaGetDeviceCount: cudaErrorInsufficientDriver (35): CUDA driver version is insufficient for CUDA runtime version"},
				{Path: "/usr/local/cuda-13.0/lib64/libcudart.so.13.0.96", Found: "/usr/local/cuda-*", RuntimeVersion: "13.0"},
			},
		},
		Devices: []doctor.Device{{
			Name: "NVIDIA H200", UUID: "GPU-00000000-1111-2222-3333-444444444444", PCIBusID: "0000:00:06.0",
			ComputeCapability: "9.0", DeviceMemory: doctor.DeviceMemory{MemoryTotal: 150109880320, MemoryFree: 149571567616},
			Verify: &verify.Report{
				CasesPlanned: 3233, Cases: 3200, VerifiedBytes: 318_900_000, SkippedCases: 33, Duration: 910 * time.Millisecond, VerifiedGBPerS: 0.35,
				Paths: []verify.PathReport{
					{Path: "pinned", CasesPlanned: 2000, Cases: 2000, LargestBytes: 6<<20 + 3, VerifiedBytes: 200_000_000, Duration: 300 * time.Millisecond},
					{Path: "managed", CasesPlanned: 1233, Cases: 1200, SkippedCases: 33, LargestBytes: 2 << 20, VerifiedBytes: 118_900_000, Duration: 610 * time.Millisecond},
				},
				Skipped: []verify.Skip{{Path: "managed", Cases: 33, Reason: "managed memory is verified up to 256 MiB"}},
				Stale:   &verify.StaleResult{SizeBytes: 64 << 20, SampledBytes: 256, StaleBefore: 251},
			},
			Bandwidth: quickCheck(
				series(result.HostToDevice, 55.41, 55.38, 55.44),
				series(result.DeviceToHost, 55.35, 55.31, 55.36),
			),
		}},
	}
	f.Devices[0].Relink(h)
	return f
}

// All GPUs at once are below the GPUs, and what was not measured says why.
func TestAllGPUsAtOnceAreShown(t *testing.T) {
	t.Parallel()
	f := h200(host(t, "h200-vm"))
	of := func(device, direction string, rate float64) result.Series {
		s := series(direction, rate, rate, rate)
		s.Name, s.Labels = doctor.TogetherBandwidth, s.Labels.With(result.Device, device)
		return s
	}
	f.Together = &result.Bench{Series: []result.Series{
		of("0", result.HostToDevice, 52.7), of(doctor.TogetherSum, result.HostToDevice, 105.4), of(doctor.TogetherSum, result.DeviceToHost, 110),
	}}
	text := render(t, &Result{Facts: f}, Text, Style{})
	assert.Contains(t, text, "\nall 1 at once                 105 GB/s   110 GB/s\n")
	assert.NotContains(t, text, "52.7")
	f.Together = &result.Bench{Notes: []string{"not measured: there is no memory"}}
	assert.Contains(t, render(t, &Result{Facts: f}, Text, Style{}), "\nAll GPUs at once: not measured: there is no memory\n")
}

func results(t *testing.T) map[string]*Result {
	t.Helper()
	judged := func(command string, f *doctor.Facts) *Result {
		r := &Result{Command: command, Tool: testTool, HostName: "host-7", Started: started, Seconds: 1.5, Complete: true, Facts: f}
		_, r.Findings = doctor.Evaluate(f)
		r.Conclude(true)
		return r
	}

	bad := h200(host(t, "epyc-dual-cgroup-v2"))
	bad.Devices[0].PCIBusID = "0000:C3:00.0"
	bad.Devices[0].Name = "NVIDIA L40S\x1b[31m"
	d := &bad.Devices[0]
	d.Relink(bad.Host)
	c := verify.Case{Path: "pinned", Pattern: "counter", SizeBytes: 4097, Offset: verify.Offset{Source: 1, Return: 513}, Streams: 4}
	d.Verify.MismatchCount, d.Verify.Paths[0].MismatchCount = 3, 3
	d.Verify.Mismatches = []verify.Mismatch{{
		Case:                c,
		FirstBadOffsetBytes: 4096, LastBadOffsetBytes: 4096, BadBytes: 1, BadBits: 7, Regions: 1, ExpectedHex: "01", FoundHex: "ff",
	}}
	d.Verify.FailureCount = 1
	d.Verify.Failures = []verify.Failure{{Case: c, Error: "cudaMemcpyAsync: cudaErrorInvalidValue (1): invalid argument", Err: errors.New("x")}}
	d.Bandwidth.Series = []result.Series{series(result.HostToDevice, 6.1, 6.2, 9.1), series(result.DeviceToHost, 13.1, 13.2, 13.2)}
	d.Errors = []string{"cudaMemGetInfo: cudaErrorUnknown (999): unknown error\n\tsee above"}

	sim := h200(host(t, "no-gpu-cgroup-v1"))
	sim.Simulated = true
	sim.Library = &doctor.Library{Path: "simulated libcudart 13.0", Found: "Options.Source", RuntimeVersion: "13.0", DriverVersion: "13.0"}
	sim.Devices[0].Name = "Simulated GPU"

	none := &doctor.Facts{
		Host: host(t, "container-cgroup-v1"),
		Search: &doctor.Search{
			Attempts: []doctor.Attempt{{Path: "libcudart.so.13", Found: "loader path", RuntimeVersion: "13.0", Error: "dlopen: libcudart.so.13: cannot open shared object file"}},
			Searched: []string{"$CUDA_PATH (not set)", "/usr/local/cuda/lib64"},
		},
		Requirements: doctor.Require(host(t, "container-cgroup-v1"), errors.New("not an OpenError")),
		Devices:      []doctor.Device{},
	}
	return map[string]*Result{
		"healthy":   judged("check", h200(host(t, "h200-vm"))),
		"unhealthy": judged("verify", bad),
		"simulated": judged("check", sim),
		"no-gpu":    judged("check", none),
		"devices":   {Command: "devices", Tool: testTool, Started: started, Complete: true, Facts: h200(host(t, "h200-vm"))},
		"version":   {Command: "version", Tool: testTool, Complete: true},
		"bench":     benched(h200(host(t, "h200-vm"))),
		"stopped":   stopped(h200(host(t, "h200-vm"))),
		"failed":    {Command: "pincheck", Tool: testTool, Started: started, Verdict: doctor.Failed, Errors: []string{"--sizes: \"0\": must be at least 1 byte"}},
	}
}

func render(t *testing.T, r *Result, f Format, s Style) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, Write(&b, r, f, s))
	return b.String()
}

func TestGolden(t *testing.T) {
	t.Parallel()
	for name, r := range results(t) {
		golden(t, "golden/report-"+name+".txt", render(t, r, Text, Style{}))
		golden(t, "golden/report-"+name+"-40.txt", render(t, r, Text, Style{Width: 40}))
		golden(t, "golden/report-"+name+"-verbose.txt", render(t, r, Text, Style{Verbose: true}))
		golden(t, "golden/report-"+name+".json", render(t, r, JSON, Style{}))
		golden(t, "golden/report-"+name+".prom", render(t, r, Prometheus, Style{}))
		golden(t, "golden/report-"+name+".csv", render(t, r, CSV, Style{}))
	}
}

// Results that are stored as JSON, also of real GPUs, must still be read in full, and their text must be complete.
func TestKeptResults(t *testing.T) {
	t.Parallel()
	made, err := filepath.Glob(filepath.Join(testdata, "golden", "report-*.json"))
	require.NoError(t, err)
	assert.NotEmpty(t, made)
	for _, file := range made {
		if *update { // TestGolden is writing them
			break
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		r, err := Read(text)
		require.NoError(t, err, file)
		assert.Equal(t, string(text), render(t, r, JSON, Style{}), file)
		want, err := os.ReadFile(strings.TrimSuffix(file, ".json") + ".txt")
		require.NoError(t, err)
		assert.Equal(t, string(want), render(t, r, Text, Style{}), file)
	}
	kept, err := filepath.Glob(filepath.Join(testdata, "results", "*.json"))
	require.NoError(t, err)
	assert.NotEmpty(t, kept)
	for _, file := range kept {
		if strings.HasPrefix(filepath.Base(file), "guard-") {
			continue // of benchmarks of the library, not of pincheck
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		r, err := Read(text)
		require.NoError(t, err, file)
		assert.True(t, r.Complete, file)
		assert.NotEmpty(t, r.Devices, file)
		if len(r.Benches) > 0 && r.Devices[0].Bandwidth == nil {
			benchGoldens(t, strings.TrimSuffix(file, ".json"), r)
			continue
		}
		for _, d := range r.Devices {
			require.NotNil(t, d.Bandwidth, file)
			require.Len(t, d.Bandwidth.Series, 2, file)
			assert.Len(t, d.Bandwidth.Series[1].Samples, 9, file)
			assert.InDelta(t, 55, d.Bandwidth.Series[1].Median, 1, file)
			assert.Equal(t, strconv.Itoa(d.Ordinal), d.Bandwidth.Series[1].Labels.Get(result.Device), file)
			assert.Equal(t, "67108864", d.Bandwidth.Series[1].Labels.Get(result.Size), file)
		}
		rel, err := filepath.Rel(testdata, strings.TrimSuffix(file, ".json")+".txt")
		require.NoError(t, err)
		golden(t, rel, render(t, r, Text, Style{Verbose: true}))
	}
}

// benchGoldens compares everything that is rendered of a bench on a real GPU.
func benchGoldens(t *testing.T, file string, r *Result) {
	t.Helper()
	name, err := filepath.Rel(testdata, file)
	require.NoError(t, err)
	golden(t, name+".txt", render(t, r, Text, Style{Verbose: true}))
	golden(t, name+"-40.txt", render(t, r, Text, Style{Verbose: true, Width: 40}))
	golden(t, name+".prom", render(t, r, Prometheus, Style{}))
	golden(t, name+".csv", render(t, r, CSV, Style{}))
	golden(t, name+".html", render(t, r, HTML, Style{}))
	assert.Len(t, strings.Split(strings.TrimSpace(render(t, r, JSONLines, Style{})), "\n"), 1)
}

func TestErrorsOfTheQuickCheckAreShown(t *testing.T) {
	t.Parallel()
	r := results(t)["healthy"]
	r.Devices[0].Bandwidth.Errors = []string{"GPU 0, registered memory: wrong bytes: byte 7"}
	assert.Contains(t, render(t, r, Text, Style{}), "\nError  GPU 0, registered memory: wrong bytes: byte 7\n")
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	whole := render(t, results(t)["bench"], JSON, Style{})
	for text, says := range map[string]string{
		"":                                 "not a result of pincheck",
		"GPU 0":                            "not a result of pincheck",
		"{}":                               "no schema_version",
		"[1]":                              "not a result of pincheck",
		`{"schema_version":3}`:             "schema_version 3: this pincheck reads 2 (use the pincheck that wrote it, or a newer one)",
		`{"schema_version":-1}`:            "schema_version -1",
		whole[:len(whole)/2]:               "unexpected end of JSON input",
		`{"schema_version":2,"devices":7}`: "devices",
	} {
		_, err := Read([]byte(text))
		assert.ErrorContains(t, err, says)
	}
}

func TestSimulatedIsMarked(t *testing.T) {
	t.Parallel()
	r := results(t)["simulated"]
	text := render(t, r, Text, Style{})
	assert.True(t, strings.HasPrefix(text, "Simulated GPU: nothing here was measured on hardware.\n"), text)
	assert.Contains(t, render(t, r, JSON, Style{}), `"simulated": true`)
	real := render(t, results(t)["healthy"], Text, Style{})
	assert.NotContains(t, strings.ToLower(real), "simulated")
	assert.Contains(t, render(t, results(t)["healthy"], JSON, Style{}), `"simulated": false`)
}

var escape = regexp.MustCompile("\x1b\\[[0-9;]*m")

func TestColorChangesNothingElse(t *testing.T) {
	t.Parallel()
	for name, r := range results(t) {
		text := render(t, r, Text, Style{})
		colored := render(t, r, Text, Style{Color: true})
		assert.NotContains(t, text, "\x1b", name)
		assert.Contains(t, colored, "\x1b[", name)
		assert.Equal(t, text, escape.ReplaceAllString(colored, ""), name)
	}
}

func TestNamesInJSON(t *testing.T) {
	t.Parallel()
	snake := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, inner := range v {
				if path != ".host.env" {
					assert.Regexp(t, snake, name, path)
				}
				walk(path+"."+name, inner)
			}
		case []any:
			for _, inner := range v {
				walk(path+"[]", inner)
			}
		}
	}
	for _, r := range results(t) {
		var v any
		require.NoError(t, json.Unmarshal([]byte(render(t, r, JSON, Style{})), &v))
		walk("", v)
	}
}

// isCommand reports whether a line of a finding is a command to copy.
func isCommand(line string) bool {
	return len(line) > detailIndent+detailWidth+2 && strings.HasPrefix(line, "  ") && strings.HasPrefix(line[detailIndent+detailWidth:], "  ")
}

func TestLinesAreShort(t *testing.T) {
	t.Parallel()
	for name, r := range results(t) {
		for _, width := range []int{0, 40, 60, 80, 120} {
			for line := range strings.Lines(render(t, r, Text, Style{Width: width})) {
				line = strings.TrimSuffix(line, "\n")
				if isCommand(line) {
					continue // it is not wrapped
				}
				assert.LessOrEqual(t, len([]rune(line)), Style{Width: width}.width(), "%s at %d: %q", name, width, line)
				assert.Equal(t, strings.TrimRight(line, " "), line, "%s: trailing space", name)
			}
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("no space") }

func TestWriteErrors(t *testing.T) {
	t.Parallel()
	for _, f := range Formats() {
		assert.ErrorContains(t, Write(failing{}, results(t)["healthy"], f, Style{}), "no space")
	}
	assert.ErrorContains(t, Write(&bytes.Buffer{}, &Result{}, "xml", Style{}), `"xml"`)
}

// Without UTF-8 every character is ASCII, and columns stay where they are.
func TestTextWithoutUTF8(t *testing.T) {
	t.Parallel()
	for locale, want := range map[string]bool{"": false, "C.UTF-8": false, "en_US.utf8": false, "C": true, "POSIX": true, "de_DE.ISO-8859-1": true} {
		assert.Equal(t, want, StyleFor(io.Discard, func(name string) string {
			return map[string]string{"LANG": locale, "NO_COLOR": "1"}[name]
		}).ASCII, locale)
	}
	r := results(t)["bench"]
	r.Benches[0].Answers = []string{"Host größer."}
	text, ascii := render(t, r, Text, Style{Verbose: true}), render(t, r, Text, Style{Verbose: true, ASCII: true})
	assert.Contains(t, text, "█")
	assert.Contains(t, ascii, "####")
	assert.Contains(t, ascii, "Host gr??er.")
	assert.Equal(t, -1, strings.IndexFunc(ascii, func(r rune) bool { return r > unicode.MaxASCII }))
	assert.Equal(t, utf8.RuneCountInString(text), len(ascii))
}

func TestStyleFor(t *testing.T) {
	t.Parallel()
	device, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no terminal to test with: %v", err)
	}
	defer device.Close()
	require.True(t, IsTerminal(device))
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	assert.False(t, IsTerminal(null), "a character device that is no terminal")
	assert.Equal(t, 80, Width(null))
	for _, c := range []struct {
		name     string
		env      map[string]string
		terminal bool
		want     bool
	}{
		{"terminal", nil, true, true},
		{"pipe", nil, false, false},
		{"NO_COLOR", map[string]string{"NO_COLOR": "1"}, true, false},
		{"NO_COLOR empty", map[string]string{"NO_COLOR": ""}, true, true},
		{"dumb", map[string]string{"TERM": "dumb"}, true, false},
		{"forced", map[string]string{"CLICOLOR_FORCE": "1"}, false, true},
		{"not forced", map[string]string{"CLICOLOR_FORCE": "0"}, false, false},
		{"NO_COLOR before force", map[string]string{"NO_COLOR": "1", "CLICOLOR_FORCE": "1"}, true, false},
	} {
		getenv := func(name string) string { return c.env[name] }
		if c.terminal {
			assert.Equal(t, c.want, StyleFor(device, getenv).Color, c.name)
		} else {
			assert.Equal(t, c.want, StyleFor(&bytes.Buffer{}, getenv).Color, c.name)
		}
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "a b? c", plain("a\n\tb\x1b c"))
	assert.Equal(t, []string{"aa bb", "ccccc", "ccc d"}, wrap("aa bb cccccccc d", 5))
}
