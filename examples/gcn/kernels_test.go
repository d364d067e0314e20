//go:build linux && !android && (amd64 || arm64)

package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel/cublas"
)

// kernelParameters are the kernels of network.ptx and the numbers of their parameters.
var kernelParameters = map[string]int{
	"pinned_edges_add": 7, "pinned_relu": 3, "pinned_relu_gradient": 4, "pinned_cross_entropy": 7, "pinned_sgd": 4, "pinned_scale": 3,
	"pinned_multiply_nn": 8, "pinned_multiply_nt": 8, "pinned_multiply_tn": 8, "pinned_multiply_tt": 8,
}

// Every kernel is launched with the parameters that it has in the PTX: Launch compares their
// number and their sizes. Without a GPU nothing else does.
func TestKernelsGetTheirParameters(t *testing.T) {
	k, dev := testgpu.NewKernels(t, cudasim.Config{})
	k.Names = kernelParameters
	n, err := newNetwork(t.Context(), dev)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, n.addEdges(s, 1, 2, 3, 4, 5, 6, 7))
	require.NoError(t, n.relu(s, 1, 2, 3))
	require.NoError(t, n.reluGradient(s, 1, 2, 3, 4))
	require.NoError(t, n.crossEntropy(s, 1, 2, 3, 4, 5, 6, 0.5))
	require.NoError(t, n.sgd(s, 1, 2, 0.5, 3))
	a, b, c := cublas.Matrix{P: 1, Rows: 2, Cols: 2}, cublas.Matrix{P: 2, Rows: 2, Cols: 2}, cublas.Matrix{P: 3, Rows: 2, Cols: 2}
	for form := range 4 {
		x, y := a, b
		if form&1 != 0 {
			x = a.T()
		}
		if form&2 != 0 {
			y = b.T()
		}
		require.NoError(t, n.multiply(s, c, x, y, 1, 0))
	}
	launched := map[string]bool{}
	for _, l := range k.Launches() {
		launched[l.Kernel] = true
	}
	launched["pinned_scale"] = true // by TestBlocksShareLongProducts
	assert.Equal(t, slices.Sorted(maps.Keys(kernelParameters)), slices.Sorted(maps.Keys(launched)))
	require.NoError(t, n.relu(s, 1, 2, 0), "nothing is launched for no elements")
	require.NoError(t, s.Close())
	require.NoError(t, n.Close())
}

// network.multiply has several blocks share the inner dimension where c has few tiles. They
// add, so that c is made beta * c before.
func TestBlocksShareLongProducts(t *testing.T) {
	const processors = 108 // of the simulated device: see below
	k, dev := testgpu.NewKernels(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrMultiProcessorCount: processors}}}})
	k.Names = make(map[string]int)
	for name, params := range kernelParameters {
		k.Names[name] = params
	}
	n, err := newNetwork(t.Context(), dev)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	const rows, cols = 65, 10
	c, err := dev.Malloc(4 * rows * cols)
	require.NoError(t, err)
	for _, tt := range []struct {
		rows, inner int
		beta        float32
		z           int // blocks that share the inner dimension
		before      string
	}{
		{rows, tileShare, 0, 1, ""},
		{rows, 2*tileShare - 1, 0.5, 1, ""},
		{rows, 2 * tileShare, 0, 2, "memset"},
		{rows, 2 * tileShare, 1, 2, ""},
		{rows, 3 * tileShare, 0.5, 3, "pinned_scale"},
		{rows, 1000 * tileShare, 0, 4 * processors / 2, "memset"},
		{tile * 2 * processors, 3 * tileShare, 0.5, 1, ""},
	} {
		name := fmt.Sprintf("%+v", tt)
		launched, memsets := len(k.Launches()), k.Calls("cudaMemsetAsync")
		to := cublas.Matrix{P: c, Rows: tt.rows, Cols: cols}
		a, b := cublas.Matrix{P: 0x1000, Rows: tt.inner, Cols: tt.rows}.T(), cublas.Matrix{P: 0x2000, Rows: tt.inner, Cols: cols}
		require.NoError(t, n.multiply(s, to, a, b, 2, tt.beta), name)
		launches := k.Launches()[launched:]
		want := []string{"pinned_multiply_tn"}
		if tt.before == "pinned_scale" {
			want = []string{"pinned_scale", want[0]}
			assert.Equal(t, []uint64{uint64(c), uint64(math.Float32bits(tt.beta)), uint64(to.Rows * to.Cols)}, launches[0].Args, name)
		}
		var got []string
		for _, l := range launches {
			got = append(got, l.Kernel)
		}
		assert.Equal(t, want, got, name)
		memset := 0
		if tt.before == "memset" {
			memset = 1
		}
		assert.Equal(t, memset, k.Calls("cudaMemsetAsync")-memsets, name)
		l := launches[len(launches)-1]
		assert.Equal(t, [3]uint32{uint32((tt.rows-1)/tile + 1), 1, uint32(tt.z)}, l.Grid, name)
		assert.Equal(t, []uint64{uint64(c), 0x1000, 0x2000, uint64(tt.rows), cols, uint64(tt.inner), uint64(math.Float32bits(2)), uint64(math.Float32bits(tt.beta))}, l.Args, name)
	}
	require.NoError(t, s.Synchronize(t.Context()))
	require.NoError(t, dev.Free(c))
	require.NoError(t, s.Close())
	require.NoError(t, n.Close())
}
