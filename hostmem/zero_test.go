//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// All exported methods and functions, with values that nobody should pass.
func TestZeroAndNilAreErrors(t *testing.T) {
	t.Parallel()
	hostmemtest.ZeroArguments(t, new(Buffer))
	for _, value := range []any{Method(-1), Method(math.MaxInt), HugePages(-1), Holding{}} {
		hostmemtest.ZeroArguments(t, value)
	}
	require.NoError(t, SetLimits(Limits{}))

	g := newSimFixture(t, cudasim.Config{})
	buf, err := Alloc(t.Context(), g.Dev, 1, Options{})
	require.NoError(t, err)
	hostmemtest.ZeroArguments(t, buf, "Close")

	var none context.Context
	for name, call := range map[string]func() error{
		"Alloc, context":    func() error { return second(Alloc(none, g.Dev, 1, Options{})) },
		"Alloc, device":     func() error { return second(Alloc(t.Context(), nil, 1, Options{})) },
		"Alloc, size":       func() error { return second(Alloc(t.Context(), g.Dev, 0, Options{})) },
		"Register, context": func() error { return second(Register(none, g.Dev, make([]byte, 1), RegisterOptions{})) },
		"Register, device":  func() error { return second(Register(t.Context(), nil, make([]byte, 1), RegisterOptions{})) },
		"Register, memory":  func() error { return second(Register(t.Context(), g.Dev, nil, RegisterOptions{})) },
		"MapFile, context":  func() error { return second(MapFile(none, g.Dev, "/x", FileOptions{})) },
		"MapFile, device":   func() error { return second(MapFile(t.Context(), nil, "/x", FileOptions{})) },
		"MapFile, path":     func() error { return second(MapFile(t.Context(), g.Dev, "", FileOptions{})) },
		"SetLimits":         func() error { return SetLimits(Limits{MaxBytes: -1}) },
		"SetLimits, NaN":    func() error { return SetLimits(Limits{MaxShare: math.NaN()}) },
	} {
		assert.NotPanics(t, func() { assert.Error(t, call(), name) }, name)
	}
	assert.Nil(t, Slice[int](nil))
	_, _, ok := Find(nil)
	assert.False(t, ok)
	_, ok = NodeOf(none, g.Dev)
	assert.False(t, ok)
	_, ok = NodeOf(t.Context(), nil)
	assert.False(t, ok)
}
