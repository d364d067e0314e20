package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cudart"
)

// What CUDA fails with where it cannot reach a GPU at all: with no code if its library finds no driver.
var (
	notReached = []cudart.Code{0, cudart.ErrNoDevice, cudart.ErrInvalidDevice, cudart.ErrUnknown,
		cudart.ErrInitializationError, cudart.ErrOperatingSystem, cudart.ErrDevicesUnavailable, cudart.ErrNotPermitted}
	// withoutDriver are those of a host without a driver: an old libcuda may say that it is too old.
	withoutDriver = slices.Concat(notReached, []cudart.Code{cudart.ErrInsufficientDriver, cudart.ErrSystemDriverMismatch,
		cudart.ErrSystemNotReady, cudart.ErrStubLibrary, cudart.ErrMemoryAllocation})
	// withoutRuntime are findings of CUDA's own libraries, which matter after the driver does.
	withoutRuntime = []string{"no_runtime_library", "library_unusable"}
)

// accessChecks find what keeps a process from reaching a GPU, from the machine to the device node.
// What denies nodes that are there is in denied.go.
var accessChecks = []Check{
	{ID: "no_gpu", Explains: withoutDriver, Suppresses: slices.Concat(withoutRuntime, []string{"missing_gpus"}), Host: unlessUsable(noGPU)},
	{ID: "gpu_switched_off", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(switchedOff)},
	{ID: "gpu_off_bus", Explains: notReached, Suppresses: []string{"missing_gpus", "driver_hangs", "driver_crashes"}, Host: either(offBus, loggedOffBus)},
	{ID: "gpu_too_old_for_driver", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: either(tooOld, loggedUnsupported)},
	{ID: "nouveau_holds_gpu", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(nouveau)},
	{ID: "other_driver_holds_gpu", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(otherDriver)},
	{ID: "vfio_holds_gpu", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(vfio)},
	{ID: "module_not_signed", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(notSigned)},
	{ID: "no_kernel_module", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noModule)},
	{ID: "container_gpu_void", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(gpuVoid)},
	{ID: "systemd_denies_devices", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(systemdDenies)},
	{ID: "container_without_gpu", Explains: withoutDriver, Suppresses: []string{"no_device_nodes", "no_driver_library", "missing_gpus"}, Host: unlessUsable(containerWithoutGPU)},
	{ID: "capabilities_without_compute", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(withoutCompute)},
	{ID: "no_device_nodes", Explains: withoutDriver, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noNodes)},
	{ID: "no_uvm", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noUVM)},
	{ID: "stale_device_node", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(staleNode)},
	{ID: "lsm_denies", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(lsmDenies)},
	{ID: "node_permission", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(nodePermission)},
	{ID: "device_cgroup_denies", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(deviceCgroup)},
}

// unlessUsable is for checks of what would keep every GPU from being used: where one can
// be used, it does not.
func unlessUsable(check func(*Facts) []Finding) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		if len(f.Devices) > 0 && !f.partial() || f.Host == unread {
			return nil
		}
		return check(f)
	}
}

// requirement returns a requirement by its id.
func (f *Facts) requirement(id string) (Requirement, bool) {
	return first(f.Requirements, func(r Requirement) bool { return r.ID == id })
}

// missing makes a finding of a requirement that is not met.
func (f *Facts) missing(id, summary string) []Finding {
	r, ok := f.requirement(id)
	if !ok || r.State != Missing {
		return nil
	}
	return finding(Finding{Summary: summary, Evidence: []string{capital(r.Detail)}, Remedy: r.Remedy})
}

// capital returns the detail of a requirement as the beginning of a sentence.
func capital(detail string) string {
	return strings.ToUpper(detail[:min(1, len(detail))]) + detail[min(1, len(detail)):]
}

func noGPU(f *Facts) []Finding {
	if f.NVML != nil && f.NVML.Count > 0 {
		return nil // it is not on the bus that is shown
	}
	return f.missing("gpu", "this machine has no NVIDIA GPU")
}

