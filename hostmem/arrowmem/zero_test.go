//go:build linux && !android && (amd64 || arm64)

package arrowmem

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// All exported methods and functions, with values that nobody should pass.
func TestZeroAndNilAreErrors(t *testing.T) {
	t.Parallel()
	var none *Allocator
	hostmemtest.ZeroArguments(t, none)
	assert.Nil(t, none.Allocate(1))
	assert.Nil(t, none.Reallocate(1, nil))

	var zero Allocator
	hostmemtest.ZeroArguments(t, &zero, "Err")
	mem := zero.Reallocate(100, zero.Allocate(10))
	assert.Len(t, mem, 100)
	assert.ErrorContains(t, zero.Err(), "which now are of the Go heap: pool: get 100 bytes from no pool: the zero Pool")
	zero.Free(mem)
	assert.Equal(t, Stats{PeakBytes: 110, Fallbacks: 2}, zero.Stats())

	_, err := New(nil, Options{})
	assert.ErrorContains(t, err, "arrowmem: new: the pool is nil")
}
