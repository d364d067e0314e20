package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

func requireModule(h *hostinfo.Host, container bool) Requirement {
	r := Requirement{ID: "kernel_module", Name: "kernel module", State: Present, Detail: "nvidia " + h.NVIDIA.DriverVersion}
	if h.NVIDIA.OpenModule {
		r.Detail += " (open)"
	}
	switch {
	case h.NVIDIA.DriverVersion != "":
	case boundDriver(h) == "nvidia":
		r.Detail = "nvidia is bound to the GPU; its version is not visible (/proc/driver/nvidia/version)"
	case h.Virt.WSL:
		r.Detail = "not needed under WSL, which uses the driver of Windows"
	case h.Virt.Tegra:
		r.Detail = "the chip's own: nvgpu"
	case h.Virt.Sandbox != "":
		r.State, r.Detail = Uncertain, "the sandbox ("+h.Virt.Sandbox+") does not show it"
	case h.NVIDIA.HasModule("nvidia") && container:
		r.Detail = "nvidia is in /proc/modules; its version is not visible (/proc/driver/nvidia/version)"
	case h.NVIDIA.HasGPUNode() && h.NVIDIA.HasNode("/dev/nvidiactl") && container:
		r.State, r.Detail = Uncertain, "not visible in this container, which has the GPU's nodes"
	case h.Kernel.Release == "":
		r.State, r.Detail = Uncertain, "/proc is not visible"
	default:
		r.State = Missing
		r.Detail = "no /proc/driver/nvidia/version"
		r.because, _, r.values = whyNoModule(h)
		switch bound := boundDriver(h); {
		case bound == "nouveau" || h.NVIDIA.HasModule("nouveau"):
			r.Detail += "; nouveau has the GPU"
			r.because, r.values = "nouveau", toInstall(h)
		case bound == "vfio-pci":
			r.Detail += "; vfio-pci has the GPU, for a virtual machine"
			r.because = "vfio"
		case container:
			r.because = "container"
		}
	}
	return r
}

func noModule(f *Facts) []Finding {
	r, ok := f.requirement("kernel_module")
	if !ok || r.State != Missing || f.NVML != nil && f.NVML.Count > 0 {
		return nil
	}
	out := Finding{Summary: "the NVIDIA kernel module is not loaded", Evidence: []string{capital(r.Detail)}, Remedy: r.Remedy}
	if h := f.Host; h.Virt.Container == "" && boundDriver(h) == "" && !h.NVIDIA.HasModule("nouveau") {
		var seen []string
		out.because, seen, out.values = whyNoModule(h)
		out.Evidence, out.Remedy = append(out.Evidence, seen...), ""
	}
	return finding(out)
}

// noModuleCauses are why the module is not loaded on a host whose GPUs no driver holds, the surest first. Each returns
// what it is seen by, and nothing where that does not show.
var noModuleCauses = []struct {
	because string
	seen    func(*hostinfo.Host) (evidence []string, values findings.Values)
}{
	{"window", func(h *hostinfo.Host) ([]string, findings.Values) {
		return ofAll(h, func(g hostinfo.PCIDevice) string {
			if !g.NoWindow {
				return ""
			}
			return g.Dir() + "/resource: BAR 1 has no address"
		}), nil
	}},
	{"override", func(h *hostinfo.Host) ([]string, findings.Values) {
		seen := ofAll(h, func(g hostinfo.PCIDevice) string {
			if g.Override == "" || g.Override == nvidiaDriver {
				return ""
			}
			return g.Dir() + "/driver_override is " + g.Override
		})
		if seen == nil {
			return nil, nil
		}
		return seen, findings.Values{"driver": word(h.GPUs[0].Override), "ADDRESS": word(h.GPUs[0].Address)}
	}},
	{"blocked", func(h *hostinfo.Host) ([]string, findings.Values) {
		if h.NVIDIA.ModuleBlocked == "" {
			return nil, nil
		}
		file, _, _ := strings.Cut(h.NVIDIA.ModuleBlocked, ": ")
		return []string{h.NVIDIA.ModuleBlocked}, findings.Values{"FILE": word(file)}
	}},
	{"other_kernel", otherKernel},
	{"not_built", func(h *hostinfo.Host) (seen []string, _ findings.Values) {
		for _, b := range h.NVIDIA.ModuleBuilds {
			if b.Kernel == "" && h.NVIDIA.ModuleFile == "" {
				seen = append(seen, b.Path+" has no build for any kernel")
			}
		}
		return seen, nil
	}},
	{"guest", func(h *hostinfo.Host) ([]string, findings.Values) {
		if h.NVIDIA.ModuleFile == "" || !h.Virt.VM || h.NVIDIA.LicenceServer != nil {
			return nil, nil
		}
		return []string{h.NVIDIA.ModuleFile + " is installed for this kernel", "This is a virtual machine, without /etc/nvidia/gridd.conf of the vGPU guest driver"}, nil
	}},
	{"not_loaded", func(h *hostinfo.Host) ([]string, findings.Values) {
		if h.NVIDIA.ModuleFile == "" {
			return nil, nil
		}
		return []string{h.NVIDIA.ModuleFile + " is installed for this kernel"}, nil
	}},
	{"not_installed", func(h *hostinfo.Host) ([]string, findings.Values) {
		if n := h.NVIDIA; !n.ModulesShown || n.ModuleFile != "" || len(n.ModuleBuilds) > 0 || len(n.Libraries) > 0 {
			return nil, nil
		}
		return []string{"Neither /lib/modules nor /var/lib/dkms has the module, and no libcuda.so is in the usual directories"}, toInstall(h)
	}},
}

