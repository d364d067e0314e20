package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// samples are the files of testdata/reports with the findings that are expected: notes last.
var samples = map[string]struct {
	verdict  doctor.Verdict
	findings string
	says     string
}{
	"bug-report-off-the-bus.log.gz":   {doctor.Problems, "gpu_off_bus", "0000:01:00.0 fell off the bus"},
	"bug-report-gsp-timeout.log.gz":   {doctor.Problems, "xid", "Xid 119"},
	"bug-report-no-window.log.gz":     {doctor.Problems, "gpu_not_initialized", "Above 4G Decoding"},
	"bug-report-healthy.log.gz":       {doctor.Unknown, "", "A100-PCIE-40GB"},
	"nvidia-smi-450-v100-ecc.txt":     {doctor.Problems, "uncorrectable_ecc row_remap_pending", "2 uncorrectable errors"},
	"nvidia-smi-515-healthy.txt":      {doctor.Unknown, "", "0000:41:00.0"},
	"nvidia-smi-570-power-brake.txt":  {doctor.Warnings, "throttled", "hw_power_brake_slowdown"},
	"nvidia-smi-580-remap-failed.xml": {doctor.Problems, "row_remap_failed", "A100-SXM4-80GB"},
	"nvidia-smi-590-narrow-link.txt":  {doctor.Warnings, "narrow_link", "4 of 16 lanes"},
	"nvidia-smi-mismatch.txt":         {doctor.Problems, "driver_mismatch", "Driver/library version mismatch"},
	"lspci-idle-healthy.txt":          {doctor.Unknown, "", "0000:41:00.0"},
	"lspci-narrow-gen1.txt":           {doctor.Problems, "narrow_link", "4 of 16 lanes"},
	"dmesg-program-fault.txt":         {doctor.Unknown, "xid", "page fault of GPU memory"},
	"dmesg-t-aer.txt":                 {doctor.Warnings, "link_errors", "Do Nov 20 11:31:17 2025"},
	"journal-two-boots.txt":           {doctor.Unknown, "", "kernel log"},
	"dmesg-closed-module.txt":         {doctor.Problems, "gpu_too_old_for_driver", "Blackwell or later"},
	"dmesg-legacy.txt":                {doctor.Problems, "gpu_too_old_for_driver", "the last branch for this GPU"},
	"journal-api-mismatch.txt":        {doctor.Problems, "driver_mismatch", "390.48"},
}

// elsewhere is a machine that --from must not look at.
func elsewhere(t *testing.T) system {
	return failing(t, "no-gpu-cgroup-v1", errors.New("a file needs no library"), "CUDA_VISIBLE_DEVICES=")
}

func idsOf(r *report.Result) string {
	var ids []string
	for _, f := range r.Findings {
		if !slices.Contains(ids, f.ID) {
			ids = append(ids, f.ID)
		}
	}
	return strings.Join(ids, " ")
}

// Each sample has the findings that are expected, and no other. Nothing of this machine is in the result.
func TestFromWhatPeopleHave(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob(testdata("reports", "*.*"))
	require.NoError(t, err)
	assert.Len(t, names, len(samples), "each sample has its findings")
	for name, want := range samples {
		got := call(t, elsewhere(t), "--from", testdata("reports", name), "--format", "json")
		r := resultOf(t, got)
		assert.Equal(t, want.verdict, r.Verdict, name)
		assert.Equal(t, want.findings, idsOf(r), name)
		assert.Contains(t, got.stdout, want.says, name)
		assert.NotEmpty(t, r.Sources, name)
		assert.Empty(t, r.Passed, "%s: a text is no examination", name)
		assert.Empty(t, r.HostName, name)
		assert.Equal(t, map[doctor.Verdict]int{doctor.Problems: exitProblems, doctor.Warnings: exitWarnings, doctor.Unknown: exitUnknown}[r.Verdict], got.code, name)
		if strings.Contains(name, "program-fault") {
			assert.Equal(t, doctor.Note, r.Findings[0].Severity, "a program's fault accuses no hardware")
		}
	}
}

// A sample that was cut off anywhere has no finding that the whole one lacks.
func TestCutOffTextsAccuseNobody(t *testing.T) {
	t.Parallel()
	for name, want := range samples {
		if name == "journal-two-boots.txt" {
			continue // it begins with another boot
		}
		text := sampleText(t, name)
		for part := 1; part < 8; part++ {
			sys := elsewhere(t)
			got := callWith(t, sys, bytes.NewReader(text[:len(text)*part/8]), "--from", "-", "--format", "json", "-q")
			if got.code == exitUsage {
				assert.Contains(t, got.stderr+got.stdout, "its form is not known", name)
				continue
			}
			for _, f := range resultOf(t, got).Findings {
				assert.Contains(t, want.findings, f.ID, "%s, %d of 8 parts", name, part)
			}
		}
	}
}

