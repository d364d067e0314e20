package peers_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/peers"
	"github.com/gopinned/pinned/internal/testgpu"
)

func prove(t *testing.T, p *peers.Prover, path peers.Path) (lost int, err error) {
	t.Helper()
	require.NoError(t, path.From.EnablePeerAccess(path.To))
	defer func() { require.NoError(t, path.From.DisablePeerAccess(path.To)) }()
	return p.Prove(t.Context(), path)
}

// Of four devices one direction of one pair loses what is copied. Each path has its own outcome,
// which the Runtime keeps, and nothing stays allocated.
func TestEachPathHasItsOwnOutcome(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), LostPeerCopies: [][2]int{{3, 1}}})
	var p peers.Prover
	for range 2 {
		copies := sim.Calls("cudaMemcpyPeerAsync")
		for _, from := range rt.Devices() {
			for _, to := range rt.Devices() {
				if from == to {
					continue
				}
				path := peers.Path{From: from, To: to}
				lost, err := prove(t, &p, path)
				require.NoError(t, err)
				want := 0
				if from.Ordinal() == 3 && to.Ordinal() == 1 {
					want = peers.ProofBytes
				}
				assert.Equal(t, want, lost, "%v", path)
				known, ok := path.Known()
				assert.True(t, ok)
				assert.Equal(t, want, known)
			}
		}
		if copies > 0 {
			assert.Equal(t, copies, sim.Calls("cudaMemcpyPeerAsync"), "a path is proved once")
		}
	}
	require.NoError(t, p.Release(t.Context()))
	require.NoError(t, p.Release(t.Context()))
	assert.Zero(t, sim.Outstanding().DeviceAllocs)
}

// A call that fails proves nothing, is remembered by nobody, and the next proof is whole.
func TestAProofThatFailsIsNotRemembered(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaMalloc", "cudaStreamCreateWithPriority", "cudaMemcpyPeerAsync", "cudaMemcpy"} {
		sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		path := peers.Path{From: rt.Devices()[0], To: rt.Devices()[1]}
		var p peers.Prover
		code := cudart.ErrUnknown
		if fn == "cudaMalloc" {
			code = cudart.ErrMemoryAllocation
		}
		sim.Fail(fn, cudasim.Fault{Nth: 1, Times: 1, Code: code})
		_, err := prove(t, &p, path)
		require.ErrorIs(t, err, code, fn)
		require.ErrorContains(t, err, "prove copies from device 0", fn)
		if fn == "cudaMalloc" {
			require.ErrorIs(t, err, peers.ErrNoMemory)
		}
		_, known := path.Known()
		require.False(t, known, fn)
		lost, err := prove(t, &p, path)
		require.NoError(t, err, fn)
		require.Zero(t, lost, fn)
		require.NoError(t, p.Release(t.Context()))
	}
}
