//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/dynlib"
	"github.com/gopinned/pinned/internal/findlib"
)

// realLibraries are the libcudarts that PINNED_TEST_LIBCUDART names.
func realLibraries(t *testing.T) []string {
	t.Helper()
	named := os.Getenv("PINNED_TEST_LIBCUDART")
	if named == "" {
		t.Skip("PINNED_TEST_LIBCUDART names no libraries: scripts/check.sh libcudart does")
	}
	return filepath.SplitList(named)
}

// versionOfFile is the version of a libcudart that names contain: that of the
// file, or of the wheel that it is in.
func versionOfFile(file string) Version {
	return versionInName(findlib.This().Version(libcudart, file))
}

// Every function that we bind is in the real library of that version, unless its row says
// that it may be missing.
func TestRealLibrariesExportWhatWeBind(t *testing.T) {
	for _, file := range realLibraries(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			source, err := dynlib.Open(file)
			require.NoError(t, err)
			version := versionOfFile(file)
			require.NotZero(t, version, "the version in the file's name")
			var rows [maxFunctions]int
			for i := range symbols {
				if s := &symbols[i]; s.serves(version) {
					assert.NotZero(t, source.Symbol(s.name), "%s in %v", s.name, version)
					rows[s.fn]++
				}
			}
			// From the first version that has a function on, each has one row for it. Those of
			// the driver's library have none.
			for fn, n := range rows {
				want := 0
				for _, s := range symbols {
					if s.fn == function(fn) && version >= s.since {
						want = 1
					}
				}
				assert.Equal(t, want, n, "rows for %s in %v", function(fn).name(), version)
			}
			assert.Zero(t, source.Symbol("cudaNoSuchFunction"))
		})
	}
}

// Without a driver a real library must lead to a clear error, and with one to
// a runtime. Nothing crashes either way.
func TestRealLibrariesOpen(t *testing.T) {
	for _, file := range realLibraries(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			rt, err := Open(context.Background(), Options{Library: file})
			if err == nil {
				assert.Equal(t, versionOfFile(file), rt.Library().Runtime)
				require.NoError(t, rt.Close())
				return
			}
			var open *OpenError
			require.ErrorAs(t, err, &open)
			if open.Driver.LibPath == "" {
				require.ErrorIs(t, err, ErrNoDriver)
			}
		})
	}
}
