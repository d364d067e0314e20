package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// numaChecks judge which processors and which memory the process has, seen from the GPU.
var numaChecks = []Check{
	{ID: "few_cpus", Host: oneCPU},
	{ID: "far_cpus", Suppresses: []string{"pages_far", "far_node_slow"}, Device: remoteCPUs},
	{ID: "far_memory", Suppresses: []string{"pages_far", "far_node_slow", "far_node_not_measured"}, Device: remoteMemory},
	{ID: "pages_far", Suppresses: []string{"far_node_slow"}, Device: pagesRemote},
	{ID: "far_node_slow", Device: remoteNodeSlow},
	{ID: "numa_unknown", Device: numaUnknown},
	{ID: "sub_numa", Host: subNUMA},
	{ID: "no_sys_nice", Suppresses: []string{"far_node_not_measured"}, Host: noSysNice},
	{ID: "far_node_not_measured", Device: remoteNodeNotMeasured},
}

func oneCPU(f *Facts) []Finding {
	h := f.Host
	if h == nil || h.CPU.Threads <= 1 || h.CPU.Usable() == 0 || h.CPU.Usable() > 1 {
		return nil
	}
	out := Finding{Summary: fmt.Sprintf("this process may use %g of %d CPUs", h.CPU.Usable(), h.CPU.Threads)}
	if h.CPU.Quota > 0 && h.CPU.Quota <= 1 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("The quota of the control group is %g CPUs", h.CPU.Quota))
		if h.CPU.AllowedCount != 1 {
			out.because = "quota"
		}
	}
	if h.CPU.Allowed != "" {
		out.Evidence = append(out.Evidence, "Cpus_allowed_list is "+h.CPU.Allowed+" (/proc/self/status)")
	}
	if out.because == "" {
		out.values = findings.Values{"CPUS": fmt.Sprintf("0-%d", h.CPU.Threads-1)}
	}
	return finding(out)
}

// home returns the NUMA node of a GPU on a host that has several with memory. A process without a GPU's
// device node copies nothing, wherever its CPUs are.
func (f *Facts) home(d *Device) (node hostinfo.NUMANode, ok bool) {
	if d.NUMANode == nil || len(f.memoryNodes()) < 2 || f.CUDADevices == nil && !f.Host.NVIDIA.HasGPUNode() {
		return hostinfo.NUMANode{}, false
	}
	return first(f.Host.NUMA, func(n hostinfo.NUMANode) bool { return n.ID == *d.NUMANode })
}

