package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// released calls a function with the files of each release in testdata/released, which `scripts/release.sh
// fixtures` wrote with that release. name is the end of their names.
func released(t *testing.T, name string, f func(t *testing.T, file string)) {
	t.Helper()
	files, err := filepath.Glob(testdata("released", "*", "*"+name))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file))+"/"+filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			f(t, file)
		})
	}
}

// Results of earlier releases are read, and nothing that they say is lost or changed.
func TestResultsOfReleasesStayReadable(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("files need no library"))
	released(t, ".json.gz", func(t *testing.T, file string) {
		packed, err := os.Open(file)
		require.NoError(t, err)
		defer packed.Close()
		unpacked, err := gzip.NewReader(packed)
		require.NoError(t, err)
		text, err := io.ReadAll(unpacked)
		require.NoError(t, err)

		r, err := report.Read(text)
		require.NoError(t, err)
		assert.Equal(t, filepath.Base(filepath.Dir(file)), r.Tool.Version)
		var b bytes.Buffer
		require.NoError(t, report.Write(&b, r, report.JSON, report.Style{}))
		assertKept(t, text, b.Bytes())

		for _, format := range report.Formats() {
			assert.NoError(t, report.Write(io.Discard, r, format, report.Style{Width: 80}), "%s", format)
		}
		plain := filepath.Join(t.TempDir(), "result.json")
		require.NoError(t, os.WriteFile(plain, text, 0o600))
		got := call(t, sys, "report", plain, "-o", filepath.Join(t.TempDir(), "report.html"))
		assert.Equal(t, exitOK, got.code, got.stderr)
		if len(r.Benches) > 0 {
			got = call(t, sys, "compare", plain, plain)
			assert.Equal(t, exitOK, got.code, "%s%s", got.stdout, got.stderr)
		}
	})
}

// An archive of an earlier release is diagnosed, with all facts that it has.
func TestCapturesOfReleasesStayReadable(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("an archive needs no library"))
	released(t, ".tar.gz", func(t *testing.T, file string) {
		packed, err := os.Open(file)
		require.NoError(t, err)
		defer packed.Close()
		archive, err := capture.Read(packed)
		require.NoError(t, err)
		assert.NotEmpty(t, archive.Host)
		var facts doctor.Facts
		require.NoError(t, json.Unmarshal(archive.Facts, &facts))
		require.NotEmpty(t, facts.Devices)
		again, err := json.Marshal(&facts)
		require.NoError(t, err)
		assertKept(t, archive.Facts, again)

		got := call(t, sys, "--from", file, "--format", "json")
		r, err := report.Read([]byte(got.stdout))
		require.NoError(t, err, "status %d: %s", got.code, got.stderr)
		assert.Equal(t, facts.Devices[0].Name, r.Devices[0].Name)
		assert.NotEmpty(t, r.Verdict)
	})
}

// assertKept fails if an object of the first JSON text lacks a field in the second one, or has another value there.
func assertKept(t *testing.T, before, after []byte) {
	t.Helper()
	var was, is any
	require.NoError(t, json.Unmarshal(before, &was))
	require.NoError(t, json.Unmarshal(after, &is))
	var compare func(path []string, was, is any)
	compare = func(path []string, was, is any) {
		switch was := was.(type) {
		case map[string]any:
			is, _ := is.(map[string]any)
			for name, value := range was {
				compare(append(path, name), value, is[name])
			}
		case []any:
			is, _ := is.([]any)
			if assert.Len(t, is, len(was), strings.Join(path, ".")) {
				for i := range was {
					compare(append(path, "[]"), was[i], is[i])
				}
			}
		default:
			if was != is { // without testify, which is slow for each of 20,000 numbers
				assert.Equal(t, was, is, strings.Join(path, "."))
			}
		}
	}
	compare(nil, was, is)
}
