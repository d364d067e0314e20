package doctor

import (
	"fmt"

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
	if !held && len(failed) == 0 {
		return nil
	}
	return finding(out)
}

// whyNotInitialized returns the cause that one file shows, and the evidence. Without a cause the evidence is what
// speaks against one.
func whyNotInitialized(h *hostinfo.Host, g hostinfo.PCIDevice) (because, seen string) {
	switch {
	case g.NoWindow:
		return "window", g.Dir() + "/resource: BAR 1 has no address"
	case g.PowerState == "D3cold":
		return "power_state", g.Dir() + "/power_state is D3cold"
	case h.Virt.VM && h.NVIDIA.LicenceServer != nil:
		return "vgpu", fmt.Sprintf("/etc/nvidia/gridd.conf exists, and the guest driver is %s", h.NVIDIA.DriverVersion)
	case g.Window > 0:
		return "", fmt.Sprintf("%s/resource: BAR 1 has %s and an address", g.Dir(), units.Bytes(g.Window))
	}
	return "", ""
}
