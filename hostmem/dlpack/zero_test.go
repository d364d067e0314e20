//go:build linux && !android && (amd64 || arm64)

package dlpack

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// All exported methods and functions, with values that nobody should pass.
func TestZeroAndNilAreErrors(t *testing.T) {
	t.Parallel()
	for _, zero := range []any{Versioned(0), Unversioned(0), DataType{}} {
		hostmemtest.ZeroArguments(t, zero)
	}
	for _, zero := range []any{new(Imported), (*Imported)(nil)} {
		hostmemtest.ZeroArguments(t, zero, "Close") // there is no deleter
	}
	_, err := Import(0)
	assert.ErrorContains(t, err, "dlpack: import: the address is 0")
	_, err = ImportUnversioned(0)
	assert.ErrorContains(t, err, "dlpack: import: the address is 0")
	_, err = Export(nil, Tensor{}, nil)
	assert.ErrorContains(t, err, "dlpack: export 0 bytes: ")
	_, err = ExportUnversioned(nil, Tensor{}, nil)
	assert.ErrorContains(t, err, "dlpack: export 0 bytes: ")
}
