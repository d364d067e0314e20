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
	return first(h.NVIDIA.Boards, func(b hostinfo.Board) bool { return hostinfo.SamePCI(b.Address, g.Address) })
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
	return first(h.NVIDIA.Nodes, func(n hostinfo.Node) bool {
		return hostinfo.IsGPUNode(n.Path) && (known && n.Path == path || !known && n.OpenError != "")
	})
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

// An unserved is a GPU that is not examined, with what is known of it.
type unserved struct {
	*Facts
	g        hostinfo.PCIDevice
	at       node
	own, why string // what gives this process GPUs of its own: see narrowed
	listed   bool   // by the kernel module
	known    *nvml.GPU
	path     string        // of its device node
	node     hostinfo.Node // that cannot be opened, if refused
	refused  bool
}

// serviceOf returns the service of a GPU that is not examined: that of the first reason that holds.
func (f *Facts) serviceOf(g hostinfo.PCIDevice, at node) busGPU {
	u := &unserved{Facts: f, g: g, at: at, path: "its device node"}
	u.known, _ = first(f.managed(), func(known *nvml.GPU) bool { return u.isAt(known.PCIBusID) })
	u.own, u.why = narrowed(f.Host)
	board, listed := boardOf(f.Host, g)
	u.listed = listed
	if board.Minor != "" {
		u.path = "/dev/nvidia" + board.Minor
	}
	u.node, u.refused = nodeAt(f.Host, u.path, board.Minor != "")
	if one := u.bySystem(); one.service != "" {
		return one
	}
	if one := u.byChoice(); one.service != "" {
		return one
	}
	return u.byNobody()
}

func keptBy(cause, seen string) busGPU {
	return busGPU{service: isExcluded, finding: excludedID, cause: cause, seen: seen}
}

func missingBy(cause, seen string) busGPU {
	return busGPU{service: isReported, finding: missingID, cause: cause, seen: seen}
}

func unexplained(seen string) busGPU { return busGPU{service: isUnexplained, seen: seen} }

// bySystem is for what the hardware, the kernel and its module have done, which no choice of a process explains.
func (u *unserved) bySystem() busGPU {
	h, g, assigned := u.Host, u.g, u.Host.NVIDIA.AssignedGPUs
	_, _, evidence, tooOld := unsupported(h, g)
	switch {
	case g.OffBus:
		return busGPU{service: isReported, finding: offBusID}
	case g.VirtualFunction:
		return keptBy("virtual_function", g.Dir()+"/physfn exists")
	case g.SwitchedOff:
		return keptBy("switched_off", "/proc/acpi/bbswitch: "+g.Address+" OFF")
	case g.Driver != "" && g.Driver != nvidiaDriver:
		return keptBy("driver", g.Dir()+"/driver is "+g.Driver)
	case g.Override != "" && g.Override != nvidiaDriver:
		return keptBy("override", g.Dir()+"/driver_override is "+g.Override)
	case told(h, g):
		return keptBy("parameter", "/proc/driver/nvidia: GPU Excluded is Yes, or ExcludedGpus contains it")
	case g.Driver == "" && len(assigned) > 0 && !slices.ContainsFunc(assigned, u.isAt):
		return keptBy("assigned", "NVreg_AssignGpus is "+strings.Join(assigned, ","))
	case slices.ContainsFunc(u.NotChosen, u.isAt):
		return keptBy("device_option", "--device names other GPUs")
	case (u.at == nodeGone || u.at == nodeUnlisted) && u.own != "":
		return keptBy(u.own, u.why+"; its device node is missing")
	case tooOld && u.known == nil && !u.listed:
		return busGPU{service: isReported, finding: tooOldID, seen: evidence}
	case u.driverless() && g.NoWindow:
		return missingBy("window", u.withoutDriver(g))
	case u.driverless():
		return missingBy("no_driver", u.withoutDriver(g))
	}
	return busGPU{}
}

// isAt reports whether an address is the GPU's.
func (u *unserved) isAt(address string) bool { return hostinfo.SamePCI(address, u.g.Address) }

// driverless reports whether no driver holds the GPU, where drivers show because one holds another GPU. A device node
// for each GPU speaks against it.
func (u *unserved) driverless() bool {
	h := u.Host
	asked := u.CUDADevices != nil || len(h.NVIDIA.GPUNodes()) < len(h.GPUs)
	return u.g.Driver == "" && !u.listed && asked && slices.ContainsFunc(h.GPUs, func(o hostinfo.PCIDevice) bool { return o.Driver != "" })
}

// byChoice is for what somebody wanted.
func (u *unserved) byChoice() busGPU {
	instance := u.instanceShown()
	hidden, byVariable := u.hiddenByChoice()
	denied := u.node.Path + ": " + u.node.OpenError
	switch {
	case u.known != nil && isTrue(u.known.MIG) && u.known.MIGInstances != nil && *u.known.MIGInstances <= 0:
		return busGPU{service: isExcluded, finding: migID, seen: fmt.Sprintf("NVML: GPU %d (%s): MIG is on, with 0 instances", u.known.Index, u.known.PCIBusID)}
	case instance != "":
		return keptBy("mig", instance)
	case byVariable:
		return hidden
	case u.refused && strings.Contains(u.node.OpenError, eperm) && u.Host.Virt.Unit != "" && u.own == "":
		return keptBy("unit", denied+"; the process runs in "+u.Host.Virt.Unit)
	case u.refused && strings.Contains(u.node.OpenError, eperm):
		return keptBy("control_group", denied)
	case u.own == "job":
		return keptBy("job", u.why)
	case u.ExpectedGPUs > 0 && u.countShown() >= u.ExpectedGPUs:
		return keptBy("expected", fmt.Sprintf("--expect-gpus %d, and CUDA shows %d", u.ExpectedGPUs, u.countShown()))
	case u.at == nodesUnshown && u.Host.Virt.Container != "":
		return keptBy("container", u.why+"; no device node of a GPU is visible")
	}
	return busGPU{}
}

// byNobody is for what is left: nobody chose it, as far as shows.
func (u *unserved) byNobody() busGPU {
	failed := slices.ContainsFunc(u.managed(), func(o *nvml.GPU) bool { return o.Error != "" })
	switch {
	case u.at == nodeGone && u.CUDADevices != nil:
		return missingBy("no_node", u.path+" is missing")
	case u.refused && u.node.OpenError != "":
		return missingBy("closed", u.node.Path+": "+u.node.OpenError)
	case u.refused && u.node.Closed:
		return missingBy("closed", u.node.Path+" "+u.node.Mode)
	case u.known != nil && u.known.Error != "":
		return missingBy("", "NVML: "+u.known.Error)
	case u.at == nodeUnlisted:
		return unexplained("/proc/driver/nvidia/gpus does not list it")
	case u.CUDADevices == nil: // CUDA was not asked
		return unexplained("")
	case u.at == nodesUnshown && *u.CUDADevices > 0:
		return unexplained("no device node of a GPU is visible")
	case u.NVML != nil && (u.known != nil || u.NVML.Count >= len(u.Host.GPUs) && !failed):
		return unexplained(fmt.Sprintf("NVML shows %d", u.NVML.Count))
	}
	return missingBy("", "")
}
