package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
)

// benchJSON is a document of pincheck bench with one series of this rate.
func benchJSON(host string, rate float64) string {
	var samples []string
	for i := range 9 {
		samples = append(samples, fmt.Sprint(rate+0.01*float64(i)))
	}
	return fmt.Sprintf(`{"schema_version": %d, "command": "bench", "host_name": %q, "complete": true, "benches": [{"bench": "bandwidth", "complete": true, "series": [`+
		`{"name": "bandwidth", "labels": {"device": "0", "direction": "host_to_device", "memory": "registered", "size_bytes": "67108864"}, "unit": "gb_per_s", "better": "higher", "samples": [%s]}]}]}`+"\n",
		report.SchemaVersion, host, strings.Join(samples, ","))
}

func TestCompare(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return file
	}
	fast, slow := write("fast.json", benchJSON("a", 55)), write("slow.json", benchJSON("b", 40))
	fleet := write("fleet.jsonl", benchJSON("a", 55)+benchJSON("b", 40)+benchJSON("c", 55.1))

	got := call(t, system{}, "compare", fast, slow)
	assert.Equal(t, exitProblems, got.code)
	assert.Empty(t, got.stderr)
	assert.Contains(t, got.stdout, "worse")
	assert.Contains(t, got.stdout, "Worse: 1 of 1 series, by up to 27%.\n")

	got = call(t, system{}, "compare", slow, fast)
	assert.Equal(t, exitOK, got.code, "better is no failure")
	assert.Contains(t, got.stdout, "better")

	got = call(t, system{}, "compare", fast, fast)
	assert.Equal(t, exitOK, got.code)
	got = call(t, system{}, "compare", "--threshold", "50", fast, slow)
	assert.Equal(t, exitOK, got.code, "less than half")

	got = call(t, system{}, "compare", "--format", "json", fleet)
	assert.Equal(t, exitProblems, got.code)
	var c struct {
		Verdict string
		Hosts   []struct {
			Name  string
			Worse int
		}
	}
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &c), got.stdout)
	assert.Equal(t, "worse", c.Verdict)
	require.Len(t, c.Hosts, 3)
	assert.Equal(t, "b", c.Hosts[1].Name)
	assert.Equal(t, 1, c.Hosts[1].Worse)

	file := filepath.Join(dir, "compare.html")
	got = call(t, system{}, "compare", fast, slow, "--format", "html", "-o", file)
	assert.Equal(t, exitProblems, got.code, got.stderr)
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(page), "Worse: 1 of 1 series")
	assert.Equal(t, "text\njson\nhtml\n:4\n", call(t, system{}, "__complete", "compare", "--format", "").stdout)

	root := newRoot(&options{}, system{})
	var out bytes.Buffer
	root.SetArgs([]string{"compare", "-", fast})
	root.SetIn(strings.NewReader(benchJSON("z", 55)))
	root.SetOut(&out)
	require.NoError(t, root.Execute())
	assert.Contains(t, out.String(), "a: z, pincheck")

	garbage := write("garbage", "no GPU")
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "name two or more files"},
		{[]string{fast}, "1 run: two or more are needed"},
		{[]string{fast, filepath.Join(dir, "nothing")}, "nothing: no such file or directory\n"},
		{[]string{fast, dir}, dir + ": is a directory, not a file\n"},
		{[]string{fast, garbage}, "garbage: not JSON: byte 2"},
		{[]string{fast, write("future", strings.Replace(benchJSON("a", 1), `"schema_version": `, `"schema_version": 9`, 1))}, "future: document 1: schema_version 9"},
		{[]string{fast, slow, "--format", "xml"}, "--format xml: want text, json or html"},
		{[]string{fast, slow, "--threshold", "-1"}, "threshold -0.01: must not be negative"},
		{[]string{fast, slow, "--threshold", "NaN"}, "threshold NaN: must not be negative"},
	} {
		got := call(t, system{}, append([]string{"compare"}, c.args...)...)
		assert.Equal(t, exitUsage, got.code, c.want)
		assert.Contains(t, got.stderr, c.want)
		assert.Empty(t, got.stdout)
	}

	var stderr bytes.Buffer
	code := run(t.Context(), []string{"compare", fast, fast}, fullDisk{}, &stderr, system{})
	assert.NotEqual(t, exitOK, code)
	assert.Contains(t, stderr.String(), "no space left on device")
}

