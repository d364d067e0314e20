package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/internal/units"
)

// A service is what becomes of a GPU on the PCI bus in this run. Each GPU has exactly one, and serviceOf is the only
// place that decides which:
//
//	examined     CUDA shows it to this process, and the run examines it
//	excluded     somebody's will keeps it from this process: a note names whose
//	reported     a finding is about it: that of cause, else missing_gpus
//	unexplained  CUDA does not show it, and nothing tells why: the verdict is not Healthy
type service string

const (
	isExamined    service = "examined"
	isExcluded    service = "excluded"
	isReported    service = "reported"
	isUnexplained service = "unexplained"
)

// A busGPU is a GPU on the PCI bus, with its service.
type busGPU struct {
	hostinfo.PCIDevice
	service service
	// finding is the id of the finding or note about it, cause the cause on that page, and seen the evidence.
	finding, cause, seen string
}

// Where the ids of services come from.
const (
	missingID  = "missing_gpus"
	excludedID = "gpus_excluded"
	migID      = "mig_without_instance"
	offBusID   = "gpu_off_bus"
	tooOldID   = "gpu_too_old_for_driver"
	failedID   = "failed_call"
)

// services returns all GPUs on the PCI bus with their services. Where no bus shows, the GPUs are those that the
// kernel module lists, or else the device nodes. WSL's and simulated GPUs are on no bus.
func (f *Facts) services() []busGPU {
	if f.Host.Virt.WSL || f.Simulated {
		return nil
	}
	gpus := onBus(f.Host)
	all := make([]busGPU, len(gpus))
	unplaced := 0 // GPUs of CUDA whose place on the bus does not show
	for _, d := range f.Devices {
		i := slices.IndexFunc(gpus, func(g hostinfo.PCIDevice) bool { return hostinfo.SamePCI(g.Address, d.PCIBusID) })
		switch {
		case i >= 0:
			all[i].service = isExamined
		case len(f.Host.GPUs) == 0 || !isAddress(d.PCIBusID):
			unplaced++
		}
	}
	nodes := nodesOf(f.Host, gpus, func(i int) bool { return all[i].service == isExamined })
	undescribed := len(f.DeviceErrors)
	for i, g := range gpus {
		all[i].PCIDevice = g
		if all[i].service == isExamined {
			continue
		}
		one := f.serviceOf(g, nodes[i])
		atFault := one.service == isUnexplained || one.finding == missingID && one.cause == ""
		switch {
		case atFault && unplaced > 0:
			unplaced--
			one = busGPU{service: isExamined}
		case atFault && undescribed > 0:
			undescribed--
			one = busGPU{service: isReported, finding: failedID}
		}
		one.PCIDevice = g
		all[i] = one
	}
	return all
}

func isAddress(text string) bool { return hostinfo.SamePCI(text, text) }

// onBus returns the GPUs of a host: see services.
func onBus(h *hostinfo.Host) []hostinfo.PCIDevice {
	if len(h.GPUs) > 0 {
		return h.GPUs
	}
	var out []hostinfo.PCIDevice
	for _, b := range h.NVIDIA.Boards {
		out = append(out, hostinfo.PCIDevice{Address: b.Address, Driver: nvidiaDriver})
	}
	if len(out) > 0 {
		return out
	}
	for _, path := range h.NVIDIA.GPUNodes() {
		out = append(out, hostinfo.PCIDevice{Address: path, Driver: nvidiaDriver})
	}
	return out
}

const nvidiaDriver = "nvidia"

// A node says whether a GPU has its device node in this process's /dev.
type node int

const (
	nodeThere node = iota
	nodeGone
	// nodesUnshown is that no GPU has one: nodes are made when they are first used, and a sandbox may not show them.
	nodesUnshown
	// nodeUnlisted is that the kernel module's list has other GPUs, though the driver nvidia holds this one: the list is
	// that of a container.
	nodeUnlisted
)

