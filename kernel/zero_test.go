//go:build linux && !android && (amd64 || arm64)

package kernel_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

// The exported functions and methods, with values that nobody should pass: zero ones, nil, and
// sizes out of range. All are errors, and none panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	r := newFixture(t, 13000, ptx)
	empty := r.kernel(t, "empty")
	ctx, one := t.Context(), kernel.Threads(1, 1)
	var none context.Context
	type calls map[string]func() error
	ofModule := func(m *kernel.Module) calls {
		return calls{
			"Kernel":                   func() error { _, err := m.Kernel(t.Context(), "f"); return err },
			"Close":                    m.Close,
			"CloseContext":             func() error { return m.CloseContext(ctx) },
			"CloseContext without ctx": func() error { return m.CloseContext(none) },
		}
	}
	ofKernel := func(k *kernel.Kernel) calls {
		assert.Zero(t, k.Limits())
		return calls{
			"Launch":      func() error { return k.Launch(r.stream, one) },
			"AllowShared": func() error { return k.AllowShared(1) },
		}
	}
	for name, list := range map[string]calls{
		"nil Module": ofModule(nil), "zero Module": ofModule(new(kernel.Module)),
		"nil Kernel": ofKernel(nil), "zero Kernel": ofKernel(new(kernel.Kernel)),
		"functions": {
			"Load":                     func() error { _, err := kernel.Load(t.Context(), nil, []byte(ptx)); return err },
			"Load on a zero device":    func() error { _, err := kernel.Load(t.Context(), new(cudart.Device), []byte(ptx)); return err },
			"Load without ctx":         func() error { _, err := kernel.Load(none, r.dev, []byte(ptx)); return err },
			"Kernel without ctx":       func() error { _, err := r.module.Kernel(none, "empty"); return err },
			"Load of nothing":          func() error { _, err := kernel.Load(t.Context(), r.dev, nil); return err },
			"Launch on no stream":      func() error { return empty.Launch(nil, one) },
			"Launch on a zero stream":  func() error { return empty.Launch(new(cudart.Stream), one) },
			"Launch of nothing":        func() error { return empty.Launch(r.stream, kernel.Config{}) },
			"Launch of less":           func() error { return empty.Launch(r.stream, kernel.Threads(math.MinInt, math.MinInt)) },
			"Launch of all":            func() error { return empty.Launch(r.stream, kernel.Threads(math.MaxInt, math.MaxInt)) },
			"Launch of zero arguments": func() error { return r.kernel(t, "mixed").Launch(r.stream, one, make([]kernel.Value, 6)...) },
			"Launch of many arguments": func() error { return empty.Launch(r.stream, one, make([]kernel.Value, 1000)...) },
			"Close without ctx":        func() error { return r.module.CloseContext(none) },
		},
	} {
		for call, f := range list {
			if assert.NotPanics(t, func() {
				err := f()
				assert.ErrorContains(t, err, "kernel: ", "%s: %s", name, call)
			}, "%s: %s", name, call) {
				continue
			}
		}
	}
	assert.Empty(t, r.Launches())
}

// A load that never returns holds up no caller past its context. Code that is loaded after all
// is unloaded.
func TestLoadEndsWithItsContext(t *testing.T) {
	k, dev := testgpu.NewKernels(t, cudasim.Config{})
	loading, unblock := make(chan struct{}), make(chan struct{})
	k.Loading = func() { close(loading); <-unblock }
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	over := make(chan error)
	go func() {
		_, err := kernel.Load(ctx, dev, []byte(ptx))
		over <- err
	}()
	<-loading
	cancel(cause)
	err := <-over
	for _, want := range []error{context.Canceled, cause, bounded.ErrStuck} {
		require.ErrorIs(t, err, want)
	}
	close(unblock)
	for unloaded := 0; unloaded == 0; {
		_, unloaded = k.Loaded()
	}
	_, err = kernel.Load(ctx, dev, []byte(ptx))
	require.ErrorIs(t, err, cause)
	codes, _ := k.Loaded()
	require.Len(t, codes, 1)
}