func TestCompareSimulatedRuns(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var args []string
	for name, rate := range map[string]float64{"a": 55, "b": 20} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(strings.Replace(benchJSON(name, rate), `"command"`, `"simulated": true, "devices": [], "command"`, 1)), 0o600))
		args = append(args, file)
	}
	got := call(t, system{}, append([]string{"compare"}, args...)...)
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Contains(t, strings.Join(strings.Fields(got.stdout), " "), "No verdict: a run is of the simulated GPU, whose copies take the time of the host's processors.")
	assert.NotContains(t, got.stdout, "worse")
	got = call(t, system{}, append([]string{"compare", "--format", "json"}, args...)...)
	assert.Equal(t, exitOK, got.code)
	assert.Contains(t, got.stdout, `"verdict": "simulated"`)
}

func TestNPDOfASimulatedGPU(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	got := call(t, sys, "--npd", "--sim")
	assert.Equal(t, report.NPDOK, got.code)
	assert.Regexp(t, `^simulated: 1 GPU healthy, H2D [0-9.]+ GB/s, D2H [0-9.]+ GB/s\n$`, got.stdout)
	assert.Empty(t, got.stderr)
}

func TestNPDWithoutAGPU(t *testing.T) {
	t.Parallel()
	none := call(t, failing(t, "no-gpu-cgroup-v1", noLibrary(cudart.DriverFacts{})), "--npd")
	assert.Equal(t, report.NPDUnknown, none.code, "a node without a GPU is not broken")
	assert.Equal(t, "no NVIDIA GPU on the PCI bus of this host\n", none.stdout)
	lost := call(t, failing(t, "h200-vm", noLibrary(cudart.DriverFacts{})), "--npd")
	assert.Equal(t, report.NPDNotOK, lost.code)
	assert.Contains(t, lost.stdout, "no usable GPU: ")
	assert.LessOrEqual(t, len(lost.stdout), 81)
}

// Whatever else fails, nothing is known of the node.
func TestNPDOfAFailure(t *testing.T) {
	t.Parallel()
	assert.Equal(t, outcome{"check failed: library on fire\n", "", report.NPDUnknown}, call(t, failing(t, "h200-vm", errors.New("library on fire")), "--npd"))
	for args, want := range map[string]string{
		"--npd --format xml":          "--format xml: want text, json",
		"--npd --format json --nope":  "unknown flag --nope",
		"--npd extra":                 `unknown command "extra"`,
		"--expect-gpus x --npd":       `--expect-gpus "x": want a whole number`,
		"--npd=maybe":                 `--npd "maybe": want true or false`,
		"verify --npd":                "no flag --npd: it belongs to check",
		"--npd --version":             "exclude each other",
		"--npd --from /nonexistent":   "--from /nonexistent: no such file or directory",
		"check --npd --fail-on never": "--fail-on never",
		"--npd --device 7 --sim":      "--device 7: no such GPU",
	} {
		if strings.Contains(args, "--sim") {
			needsSim(t)
		}
		got := call(t, on(t, "h200-vm"), strings.Fields(args)...)
		assert.Equal(t, report.NPDUnknown, got.code, args)
		assert.Contains(t, got.stdout, "check failed: ", args)
		assert.Contains(t, got.stdout, want, args)
		assert.Equal(t, 1, strings.Count(got.stdout, "\n"), args)
		assert.LessOrEqual(t, len(got.stdout), 81, args)
		assert.Empty(t, got.stderr, args)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	var stdout bytes.Buffer
	assert.Equal(t, report.NPDUnknown, run(ctx, []string{"--npd"}, &stdout, io.Discard, on(t, "h200-vm")))
	assert.Equal(t, "no verdict: interrupted\n", stdout.String())
	assert.Equal(t, exitUsage, call(t, system{}, "--npd=false", "--nope").code)
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"--npd"}, fullDisk{}, &stderr, failing(t, "no-gpu-cgroup-v1", noLibrary(cudart.DriverFacts{})))
	assert.Equal(t, report.NPDUnknown, code)
}