// nodesOf returns the nodes of GPUs. The kernel module lists which node is whose. Where it does not, the nodes are
// those of the GPUs that are examined, and then of the first others that the driver holds.
func nodesOf(h *hostinfo.Host, gpus []hostinfo.PCIDevice, examined func(i int) bool) []node {
	out := make([]node, len(gpus))
	paths := h.NVIDIA.GPUNodes()
	if len(paths) == 0 {
		for i := range out {
			out[i] = nodesUnshown
		}
		return out
	}
	var unlisted []int // GPUs whose node the module does not list
	left := len(paths)
	for i, g := range gpus {
		b, ok := boardOf(h, g)
		switch {
		case slices.Contains(paths, g.Address): // there is nothing but nodes
		case ok && b.Minor != "":
			if !h.NVIDIA.HasNode("/dev/nvidia" + b.Minor) {
				out[i] = nodeGone
				continue
			}
		case !ok && !examined(i) && len(paths) <= len(h.NVIDIA.Boards) && slices.ContainsFunc(h.NVIDIA.Boards, func(b hostinfo.Board) bool { return isAddress(b.Address) }):
			out[i] = nodeUnlisted
			continue
		default:
			unlisted = append(unlisted, i)
			continue
		}
		left--
	}
	for _, first := range []bool{true, false} {
		for _, i := range unlisted {
			if examined(i) != first {
				continue
			}
			if first || gpus[i].Driver == nvidiaDriver && left > 0 {
				left--
			} else {
				out[i] = nodeGone
			}
		}
	}
	return out
}

func boardOf(h *hostinfo.Host, g hostinfo.PCIDevice) (hostinfo.Board, bool) {
	i := slices.IndexFunc(h.NVIDIA.Boards, func(b hostinfo.Board) bool { return hostinfo.SamePCI(b.Address, g.Address) })
	if i < 0 {
		return hostinfo.Board{}, false
	}
	return h.NVIDIA.Boards[i], true
}

// reachable returns how many GPUs CUDA can number on a host: the driver holds them, and their nodes are there. 0 is
// unknown.
func reachable(h *hostinfo.Host) (n int) {
	if h.Virt.WSL {
		return 0
	}
	gpus := onBus(h)
	nodes := nodesOf(h, gpus, func(int) bool { return false })
	held := 0
	for i, g := range gpus {
		if g.Driver != nvidiaDriver || told(h, g) {
			continue
		}
		held++
		if nodes[i] == nodeThere || nodes[i] == nodesUnshown && h.Virt.Container == "" {
			n++
		}
	}
	if held == 0 {
		return len(h.NVIDIA.GPUNodes())
	}
	return n
}

// told reports whether the module was told to leave a GPU alone.
func told(h *hostinfo.Host, g hostinfo.PCIDevice) bool {
	b, ok := boardOf(h, g)
	return ok && (b.Excluded || b.UUID != "" && slices.Contains(h.NVIDIA.ExcludedGPUs, b.UUID))
}

// narrowed returns what gives this process GPUs of its own, though it sees all of the host's on the bus: a cause of
// gpus_excluded, and the evidence. Empty without one.
func narrowed(h *hostinfo.Host) (cause, seen string) {
	_, _, job := h.SlurmJob()
	switch {
	case job:
		return "job", "SLURM_JOB_ID=" + h.Env["SLURM_JOB_ID"] + ", SLURM_JOB_GPUS=" + h.Env["SLURM_JOB_GPUS"]
	case h.Virt.Container != "":
		return "container", "the process runs in a container (" + h.Virt.Container + ")"
	case h.Env["NVIDIA_VISIBLE_DEVICES"] != "":
		return "container", "NVIDIA_VISIBLE_DEVICES=" + h.Env["NVIDIA_VISIBLE_DEVICES"]
	case h.Virt.PrivateDevices:
		return "unit", "the unit " + h.Virt.Unit + " has its own /dev"
	}
	return "", ""
}

// withoutDriver is the evidence of a GPU that no driver holds.
func (f *Facts) withoutDriver(g hostinfo.PCIDevice) string {
	seen := "no driver is bound to it"
	if g.NoWindow {
		seen += "; BAR 1 has no address"
	}
	if g.Asleep {
		seen += "; power_state is " + g.PowerState
	}
	return seen
}

