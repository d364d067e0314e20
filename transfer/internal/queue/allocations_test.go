package queue

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Parts in several allocations are asked for once a chunk each, and joined within one.
func TestAllocations(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	var memory [2]cudart.DevPtr
	for i := range memory {
		p, err := dev.Malloc(1000 * (i + 1))
		require.NoError(t, err)
		defer func() { require.NoError(t, dev.Free(p)) }()
		memory[i] = p
	}
	first, second := memory[0], memory[1]
	a := Allocations{Device: dev}
	before := sim.Calls("cuMemGetAddressRange_v2")
	for range 3 {
		require.True(t, a.Hold(first, 1000))
		require.True(t, a.Hold(second+1999, 1))
		require.False(t, a.Hold(second+1999, 2))
		require.False(t, a.Hold(first-1, 2))
		require.False(t, a.Hold(^cudart.DevPtr(3), 4096), "past the last address")
		require.False(t, a.Joins(first+10, math.MaxInt))
		require.True(t, a.Joins(first+10, 990))
		require.False(t, a.Joins(first+10, 991))
	}
	require.LessOrEqual(t, sim.Calls("cuMemGetAddressRange_v2")-before, 2+3*3, "and unknown addresses each time")
	a.list = []allocation{{100, 200}, {200, 300}, {400, 500}}
	a.last = allocation{}
	require.True(t, a.Hold(150, 150), "neighbours share it")
	require.False(t, a.Joins(150, 100), "and a copy may not span them")
	require.True(t, a.Joins(200, 100))
	require.False(t, a.Hold(250, 160))
}
