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
// sizes out of range. All are errors, and none panics. (A method that a nil *Memory
// has from its embedded Module panics in the caller.)
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
	ofMemory := func(m *kernel.Memory, n int) calls {
		return calls{
			"Fill":                   func() error { return m.Fill(r.stream, 1, n, kernel.Content{}, 0) },
			"Check":                  func() error { return m.Check(r.stream, 1, n, kernel.Content{}, 0, 1) },
			"Copy":                   func() error { return m.Copy(r.stream, 1, 1, n, math.MaxInt) },
			"Chase":                  func() error { return m.Chase(r.stream, 1, n, n, 1) },
			"Busy":                   func() error { return m.Busy(r.stream, 1) },
			"Busy long":              func() error { return m.Busy(r.stream, math.MaxInt64) },
			"ReadResult":             func() error { _, err := m.ReadResult(ctx, 1); return err },
			"ResetResult":            func() error { return m.ResetResult(new(cudart.Stream), 1) },
			"Compare without ctx":    func() error { _, err := m.Compare(none, r.stream, 1, n, kernel.Content{}, 0); return err },
			"ReadResult without ctx": func() error { _, err := m.ReadResult(none, 1); return err },
			"Compare":                func() error { _, err := m.Compare(ctx, r.stream, 1, n, kernel.Content{}, 0); return err },
		}
	}
	ofBlocks := func(b *kernel.Blocks, n int) calls {
		return calls{
			"Copy":        func() error { return b.Copy(r.stream, kernel.BlockList{}, kernel.BlockList{}, 1, n, 1) },
			"FirstBeyond": func() error { return b.FirstBeyond(r.stream, 1, n, 1, 1) },
		}
	}
	for name, list := range map[string]calls{
		"nil Blocks": ofBlocks(nil, 1), "zero Blocks": ofBlocks(new(kernel.Blocks), 1), "less blocks than none": ofBlocks(new(kernel.Blocks), -1),
		"nil Module": ofModule(nil), "zero Module": ofModule(new(kernel.Module)), "Module of a zero Memory": ofModule(new(kernel.Memory).Module),
		"nil Kernel": ofKernel(nil), "zero Kernel": ofKernel(new(kernel.Kernel)),
		"nil Memory": ofMemory(nil, 1), "zero Memory": ofMemory(new(kernel.Memory), 1), "less than nothing": ofMemory(new(kernel.Memory), math.MinInt),
		"functions": {
			"Load":                     func() error { _, err := kernel.Load(t.Context(), nil, []byte(ptx)); return err },
			"Load on a zero device":    func() error { _, err := kernel.Load(t.Context(), new(cudart.Device), []byte(ptx)); return err },
			"Load without ctx":         func() error { _, err := kernel.Load(none, r.dev, []byte(ptx)); return err },
			"NewMemory without ctx":    func() error { _, err := kernel.NewMemory(none, r.dev); return err },
			"Kernel without ctx":       func() error { _, err := r.module.Kernel(none, "empty"); return err },
			"Load of nothing":          func() error { _, err := kernel.Load(t.Context(), r.dev, nil); return err },
			"NewMemory":                func() error { _, err := kernel.NewMemory(t.Context(), nil); return err },
			"NewBlocks":                func() error { _, err := kernel.NewBlocks(t.Context(), nil); return err },
			"NewBlocks without ctx":    func() error { _, err := kernel.NewBlocks(none, r.dev); return err },
			"Launch on no stream":      func() error { return empty.Launch(nil, one) },
			"Launch on a zero stream":  func() error { return empty.Launch(new(cudart.Stream), one) },
			"Launch of nothing":        func() error { return empty.Launch(r.stream, kernel.Config{}) },
			"Launch of less":           func() error { return empty.Launch(r.stream, kernel.Threads(math.MinInt, math.MinInt)) },
			"Launch of all":            func() error { return empty.Launch(r.stream, kernel.Threads(math.MaxInt, math.MaxInt)) },
			"Launch of zero arguments": func() error { return r.kernel(t, "mixed").Launch(r.stream, one, make([]kernel.Arg, 6)...) },
			"Launch of many arguments": func() error { return empty.Launch(r.stream, one, make([]kernel.Arg, 1000)...) },
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
	assert.Equal(t, "content kind 4294967295", kernel.ContentKind(math.MaxUint32).String())
	kernel.Content{Kind: math.MaxUint32}.Fill(make([]byte, 20), math.MaxUint64)
	assert.Empty(t, r.Launches())
}

// A call into the library that never returns holds up no Compare past its context.
func TestCompareEndsWithItsContext(t *testing.T) {
	t.Parallel()
	k, dev := testgpu.NewKernels(t, cudasim.Config{})
	k.Names = map[string]int{"pinned_fill": 6, "pinned_check": 7, "pinned_copy": 3, "pinned_chase": 4, "pinned_busy": 2}
	m, err := kernel.NewMemory(t.Context(), dev)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	functions := []string{"cudaMalloc", "cudaMemcpy", "cudaFree"}
	over := make(chan error, len(functions))
	var unblock []func()
	for _, fn := range functions {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		unblock = append(unblock, k.Block(fn, cudasim.Fault{}))
		go func() {
			_, err := m.Compare(ctx, s, 0x1000, 64, kernel.Content{}, 0)
			over <- err
			_ = s.Close()
		}()
		require.NoError(t, k.AwaitBlocked(t.Context(), fn, 1))
	}
	cancel()
	for range functions {
		err := <-over
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, bounded.ErrStuck)
	}
	for _, f := range unblock {
		f()
	}
	require.NoError(t, m.Close())
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
