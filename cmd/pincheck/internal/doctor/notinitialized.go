package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

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
