package linux

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A NUMANode is the number of a memory node, the N of
// /sys/devices/system/node/nodeN.
type NUMANode int

// NoNode is the node of a device whose firmware names none.
const NoNode NUMANode = -1

const nodeDir = "sys/devices/system/node"

// ReadNUMANodes lists the host's nodes, ascending, those without memory or without
// CPUs included.
func ReadNUMANodes(fsys fs.FS) ([]NUMANode, error) {
	entries, err := fs.ReadDir(fsys, nodeDir)
	if err != nil {
		return nil, inFile(nodeDir, err)
	}
	var nodes []NUMANode
	for _, e := range entries {
		digits, ok := strings.CutPrefix(e.Name(), "node")
		if n, err := strconv.ParseUint(digits, 10, 16); ok && err == nil {
			nodes = append(nodes, NUMANode(n))
		}
	}
	slices.Sort(nodes)
	return nodes, nil
}

// ReadMemoryNodes lists the nodes that have memory, ascending. On kernels that do
// not list them, as many before Linux 4.15, it lists those that are online.
func ReadMemoryNodes(fsys fs.FS) ([]NUMANode, error) {
	list, err := ReadCPUList(fsys, nodeDir+"/has_memory")
	if errors.Is(err, fs.ErrNotExist) {
		list, err = ReadCPUList(fsys, nodeDir+"/online")
	}
	var nodes []NUMANode
	for _, n := range list {
		nodes = append(nodes, NUMANode(n))
	}
	return nodes, err
}

func (n NUMANode) file(name string) string {
	return path.Join(nodeDir, "node"+strconv.Itoa(int(n)), name)
}

// CPUs reads the CPUs of the node.
func (n NUMANode) CPUs(fsys fs.FS) (CPUList, error) { return ReadCPUList(fsys, n.file("cpulist")) }

// Meminfo reads the node's part of the host's memory.
func (n NUMANode) Meminfo(fsys fs.FS) (Meminfo, error) {
	return read(fsys, n.file("meminfo"), ParseMeminfo)
}

// Distances reads how far each node's memory is from this node: 10 is its own.
func (n NUMANode) Distances(fsys fs.FS) ([]int, error) {
	return read(fsys, n.file("distance"), parseDistances)
}

func parseDistances(text string) ([]int, error) {
	var distances []int
	for field := range strings.FieldsSeq(text) {
		d, err := parseInt(field)
		if err != nil {
			return nil, &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: "a list of distances"}
		}
		distances = append(distances, d)
	}
	return distances, nil
}
