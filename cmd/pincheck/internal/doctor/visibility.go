package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/docs/findings"
	"github.com/gopinned/pinned/internal/units"
)

// visibilityChecks find GPUs that are there and that CUDA does not show, or shows under
// another number.
var visibilityChecks = []Check{
	{ID: "hidden_gpu", Suppresses: []string{"no_device", "failed_open", "missing_gpus"}, Host: unlessUsable(hiddenGPU)},
	{ID: "visible_devices_unknown", Suppresses: []string{"no_device", "failed_open", "missing_gpus"}, Host: visibleDevicesUnknown},
	{ID: "mig_without_instance", Suppresses: []string{"no_device", "gpus_unavailable", "failed_open", "missing_gpus"}, Host: unlessUsable(migWithoutInstance)},
	{ID: "no_device", Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noDevice)},
	{ID: "missing_gpus", Host: missingGPUs},
	{ID: "device_order", Host: deviceOrder},
}

const visibleDevices = "CUDA_VISIBLE_DEVICES"

func hiddenGPU(f *Facts) []Finding {
	value, set := f.Host.Env[visibleDevices]
	if !set || !hidesDevices(value) {
		return nil
	}
	return finding(Finding{
		Summary:  "CUDA_VISIBLE_DEVICES hides GPUs from this process",
		Evidence: []string{fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", value)},
	})
}

// hidesDevices reports whether a value of CUDA_VISIBLE_DEVICES hides all devices: if it
// is empty, or starts with an ordinal below 0.
func hidesDevices(v string) bool {
	v = strings.TrimSpace(v)
	return v == "" || strings.HasPrefix(v, "-") || strings.EqualFold(v, "NoDevFiles")
}

func visibleDevicesUnknown(f *Facts) []Finding {
	if f.Host == nil || f.Simulated {
		return nil
	}
	value, set := f.Host.Env[visibleDevices]
	if !set || hidesDevices(value) {
		return nil
	}
	unknown := unknownDevice(value, f.Host)
	if unknown == "" && (f.Opening == nil || cudart.Code(f.Opening.Code) != cudart.ErrInvalidDevice) {
		return nil
	}
	out := Finding{
		Summary:  "CUDA_VISIBLE_DEVICES names a GPU that does not exist",
		Evidence: []string{fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", value)},
	}
	if unknown != "" {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s is none of the %s here", unknown, units.Things(gpuCount(f.Host), "GPU", "GPUs")))
	}
	if n := len(f.Devices); n > 0 {
		out.Severity, out.because, out.values = Warning, "some", findings.Values{"N GPUs": units.Things(n, "GPU", "GPUs")}
	}
	return finding(out)
}

// unknownDevice returns the first entry that names none of the host's GPUs, or "". What
// the host does not show is not judged, nor are MIG instances.
func unknownDevice(value string, h *hostinfo.Host) string {
	count := gpuCount(h)
	for entry := range strings.SplitSeq(value, ",") {
		entry = strings.TrimSpace(entry)
		if n, err := strconv.Atoi(entry); err == nil {
			if count > 0 && n >= count {
				return entry
			}
			continue
		}
		if !strings.HasPrefix(entry, "GPU-") || len(h.NVIDIA.Boards) == 0 {
			continue
		}
		if !slices.ContainsFunc(h.NVIDIA.Boards, func(b hostinfo.Board) bool {
			// The module masks UUIDs that it does not know yet with question marks.
			return strings.HasPrefix(b.UUID, entry) || b.UUID == "" || strings.Contains(b.UUID, "?")
		}) {
			return entry
		}
	}
	return ""
}

// gpuCount returns how many GPUs this process should see without CUDA_VISIBLE_DEVICES. 0
// is unknown. A container sees all GPUs of the host on the PCI bus, but has nodes of its
// own only.
func gpuCount(h *hostinfo.Host) (n int) {
	if h.Virt.WSL {
		return 0
	}
	for _, node := range h.NVIDIA.Nodes {
		if hostinfo.IsGPUNode(node.Path) {
			n++
		}
	}
	bound := 0
	for _, g := range h.GPUs {
		if g.Driver == "nvidia" {
			bound++
		}
	}
	if bound > 0 && (h.Virt.Container == "" || bound < n) {
		return bound // nodes are made when they are first used
	}
	return n
}

func noDevice(f *Facts) []Finding {
	if f.Opening != nil && cudart.Code(f.Opening.Code) != cudart.ErrNoDevice || f.Opening == nil && f.CUDADevices == nil {
		return nil
	}
	out := Finding{
		Summary: "everything is there, and yet CUDA shows no device",
	}
	if f.Opening != nil {
		out.Evidence = []string{f.Opening.Error}
	}
	for _, g := range f.Host.GPUs {
		out.Evidence = append(out.Evidence, fmt.Sprintf("PCI %s is bound to %q", g.Address, g.Driver))
	}
	return finding(out)
}

func missingGPUs(f *Facts) []Finding {
	if f.CUDADevices == nil && len(f.Devices) == 0 && (f.ExpectedGPUs == 0 || f.Opening == nil && f.Requirements == nil) {
		return nil // the run ended before it looked
	}
	have := len(f.Devices)
	shows, count := "CUDA shows", "CUDA did not start"
	switch {
	case f.CUDADevices != nil:
		have = *f.CUDADevices
		count = fmt.Sprintf("cudaGetDeviceCount: %d", have)
	case f.Opening == nil: // it was not asked
		if f.Host != nil {
			have = max(have, gpuCount(f.Host))
		}
		shows, count = "the host shows", fmt.Sprintf("GPUs with NVIDIA's driver: %d", have)
	}
	want, source := f.ExpectedGPUs, "--expect-gpus"
	if want == 0 {
		if f.Host == nil || f.mig() {
			return nil
		}
		if _, chosen := f.Host.Env[visibleDevices]; chosen {
			return nil
		}
		want, source = gpuCount(f.Host), "PCI bus and device nodes"
	}
	if have >= want {
		return nil
	}
	out := Finding{
		Summary:  fmt.Sprintf("%s %s, and there should be %d", shows, units.Things(have, "GPU", "GPUs"), want),
		Evidence: []string{fmt.Sprintf("%s; %s: %d", count, source, want)},
	}
	if f.Host != nil && len(f.Devices) == have {
		for _, g := range f.Host.GPUs {
			if !slices.ContainsFunc(f.Devices, func(d Device) bool {
				same, ok := f.pci(&d)
				return ok && same.Address == g.Address
			}) {
				out.Evidence = append(out.Evidence, fmt.Sprintf("not in CUDA: %s, driver %q", g.Address, g.Driver))
			}
		}
	}
	return finding(out)
}

// mig reports whether a device is a MIG instance: CUDA shows one instance a process then,
// whatever the number of GPUs.
func (f *Facts) mig() bool {
	return slices.ContainsFunc(f.Devices, func(d Device) bool {
		return strings.HasPrefix(d.UUID, "MIG-") || strings.Contains(d.Name, " MIG ") || d.Health != nil && d.Health.MIG != nil && *d.Health.MIG
	})
}

func deviceOrder(f *Facts) []Finding {
	if len(f.Devices) < 2 || f.Simulated || f.Host == nil || f.Host.Env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" {
		return nil
	}
	var order []string
	for _, d := range f.Devices {
		order = append(order, strings.ToLower(d.PCIBusID))
	}
	if slices.IsSorted(order) {
		return nil
	}
	var evidence []string
	for _, d := range f.Devices {
		evidence = append(evidence, fmt.Sprintf("GPU %d is %s at %s", d.Ordinal, d.Name, d.PCIBusID))
	}
	return finding(Finding{
		Summary: "CUDA's numbers are not those of nvidia-smi", Evidence: evidence,
	})
}

// migWithoutInstance needs NVML: CUDA shows no such GPU. One GPU without MIG would be shown.
func migWithoutInstance(f *Facts) []Finding {
	if f.NVML == nil || len(f.NVML.GPUs) == 0 || len(f.NVML.GPUs) < f.NVML.Count {
		return nil
	}
	var evidence []string
	for _, g := range f.NVML.GPUs {
		if !isTrue(g.MIG) || g.MIGInstances == nil || *g.MIGInstances > 0 {
			return nil
		}
		evidence = append(evidence, fmt.Sprintf("NVML: GPU %d (%s): MIG is on, with 0 instances", g.Index, g.PCIBusID))
	}
	return finding(Finding{
		Summary: "MIG is on, and there is no instance to compute on", Evidence: evidence[:min(len(evidence), 4)],
	})
}