// nodeAt returns the node of a GPU whose number is known, or, if no number is, one that was refused: which GPU's it
// is does not matter, as all are on one side.
func nodeAt(h *hostinfo.Host, path string, known bool) (hostinfo.Node, bool) {
	i := slices.IndexFunc(h.NVIDIA.Nodes, func(n hostinfo.Node) bool {
		return hostinfo.IsGPUNode(n.Path) && (known && n.Path == path || !known && n.OpenError != "")
	})
	if i < 0 {
		return hostinfo.Node{}, false
	}
	return h.NVIDIA.Nodes[i], true
}

// nvmlOf returns what NVML has of a GPU, or nil.
func (f *Facts) nvmlOf(g hostinfo.PCIDevice) *nvml.GPU {
	for _, known := range f.managed() {
		if hostinfo.SamePCI(known.PCIBusID, g.Address) {
			return known
		}
	}
	return nil
}

// countShown returns how many GPUs CUDA shows.
func (f *Facts) countShown() int {
	if f.CUDADevices != nil {
		return *f.CUDADevices
	}
	return len(f.Devices) + len(f.NotChosen)
}

// instanceShown returns the evidence that CUDA shows a MIG instance: then it shows a process this one alone, and no
// other GPU. Empty if it does not.
func (f *Facts) instanceShown() string {
	for _, d := range f.Devices {
		if strings.HasPrefix(d.UUID, "MIG-") || strings.Contains(d.Name, " MIG ") || d.Health != nil && isTrue(d.Health.MIG) {
			return fmt.Sprintf("GPU %d of CUDA is a MIG instance: %s", d.Ordinal, d.Name)
		}
	}
	return ""
}

// hiddenByChoice returns the service of a GPU that CUDA_VISIBLE_DEVICES hides. It hides the others if CUDA shows all
// GPUs that it names.
func (f *Facts) hiddenByChoice() (busGPU, bool) {
	value, set := f.Host.Env[visibleDevices]
	if !set {
		return busGPU{}, false
	}
	seen := fmt.Sprintf("%s=%q", visibleDevices, value)
	c := f.chosen(value)
	switch {
	case hidesDevices(value), c.named <= f.countShown() && (c.bad == "" || c.why == "negative"):
		return busGPU{service: isExcluded, finding: excludedID, cause: "visible_devices", seen: seen}, true
	case c.bad != "" && len(f.Devices) > 0:
		return busGPU{service: isReported, finding: "visible_devices_unknown", seen: seen}, true
	}
	return busGPU{}, false
}

// excludedGPUs makes a note for each way in which GPUs are kept from this process on purpose. Where CUDA shows none,
// the findings about that have it.
func excludedGPUs(f *Facts) (out []Finding) {
	if len(f.Devices) == 0 {
		return nil
	}
	for _, g := range f.services() {
		if g.service != isExcluded || g.finding != excludedID {
			continue
		}
		i := slices.IndexFunc(out, func(one Finding) bool { return one.because == g.cause })
		if i < 0 {
			i = len(out)
			out = append(out, Finding{because: g.cause})
		}
		out[i].Evidence = append(out[i].Evidence, g.Address+": "+g.seen)
	}
	for i := range out {
		out[i].values = findings.Values{"GPUs are": units.Things(len(out[i].Evidence), "GPU is", "GPUs are")}
	}
	return out
}

// migBeside are GPUs in MIG mode without an instance, beside others that CUDA shows.
func migBeside(f *Facts) []Finding {
	var evidence []string
	for _, g := range f.services() {
		if g.finding == migID {
			evidence = append(evidence, g.seen)
		}
	}
	if len(evidence) == 0 {
		return nil
	}
	return finding(Finding{
		Severity: Note,
		Summary:  units.Things(len(evidence), "GPU is", "GPUs are") + " in MIG mode without an instance",
		Evidence: evidence, because: "some",
	})
}

// accounted reports whether each GPU on the bus is examined, excluded, or in one of the findings, also if that is
// ignored or follows from another one.
func (f *Facts) accounted(found []Finding, ignore []string) bool {
	return !slices.ContainsFunc(f.services(), func(g busGPU) bool {
		inFinding := slices.Contains(ignore, g.finding) || slices.ContainsFunc(found, func(one Finding) bool {
			return one.ID == g.finding || slices.Contains(one.Suppressed, g.finding)
		})
		return g.service == isUnexplained || g.service != isExamined && !inFinding
	})
}