// whyNoModule returns the first cause of noModuleCauses that shows. Without one it is "host", which names several.
func whyNoModule(h *hostinfo.Host) (because string, evidence []string, values findings.Values) {
	for _, c := range noModuleCauses {
		if seen, of := c.seen(h); len(seen) > 0 {
			return c.because, seen, of
		}
	}
	return "host", nil, toInstall(h)
}

// toInstall are the drivers that support the first GPU, as far as its device id is known.
func toInstall(h *hostinfo.Host) findings.Values {
	if len(h.GPUs) > 0 {
		if gen, _, ok := generationOf(h.GPUs[0]); ok {
			return findings.Values{anyBranches: gen.branches()}
		}
	}
	return nil
}

// ofAll returns what is seen of each GPU, and nothing if one has nothing.
func ofAll(h *hostinfo.Host, see func(hostinfo.PCIDevice) string) (all []string) {
	for _, g := range h.GPUs {
		seen := see(g)
		if seen == "" {
			return nil
		}
		all = append(all, seen)
	}
	return all
}

// otherKernel finds a module that was built for other kernels than the one that runs.
func otherKernel(h *hostinfo.Host) (seen []string, values findings.Values) {
	if h.NVIDIA.ModuleFile != "" || h.Kernel.Release == "" {
		return nil, nil
	}
	var kernels []string
	for _, b := range h.NVIDIA.ModuleBuilds {
		if b.Kernel == h.Kernel.Release {
			return nil, nil // it is somewhere
		}
		if b.Kernel != "" && !slices.Contains(kernels, b.Kernel) {
			kernels = append(kernels, b.Kernel)
			seen = append(seen, fmt.Sprintf("%s is for kernel %s", b.Path, b.Kernel))
		}
	}
	if len(seen) == 0 {
		return nil, nil
	}
	seen = append(seen[max(0, len(seen)-3):], "/proc/sys/kernel/osrelease is "+h.Kernel.Release)
	return seen, findings.Values{"KERNEL": word(kernels[len(kernels)-1]), "RELEASE": word(h.Kernel.Release)}
}

// notInitialized is a GPU that the module holds and could not start: NVML works, and shows none. A module that does
// not support the GPU is gpu_too_old_for_driver.
func notInitialized(f *Facts) []Finding {
	h := f.Host
	_, failed := f.denied(eio)
	none := f.NVML != nil && f.NVML.Count == 0
	if !f.called() || !none && len(failed) == 0 || h.NVIDIA.DriverVersion == "" {
		return nil
	}
	out := Finding{Summary: "the driver could not initialize the GPU (RmInitAdapter)", Evidence: append([]string{f.Opening.Error}, failed...)}
	if none {
		out.Evidence = append(out.Evidence, "NVML works and shows no GPU")
	}
	held := false
	for _, g := range h.GPUs {
		held = held || g.Driver == nvidiaDriver
		because, seen := whyNotInitialized(h, g)
		if because != "" && out.because == "" {
			out.because = because
		}
		if seen != "" {
			out.Evidence = append(out.Evidence, seen)
		}
	}
	switch {
	case held, len(failed) > 0:
		return finding(out)
	case unbound(h):
		out.Summary, out.because = "no driver is bound to the GPU, although the nvidia module is loaded", "unbound"
		out.values = findings.Values{"ADDRESS": word(h.GPUs[0].Address)}
		out.Evidence = append(out.Evidence, h.GPUs[0].Dir()+"/driver is missing")
		return finding(out)
	}
	return nil
}

// unbound reports whether no driver holds any GPU, as far as the host shows its devices.
func unbound(h *hostinfo.Host) bool {
	return len(h.GPUs) > 0 && len(h.NVIDIA.Boards) == 0 && h.Virt.Sandbox == "" && h.Virt.Container == "" &&
		!slices.ContainsFunc(h.GPUs, func(g hostinfo.PCIDevice) bool { return g.Driver != "" || g.Asleep || g.OffBus })
}

// firstOpenForDisplays is the first branch whose open module takes GPUs that draw a screen without being told to:
// before, it was for data centers.
const firstOpenForDisplays = 545

// whyNotInitialized returns the cause that one file shows, and the evidence. Without a cause the evidence is what
// speaks against one.
func whyNotInitialized(h *hostinfo.Host, g hostinfo.PCIDevice) (because, seen string) {
	switch {
	case g.NoWindow:
		return "window", g.Dir() + "/resource: BAR 1 has no address"
	case g.PowerState == "D3cold":
		return "power_state", g.Dir() + "/power_state is D3cold"
	case h.NVIDIA.OpenModule && len(h.NVIDIA.Firmware) > 0 && !slices.Contains(h.NVIDIA.Firmware, h.NVIDIA.DriverVersion):
		return "firmware", fmt.Sprintf("/lib/firmware/nvidia has %s, and the module is %s", strings.Join(h.NVIDIA.Firmware, ", "), h.NVIDIA.DriverVersion)
	case h.NVIDIA.OpenModule && branchOf(h.NVIDIA.DriverVersion) < firstOpenForDisplays && strings.HasPrefix(g.Class, "0x0300"):
		return "early_open", fmt.Sprintf("The open kernel module %s is loaded, and %s/class is %s", h.NVIDIA.DriverVersion, g.Dir(), g.Class)
	case h.Virt.VM && h.NVIDIA.LicenceServer != nil:
		return "vgpu", fmt.Sprintf("/etc/nvidia/gridd.conf exists, and the guest driver is %s", h.NVIDIA.DriverVersion)
	case g.Window > 0:
		return "", fmt.Sprintf("%s/resource: BAR 1 has %s and an address", g.Dir(), units.Bytes(g.Window))
	}
	return "", ""
}
