package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
)

// The facts keep which GPUs --device left out: a note is about them.
func TestGPUsThatDeviceLeavesOutAreKept(t *testing.T) {
	t.Parallel()
	facts := func() *doctor.Facts {
		return &doctor.Facts{Devices: []doctor.Device{{Ordinal: 0, PCIBusID: "0000:01:00.0"}, {Ordinal: 1, PCIBusID: "0000:02:00.0"}, {Ordinal: 2, PCIBusID: "0000:03:00.0"}}}
	}
	f := facts()
	require.NoError(t, devices{"2", "0000:01:00.0", "2"}.choose(f))
	assert.Equal(t, []string{"0000:02:00.0"}, f.NotChosen)
	require.Len(t, f.Devices, 2)
	assert.Equal(t, 2, f.Devices[0].Ordinal)

	f = facts()
	require.NoError(t, devices{}.choose(f))
	assert.Empty(t, f.NotChosen)
	assert.Len(t, f.Devices, 3)
	assert.ErrorContains(t, devices{"7"}.choose(f), "no such GPU")
}
