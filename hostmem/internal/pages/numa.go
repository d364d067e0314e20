package pages

import (
	"fmt"
	"slices"
)

// Bind requests pages that are not resident yet from one node, as Options.Node does.
func (r *Region) Bind(node int) { r.bind(Options{Node: node, NodeSet: true}) }

// bind requests the region's pages from one node (mbind), on a host with several nodes. A
// refusal is a note.
func (r *Region) bind(o Options) {
	if !o.NodeSet || len(r.sys.Nodes) < 2 {
		return
	}
	if !slices.Contains(r.sys.Nodes, o.Node) {
		r.note(numaNote+"node %d has no memory (nodes %v have), not bound", o.Node, r.sys.Nodes)
		return
	}
	if err := r.sys.Calls.Bind(r.base, r.mapped, o.Node); err != nil {
		r.note(numaNote+"binding to node %d failed (%v), pages come from any node", o.Node, err)
		return
	}
	r.node = o.Node
}

// checkNode notes when pages reside on other nodes than the one they were bound to.
func (r *Region) checkNode() {
	if r.node < 0 {
		return
	}
	at, err := r.where(samples)
	if err != nil {
		r.note(numaNote+"the nodes of the pages are unknown: %v", err)
		return
	}
	delete(at, r.node)
	if len(at) > 0 {
		r.note(numaNote+"pages reside on other nodes than %d (of %d examined, by node: %v)", r.node, samples, at)
	}
}

// where examines up to n pages, evenly spread over the region, and counts them by the
// NUMA node on which they reside (move_pages). Pages that are not resident do not count.
func (r *Region) where(n int) (map[int]int, error) {
	list := r.sample(n)
	nodes := make([]int32, len(list))
	if err := r.sys.Calls.Where(list, nodes); err != nil {
		return nil, fmt.Errorf("node of %d pages: %w", len(list), err)
	}
	at := make(map[int]int)
	for _, node := range nodes {
		if node >= 0 {
			at[int(node)]++
		}
	}
	return at, nil
}