func sampleText(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(testdata("reports", name))
	require.NoError(t, err)
	if strings.HasSuffix(name, ".gz") {
		r, err := gzip.NewReader(bytes.NewReader(text))
		require.NoError(t, err)
		text, err = io.ReadAll(r)
		require.NoError(t, err)
	}
	return text
}

// callWith is call with a standard input.
func callWith(t *testing.T, sys system, stdin io.Reader, args ...string) outcome {
	t.Helper()
	name := filepath.Join(t.TempDir(), "input")
	text, err := io.ReadAll(stdin)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(name, text, 0o600))
	for i, a := range args {
		if a == "-" {
			args[i] = name
		}
	}
	return call(t, sys, args...)
}

// Texts of one machine complete each other: lspci shows that the GPU answers again.
func TestSeveralTexts(t *testing.T) {
	t.Parallel()
	sys := elsewhere(t)
	log := filepath.Join(t.TempDir(), "dmesg")
	require.NoError(t, os.WriteFile(log, []byte("[    5.0] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"), 0o600))
	assert.Equal(t, "gpu_off_bus", idsOf(resultOf(t, call(t, sys, "--from", log, "--format", "json"))))
	r := resultOf(t, call(t, sys, "--from", log, "--from", testdata("reports", "lspci-idle-healthy.txt"), "--format", "json"))
	assert.Equal(t, "xid", idsOf(r))
	assert.Contains(t, r.Findings[0].Cause, "answers now")
	assert.Equal(t, []string{"kernel log", "lspci"}, r.Sources)
}

// Half of the lanes of a GPU whose slot is not in the text may be all that the slot has.
func TestHalfOfTheLanesAccuseNobody(t *testing.T) {
	t.Parallel()
	text := string(sampleText(t, "nvidia-smi-590-narrow-link.txt"))
	for old, changed := range map[string]string{": 4x": ": 8x", "RTX 5090": "RTX 5090 Laptop GPU"} {
		require.Contains(t, text, old)
		got := callWith(t, elsewhere(t), strings.NewReader(strings.Replace(text, old, changed, 1)), "--from", "-", "--format", "json")
		assert.Equal(t, exitUnknown, got.code)
		r := resultOf(t, got)
		require.Equal(t, "narrow_link", idsOf(r))
		assert.Equal(t, doctor.Note, r.Findings[0].Severity)
	}
}

// Beside an archive a text adds the kernel's log, and the archive's verdict is its own.
func TestATextBesideAnArchive(t *testing.T) {
	t.Parallel()
	archive := filepath.Join(t.TempDir(), "a.tar.gz")
	call(t, failing(t, "h200-vm", errors.New("no library")), "capture", "-q", "-o", archive)
	sys := elsewhere(t)
	alone := resultOf(t, call(t, sys, "--from", archive, "--format", "json"))
	both := resultOf(t, call(t, sys, "--from", archive, "--from", testdata("reports", "dmesg-program-fault.txt"), "--format", "json"))
	assert.Equal(t, alone.Verdict, both.Verdict)
	assert.Equal(t, strings.TrimSpace(idsOf(alone)+" xid"), idsOf(both))
	assert.Empty(t, both.Sources)
	got := call(t, sys, "--from", archive, "--from", archive)
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "a second archive")
}

func TestTicket(t *testing.T) {
	t.Parallel()
	sys := elsewhere(t)
	got := call(t, sys, "--from", testdata("reports", "bug-report-off-the-bus.log.gz"), "--format", "ticket")
	assert.Equal(t, exitProblems, got.code)
	for _, line := range []string{"Verdict: Problem: the GPU at 0000:01:00.0 fell off the bus\n", "Finding: gpu_off_bus\n", "Cause: ", "Evidence:\n- /sys", "\n- NVRM: Xid", "Fix: "} {
		assert.Contains(t, got.stdout, line)
	}
	assert.Less(t, strings.Count(got.stdout, "\n"), 12)
	got = call(t, sys, "--from", testdata("reports", "lspci-idle-healthy.txt"), "--format", "ticket")
	assert.Equal(t, exitUnknown, got.code)
	assert.Contains(t, got.stdout, "what it does not contain is unknown")
	got = call(t, sys, "devices", "--format", "ticket")
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "--format ticket: want text, json, jsonl, prometheus, csv or html")
}

// What is no such text is refused, in words that name the forms.
func TestTextsThatAreRefused(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"":                         "its form is not known",
		"hello\n":                  `it begins with "hello"`,
		"\xff\xfeN\x00V\x00\n\x00": "UTF-16",
		"PK\x03\x04x":              "compressed (zip)",
		"\xfd7zXZ\x00x":            "compressed (xz)",
		"\x1f\x8bx":                "decompress",
		"\x1b[2Jhello\n":           "its form is not known",
	} {
		got := callWith(t, elsewhere(t), strings.NewReader(text), "--from", "-")
		assert.Equal(t, exitUsage, got.code, "%q", text)
		assert.Contains(t, got.stderr, says, "%q", text)
		assert.NotContains(t, got.stderr, "\x1b")
	}
}
