package cudart_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// openingCalls are the calls of Open that hang on hosts with a broken GPU or driver.
var openingCalls = []string{"cudaDriverGetVersion", "cudaGetDeviceCount", "cudaGetDeviceProperties"}

// Open ends with its context and names the call and the library, although the
// call has not returned.
func TestOpenEndsWithItsContextDuringACallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	for _, fn := range openingCalls {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim := newSim(t, cudasim.Config{})
			unblock := sim.Block(fn, cudasim.Fault{Times: -1})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			opened := make(chan error, 1)
			go func() {
				_, err := cudart.Open(ctx, cudart.Options{Source: sim})
				opened <- err
			}()
			require.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
			cancel()
			err := <-opened
			require.Equal(t, map[string]int{fn: 1}, sim.Blocked(), "the call is still inside the library")

			require.ErrorIs(t, err, context.Canceled)
			var open *cudart.OpenError
			require.ErrorAs(t, err, &open)
			reason := fn + " of " + sim.String() + " has not returned: context canceled"
			require.EqualError(t, open.Err, reason)
			require.Len(t, open.Attempts, 1)
			assert.EqualError(t, open.Attempts[0].Err, reason)
			assert.ErrorContains(t, err, "cudart: open: "+reason+"\n")
			assert.ErrorContains(t, err, "what helps: the driver hangs")
		})
	}
}

// With the driver API the call that hangs is mostly cuInit.
func TestOpenNamesTheCallOfTheDriverThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{API: cudart.DriverAPI})
	unblock := sim.Block("cuInit", cudasim.Fault{Times: -1})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	opened := make(chan error, 1)
	go func() {
		_, err := cudart.Open(ctx, cudart.Options{Source: sim})
		opened <- err
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cuInit", 1))
	cancel()
	var open *cudart.OpenError
	require.ErrorAs(t, <-opened, &open)
	require.Equal(t, "cuInit", open.Stuck)
}

// A call that returns after the context has ended is the last one: the opening neither
// goes on with the library nor succeeds.
func TestOpenMakesNoCallAfterItsContextHasEnded(t *testing.T) {
	t.Parallel()
	for _, fn := range openingCalls {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim := newSim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
			unblock := sim.Block(fn, cudasim.Fault{Times: -1})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			opened := make(chan error, 1)
			go func() {
				_, err := cudart.OpenHere(ctx, cudart.Options{Source: sim})
				opened <- err
			}()
			require.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
			cancel()
			unblock()
			require.ErrorIs(t, <-opened, context.Canceled)
			require.Equal(t, 1, sim.Calls(fn))
			switch fn {
			case "cudaDriverGetVersion":
				assert.Zero(t, sim.Calls("cudaRuntimeGetVersion"))
			case "cudaGetDeviceCount":
				assert.Zero(t, sim.Calls("cudaGetDeviceProperties"))
			}
		})
	}
}

func TestOpenWithAContext(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	rt, err := cudart.Open(ctx, cudart.Options{Source: sim})
	require.NoError(t, err)
	cancel()
	dev, err := rt.Device(0)
	require.NoError(t, err, "the context bounds the opening only")
	_, _, err = dev.MemInfo()
	require.NoError(t, err)
	require.NoError(t, rt.Close())

	calls := sim.TotalCalls()
	var open *cudart.OpenError
	_, err = cudart.Open(ctx, cudart.Options{Source: sim})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorAs(t, err, &open)
	assert.Empty(t, open.Attempts)
	assert.Equal(t, calls, sim.TotalCalls(), "a context that has ended: no library is called")

	var none context.Context
	_, err = cudart.Open(none, cudart.Options{Source: sim})
	require.EqualError(t, err, "cudart: open: the context is nil")
	_, err = cudart.Open(t.Context(), cudart.Options{Library: filepath.Join(t.TempDir(), "libcudart.so.12")})
	require.ErrorIs(t, err, cudart.ErrNoLibrary, "errors are those of Open")
	require.ErrorAs(t, err, &open)
	require.Len(t, open.Attempts, 1)
	assert.False(t, errors.Is(err, context.Canceled))
}