// memoryNodes returns the nodes that have memory and CPUs: others are memory of GPUs, or
// of expanders.
func (f *Facts) memoryNodes() (nodes []hostinfo.NUMANode) {
	for _, n := range f.Host.NUMA {
		if n.Total > 0 && n.CPUs != "" {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

func remoteCPUs(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	local := d.LocalCPUs
	if local == "" {
		local = node.CPUs
	}
	if n, known := f.Host.CPU.AllowedIn(local); !known || n > 0 {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(f.divided(d, node)),
		Summary:  fmt.Sprintf("the GPU is on NUMA node %d, and this process may use no CPU there", node.ID),
		Evidence: []string{"CPUs near the GPU: " + local, "Cpus_allowed_list is " + f.Host.CPU.Allowed + " (/proc/self/status)"},
		values:   d.remoteValues(node.ID),
	})
}

// siblingDistance is the highest distance of nodes of one socket: SNC has 11 to 13, NPS4 12, and other sockets 20 and
// more.
const siblingDistance = 15

// divided reports whether sockets are divided into nodes, as far as is known, and nothing shows that this costs: copies
// reach the rate that is expected, or a CPU of this process is of the GPU's socket.
func (f *Facts) divided(d *Device, home hostinfo.NUMANode) bool {
	h := f.Host
	if h.CPU.Sockets > 0 && len(f.memoryNodes()) <= h.CPU.Sockets {
		return false
	}
	if len(f.comparisons(d)) > 0 {
		return !f.Slow(d)
	}
	nearest := 0 // unknown
	for i, n := range h.NUMA {
		if in, known := h.CPU.AllowedIn(n.CPUs); !known || in == 0 || i >= len(home.Distances) {
			continue
		}
		if nearest == 0 || home.Distances[i] < nearest {
			nearest = home.Distances[i]
		}
	}
	return nearest <= siblingDistance
}

func remoteMemory(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok || node.Total == 0 {
		return nil
	}
	if may, known := f.Host.CPU.MemoryFrom(node.ID); !known || may {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(len(f.comparisons(d)) > 0 && f.divided(d, node)),
		Summary:  fmt.Sprintf("the GPU is on NUMA node %d, and this process may not use memory there", node.ID),
		Evidence: []string{"Mems_allowed_list is " + f.Host.CPU.AllowedMems + " (/proc/self/status)"},
		values:   d.remoteValues(node.ID),
	})
}

func pagesRemote(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	for _, s := range d.copies() {
		if s.NUMANode == nil || *s.NUMANode == node.ID {
			continue
		}
		return finding(Finding{
			Severity: noteIf(f.divided(d, node)),
			Summary:  fmt.Sprintf("the measured memory was on NUMA node %d, and the GPU is on node %d", *s.NUMANode, node.ID),
			Evidence: []string{fmt.Sprintf("/proc/self/numa_maps, for the memory of copies %s", directionText(&s))},
			values:   d.remoteValues(node.ID),
		})
	}
	return nil
}

// remoteShare is the share of the near node's rate below which a far node is slower for sure:
// samples of one case spread less, or are called unsteady, and a third less is the smallest
// difference that was reported.
const remoteShare = 1 - unsteady

// A remoteCopy is what copies one way reach from or to memory of the GPU's own node, and of a
// remote one.
type remoteCopy struct {
	local, remote *result.Series
}

func (c remoteCopy) share() float64 { return c.remote.Median / c.local.Median }

func (c remoteCopy) String() string {
	return fmt.Sprintf("%s, %s with memory of node %s, %s with memory of node %s",
		directionText(c.local), units.Rate(c.local.Median), c.local.Labels.Get(TrialNode), units.Rate(c.remote.Median), c.remote.Labels.Get(TrialNode))
}

// remoteCopies returns what was measured of a GPU with this node, without what was unsteady.
func (d *Device) remoteCopies(own int) (all []remoteCopy) {
	if d.Trials == nil {
		return nil
	}
	node := strconv.Itoa(own)
	for i := range d.Trials.Series {
		remote := &d.Trials.Series[i]
		if remote.Name != TrialByNode || remote.Labels.Get(TrialNode) == node {
			continue
		}
		local := d.trial(TrialByNode, result.Label{Key: TrialNode, Value: node}, result.Label{Key: result.Direction, Value: remote.Labels.Get(result.Direction)})
		if local != nil && remote.Median > 0 && local.Spread <= unsteady && remote.Spread <= unsteady {
			all = append(all, remoteCopy{local, remote})
		}
	}
	return all
}

// remoteValues are what memory of a far node costs on this host, if that is known.
func (d *Device) remoteValues(own int) findings.Values {
	var texts []string
	for _, c := range d.remoteCopies(own) {
		texts = append(texts, c.String())
	}
	if len(texts) == 0 {
		return nil
	}
	return findings.Values{"others measured a third to two thirds less": strings.Join(texts, "; ")}
}

func remoteNodeSlow(f *Facts, d *Device) []Finding {
	node, ok := f.home(d)
	if !ok {
		return nil
	}
	var texts []string
	smallest := 1.0
	for _, c := range d.remoteCopies(node.ID) {
		if c.share() < remoteShare {
			texts = append(texts, capital(c.String()))
			smallest = min(smallest, c.share())
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("copies with memory of a remote NUMA node reach %s of the local rate", units.Share(smallest)),
		Evidence: texts,
		values:   findings.Values{"several times": units.Times(1 / smallest)},
	})
}

// remoteNodeNotMeasured says why the cost is not known, where it was asked for.
func remoteNodeNotMeasured(f *Facts, d *Device) []Finding {
	_, ok := f.home(d)
	if !ok || d.Trials == nil {
		return nil
	}
	var notes []string
	for _, u := range d.Trials.Unmeasured {
		text := fmt.Sprintf("Memory of node %s: %s", u.Labels.Get(TrialNode), u.Reason)
		if u.Name == TrialByNode && !slices.Contains(notes, text) { // once for both directions
			notes = append(notes, text)
		}
	}
	return seen(notes...)
}

func numaUnknown(f *Facts, d *Device) []Finding {
	h := f.Host
	if h == nil || d.NUMANode != nil || len(f.memoryNodes()) < 2 || h.CPU.Sockets < 2 || f.Simulated {
		return nil
	}
	if _, shown := f.pci(d); !shown {
		return nil
	}
	return seen("numa_node is -1", units.Things(len(f.memoryNodes()), "node", "nodes")+", "+units.Things(h.CPU.Sockets, "socket", "sockets"))
}

func subNUMA(f *Facts) []Finding {
	h := f.Host
	nodes := f.memoryNodes()
	if h == nil || h.CPU.Sockets == 0 || h.Virt.VM || len(nodes) <= h.CPU.Sockets || len(f.Devices) == 0 {
		return nil
	}
	var local []int
	for _, d := range f.Devices {
		if d.NUMANode != nil && !slices.Contains(local, *d.NUMANode) {
			local = append(local, *d.NUMANode)
		}
	}
	slices.Sort(local)
	if len(local) == 0 || len(local) >= len(nodes) {
		return nil
	}
	return summarized(fmt.Sprintf("%s on %s, and GPUs only near nodes %v", units.Things(len(nodes), "NUMA node", "NUMA nodes"), units.Things(h.CPU.Sockets, "socket", "sockets"), local),
		"/sys/devices/system/node, numa_node of the GPUs")
}

func noSysNice(f *Facts) []Finding {
	h := f.Host
	if h == nil || h.Virt.Container == "" || h.User == nil || h.User.SysNice || len(f.memoryNodes()) < 2 || len(f.Devices) == 0 {
		return nil
	}
	return seen(fmt.Sprintf("CAP_SYS_NICE is missing, and there are %d nodes", len(f.memoryNodes())))
}
