package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/docs/findings"
	"github.com/gopinned/pinned/internal/units"
)

// visibilityChecks find GPUs that are there and that CUDA does not show, or shows under
// another number.
var visibilityChecks = []Check{
	{ID: "hidden_gpu", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(hiddenGPU)},
	{ID: "visible_devices_unknown", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: visibleDevicesUnknown},
	{ID: "mig_without_instance", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(migWithoutInstance)},
	{ID: "no_device", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noDevice)},
	{ID: "missing_gpus", Host: missingGPUs},
	{ID: "device_order", Host: deviceOrder},
}

const visibleDevices = "CUDA_VISIBLE_DEVICES"

// A choice is what CUDA makes of CUDA_VISIBLE_DEVICES: it takes the entries up to the first that names no GPU, and
// no GPU at all if one is named twice.
type choice struct {
	named int    // GPUs that the entries name
	bad   string // the entry at which CUDA stops
	why   string // a cause of the page visible_devices_unknown
}

// chosen reads CUDA_VISIBLE_DEVICES as CUDA does. What the host does not show is taken to be there.
func (f *Facts) chosen(value string) (c choice) {
	count := gpuCount(f.Host)
	if f.Opening == nil && (f.CUDADevices == nil || len(f.Devices) > 0) { // nothing says that CUDA found none: what shows may be a part
		count = max(count, len(f.Host.GPUs), len(f.Host.NVIDIA.Boards))
	}
	var boards, seen []string
	for _, b := range f.Host.NVIDIA.Boards {
		boards = append(boards, b.UUID)
	}
	for entry := range strings.SplitSeq(value, ",") {
		entry = strings.TrimSpace(entry)
		stop := func(why string) choice { return choice{c.named, entry, why} }
		n, err := strconv.Atoi(entry)
		switch {
		case slices.Contains(seen, entry):
			return choice{0, entry, "twice"}
		case err == nil && n < 0:
			return stop("negative")
		case err == nil && count > 0 && n >= count && !f.mig():
			return stop("missing")
		case err == nil:
		case strings.HasPrefix(entry, "GPU-"):
			// The module masks UUIDs that it does not know yet with question marks.
			// All have to be listed: one that is not may be it.
			if len(boards) >= max(1, len(f.Host.GPUs), count) && !slices.ContainsFunc(boards, func(uuid string) bool {
				return strings.HasPrefix(uuid, entry) || uuid == "" || strings.Contains(uuid, "?")
			}) {
				return stop("missing")
			}
		case strings.HasPrefix(entry, "MIG-"):
			if code, failed := f.startCode(); f.noMIG() || failed && c.named == 0 && (code == cudart.ErrNoDevice || code == cudart.ErrInvalidDevice) {
				return stop("mig")
			}
		default:
			return stop("no_name")
		}
		seen = append(seen, entry)
		c.named++
	}
	return c
}

// noMIG reports whether NVML shows that no GPU has an instance.
func (f *Facts) noMIG() bool {
	if f.NVML == nil || len(f.NVML.GPUs) == 0 || len(f.NVML.GPUs) < f.NVML.Count {
		return false
	}
	return !slices.ContainsFunc(f.NVML.GPUs, func(g nvml.GPU) bool {
		return g.MIG == nil || *g.MIG && (g.MIGInstances == nil || *g.MIGInstances > 0)
	})
}

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

// hidesDevices reports whether a value of CUDA_VISIBLE_DEVICES hides all devices, as one does that is empty, that
// starts with an ordinal below 0, or with a word for none.
func hidesDevices(v string) bool {
	first, _, _ := strings.Cut(v, ",")
	switch first = strings.ToLower(strings.TrimSpace(first)); first {
	case "", "none", "void", "nodevfiles", "null":
		return true
	}
	return strings.HasPrefix(first, "-")
}