// offBus leaves out GPUs that sleep: they answer nothing either. Others go on beside one that is lost.
func offBus(f *Facts) []Finding {
	var out []Finding
	for _, g := range f.Host.GPUs {
		if g.OffBus {
			one := Finding{
				Summary:  fmt.Sprintf("the GPU at %s fell off the bus", g.Address),
				Evidence: []string{"/sys/bus/pci/devices/" + g.Address + "/config returns only ones"},
			}
			logged := f.offBusEvidence(g.Address)
			one.Evidence = append(one.Evidence, logged...)
			switch {
			case len(logged) > 0:
			case g.PowerState != "":
				one.Evidence = append(one.Evidence, "power_state is "+g.PowerState)
			case f.Host.Virt.VM || g.Driver == "":
				one.Against = []string{"it may be switched off: this host does not show its power_state, or no driver is bound to it"}
			}
			out = append(out, one)
		}
	}
	return out
}

// switchedOff finds GPUs without power that nothing wakes: no driver of NVIDIA holds them. What sleeps under
// the driver wakes when it is used.
func switchedOff(f *Facts) []Finding {
	var evidence []string
	for _, g := range f.Host.GPUs {
		_, listed := boardOf(f.Host, g) // by the kernel module, which holds it then
		switch {
		case g.SwitchedOff:
			evidence = append(evidence, "/proc/acpi/bbswitch: "+g.Address+" OFF")
		case g.Asleep && g.Driver != "nvidia" && !slices.Contains(forGuests, g.Driver) && !listed:
			evidence = append(evidence, fmt.Sprintf("%s is in power_state %s, and not bound to nvidia", g.Address, cmp.Or(g.PowerState, "suspended")))
		}
	}
	if len(evidence) == 0 || len(evidence) < len(f.Host.GPUs) {
		return nil
	}
	return seen(evidence...)
}

func nouveau(f *Facts) []Finding {
	n := f.Host.NVIDIA
	if n.DriverVersion != "" || boundDriver(f.Host) != "nouveau" && !n.HasModule("nouveau") {
		return nil
	}
	evidence := "nouveau is in /proc/modules or bound to the GPU, and /proc/driver/nvidia/version is missing"
	if f.partial() {
		evidence = "the driver in use is nouveau (lspci)"
	}
	return seen(evidence)
}

// forGuests are drivers that hold a device for a virtual machine.
var forGuests = []string{"vfio-pci", "pci-stub", "pciback", "xen-pciback"}

func otherDriver(f *Facts) []Finding {
	bound := boundDriver(f.Host)
	evidence := ""
	switch {
	case bound == "" && f.Host.NVIDIA.HasModule("nova_core"):
		bound, evidence = "nova_core", "nova_core is in /proc/modules"
	case bound != "":
		evidence = "/sys/bus/pci/devices/" + f.Host.GPUs[0].Address + "/driver is " + bound
	}
	if bound == "" || bound == "nvidia" || bound == "nouveau" || slices.Contains(forGuests, bound) || f.Host.Virt.Tegra {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("the %s driver has the GPU, and does not support CUDA", bound),
		Evidence: []string{evidence},
		values:   findings.Values{"driver": word(bound)},
	})
}

func vfio(f *Facts) []Finding {
	bound := boundDriver(f.Host)
	if f.Host.NVIDIA.DriverVersion != "" && f.Host.NVIDIA.HasGPUNode() || !slices.Contains(forGuests, bound) {
		return nil
	}
	var evidence []string
	for _, g := range f.Host.GPUs {
		if g.Driver != bound {
			return nil // the others are for this host
		}
		evidence = append(evidence, fmt.Sprintf("%s is bound to %s", g.Address, g.Driver))
	}
	return summarized(bound+" has the GPU, for a virtual machine", evidence...)
}

// notSigned needs the module's file, or a driver that was installed: without them nothing was refused.
func notSigned(f *Facts) []Finding {
	r, ok := f.requirement("kernel_module")
	s, n := f.Host.Security, f.Host.NVIDIA
	enforced := isTrue(s.SecureBoot) || slices.Contains(f.Host.Kernel.Parameters, "module.sig_enforce=1") || slices.Contains(f.Host.Kernel.Parameters, "module.sig_enforce")
	if !ok || r.State != Missing || !enforced || f.Host.Virt.Container != "" || boundDriver(f.Host) != "" || n.ModuleFile == "" && len(n.Libraries) == 0 {
		return nil
	}
	out := Finding{Summary: "the NVIDIA kernel module is not loaded, and Secure Boot is on", Evidence: []string{capital(r.Detail)}}
	if isTrue(s.SecureBoot) {
		out.Evidence = append(out.Evidence, "The firmware variable SecureBoot is 1")
	}
	if s.Lockdown != "" {
		out.Evidence = append(out.Evidence, "/sys/kernel/security/lockdown is "+s.Lockdown)
	}
	if n.ModuleFile != "" {
		out.Evidence = append(out.Evidence, n.ModuleFile+" is installed for this kernel")
	} else {
		out.Certainty = Possible // it may not be built
	}
	return finding(out)
}

