package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// What follows from a GPU that this process cannot reach: each later step fails too. A
// driver that hangs does not follow from what is missing.
var (
	startFailures = []string{
		"stub_library", "driver_too_old", "driver_mismatch", "compat_library", "fabric_not_ready", "gpus_unavailable",
		"driver_init_failed", "driver_unknown_error", "no_device", "open_out_of_memory", "mps_unavailable", "failed_open",
		"hmm_breaks_start", "visible_devices_unknown", "hidden_gpu",
	}
	withoutModule = slices.Concat([]string{"no_device_nodes", "no_uvm", "no_driver_library"}, startFailures)
	withoutNodes  = slices.Concat([]string{"no_driver_library", "no_uvm", "missing_gpus"}, startFailures)
	withoutGPU    = slices.Concat([]string{
		"no_c_library", "nouveau_holds_gpu", "vfio_holds_gpu", "container_gpu_void", "container_without_gpu",
		"capabilities_without_compute", "no_kernel_module", "node_permission", "device_cgroup_denies",
		"no_runtime_library", "library_unusable", "missing_gpus",
	}, withoutModule)
)

// accessChecks find what keeps a process from reaching a GPU, from the machine to the
// device node.
var accessChecks = []Check{
	{ID: "no_gpu", Suppresses: withoutGPU,
		Host: unlessUsable(func(f *Facts) []Finding { return f.missing("gpu", "there is no NVIDIA GPU in this machine") })},
	{ID: "gpu_off_bus", Suppresses: slices.Concat([]string{"missing_gpus", "driver_hangs", "driver_crashes"}, startFailures), Host: offBus},
	{ID: "nouveau_holds_gpu", Suppresses: slices.Concat([]string{"no_kernel_module"}, withoutModule), Host: unlessUsable(nouveau)},
	{ID: "vfio_holds_gpu", Suppresses: slices.Concat([]string{"no_kernel_module"}, withoutModule), Host: unlessUsable(vfio)},
	{ID: "no_kernel_module", Suppresses: slices.Concat(
		[]string{"container_gpu_void", "container_without_gpu", "capabilities_without_compute"}, withoutModule),
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("kernel_module", "the NVIDIA kernel module is not loaded")
		})},
	{ID: "container_gpu_void", Suppresses: slices.Concat([]string{"container_without_gpu", "no_device_nodes"}, withoutNodes), Host: unlessUsable(gpuVoid)},
	{ID: "container_without_gpu", Suppresses: slices.Concat([]string{"no_device_nodes"}, withoutNodes), Host: unlessUsable(containerWithoutGPU)},
	{ID: "capabilities_without_compute", Suppresses: slices.Concat([]string{"no_driver_library", "no_uvm"}, startFailures), Host: unlessUsable(withoutCompute)},
	{ID: "no_device_nodes", Suppresses: withoutNodes, Host: unlessUsable(noNodes)},
	{ID: "no_uvm", Suppresses: startFailures, Host: unlessUsable(noUVM)},
	{ID: "node_permission", Suppresses: startFailures, Host: unlessUsable(nodePermission)},
	{ID: "device_cgroup_denies", Suppresses: startFailures, Host: unlessUsable(deviceCgroup)},
}

// unlessUsable is for checks of what would keep every GPU from being used: where one can
// be used, it does not.
func unlessUsable(check func(*Facts) []Finding) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		if len(f.Devices) > 0 || f.Host == nil {
			return nil
		}
		return check(f)
	}
}

// requirement returns a requirement by its id.
func (f *Facts) requirement(id string) (Requirement, bool) {
	i := slices.IndexFunc(f.Requirements, func(r Requirement) bool { return r.ID == id })
	if i < 0 {
		return Requirement{}, false
	}
	return f.Requirements[i], true
}

// missing makes a finding of a requirement that is not met.
func (f *Facts) missing(id, summary string) []Finding {
	r, ok := f.requirement(id)
	if !ok || r.State != Missing {
		return nil
	}
	return finding(Finding{Summary: summary, Evidence: []string{r.Detail}, Remedy: r.Remedy})
}

func offBus(f *Facts) []Finding {
	if f.Host == nil {
		return nil
	}
	var out []Finding
	for _, g := range f.Host.GPUs {
		if g.OffBus {
			out = append(out, Finding{
				Summary:  fmt.Sprintf("the GPU at %s fell off the bus", g.Address),
				Evidence: []string{"/sys/bus/pci/devices/" + g.Address + "/config reads as ones only"},
			})
		}
	}
	return out
}

func nouveau(f *Facts) []Finding {
	n := f.Host.NVIDIA
	if n.DriverVersion != "" || boundDriver(f.Host) != "nouveau" && !n.HasModule("nouveau") {
		return nil
	}
	return finding(Finding{
		Summary:  "the driver nouveau holds the GPU, which has no CUDA",
		Evidence: []string{"nouveau is in /proc/modules or bound to the GPU; there is no /proc/driver/nvidia/version"},
	})
}

func vfio(f *Facts) []Finding {
	if f.Host.NVIDIA.DriverVersion != "" || boundDriver(f.Host) != "vfio-pci" {
		return nil
	}
	var evidence []string
	for _, g := range f.Host.GPUs {
		evidence = append(evidence, fmt.Sprintf("%s is bound to %s", g.Address, g.Driver))
	}
	return finding(Finding{
		Summary:  "vfio-pci holds the GPU, which is to be passed to a virtual machine",
		Evidence: evidence,
	})
}

