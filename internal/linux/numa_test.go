package linux_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestNUMANodes(t *testing.T) {
	t.Parallel()
	fsys := captured(t, "vmd-cxl")
	nodes, err := linux.ReadNUMANodes(fsys)
	require.NoError(t, err)
	assert.Equal(t, []linux.NUMANode{0, 1, 2}, nodes)
	distances, err := nodes[1].Distances(fsys)
	require.NoError(t, err)
	assert.Equal(t, []int{21, 10, 24}, distances)
	info, err := nodes[2].Meminfo(fsys)
	require.NoError(t, err)
	assert.Equal(t, 128*gib, info["MemTotal"])
	cpus, err := nodes[2].CPUs(fsys)
	require.NoError(t, err, "a node without CPUs has an empty list")
	assert.Empty(t, cpus)

	ten := host(map[string]string{"sys/devices/system/node/node10/distance": "10\n", "sys/devices/system/node/node2/distance": "10\n", "sys/devices/system/node/nodes/x": "", "sys/devices/system/node/possible": "0-10\n"})
	nodes, err = linux.ReadNUMANodes(ten)
	require.NoError(t, err)
	assert.Equal(t, []linux.NUMANode{2, 10}, nodes)
}

func TestMemoryNodes(t *testing.T) {
	t.Parallel()
	nodes, err := linux.ReadMemoryNodes(captured(t, "vmd-cxl"))
	require.NoError(t, err)
	assert.Equal(t, []linux.NUMANode{0, 1, 2}, nodes)

	files := map[string]string{"sys/devices/system/node/online": "0-1\n"}
	nodes, err = linux.ReadMemoryNodes(host(files))
	require.NoError(t, err, "a kernel that does not list nodes with memory")
	assert.Equal(t, []linux.NUMANode{0, 1}, nodes)
	files["sys/devices/system/node/has_memory"] = "1\n"
	nodes, err = linux.ReadMemoryNodes(host(files))
	require.NoError(t, err)
	assert.Equal(t, []linux.NUMANode{1}, nodes)
}