// gpuVoid needs no sign of a container: the variable asks for one without a GPU, and there is none.
func gpuVoid(f *Facts) []Finding {
	value, set := f.Host.Env["NVIDIA_VISIBLE_DEVICES"]
	hides := set && (value == "void" || value == "none" || value == "" && f.Host.Virt.Container != "")
	if !hides || f.Host.NVIDIA.HasGPUNode() {
		return nil
	}
	return seen(fmt.Sprintf("NVIDIA_VISIBLE_DEVICES=%q, and /dev/nvidia0 is missing", value))
}

// containerWithoutGPU is for containers of hosts that have a GPU: their driver shows, or the container asks for
// one, or the board is one with a GPU.
func containerWithoutGPU(f *Facts) []Finding {
	h := f.Host
	if h.Virt.Container == "" || h.NVIDIA.HasGPUNode() || h.NVIDIA.HasNode(tegraNode) || len(h.NVIDIA.Nodes) > 0 {
		return nil
	}
	requested := h.Env["NVIDIA_VISIBLE_DEVICES"]
	out := Finding{Summary: "the container was started without a GPU"}
	switch {
	case h.NVIDIA.DriverVersion != "":
		out.Evidence = []string{"The host has driver " + h.NVIDIA.DriverVersion + " (/proc/driver/nvidia/version)"}
	case h.Virt.Tegra:
		out.because = "tegra"
		out.Evidence = []string{"The board is " + cmp.Or(h.Virt.Board, "of the Tegra family")}
	case h.Virt.Sandbox != "":
		out.because = "sandbox"
		out.Evidence = []string{"The kernel is that of " + h.Virt.Sandbox}
	case requested != "" && h.PCICount == 0:
		out.Evidence = []string{"NVIDIA_VISIBLE_DEVICES=" + requested}
	default:
		return nil
	}
	nodes := "/dev/nvidia*"
	if h.Virt.Tegra {
		nodes = tegraNode
	}
	out.Evidence = append(out.Evidence, nodes+" is missing in this container")
	return finding(out)
}

func withoutCompute(f *Facts) []Finding {
	value := f.Host.Env["NVIDIA_DRIVER_CAPABILITIES"]
	if value == "" || f.Host.Virt.Container == "" || f.Opening != nil && f.Opening.DriverLibrary != "" {
		return nil // a library for computing is there
	}
	for c := range strings.SplitSeq(value, ",") {
		if c = strings.TrimSpace(c); c == "compute" || c == "all" {
			return nil
		}
	}
	return seen(fmt.Sprintf("NVIDIA_DRIVER_CAPABILITIES=%q, without compute", value))
}

func noNodes(f *Facts) []Finding {
	n := f.Host.NVIDIA
	if n.HasGPUNode() && (f.Host.Virt.WSL || n.HasNode("/dev/nvidiactl")) {
		return nil // nvidia-uvm has a check of its own
	}
	return f.missing("device_nodes", "device nodes of the GPU are missing")
}

// noUVM tells a module that is not loaded from a node that was not passed into the container.
func noUVM(f *Facts) []Finding {
	n := f.Host.NVIDIA
	loaded := n.HasModule("nvidia_uvm") || n.Majors["nvidia-uvm"] > 0
	shown := len(n.Modules) > 0 || len(n.Majors) > 0
	if f.Host.Virt.WSL || f.Host.Virt.Tegra || !n.HasGPUNode() || !n.HasNode("/dev/nvidiactl") || n.HasNode("/dev/nvidia-uvm") && (loaded || !shown) {
		return nil
	}
	out := Finding{Summary: "/dev/nvidia-uvm is missing", Evidence: []string{"/dev/nvidiactl and the node of a GPU exist, /dev/nvidia-uvm does not"}}
	switch {
	case n.HasNode("/dev/nvidia-uvm"):
		out.Summary = "the module nvidia_uvm is not loaded"
		out.Evidence = []string{"/proc/modules does not contain nvidia_uvm"}
		out.because = "not_loaded"
	case loaded && f.Host.Virt.Container != "":
		out.Evidence = append(out.Evidence, "The module nvidia_uvm is loaded (/proc/modules, /proc/devices)")
		out.because = "not_passed"
	}
	return finding(out)
}
