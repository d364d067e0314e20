package hostmem

import (
	"context"
	"fmt"
	"io/fs"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// A Node is the NUMA node on which memory should reside. 0 is the node that the device is attached to: on
// hosts with several nodes, copies are faster from there. [OnNode] returns the others.
type Node int

// AnyNode lets the kernel choose.
const AnyNode Node = -1

// maxNodes is the largest number of nodes of a Linux kernel (CONFIG_NODES_SHIFT is at most 10).
const maxNodes = 1 << 10

// OnNode is the node with that number, as in /sys/devices/system/node. Memory on a node below 0
// or above 1023 is refused.
func OnNode(n int) Node {
	if n < 0 || n >= maxNodes {
		return maxNodes + 1
	}
	return Node(n + 1)
}

// choose returns the node for memory of dev, if there is a choice. A host with one
// node has none, and firmware may not report the device's node.
func (n Node) choose(ctx context.Context, dev *cudart.Device, system *pages.System) (node int, ok bool, note string) {
	switch {
	case n == AnyNode || len(system.Nodes) < 2:
		return 0, false, ""
	case n != 0:
		return int(n) - 1, true, ""
	}
	node, err := nodeOf(os.DirFS("/"), dev.PCIBusID())
	if err == nil {
		return node, true, ""
	}
	if id, attrErr := hosts.Of(dev).attribute(ctx, dev, cudart.AttrHostNumaID); attrErr == nil && id >= 0 {
		return id, true, ""
	}
	return 0, false, fmt.Sprintf("numa: the node of %v is unknown (%v), pages come from any node", dev, err)
}

// NodeOf returns the NUMA node on which memory for the device resides by default,
// as in /sys/devices/system/node (the PCI device's numa_node, or the attribute
// HostNumaId by cudaDeviceGetAttribute); ok is false for a nil context or device, where
// there is one node only, and where the system does not report it.
func NodeOf(ctx context.Context, dev *cudart.Device) (node int, ok bool) {
	if ctx == nil || dev == nil {
		return 0, false
	}
	node, ok, _ = Node(0).choose(ctx, dev, pages.SystemOf(ctx))
	return node, ok
}

// nodeOf reads the node of a PCI device, which is named as CUDA names it.
func nodeOf(files fs.FS, busID string) (int, error) {
	address, err := linux.ParsePCIAddress(busID)
	if err != nil {
		return 0, err
	}
	node, err := address.NUMANode(files)
	if err == nil && node < 0 {
		err = fmt.Errorf("the firmware reports none for PCI device %v", address)
	}
	return int(node), err
}
