// Series of copies whose host memory resides on one NUMA node: the device's own, and the remotest one. They are
// part of [Trials], and have the clock and the denominators of bandwidth. Where the kernel reports other nodes for the
// pages than requested, the case fails.

package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/linux"
)

// seriesByNode are copies whose host memory resides on the NUMA node of nodeLabel.
const (
	seriesByNode = "bandwidth_by_node"
	nodeLabel    = "numa_node"
)

// What a case of seriesByNode takes: 64 MiB is more than the caches hold that copies of the
// processor leave behind, and 4 such copies take 5 ms on PCIe 5.0.
const (
	nodeBytes  = 64 << 20
	nodeCopies = 4
	nodeBudget = 50 * time.Millisecond
)

// byNode returns groups that copy from and to memory of the device's own node, and of the
// node farthest from it. There are none where the host has no choice, or does not name the
// device's node. Memory returns the kind of memory of a node.
func byNode(host *hostinfo.Host, dev *cudart.Device, n int, memory func(node int) hostKind) (groups []measure.Group) {
	own, remote, ok := remotest(host, dev.PCIBusID())
	if !ok {
		return nil
	}
	for _, node := range []int{own, remote} {
		fixture := &copyFixture{resources: resources{dev: dev}, kind: memory(node), n: n}
		var cases []measure.Case
		for _, direction := range bothDirections {
			c := fixture.bandwidth(seriesByNode, direction, n, nodeCopies)
			c.Labels = c.Labels.With(nodeLabel, strconv.Itoa(node))
			c.Samples, c.MinSamples, c.Budget = 5, 3, nodeBudget
			c.Node = func() (int, bool) { return node, true } // opening it has looked
			cases = append(cases, c)
		}
		groups = append(groups, fixture.group(fmt.Sprintf("memory of NUMA node %d", node), cases))
	}
	return groups
}

// remotest returns the node of a device, and the one whose memory is farthest from it: of
// several the first.
func remotest(host *hostinfo.Host, busID string) (own, remote int, ok bool) {
	if host == nil {
		return 0, 0, false
	}
	pci, known := host.GPU(busID)
	if !known || pci.NUMANode == nil {
		return 0, 0, false
	}
	own = *pci.NUMANode
	i := slices.IndexFunc(host.NUMA, func(n hostinfo.NUMANode) bool { return n.ID == own && n.Total > 0 })
	if i < 0 {
		return 0, 0, false
	}
	largest := -1
	for j, n := range host.NUMA {
		// Nodes without CPUs are memory of GPUs or of expanders. A cpuset may forbid others.
		may, listed := host.CPU.MemoryFrom(n.ID)
		if j == i || n.Total == 0 || n.CPUs == "" || listed && !may {
			continue
		}
		distance := 0
		if j < len(host.NUMA[i].Distances) { // they are in the order of the nodes
			distance = host.NUMA[i].Distances[j]
		}
		if distance > largest {
			largest, remote, ok = distance, n.ID, true
		}
	}
	return own, remote, ok
}

// onNode is registered memory whose pages reside on a NUMA node. Opening it is unsupported
// where the kernel refuses that, or does not report their nodes.
func onNode(node int) hostKind {
	k := registered
	k.open = func(ctx context.Context, w *resources, n int) (hostkind.Memory, error) {
		b, err := hostmem.Alloc(ctx, w.dev, n, hostmem.Options{Label: "bench", Node: hostmem.OnNode(node)})
		if err != nil {
			return nil, err
		}
		w.undo.Push(b.CloseContext)
		return hostkind.Pinned(b), checkNode(os.DirFS("/"), b.Bytes(), node, b.Info().Misplaced)
	}
	return k
}

// minShareOnNode is the share of pages on a node from which on memory counts as resident there.
const minShareOnNode = 0.95

// checkNode returns an error unless the memory resides on a node. why is the result of Buffer.Misplaced.
func checkNode(fsys fs.FS, b []byte, node int, why []string) error {
	pages, err := pagesByNode(fsys, b)
	if err != nil {
		return fmt.Errorf("the kernel does not report the nodes of pages: %w: %w", err, errors.ErrUnsupported)
	}
	total := 0
	for _, n := range pages {
		total += n
	}
	switch there := pages[linux.NUMANode(node)]; {
	case total == 0:
		return fmt.Errorf("the kernel does not report the nodes of pages of a driver: %w", errors.ErrUnsupported)
	case float64(there) < minShareOnNode*float64(total):
		text := fmt.Sprintf("of %d pages %d lie on node %d", total, there, node)
		return fmt.Errorf("%s: %w", strings.Join(append(slices.Clone(why), text), "; "), errors.ErrUnsupported)
	}
	return nil
}

// pagesByNode counts the pages of the mappings that memory begins and ends in, by their
// nodes. A mapping counts once.
func pagesByNode(fsys fs.FS, memory ...[]byte) (map[linux.NUMANode]int, error) {
	maps, err := linux.ReadNUMAMaps(fsys)
	if err != nil {
		return nil, err
	}
	pages := map[linux.NUMANode]int{}
	counted := map[uintptr]bool{}
	for _, b := range memory {
		for _, p := range []*byte{&b[0], &b[len(b)-1]} {
			m, _ := linux.NUMAMappingOf(maps, uintptr(unsafe.Pointer(p)))
			if counted[m.Start] {
				continue
			}
			counted[m.Start] = true
			for node, n := range m.Pages {
				pages[node] += n
			}
		}
	}
	return pages, nil
}

// nodeOfMemory returns the NUMA node of most pages of host memory for a device, if the
// host has several and the kernel says so.
func nodeOfMemory(dev *cudart.Device, memory ...[]byte) (int, bool) {
	if _, several := hostmem.NodeOf(context.Background(), dev); !several {
		return 0, false
	}
	return nodeOfPages(os.DirFS("/"), memory...)
}

// nodeOfPages returns the node that most pages of memory lie on. ok is false for none.
func nodeOfPages(fsys fs.FS, memory ...[]byte) (node int, ok bool) {
	pages, err := pagesByNode(fsys, memory...)
	if err != nil {
		return 0, false
	}
	return maxPages(pages)
}

// maxPages returns the node that most pages lie on. ok is false for none.
func maxPages(pages map[linux.NUMANode]int) (node int, ok bool) {
	largest := 0
	for at, n := range pages {
		if n > largest || n == largest && n > 0 && int(at) < node {
			node, largest, ok = int(at), n, true
		}
	}
	return node, ok
}
