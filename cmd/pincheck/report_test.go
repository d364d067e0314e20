package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// reportTo is the file that pincheck report writes, with these arguments.
func reportTo(t *testing.T, sys system, args ...string) (page string, got outcome) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "out.html")
	got = call(t, sys, append([]string{"report", "--output", file}, args...)...)
	text, err := os.ReadFile(file)
	if !os.IsNotExist(err) {
		require.NoError(t, err)
	}
	left, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	assert.LessOrEqual(t, len(left), 1, "nothing else is left")
	return string(text), got
}

func TestReport(t *testing.T) {
	t.Parallel()
	page, got := reportTo(t, benches(t, none))
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Empty(t, got.stdout)
	assert.Contains(t, got.stderr, "written: ")
	for _, want := range []string{"<b>host-7</b>", "Healthy: GPU 0 copies at full speed", ">Verification</h3>", ">Copies</h3>", ">Memory kept</h3>", "1 series"} {
		assert.Contains(t, page, want)
	}
	page, got = reportTo(t, benches(t, none), "--full", "--quiet")
	assert.Equal(t, exitOK, got.code)
	assert.Empty(t, got.stderr)
	assert.Contains(t, page, "3 series")
}

// The JSON of a report has the check and the experiments, and gives the same page.
func TestReportOfFiles(t *testing.T) {
	t.Parallel()
	sys := benches(t, none)
	got := call(t, sys, "report", "--format", "json")
	assert.Equal(t, exitOK, got.code, got.stderr)
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	require.Len(t, r.Devices, 1)
	assert.NotNil(t, r.Devices[0].Verify)
	assert.NotNil(t, r.Devices[0].Bandwidth)
	assert.Len(t, r.Benches, 2)

	dir := t.TempDir()
	one, two := filepath.Join(dir, "one.json"), filepath.Join(dir, "two.jsonl")
	require.NoError(t, os.WriteFile(one, []byte(got.stdout), 0o644))
	lines := call(t, sys, "bench", "memory", "--format", "jsonl").stdout
	require.NoError(t, os.WriteFile(two, []byte(strings.Repeat(lines, 2)), 0o644))
	sys = failing(t, "h200-vm", assert.AnError) // nothing is run
	page, got := reportTo(t, sys, one, two)
	assert.Equal(t, exitOK, got.code, got.stderr)
	assert.Contains(t, page, "All 3 hosts are healthy or measured")
	page, _ = reportTo(t, sys, one)
	assert.Contains(t, page, ">Verification</h3>")
	assert.Contains(t, page, ">Copies</h3>")
}

// A report has all that the check found of a GPU, also that its slow copies were measured twice: a
// machine that is busy, or bytes that are wrong, are no other ones there.
func TestReportHasAllOfTheCheck(t *testing.T) {
	t.Parallel()
	got := call(t, benches(t, none), "report", "--format", "json", "--expect-bandwidth", "63")
	assert.Equal(t, exitProblems, got.code, got.stderr)
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	require.Len(t, r.Devices, 1)
	assert.NotNil(t, r.Devices[0].Slower)
}

func TestReportOfFilesThatAreWrong(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sys := failing(t, "h200-vm", assert.AnError)
	for name, c := range map[string]struct{ text, want string }{
		"foreign.json":   {`{"nvbandwidth":{}}`, "it has no schema_version"},
		"list.json":      {`[1]`, "not a result of pincheck"},
		"future.json":    {`{"schema_version":999}`, "schema_version 999"},
		"cut-off.json":   {`{"schema_version":2,"benches":[{"bench`, "truncated: it ends within document"},
		"empty.json":     {"", "empty: no result"},
		"not-json.json":  {"<html>", "not JSON"},
		"wrong.json":     {`{"schema_version":2,"benches":"x"}`, "benches"},
		"second.json":    {`{"schema_version":2}{`, "truncated: it ends within document"},
		"trailing.jsonl": {"{\"schema_version\":2}\n}", "not JSON"},
	} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(c.text), 0o644))
		page, got := reportTo(t, sys, file)
		assert.Equal(t, exitUsage, got.code, name)
		assert.Contains(t, got.stderr, c.want, name)
		assert.Contains(t, got.stderr, name)
		assert.Empty(t, page, "%s: nothing is written", name)
		assert.NotContains(t, got.stderr, "written: ")
	}
	for _, file := range []string{filepath.Join(dir, "missing.json"), dir} {
		_, got := reportTo(t, sys, file)
		assert.Equal(t, exitUsage, got.code, file)
		assert.Equal(t, 1, strings.Count(got.stderr, file), "the name is said once: %s", got.stderr)
	}
	_, got := reportTo(t, sys, "--format", "json", filepath.Join(dir, "empty.json"))
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "--format json")
}

func TestReportThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	ran := false
	sys := benches(t, func() { ran = true })
	got := call(t, sys, "report", "-o", filepath.Join(t.TempDir(), "missing", "out.html"))
	assert.Equal(t, exitOutput, got.code)
	assert.False(t, ran, "it is said before anything is measured")
}

// What was finished is in the file.
func TestReportInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	sys := benches(t, func() {
		if n++; n == 6 { // in the second experiment
			cancel()
		}
	})
	file := filepath.Join(t.TempDir(), "out.html")
	var stdout, stderr strings.Builder
	code := run(ctx, []string{"report", "-o", file}, &stdout, &stderr, sys)
	assert.Equal(t, exitInterrupted, code, stderr.String())
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(page), "Incomplete")
	assert.Contains(t, string(page), ">Copies</h3>")
	assert.Contains(t, string(page), "What is here was measured before that.")
}

// Without a GPU the page says what is missing.
func TestReportWithoutGPU(t *testing.T) {
	t.Parallel()
	page, got := reportTo(t, on(t, "no-gpu-cgroup-v1", "PATH=/usr/bin"), "--library", "libcudart-that-does-not-exist.so")
	assert.Equal(t, exitUnusable, got.code, got.stderr)
	assert.Contains(t, page, "No usable GPU: ")
}
