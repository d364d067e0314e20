//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A recorder is a test that notes its failures. finish ends it.
type recorder struct {
	cleanups []func()
	failures []string
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}
func (r *recorder) Fatalf(format string, args ...any) { r.Errorf("fatal: "+format, args...) }

func (r *recorder) finish() string {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	return strings.Join(r.failures, "\n")
}

func TestStartFailsTheTestForWhatIsLeft(t *testing.T) {
	t.Parallel()
	var clean, leak, wrong recorder
	sim, rt := cudasim.Start(&clean, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	require.Len(t, rt.Devices(), 2)
	assert.Empty(t, clean.finish())
	assert.Zero(t, sim.Symbol("cudaMalloc"), "closed")
	_, err := rt.Device(0)
	require.ErrorIs(t, err, cudart.ErrClosed)

	_, rt = cudasim.Start(&leak, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	_, err = dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	assert.Contains(t, leak.finish(), "simulated libcudart 13.0 at the end of the test: simulated libcudart 13.0: not released: 1 stream")

	_, rt = cudasim.Start(&wrong, cudasim.Config{Version: 7})
	assert.Nil(t, rt)
	assert.Contains(t, wrong.finish(), "fatal: start the simulated GPU: cudasim: Config.Version 7")
}

// More runtimes than there can be simulators at a time are opened, so each Close closes its simulator.
func TestOpenClosesTheSimulatorWithTheRuntime(t *testing.T) {
	t.Parallel()
	for range 40 {
		rt, err := cudasim.Open(t.Context(), cudasim.Config{API: cudart.DriverAPI})
		require.NoError(t, err)
		assert.True(t, rt.Library().Simulated)
		require.NoError(t, rt.Close())
		require.NoError(t, rt.Close())
	}
	rt, err := cudasim.Open(t.Context(), cudasim.Config{})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	mem, err := dev.Alloc(mib)
	require.NoError(t, err)
	for range 2 { // the second one neither waits nor forgets
		require.ErrorContains(t, rt.Close(), "not released: 1 device allocation (1048576 bytes)")
	}
	require.ErrorIs(t, mem.Close(), cudart.ErrCudartUnloading)
}

func TestOpenEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var none context.Context
	_, err := cudasim.Open(none, cudasim.Config{})
	require.ErrorContains(t, err, "the context is nil")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 40 { // none keeps a simulator
		_, err = cudasim.Open(ctx, cudasim.Config{})
		require.ErrorIs(t, err, context.Canceled)
	}
	_, err = cudasim.Open(t.Context(), cudasim.Config{Version: 7})
	require.ErrorContains(t, err, "cudasim: Config.Version 7")
}
