package weights_test

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// A model that goes to four devices is whole on each, although one direction of one pair loses
// what is copied, and NoPeers makes no copy from device to device.
func TestNoTensorTakesAPathThatLosesBytes(t *testing.T) {
	t.Parallel()
	file := makeSafetensors(t, nil, u8("a", 3<<20), u8("b", 12345))
	f := mustParse(t, file, "f")
	for _, c := range []struct {
		lost    [][2]int
		noPeers bool
		peers   bool // copies of the devices are made
	}{
		{nil, false, true}, {[][2]int{{2, 0}}, false, true}, {[][2]int{{0, 2}}, false, true}, {[][2]int{{0, 2}}, true, false},
	} {
		sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), LostPeerCopies: c.lost})
		var shares []weights.Share
		for tensor := range f.Tensors() {
			for dev := range 4 {
				shares = append(shares, weights.Share{Part: tensor.Whole(), Device: dev})
			}
		}
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		l, err := plan.LoadNew(t.Context(), rt.Devices(), weights.LoadOptions{NoPeers: c.noPeers})
		require.NoError(t, err)
		for p := range l.All() {
			at, err := p.Ptr()
			require.NoError(t, err)
			got := make([]byte, p.Size)
			require.NoError(t, p.Memory.Device().CopyToHost(unsafe.Pointer(&got[0]), at, p.Size))
			require.Equal(t, file[p.Tensor.Offset:][:p.Size], got, "%v: %s on %v", c.lost, p.Tensor.Name, p.Memory.Device())
		}
		require.Equal(t, c.peers, sim.Calls("cudaMemcpyPeerAsync") > 0)
		require.NoError(t, l.Close())
	}
}
