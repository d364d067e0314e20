package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/docs/findings"
	"github.com/gopinned/pinned/internal/units"
)

// numaChecks judge which processors and which memory the process has, seen from the GPU.
var numaChecks = []Check{
	{ID: "few_cpus", Host: fewCPUs},
	{ID: "far_cpus", Implies: []string{"pages_far", "far_node_slow"}, Device: farCPUs},
	{ID: "far_memory", Implies: []string{"pages_far", "far_node_slow", "far_node_not_measured"}, Device: farMemory},
	{ID: "pages_far", Implies: []string{"far_node_slow"}, Device: pagesFar},
	{ID: "far_node_slow", Device: farNodeSlow},
	{ID: "numa_unknown", Device: numaUnknown},
	{ID: "sub_numa", Host: subNUMA},
	{ID: "no_sys_nice", Implies: []string{"far_node_not_measured"}, Host: noSysNice},
	{ID: "far_node_not_measured", Device: farNodeNotMeasured},
}

func fewCPUs(f *Facts) []Finding {
	h := f.Host
	if h == nil || h.CPU.Threads <= 1 || h.CPU.Usable() == 0 || h.CPU.Usable() > 1 {
		return nil
	}
	out := Finding{
		Summary: fmt.Sprintf("this process may use %g of %d CPUs", h.CPU.Usable(), h.CPU.Threads),
	}
	if h.CPU.Quota > 0 && h.CPU.Quota <= 1 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("the control group's quota is %g CPUs", h.CPU.Quota))
	}
	if h.CPU.Allowed != "" {
		out.Evidence = append(out.Evidence, "Cpus_allowed_list is "+h.CPU.Allowed)
	}
	return finding(out)
}

// home returns the NUMA node of a GPU on a host that has several with memory.
func (f *Facts) home(d *Device) (node hostinfo.NUMANode, ok bool) {
	if f.Host == nil || d.NUMANode == nil || len(f.memoryNodes()) < 2 {
		return hostinfo.NUMANode{}, false
	}
	i := slices.IndexFunc(f.Host.NUMA, func(n hostinfo.NUMANode) bool { return n.ID == *d.NUMANode })
	if i < 0 {
		return hostinfo.NUMANode{}, false
	}
	return f.Host.NUMA[i], true
}

// memoryNodes returns the nodes that have memory and CPUs: others are memory of GPUs, or
// of expanders.
func (f *Facts) memoryNodes() (nodes []hostinfo.NUMANode) {
	if f.Host == nil {
		return nil
	}
	for _, n := range f.Host.NUMA {
		if n.Total > 0 && n.CPUs != "" {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

func farCPUs(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	near := d.LocalCPUs
	if near == "" {
		near = node.CPUs
	}
	if n, known := f.Host.CPU.AllowedIn(near); !known || n > 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("the GPU is on NUMA node %d, and this process may use none of the CPUs there", node.ID),
		Evidence: []string{"CPUs near the GPU: " + near, "Cpus_allowed_list: " + f.Host.CPU.Allowed},
		values:   d.farValues(node.ID),
	})
}

func farMemory(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok || node.Total == 0 {
		return nil
	}
	if may, known := f.Host.CPU.MemoryFrom(node.ID); !known || may {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("the GPU is on NUMA node %d, and this process may not use the memory there", node.ID),
		Evidence: []string{"Mems_allowed_list: " + f.Host.CPU.AllowedMems},
		values:   d.farValues(node.ID),
	})
}

func pagesFar(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	for _, s := range d.copies() {
		if s.NUMANode == nil || *s.NUMANode == node.ID {
			continue
		}
		return finding(Finding{
			Summary:  fmt.Sprintf("the memory that was measured lay on NUMA node %d, and the GPU is on node %d", *s.NUMANode, node.ID),
			Evidence: []string{fmt.Sprintf("/proc/self/numa_maps, of the memory of the copies %s", directionText(&s))},
			values:   d.farValues(node.ID),
		})
	}
	return nil
}

// farShare is the share of the near node's rate below which a far node is slower for sure:
// samples of one case spread less, or are called unsteady, and a third less is the smallest
// difference that was reported.
const farShare = 1 - unsteady

// A farCopy is what copies one way reach from or to memory of the GPU's own node, and of a
// far one.
type farCopy struct {
	near, far *result.Series
}

func (c farCopy) share() float64 { return c.far.Median / c.near.Median }