func visibleDevicesUnknown(f *Facts) []Finding {
	if f.Host == nil || f.Simulated {
		return nil
	}
	value, set := f.Host.Env[visibleDevices]
	if !set || hidesDevices(value) {
		return nil
	}
	c := f.chosen(value)
	requested := f.Opening != nil && cudart.Code(f.Opening.Code) == cudart.ErrInvalidDevice
	if c.bad == "" && !requested || c.why == "negative" || c.named > 0 && len(f.Devices) > c.named {
		return nil // it ends the list, or CUDA shows that it is there
	}
	out := Finding{
		Summary:  "CUDA_VISIBLE_DEVICES names a GPU that does not exist",
		Evidence: []string{fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", value)},
		because:  c.why,
	}
	switch c.why {
	case "missing":
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s is none of the %s here", c.bad, units.Things(gpuCount(f.Host), "GPU", "GPUs")))
	case "twice":
		out.Summary = "CUDA_VISIBLE_DEVICES names a GPU twice"
	case "no_name":
		out.Summary = fmt.Sprintf("CUDA_VISIBLE_DEVICES has %q, which is no GPU's number or UUID", c.bad)
	case "mig":
		out.Summary = "CUDA_VISIBLE_DEVICES names a MIG instance that does not exist"
		if f.noMIG() {
			out.Evidence = append(out.Evidence, "NVML: no GPU has an instance")
		} else {
			out.Certainty = Likely
		}
	case "":
		out.because = "missing"
	}
	if n := len(f.Devices); n > 0 {
		out.Severity, out.because, out.values = Warning, "some", findings.Values{"N GPUs": units.Things(n, "GPU", "GPUs")}
	}
	return finding(out)
}

// gpuCount returns how many GPUs this process should see without CUDA_VISIBLE_DEVICES. 0 is unknown. The nodes
// count, as far as the driver holds GPUs for them: containers and jobs have those of their own only, and show all
// GPUs of the host on the PCI bus.
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
		if g.Driver == "nvidia" && !excluded(h, g) {
			bound++
		}
	}
	if n == 0 && h.Virt.Container == "" {
		return bound // nodes are made when they are first used
	}
	if bound > 0 {
		return min(n, bound)
	}
	return n
}

// excluded reports whether the driver was told to leave a GPU alone.
func excluded(h *hostinfo.Host, g hostinfo.PCIDevice) bool {
	return slices.ContainsFunc(h.NVIDIA.Boards, func(b hostinfo.Board) bool { return b.Excluded && hostinfo.SamePCI(b.Address, g.Address) })
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
	if boards := f.Host.NVIDIA.Boards; len(boards) > 0 && !slices.ContainsFunc(boards, func(b hostinfo.Board) bool { return !b.Excluded }) {
		out.Summary, out.because = "the driver was told to leave all GPUs alone", "excluded"
		out.Evidence = append(out.Evidence, "/proc/driver/nvidia/gpus/"+boards[0].Address+"/information: GPU Excluded is Yes")
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
	count := "CUDA did not start"
	switch {
	case f.CUDADevices != nil:
		have = *f.CUDADevices
		count = fmt.Sprintf("cudaGetDeviceCount: %d", have)
	case f.Opening == nil: // it was not asked
		if f.Host != nil {
			have = max(have, gpuCount(f.Host))
		}
		count = fmt.Sprintf("GPUs with NVIDIA's driver: %d", have)
	}
	want, source := f.ExpectedGPUs, "--expect-gpus"
	if want == 0 {
		if f.Host == nil || f.mig() || f.Host.Virt.Tegra || f.Host.Env["SLURM_JOB_GPUS"] != "" {
			return nil
		}
		if _, chosen := f.Host.Env[visibleDevices]; chosen {
			return nil
		}
		if have > 0 && f.CUDADevices != nil && !f.Host.NVIDIA.HasGPUNode() {
			return nil // CUDA opened nodes that do not show
		}
		want, source = gpuCount(f.Host), "PCI bus and device nodes"
	}
	if have >= want {
		return nil
	}
	out := Finding{
		Summary:  fmt.Sprintf("%d of %s missing", want-have, units.Things(want, "GPU", "GPUs")),
		Evidence: []string{fmt.Sprintf("%s; %s: %d", count, source, want)},
	}
	if f.ExpectedGPUs == 0 && f.NVML != nil && f.NVML.Count >= want && !slices.ContainsFunc(f.NVML.GPUs, func(g nvml.GPU) bool { return g.Error != "" }) {
		// Nothing is lost: a job, a program or a limit that does not show chooses.
		out.Severity, out.because, out.Summary = Note, "chosen", fmt.Sprintf("CUDA shows %d of %s", have, units.Things(want, "GPU", "GPUs"))
		out.Evidence = append(out.Evidence, fmt.Sprintf("NVML shows %d", f.NVML.Count))
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
	if f.NVML != nil && slices.ContainsFunc(f.NVML.GPUs, func(g nvml.GPU) bool { return isTrue(g.MIG) }) {
		return true
	}
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
