package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// visibilityChecks find GPUs that are there and that CUDA does not show, or shows under
// another number.
var visibilityChecks = []Check{
	{ID: "hidden_gpu", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(hiddenGPU)},
	{ID: "visible_devices_unknown", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: visibleDevicesUnknown},
	{ID: "mig_without_instance", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: migWithoutInstance},
	{ID: "no_device", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: unlessUsable(noDevice)},
	{ID: "missing_gpus", Host: missingGPUs},
	{ID: "gpus_excluded", Host: excludedGPUs},
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
	count := reachable(f.Host)
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
	known := f.managed()
	if f.NVML == nil || len(known) == 0 || len(known) < f.NVML.Count {
		return false
	}
	return !slices.ContainsFunc(known, func(g *nvml.GPU) bool {
		return g.MIG == nil || *g.MIG && (g.MIGInstances == nil || *g.MIGInstances > 0)
	})
}

func hiddenGPU(f *Facts) []Finding {
	value, set := f.Host.Env[visibleDevices]
	if !set || !hidesDevices(value) {
		return nil
	}
	return seen(fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", value))
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
	if f.Simulated {
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
	out := Finding{Evidence: []string{fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q", value)}, because: c.why}
	switch c.why {
	case "missing":
		n := reachable(f.Host)
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s matches none of %s", c.bad, units.Things(n, "GPU", "GPUs")))
		if _, err := strconv.Atoi(c.bad); err == nil && n > 0 {
			out.Summary = fmt.Sprintf("CUDA_VISIBLE_DEVICES names GPU %s; there %s %d", c.bad, oneOrMany(n, "is", "are"), n)
		}
	case "twice":
		out.Summary = "CUDA_VISIBLE_DEVICES names a GPU twice"
	case "no_name":
		out.Summary = fmt.Sprintf("CUDA_VISIBLE_DEVICES contains %q, which is neither a number nor a UUID of a GPU", c.bad)
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

func noDevice(f *Facts) []Finding {
	if f.Opening != nil && cudart.Code(f.Opening.Code) != cudart.ErrNoDevice || f.Opening == nil && f.CUDADevices == nil {
		return nil
	}
	out := Finding{Summary: "CUDA finds no GPU, although all parts of the driver are present"}
	if f.Opening != nil {
		out.Evidence = []string{f.Opening.Error}
	}
	if boards := f.Host.NVIDIA.Boards; len(boards) > 0 && !slices.ContainsFunc(boards, func(b hostinfo.Board) bool { return !b.Excluded }) {
		out.Summary, out.because = "the driver is configured to ignore all GPUs", "excluded"
		out.Evidence = append(out.Evidence, "/proc/driver/nvidia/gpus/"+boards[0].Address+"/information: GPU Excluded is Yes")
	}
	for _, g := range f.Host.GPUs {
		out.Evidence = append(out.Evidence, fmt.Sprintf("PCI device %s is bound to %q", g.Address, g.Driver))
	}
	return finding(out)
}

// missingGPUs finds GPUs on the bus that CUDA does not show for another reason than somebody's will, and that no other
// finding is about; or, with --expect-gpus, that there are fewer than there should be.
func missingGPUs(f *Facts) []Finding {
	if f.ExpectedGPUs > 0 {
		return f.fewerThanExpected()
	}
	if f.CUDADevices == nil && len(f.Devices) == 0 {
		return nil // the run ended before it looked
	}
	all := f.services()
	own := 0 // GPUs that this process should see
	for _, g := range all {
		if g.service != isExcluded {
			own++
		}
	}
	var out []Finding
	for _, g := range all {
		because := g.cause
		switch {
		case g.service == isUnexplained && g.seen == "":
			continue // CUDA was not asked
		case g.service == isUnexplained:
			because = "chosen"
		case g.finding != missingID:
			continue
		}
		i := slices.IndexFunc(out, func(one Finding) bool { return one.because == because })
		if i < 0 {
			i = len(out)
			out = append(out, Finding{because: because, Evidence: []string{fmt.Sprintf("%s; PCI bus and device nodes: %d", f.count(), own)}})
		}
		out[i].Evidence = append(out[i].Evidence, g.notInCUDA())
	}
	for i := range out {
		one := &out[i]
		n := len(one.Evidence) - 1
		one.Summary = fmt.Sprintf("%d of %s missing", n, units.Things(own, "GPU", "GPUs"))
		switch one.because {
		case "no_driver":
			one.Summary += ": no driver is bound to " + oneOrMany(n, "it", "them")
		case "no_node":
			one.Summary += ": " + oneOrMany(n, "its device node is", "their device nodes are") + " missing"
		case "closed":
			one.Severity = Warning
			one.Summary += ": this user may not open " + oneOrMany(n, "it", "them")
		case "chosen":
			one.Severity, one.Summary = Note, fmt.Sprintf("CUDA shows %d of %s", f.countShown(), units.Things(own, "GPU", "GPUs"))
		}
	}
	return out
}

// fewerThanExpected compares with --expect-gpus. GPUs that another finding is about do not count.
func (f *Facts) fewerThanExpected() []Finding {
	if f.CUDADevices == nil && len(f.Devices) == 0 && f.Opening == nil && f.Requirements == nil {
		return nil // the run ended before it looked
	}
	have := f.countShown()
	if f.CUDADevices == nil && f.Opening == nil { // it was not asked
		have = max(have, reachable(f.Host))
	}
	missing := f.ExpectedGPUs - have
	out := Finding{Evidence: []string{fmt.Sprintf("%s; --expect-gpus: %d", f.count(), f.ExpectedGPUs)}}
	for _, g := range f.services() {
		switch {
		case g.service == isReported && g.finding != missingID && len(f.Devices) > 0:
			missing--
		case g.service != isExamined:
			out.Evidence = append(out.Evidence, g.notInCUDA())
		}
	}
	if missing <= 0 {
		return nil
	}
	out.Summary = fmt.Sprintf("%d of %s missing", missing, units.Things(f.ExpectedGPUs, "GPU", "GPUs"))
	return finding(out)
}

// count is how many GPUs this run has found.
func (f *Facts) count() string {
	switch {
	case f.CUDADevices != nil:
		return fmt.Sprintf("cudaGetDeviceCount: %d", *f.CUDADevices)
	case f.Opening == nil: // it was not asked
		return fmt.Sprintf("GPUs with NVIDIA's driver: %d", f.countShown())
	}
	return "CUDA did not start"
}

func oneOrMany(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// notInCUDA is the evidence of a GPU that CUDA does not show.
func (g busGPU) notInCUDA() string {
	text := fmt.Sprintf("Not in CUDA: %s, driver %q", g.Address, g.Driver)
	if g.seen != "" {
		text += ": " + g.seen
	}
	return text
}

// mig reports whether a device is a MIG instance: CUDA shows one instance a process then,
// whatever the number of GPUs.
func (f *Facts) mig() bool {
	if slices.ContainsFunc(f.managed(), func(g *nvml.GPU) bool { return isTrue(g.MIG) }) {
		return true
	}
	return slices.ContainsFunc(f.Devices, func(d Device) bool {
		return strings.HasPrefix(d.UUID, "MIG-") || strings.Contains(d.Name, " MIG ")
	})
}

func deviceOrder(f *Facts) []Finding {
	if len(f.Devices) < 2 || f.Simulated || f.Host.Env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" {
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
	return seen(evidence...)
}

// migWithoutInstance needs NVML: CUDA shows no such GPU. One GPU without MIG would be shown.
func migWithoutInstance(f *Facts) []Finding {
	if len(f.Devices) > 0 {
		return migBeside(f)
	}
	known := f.managed()
	if f.NVML == nil || len(known) == 0 || len(known) < f.NVML.Count {
		return nil
	}
	var evidence []string
	for _, g := range known {
		if !isTrue(g.MIG) || g.MIGInstances == nil || *g.MIGInstances > 0 {
			return nil
		}
		evidence = append(evidence, fmt.Sprintf("NVML: GPU %d (%s): MIG is on, with 0 instances", g.Index, g.PCIBusID))
	}
	return seen(evidence[:min(len(evidence), 4)]...)
}
