package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// numaChecks judge which processors and which memory the process has, seen from the GPU.
var numaChecks = []Check{
	{ID: "few_cpus", Title: "one CPU may be used", Severity: Warning, Host: fewCPUs},
	{ID: "far_cpus", Title: "no CPU near the GPU may be used", Severity: Warning, Implies: []string{"pages_far", "far_node_slow"}, Device: farCPUs},
	{ID: "far_memory", Title: "the memory near the GPU may not be used", Severity: Warning, Implies: []string{"pages_far", "far_node_slow", "far_node_not_measured"}, Device: farMemory},
	{ID: "pages_far", Title: "pages lay far from the GPU", Severity: Warning, Implies: []string{"far_node_slow"}, Device: pagesFar},
	{ID: "far_node_slow", Title: "memory of a far node is slower to copy", Severity: Note, Device: farNodeSlow},
	{ID: "numa_unknown", Title: "the firmware does not say where the GPU is", Severity: Note, Device: numaUnknown},
	{ID: "sub_numa", Title: "the sockets are divided into several nodes", Severity: Note, Host: subNUMA},
	{ID: "no_sys_nice", Title: "the container may not place memory", Severity: Note, Implies: []string{"far_node_not_measured"}, Host: noSysNice},
	{ID: "far_node_not_measured", Title: "what far memory costs could not be measured", Severity: Note, Device: farNodeNotMeasured},
}

const bind = "numactl --cpunodebind=%d --membind=%d PROGRAM"

func fewCPUs(f *Facts) []Finding {
	h := f.Host
	if h == nil || h.CPU.Threads <= 1 || h.CPU.Usable() == 0 || h.CPU.Usable() > 1 {
		return nil
	}
	out := Finding{
		Summary: fmt.Sprintf("this process may use %g of %d CPUs", h.CPU.Usable(), h.CPU.Threads),
		Cause:   "a CPU mask (taskset, a scheduler, cpuset) or a quota of the container",
		Cost:    "pinning and staging run on one thread: memory is populated at 3 to 4 GB/s in place of 25 and more",
		Remedy:  "give it more CPUs: taskset -p 0xffff PID, --cpus of the container, --cpus-per-task of Slurm",
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
		Cause:    "a CPU mask (taskset, a scheduler, cpuset)",
		Cost:     "memory is populated on the far node, and copies cross between sockets: " + cmp.Or(d.farCost(node.ID), "others measured a third to two thirds less"),
		Remedy:   fmt.Sprintf(bind+"; Slurm: --gpu-bind=closest; Kubernetes: topologyManagerPolicy: single-numa-node", node.ID, node.ID),
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
		Cause:    "a cpuset of the container or the job",
		Cost:     "all pinned memory is on the far node, and copies cross between sockets: " + cmp.Or(d.farCost(node.ID), "others measured a third to two thirds less"),
		Remedy:   fmt.Sprintf("allow node %d: --cpuset-mems of docker, or cpuset.mems of the control group", node.ID),
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
			Cause:    "the node's memory is full, or the system's policy places pages elsewhere",
			Cost:     "copies cross between sockets: " + cmp.Or(d.farCost(node.ID), "others measured a third to two thirds less"),
			Remedy:   fmt.Sprintf("free memory of the node (numastat -m), or "+bind, node.ID, node.ID),
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

// farCost says what memory of a far node costs on this host, or nothing if that is not
// known.
func (d *Device) farCost(own int) string {
	var texts []string
	for _, c := range d.farCopies(own) {
		texts = append(texts, c.String())
	}
	return strings.Join(texts, "; ")
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
		Cause:    "such copies cross between sockets, or between parts of one",
		Cost:     fmt.Sprintf("programs that do not place their memory take up to %s as long to copy: pages land on the node of the thread that populates them", units.Times(1/least)),
		Remedy:   fmt.Sprintf(bind+"; hostmem.Alloc places memory on the GPU's node by itself", node.ID, node.ID),
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
		Cause:    "the kernel placed the pages on another node: it refuses mbind to this process, a cpuset forbids the node, or the node is full; or it does not show where pages lie",
		Cost:     "whether copies are slower with memory of a far node is not known here; others measured a third to two thirds less",
		Remedy:   fmt.Sprintf("docker run --cap-add SYS_NICE; free memory of the nodes (numastat -m); or run pincheck on each node: numactl --cpunodebind=%d --membind=N pincheck", node.ID),
	})
}

func numaUnknown(f *Facts, d *Device) []Finding {
	h := f.Host
	if h == nil || d.NUMANode != nil || len(f.memoryNodes()) < 2 || h.CPU.Sockets < 2 || f.Simulated {
		return nil
	}
	if _, shown := h.GPU(d.PCIBusID); !shown {
		return nil
	}
	return finding(Finding{
		Summary:  "the host has several NUMA nodes, and does not say which is the GPU's",
		Evidence: []string{"numa_node is -1", fmt.Sprintf("%d nodes, %d sockets", len(f.memoryNodes()), h.CPU.Sockets)},
		Cause:    "the firmware, or the virtual machine's configuration, leaves it out",
		Cost:     "no program can place its memory near the GPU by itself",
		Remedy:   "update the firmware; in a virtual machine give the GPU a place in the guest's topology (pcie-expander-bus with numa_node); until then measure each node: numactl --cpunodebind=N --membind=N pincheck",
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
		Cause:    "sub-NUMA clustering (SNC) or nodes per socket (NPS) is on in the firmware",
		Cost:     "memory that is spread over all nodes is mostly far from the GPUs",
		Remedy:   "place pinned memory on the GPU's own node, or turn SNC or NPS off",
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
		Cause:    "the default seccomp profile of container runtimes allows mbind and set_mempolicy only with that capability",
		Cost:     "memory lands where its threads run; a pool that is shared by GPUs of two sockets is far from one of them",
		Remedy:   "docker run --cap-add SYS_NICE, or bind the whole container: --cpuset-cpus and --cpuset-mems",
	})
}
