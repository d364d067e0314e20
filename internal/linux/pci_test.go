package linux_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParsePCIAddress(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"0000:00:06.0":     "0000:00:06.0",
		"00000000:00:06.0": "0000:00:06.0", // nvidia-smi
		"0000:C3:1F.7":     "0000:c3:1f.7",
		"0000000A:0b:00.0": "000a:0b:00.0",
		"10000:e1:00.0":    "10000:e1:00.0", // Intel VMD
		"00010000:E1:00.0": "10000:e1:00.0",
		"ffffffff:ff:1f.7": "ffffffff:ff:1f.7",
	} {
		a, err := linux.ParsePCIAddress(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, a.String(), text)
		assert.Equal(t, "sys/bus/pci/devices/"+want, a.Dir(), text)
	}
	for _, text := range []string{
		"", "6", "junk", "06:00.0", "000:06:00.0", "000000000:06:00.0", "0000:6:00.0", "0000:06:0.0", "0000:06:00", "0000:06:00.", "0000:06:00.8",
		"0000:06:20.0", "0000:xx:00.0", "0000:06:00.0 ", " 0000:06:00.0", "0000:06:00.00", "0000.06.00.0", "0000:06:00:0", "+000:06:00.0", "0000:-1:00.0", "0x00:06:00.0",
	} {
		_, err := linux.ParsePCIAddress(text)
		assert.Error(t, err, "%q", text)
	}
}

func FuzzParsePCIAddress(f *testing.F) {
	f.Add("0000:00:06.0")
	f.Add("10000:E1:1f.7")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := linux.ParsePCIAddress(text)
		if err != nil {
			return
		}
		again, err := linux.ParsePCIAddress(a.String())
		require.NoError(t, err)
		require.Equal(t, a, again)
	})
}

// Devices that differ in the upper bits of their domain alone are on different
// nodes, however CUDA writes the address.
func TestDevicesOfTwoPCIDomains(t *testing.T) {
	t.Parallel()
	fsys := captured(t, "vmd-cxl")
	for text, want := range map[string]linux.NUMANode{
		"0000:01:00.0": 0, "00000000:01:00.0": 0,
		"10000:01:00.0": 1, "00010000:01:00.0": 1,
	} {
		a, err := linux.ParsePCIAddress(text)
		require.NoError(t, err)
		node, err := a.NUMANode(fsys)
		require.NoError(t, err)
		assert.Equal(t, want, node, text)
		near, err := a.LocalCPUs(fsys)
		require.NoError(t, err)
		cpus, err := node.CPUs(fsys)
		require.NoError(t, err)
		assert.Equal(t, cpus, near, text)
	}
	node, err := linux.PCIAddress{Device: 6}.NUMANode(captured(t, "h200-vm"))
	require.NoError(t, err)
	assert.Equal(t, linux.NoNode, node, "the firmware names none")
}