func gpuVoid(f *Facts) []Finding {
	value, set := f.Host.Env["NVIDIA_VISIBLE_DEVICES"]
	hides := set && (value == "void" || value == "none" || value == "")
	if !hides || f.Host.Virt.Container == "" || f.Host.NVIDIA.HasGPUNode() {
		return nil
	}
	return finding(Finding{
		Summary:  "the container was started with no GPU on purpose",
		Evidence: []string{fmt.Sprintf("NVIDIA_VISIBLE_DEVICES=%q, and there is no /dev/nvidia0", value)},
	})
}

func containerWithoutGPU(f *Facts) []Finding {
	h := f.Host
	if h.Virt.Container == "" || h.Virt.WSL || len(h.NVIDIA.Nodes) > 0 || h.NVIDIA.DriverVersion == "" {
		return nil
	}
	return finding(Finding{
		Summary:  "the container was started without a GPU",
		Evidence: []string{"the host has the driver " + h.NVIDIA.DriverVersion + " (/proc/driver/nvidia/version)", "there is no /dev/nvidia* in this container"},
	})
}

func withoutCompute(f *Facts) []Finding {
	value := f.Host.Env["NVIDIA_DRIVER_CAPABILITIES"]
	if value == "" || f.Host.Virt.Container == "" {
		return nil
	}
	for c := range strings.SplitSeq(value, ",") {
		if c = strings.TrimSpace(c); c == "compute" || c == "all" {
			return nil
		}
	}
	return finding(Finding{
		Summary:  "the container got the driver without its libraries for computing",
		Evidence: []string{fmt.Sprintf("NVIDIA_DRIVER_CAPABILITIES=%q, without compute", value)},
	})
}

func noNodes(f *Facts) []Finding {
	n := f.Host.NVIDIA
	if n.HasGPUNode() && (f.Host.Virt.WSL || n.HasNode("/dev/nvidiactl")) {
		return nil // nvidia-uvm has a check of its own
	}
	return f.missing("device_nodes", "device nodes of the GPU are missing")
}

func noUVM(f *Facts) []Finding {
	n := f.Host.NVIDIA
	if f.Host.Virt.WSL || !n.HasGPUNode() || !n.HasNode("/dev/nvidiactl") || n.HasNode("/dev/nvidia-uvm") && (len(n.Modules) == 0 || n.HasModule("nvidia_uvm")) {
		return nil
	}
	out := Finding{
		Summary:  "there is no /dev/nvidia-uvm",
		Evidence: []string{"/dev/nvidiactl and a GPU's node are there, /dev/nvidia-uvm is not"},
	}
	if n.HasNode("/dev/nvidia-uvm") {
		out.Summary = "the module nvidia_uvm is not loaded"
		out.Evidence = []string{"/proc/modules has no nvidia_uvm"}
		out.because = "not_loaded"
	}
	return finding(out)
}

func nodePermission(f *Facts) []Finding {
	var closed []string
	for _, n := range f.Host.NVIDIA.Nodes {
		switch {
		case !needed(n.Path):
		case strings.Contains(n.OpenError, "permission denied"):
			closed = append(closed, n.Path+": "+n.OpenError)
		case n.Closed && n.OpenError == "":
			closed = append(closed, n.Path+" "+n.Mode)
		}
	}
	if len(closed) == 0 {
		return nil
	}
	out := Finding{
		Summary: "this user may not open the GPU's device nodes", Evidence: closed,
	}
	if u := f.Host.User; u != nil {
		out.Evidence = append(out.Evidence, fmt.Sprintf("user %d, group %d, other groups %v", u.UID, u.GID, u.Groups))
	}
	return finding(out)
}

// needed reports whether CUDA opens a node.
func needed(path string) bool {
	return path == "/dev/nvidiactl" || path == "/dev/nvidia-uvm" || hostinfo.IsGPUNode(path)
}

func deviceCgroup(f *Facts) []Finding {
	var evidence []string
	for _, n := range f.Host.NVIDIA.Nodes {
		if needed(n.Path) && strings.Contains(n.OpenError, "not permitted") {
			evidence = append(evidence, n.Path+": "+n.OpenError)
		}
	}
	allowed := f.Host.Cgroup.DevicesAllowed
	const major = "195" // of /dev/nvidia0 and /dev/nvidiactl
	if len(allowed) > 0 && f.Host.NVIDIA.HasGPUNode() && !slices.ContainsFunc(allowed, func(line string) bool {
		fields := strings.Fields(line) // "c 195:* rw", "a *:* rwm"
		return len(fields) >= 2 && (fields[0] == "a" || fields[0] == "c" && (strings.HasPrefix(fields[1], major+":") || strings.HasPrefix(fields[1], "*:")))
	}) {
		evidence = append(evidence, "devices.list allows "+strings.Join(allowed[:min(len(allowed), 6)], ", ")+", and not c "+major+":*")
	}
	if len(evidence) == 0 {
		return nil
	}
	return finding(Finding{
		Summary: "the device control group keeps this container from opening the GPU", Evidence: evidence,
	})
}
