package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"testing/fstest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

// fourNodes is a host whose only GPU is on node 1, with a node of a GPU's own memory.
func fourNodes(busID string) *hostinfo.Host {
	own := 1
	return &hostinfo.Host{
		GPUs: []hostinfo.PCIDevice{{Address: busID, NUMANode: &own}},
		NUMA: []hostinfo.NUMANode{
			{ID: 0, CPUs: "0-7", Total: 1 << 30, Distances: []int{10, 32, 12, 40}},
			{ID: 1, CPUs: "8-15", Total: 1 << 30, Distances: []int{32, 10, 32, 80}},
			{ID: 2, CPUs: "16-23", Total: 1 << 30, Distances: []int{12, 32, 10, 40}},
			{ID: 3, Total: 1 << 30, Distances: []int{40, 80, 40, 10}},
		},
	}
}

func TestFarthestNode(t *testing.T) {
	t.Parallel()
	const gpu = "0000:06:00.0"
	for name, c := range map[string]struct {
		change func(*hostinfo.Host)
		remote int // -1 for none
	}{
		"of two that are as far, the first": {func(*hostinfo.Host) {}, 0},
		"the farthest":                      {func(h *hostinfo.Host) { h.NUMA[1].Distances[2] = 33 }, 2},
		"one that may be used":              {func(h *hostinfo.Host) { h.CPU.AllowedMems = "1-2" }, 2},
		"no distances":                      {func(h *hostinfo.Host) { h.NUMA[1].Distances = nil }, 0},
		"one node":                          {func(h *hostinfo.Host) { h.NUMA = h.NUMA[1:2] }, -1},
		"its own memory beside one node":    {func(h *hostinfo.Host) { h.NUMA = []hostinfo.NUMANode{h.NUMA[1], h.NUMA[3]} }, -1},
		"a node that is not said":           {func(h *hostinfo.Host) { h.GPUs[0].NUMANode = nil }, -1},
		"a node without memory":             {func(h *hostinfo.Host) { h.NUMA[1].Total = 0 }, -1},
		"a GPU that is not shown":           {func(h *hostinfo.Host) { h.GPUs = nil }, -1},
	} {
		h := fourNodes(gpu)
		c.change(h)
		own, remote, ok := remotest(h, gpu)
		assert.Equal(t, c.remote >= 0, ok, name)
		if ok {
			assert.Equal(t, [2]int{1, c.remote}, [2]int{own, remote}, name)
		}
	}
	_, _, ok := remotest(nil, gpu)
	assert.False(t, ok)
}

// Copies from and to both nodes are what the doctor asks for. A node that the kernel refuses
// is named, and its copies are not measured.
func TestCopiesByNode(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1)
	env.Duration = 0
	env.Host = fourNodes(env.Devices[0].PCIBusID())
	refused := -1
	memory := func(node int) hostKind {
		k := registered
		k.open = func(ctx context.Context, w *resources, n int) (hostkind.Memory, error) {
			if node == refused {
				return nil, fmt.Errorf("binding to node %d failed: %w", node, errors.ErrUnsupported)
			}
			return openRegistered(ctx, w, n)
		}
		return k
	}
	const n = 1 << 20
	e := measure.Experiment{Name: "nodes", Plan: func(env measure.Env) ([]measure.Group, error) {
		return byNode(env.Host, env.Devices[0], n, memory), nil
	}}
	b := run(t, e, env)
	assert.Empty(t, b.Notes)
	for _, node := range []int{0, 1} {
		for _, direction := range bothDirections {
			s := b.Find(doctor.TrialByNode, result.Label{Key: doctor.TrialNode, Value: fmt.Sprint(node)}, result.Label{Key: result.Direction, Value: direction})
			require.NotNil(t, s, "%d %s", node, direction)
			assert.True(t, s.Verified)
			assert.Equal(t, node, *s.NUMANode)
			assert.Positive(t, s.Median)
		}
	}

	refused = 0
	b = run(t, e, env)
	require.Len(t, b.Notes, 1)
	assert.Contains(t, b.Notes[0], "memory of NUMA node 0: not measured: binding")
	require.Len(t, b.Unmeasured, 2)
	for i, direction := range bothDirections {
		u := b.Unmeasured[i]
		assert.Equal(t, doctor.TrialByNode, u.Name)
		assert.Equal(t, "0", u.Labels.Get(doctor.TrialNode))
		assert.Equal(t, direction, u.Labels.Get(result.Direction))
		assert.Equal(t, "binding to node 0 failed: unsupported operation", u.Reason)
	}
	assert.Len(t, b.Select(result.View{Series: doctor.TrialByNode}), 2)

	plan, err := trials(false, n, memory).Plan(env)
	require.NoError(t, err)
	env.Host = nil
	without, err := trials(false, n, memory).Plan(env)
	require.NoError(t, err)
	assert.Equal(t, 2, len(plan)-len(without), "they are among the trials")
}

// unmoved is not on a stack, which moves.
var unmoved = make([]byte, 4096)

func TestMemoryLiesOnANode(t *testing.T) {
	t.Parallel()
	b := unmoved
	at := uintptr(unsafe.Pointer(&b[0]))
	host := func(pages string) fstest.MapFS {
		return fstest.MapFS{"proc/self/numa_maps": {Data: []byte(fmt.Sprintf("1000 default N5=9\n%x default anon=1 %s kernelpagesize_kB=4\n", at, pages))}}
	}
	require.NoError(t, checkNode(host("N1=100"), b, 1, nil))
	require.NoError(t, checkNode(host("N0=5 N1=100"), b, 1, nil))
	for _, c := range []struct {
		host fstest.MapFS
		says string
	}{
		{host("N0=50 N1=50"), "binding to node 1 failed; of 100 pages 50 lie on node 1"},
		{host(""), "pages of a driver"},
		{fstest.MapFS{}, "does not report the nodes"},
	} {
		err := checkNode(c.host, b, 1, []string{"binding to node 1 failed"})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		assert.ErrorContains(t, err, c.says)
	}
	pages, err := pagesByNode(host("N0=50 N1=51"), b)
	require.NoError(t, err)
	twice, err := pagesByNode(host("N0=50 N1=51"), b, b[1:])
	require.NoError(t, err)
	assert.Equal(t, pages, twice, "a mapping counts once")
	node, ok := maxPages(pages)
	assert.True(t, ok)
	assert.Equal(t, 1, node)
	_, ok = maxPages(map[linux.NUMANode]int{})
	assert.False(t, ok)
	node, ok = nodeOfPages(host("N0=50 N1=51"), b)
	assert.True(t, ok)
	assert.Equal(t, 1, node, "where the pages are")
	_, ok = nodeOfPages(fstest.MapFS{}, b)
	assert.False(t, ok)
}

// The kernel's own account, of memory on a node of this host.
func TestMemoryOfARealNode(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	nodes, err := linux.ReadMemoryNodes(os.DirFS("/"))
	if err != nil || len(nodes) == 0 {
		t.Skipf("no NUMA nodes here: %v", err)
	}
	if _, err := linux.ReadNUMAMaps(os.DirFS("/")); err != nil {
		t.Skipf("no numa_maps here: %v", err)
	}
	_, env := simulated(t, 1)
	w := &resources{dev: env.Devices[0]}
	defer func() { require.NoError(t, w.close()) }()
	if _, err := onNode(int(nodes[0])).open(t.Context(), w, 4<<20); len(nodes) == 1 {
		require.NoError(t, err)
	}
	_, err = onNode(1000).open(t.Context(), w, 4<<20)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}
