package doctor

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

// numaChecks judge which processors and which memory the process has, seen from the GPU.
var numaChecks = []Check{
	{ID: "few_cpus", Title: "one CPU may be used", Severity: Warning, Host: fewCPUs},
	{ID: "far_cpus", Title: "no CPU near the GPU may be used", Severity: Warning, Implies: []string{"pages_far"}, Device: farCPUs},
	{ID: "far_memory", Title: "the memory near the GPU may not be used", Severity: Warning, Implies: []string{"pages_far"}, Device: farMemory},
	{ID: "pages_far", Title: "pages lay far from the GPU", Severity: Warning, Device: pagesFar},
	{ID: "numa_unknown", Title: "the firmware does not say where the GPU is", Severity: Note, Device: numaUnknown},
	{ID: "sub_numa", Title: "the sockets are divided into several nodes", Severity: Note, Host: subNUMA},
	{ID: "no_sys_nice", Title: "the container may not place memory", Severity: Note, Host: noSysNice},
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
		Cost:     "memory is populated on the far node, and copies cross between sockets: a third to two thirds less were measured",
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
		Cost:     "all pinned memory is on the far node, and copies cross between sockets",
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
			Evidence: []string{fmt.Sprintf("sampled pages of the copies %s", directionText(&s))},
			Cause:    "the node's memory is full, or the system's policy places pages elsewhere",
			Cost:     "copies cross between sockets",
			Remedy:   fmt.Sprintf("free memory of the node (numastat -m), or "+bind, node.ID, node.ID),
		})
	}
	return nil
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
