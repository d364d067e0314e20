package cudart_test

import (
	"context"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// pair opens two devices: simulated ones, or with a real GPU those of a host with
// several.
func pair(t *testing.T) (first, second *cudart.Device) {
	t.Helper()
	var rt *cudart.Runtime
	if testgpu.Real() {
		if rt = testgpu.Device(t).Runtime(); rt.DeviceCount() < 2 {
			t.Skip("needs two GPUs")
		}
	} else {
		_, rt = testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	}
	return rt.Devices()[0], rt.Devices()[1]
}

func TestCopiesBetweenDevices(t *testing.T) {
	a, b := pair(t)
	const n = 1 << 20
	can, err := a.CanAccessPeer(b)
	require.NoError(t, err)
	onA, onB := device(t, a, n), device(t, b, n)
	s := stream(t, a)
	ctx := context.Background()
	host, back := make([]byte, n), make([]byte, n)
	for round, enabled := range []bool{false, can} {
		if enabled {
			require.NoError(t, a.EnablePeerAccess(b))
			require.NoError(t, a.EnablePeerAccess(b), "which is counted")
		}
		fill(host, byte(round+1))
		require.NoError(t, a.CopyToDevice(onA, unsafe.Pointer(&host[0]), n))
		require.NoError(t, a.Synchronize(ctx)) // it returns before they are there
		require.NoError(t, s.CopyPeer(onB+1, b, onA, a, n-1))
		require.NoError(t, s.Synchronize(ctx))
		require.NoError(t, b.CopyToHost(unsafe.Pointer(&back[0]), onB, n))
		assert.Equal(t, host[:n-1], back[1:])
		if enabled {
			require.NoError(t, a.DisablePeerAccess(b))
			require.NoError(t, a.DisablePeerAccess(b))
			require.ErrorIs(t, a.DisablePeerAccess(b), cudart.ErrPeerAccessNotEnabled)
		}
	}
	require.NoError(t, s.CopyPeer(onB, b, onA, a, 0))
	require.ErrorIs(t, s.CopyPeer(onB, b, onA, a, -1), cudart.ErrInvalidValue)
	require.ErrorContains(t, s.CopyPeer(onB, nil, onA, a, 1), "is nil")
}

func TestPeerAccessIsCounted(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3), NoPeerAccess: [][2]int{{0, 2}}})
	a, b, c := rt.Devices()[0], rt.Devices()[1], rt.Devices()[2]
	can, err := a.CanAccessPeer(c)
	require.NoError(t, err)
	assert.False(t, can)
	require.ErrorIs(t, a.EnablePeerAccess(c), cudart.ErrPeerAccessUnsupported)
	require.ErrorIs(t, a.DisablePeerAccess(c), cudart.ErrPeerAccessNotEnabled)
	require.Error(t, a.EnablePeerAccess(a))
	require.ErrorContains(t, a.EnablePeerAccess(nil), "is nil")
	for range 3 {
		require.NoError(t, a.EnablePeerAccess(b))
	}
	assert.Equal(t, 1, sim.Outstanding().PeerAccesses)
	for range 2 {
		require.NoError(t, a.DisablePeerAccess(b))
	}
	assert.Equal(t, 1, sim.Outstanding().PeerAccesses)
	sim.Fail("cudaDeviceDisablePeerAccess", cudasim.Fault{Code: cudart.ErrUnknown})
	require.ErrorIs(t, a.DisablePeerAccess(b), cudart.ErrUnknown)
	require.NoError(t, a.DisablePeerAccess(b), "which may be tried again")
	assert.Zero(t, sim.Outstanding().PeerAccesses)
}

// Access is of the process: a Runtime does not end what another one uses.
func TestRuntimesCountPeerAccessTogether(t *testing.T) {
	t.Parallel()
	sim, one := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	two, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, two.Close()) })
	enable := func(rt *cudart.Runtime) error { return rt.Devices()[0].EnablePeerAccess(rt.Devices()[1]) }
	disable := func(rt *cudart.Runtime) error { return rt.Devices()[0].DisablePeerAccess(rt.Devices()[1]) }
	require.NoError(t, enable(one))
	require.NoError(t, enable(two))
	require.NoError(t, disable(one))
	assert.Equal(t, 1, sim.Outstanding().PeerAccesses, "the other one uses it")
	require.NoError(t, disable(two))
	assert.Zero(t, sim.Outstanding().PeerAccesses)
	require.ErrorIs(t, disable(one), cudart.ErrPeerAccessNotEnabled)

	var group sync.WaitGroup
	for _, rt := range []*cudart.Runtime{one, two, one, two} {
		group.Go(func() {
			for range 200 {
				assert.NoError(t, enable(rt))
				assert.Equal(t, 1, sim.Outstanding().PeerAccesses)
				assert.NoError(t, disable(rt))
			}
		})
	}
	group.Wait()
	assert.Zero(t, sim.Outstanding().PeerAccesses)
}

// Access that other code has enabled is used, and left enabled.
func TestPeerAccessOfOthers(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	a, b := rt.Devices()[0], rt.Devices()[1]
	// As if by another library of the process: the call succeeds unseen.
	sim.Fail("cudaDeviceEnablePeerAccess", cudasim.Fault{Code: cudart.Code(704)})
	require.NoError(t, a.EnablePeerAccess(b))
	require.NoError(t, a.DisablePeerAccess(b))
	assert.Zero(t, sim.Calls("cudaDeviceDisablePeerAccess"))
}
