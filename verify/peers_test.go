package verify

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

var withPeers = []Path{pathPeer, pathFanout}

// peer returns device 1 of the Runtime of device 0.
func peer(t *testing.T, dev *cudart.Device) *cudart.Device {
	t.Helper()
	d, err := dev.Runtime().Device(1)
	require.NoError(t, err)
	return d
}

// Only the devices that are named get a context, which takes hundreds of MiB of a GPU.
func TestOnlyTheDevicesThatAreNamedGetAContext(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		paths     []Path
		dev, peer int // -1 for none
		want      []int
		skipped   int // paths
	}{
		{nil, 1, -1, []int{1}, 0},
		{Paths(), 1, -1, []int{1}, 2},
		{withPeers, 1, -1, nil, 2},
		{nil, 2, 1, []int{1, 2}, 0},
		{withPeers, 0, 2, []int{0, 2}, 0},
	} {
		sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
		device := func(ordinal int) *cudart.Device {
			if ordinal < 0 {
				return nil
			}
			dev, err := rt.Device(ordinal)
			require.NoError(t, err)
			return dev
		}
		before := sim.Contexts()
		require.Empty(t, before)
		r, err := Run(t.Context(), device(c.dev), Plan{Paths: c.paths, Peer: device(c.peer), Sizes: []int{100}, Variants: 1, NoStale: true})
		require.NoError(t, err)
		assert.Len(t, r.Skipped, c.skipped, "%+v", c)
		assert.Equal(t, c.want, sim.Contexts(), "%+v", c)
	}
}

func TestInvalidPeersAreRefused(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	_, foreign := simulated(t, cudasim.Config{})
	for _, wrong := range []*cudart.Device{dev, foreign} {
		_, err := Run(t.Context(), dev, Plan{Peer: wrong})
		require.ErrorContains(t, err, "verify: run: Plan.Peer is device 0 (Simulated GPU): must be another device of the Runtime of device 0")
	}
}

func TestTripsByAnotherDevice(t *testing.T) {
	t.Parallel()
	for name, no := range map[string][][2]int{"peers": nil, "no peers": {{0, 1}}} {
		sim, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), NoPeerAccess: no})
		r, err := Run(t.Context(), dev, Plan{Peer: peer(t, dev), Paths: withPeers, Sizes: []int{1, 4097, 65537, 2*mib + 1}, NoStale: true})
		require.NoError(t, err)
		requireClean(t, r)
		require.Empty(t, r.Skipped, name)
		require.NotZero(t, sim.Calls("cudaMemcpyPeerAsync"), name)
		require.Zero(t, sim.Outstanding().PeerAccesses, name)
	}
}

// Direct copies in one direction are lost, and succeed: round trips from GPU to GPU show it, and name what
// does that. A Fanout takes another way.
func TestADirectPathThatLosesBytes(t *testing.T) {
	t.Parallel()
	for _, lost := range [][2]int{{0, 2}, {2, 0}} {
		_, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), LostPeerCopies: [][2]int{lost}})
		other, err := dev.Runtime().Device(2)
		require.NoError(t, err)
		r, err := Run(t.Context(), dev, Plan{Peer: other, Paths: withPeers, Sizes: []int{1, 4097}, NoStale: true})
		require.NoError(t, err)
		require.ErrorIs(t, r.Err(), ErrMismatch)
		for _, p := range r.Paths {
			require.Equal(t, p.Path == pathPeer, p.MismatchCount > 0, "%v: %s", lost, p.Path)
		}
		require.Contains(t, r.Mismatches[0].String(), "the path between the GPUs loses them: an IOMMU that translates (iommu=pt ends that) or access control (ACS)")
	}
}

// The same on real GPUs.
func TestTripsByAnotherDeviceOfTheMachine(t *testing.T) {
	if !testgpu.Real() {
		t.Skip("TestTripsByAnotherDevice is for simulated ones")
	}
	dev := testgpu.Device(t)
	if dev.Runtime().DeviceCount() < 2 {
		t.Skip("needs two GPUs")
	}
	r, err := Run(t.Context(), dev, Plan{Peer: peer(t, dev), Paths: withPeers, NoStale: true})
	require.NoError(t, err)
	requireClean(t, r)
}

func TestPathsThatRequireAnotherDevice(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	r, err := newRunner(t.Context(), dev, Plan{})
	require.NoError(t, err)
	require.NotContains(t, r.plan.Paths, pathPeer)
	require.NotContains(t, r.plan.Paths, pathFanout)
	got, err := Run(t.Context(), dev, Plan{Paths: withPeers, Sizes: []int{1}, NoStale: true})
	require.NoError(t, err)
	require.Len(t, got.Skipped, 2)
	for _, s := range got.Skipped {
		require.Equal(t, "needs another device beside device 0 (Simulated GPU): Plan.Peer is nil", s.Reason)
	}
	_, two := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	r, err = newRunner(t.Context(), two, Plan{Peer: peer(t, two)})
	require.NoError(t, err)
	require.Equal(t, Paths(), r.plan.Paths)
}

// A copy that does not reach the other device is detected there.
func TestAFanoutThatDoesNotReachTheOtherDevice(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	const n = 10000
	tr := newTrip(t, dev, peer(t, dev), pathFanout, n+8, 1)
	whole := tr.source
	onlyFirst := *whole // goes to one of the two devices
	onlyFirst.upload = func(ctx context.Context, _ *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		return tr.copier.Upload(ctx, dst, whole.mem[off:off+n])
	}
	for _, pattern := range patterns() {
		c := Case{Path: pathFanout, Pattern: pattern, SizeBytes: n, Offset: Offset{1, 2, 3}}
		want := pattern.content(11)
		tr.source = &onlyFirst
		wrong, err := tr.run(t.Context(), c, want)
		require.NoError(t, err)
		require.Len(t, wrong, 1, pattern)
		assert.Equal(t, []any{n, causeStale, atPeer}, []any{wrong[0].BadBytes, wrong[0].Cause, wrong[0].At}, pattern)
		tr.source = whole
		wrong, err = tr.run(t.Context(), c, want)
		require.NoError(t, err)
		require.Empty(t, wrong)
	}
	require.NoError(t, tr.release(t.Context()))
}

// Calls of a small run fail in turn, with PINNED_SOAK each; nothing is left.
func TestEveryCallOfATripByAnotherDeviceCanFail(t *testing.T) {
	t.Parallel()
	plan := Plan{Paths: withPeers, Sizes: []int{100}, Patterns: []Pattern{patternRandom}, Offsets: []Offset{{1, 2, 3}}, Streams: []int{1}, NoStale: true}
	failed, calls, step := 0, 1, 7
	if long() {
		step = 1
	}
	for nth := 1; nth <= calls; nth += step {
		t.Run(fmt.Sprint(nth), func(t *testing.T) {
			sim, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
			plan.Peer = peer(t, dev)
			start := sim.TotalCalls()
			sim.FailCall(start+nth, cudart.ErrInvalidResourceHandle)
			r, err := Run(t.Context(), dev, plan)
			sim.ResetFaults() // the number of calls varies
			require.NoError(t, err)
			require.Zero(t, r.MismatchCount)
			for _, f := range r.Failures {
				require.ErrorIs(t, f.Err, cudart.ErrInvalidResourceHandle)
				failed++
			}
			calls = sim.TotalCalls() - start
		})
	}
	require.NotZero(t, failed)
}
