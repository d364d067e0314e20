//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/dynlib"
	"golang.org/x/sys/unix"
)

// Names and texts of the codes are those of the real libraries, except codes that are
// newer than the library. No driver is needed.
func TestCodesAgreeWithRealLibraries(t *testing.T) {
	named := os.Getenv("PINNED_TEST_LIBCUDART")
	if named == "" {
		t.Skip("PINNED_TEST_LIBCUDART names no libraries: scripts/check.sh libcudart does")
	}
	after124 := codesNamed(t, "Contained", "TensorMemoryLeak", "FunctionNotLoaded", "InvalidResourceType", "InvalidResourceConfiguration")
	after118 := append(codesNamed(t, "UnsupportedDevSideSync", "LossyQuery", "CdpNotSupported", "CdpVersionMismatch"), after124...)
	for _, file := range filepath.SplitList(named) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			library, err := dynlib.Open(file)
			require.NoError(t, err)
			text := func(function string, c Code) string {
				entry := library.Symbol(function)
				require.NotZero(t, entry, function)
				call := &cCall{entry: entry, args: [maxCallArgs]uintptr{uintptr(c)}}
				callC(call)
				address := call.result
				require.NotZero(t, address, "%s(%d)", function, c)
				return unix.BytePtrToString(*(**byte)(unsafe.Pointer(&address)))
			}
			version := versionOfFile(file)
			var known int
			var missing []Code
			check := func(c Code) {
				name := text("cudaGetErrorName", c)
				if name == unrecognizedText { // this library's word for names too
					assert.Equal(t, unrecognizedText, text("cudaGetErrorString", c))
					if c.Name() != unrecognizedName {
						missing = append(missing, c)
					}
					return
				}
				known++
				if c.Name() == unrecognizedName && version > 13000 {
					t.Logf("newer than this package: %d %s: %s", c, name, text("cudaGetErrorString", c))
					return
				}
				assert.Equal(t, name, c.Name())
				assert.Equal(t, text("cudaGetErrorString", c), c.Text(), name)
			}
			for c := Code(0); c < 2000; c++ {
				check(c)
			}
			check(10000)
			assert.Greater(t, known, 120)
			switch version {
			case 11080:
				assert.ElementsMatch(t, after118, missing)
			case 12040:
				assert.ElementsMatch(t, after124, missing)
			}
		})
	}
}

// codesNamed returns the codes of these C names, without cudaError.
func codesNamed(t *testing.T, names ...string) (codes []Code) {
	for code, info := range codeTable() {
		if slices.Contains(names, strings.TrimPrefix(info.name, "cudaError")) {
			codes = append(codes, code)
		}
	}
	require.Len(t, codes, len(names))
	return codes
}