func (c farCopy) String() string {
	return fmt.Sprintf("%s: %s with memory of node %s, and %s with memory of node %s",
		directionText(c.near), units.Rate(c.near.Median), c.near.Labels.Get(TrialNode), units.Rate(c.far.Median), c.far.Labels.Get(TrialNode))
}

// farCopies returns what was measured of a GPU with this node, without what was unsteady.
func (d *Device) farCopies(own int) (all []farCopy) {
	if d.Trials == nil {
		return nil
	}
	node := strconv.Itoa(own)
	for i := range d.Trials.Series {
		far := &d.Trials.Series[i]
		if far.Name != TrialByNode || far.Labels.Get(TrialNode) == node {
			continue
		}
		near := d.trial(TrialByNode, result.Label{Key: TrialNode, Value: node}, result.Label{Key: result.Direction, Value: far.Labels.Get(result.Direction)})
		if near != nil && far.Median > 0 && near.Spread <= unsteady && far.Spread <= unsteady {
			all = append(all, farCopy{near, far})
		}
	}
	return all
}

// farValues are the GPU's own node and, if it is known, what memory of a far node costs on this
// host.
func (d *Device) farValues(own int) findings.Values {
	values := findings.Values{"N": strconv.Itoa(own)}
	var texts []string
	for _, c := range d.farCopies(own) {
		texts = append(texts, c.String())
	}
	if len(texts) > 0 {
		values["others measured a third to two thirds less"] = strings.Join(texts, "; ")
	}
	return values
}

func farNodeSlow(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	var texts []string
	least := 1.0
	for _, c := range d.farCopies(node.ID) {
		if c.share() < farShare {
			texts = append(texts, c.String())
			least = min(least, c.share())
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("with memory of another NUMA node than its own, %d, the GPU copies at %s of the rate", node.ID, units.Share(least)),
		Evidence: texts,
		values:   findings.Values{"N": strconv.Itoa(node.ID), "several times": units.Times(1 / least)},
	})
}

// farNodeNotMeasured says why the cost is not known, where it was asked for.
func farNodeNotMeasured(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok || d.Trials == nil {
		return nil
	}
	var notes []string
	for _, u := range d.Trials.Unmeasured {
		text := fmt.Sprintf("memory of node %s: %s", u.Labels.Get(TrialNode), u.Reason)
		if u.Name == TrialByNode && !slices.Contains(notes, text) { // once for both directions
			notes = append(notes, text)
		}
	}
	if len(notes) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("what memory of another NUMA node than the GPU's own, %d, costs was not measured", node.ID),
		Evidence: notes,
		values:   findings.Values{"N": strconv.Itoa(node.ID)},
	})
}

func numaUnknown(f *Facts, d *Device) []Finding {
	h := f.Host
	if h == nil || d.NUMANode != nil || len(f.memoryNodes()) < 2 || h.CPU.Sockets < 2 || f.Simulated {
		return nil
	}
	if _, shown := f.pci(d); !shown {
		return nil
	}
	return finding(Finding{
		Summary:  "the host has several NUMA nodes, and does not say which is the GPU's",
		Evidence: []string{"numa_node is -1", fmt.Sprintf("%d nodes, %d sockets", len(f.memoryNodes()), h.CPU.Sockets)},
	})
}

func subNUMA(f *Facts) []Finding {
	h := f.Host
	nodes := f.memoryNodes()
	if h == nil || h.CPU.Sockets == 0 || h.Virt.VM || len(nodes) <= h.CPU.Sockets || len(f.Devices) == 0 {
		return nil
	}
	var near []int
	for _, d := range f.Devices {
		if d.NUMANode != nil && !slices.Contains(near, *d.NUMANode) {
			near = append(near, *d.NUMANode)
		}
	}
	slices.Sort(near)
	if len(near) == 0 || len(near) >= len(nodes) {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("%s on %s; the GPUs are near nodes %v only", units.Things(len(nodes), "NUMA node", "NUMA nodes"), units.Things(h.CPU.Sockets, "socket", "sockets"), near),
		Evidence: []string{"/sys/devices/system/node, numa_node of the GPUs"},
	})
}

func noSysNice(f *Facts) []Finding {
	h := f.Host
	if h == nil || h.Virt.Container == "" || h.User == nil || h.User.SysNice || len(f.memoryNodes()) < 2 || len(f.Devices) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  "this container may not say on which NUMA node memory is placed",
		Evidence: []string{fmt.Sprintf("no CAP_SYS_NICE, and %d nodes", len(f.memoryNodes()))},
	})
}
