package doctor

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// A generation is GPUs of one architecture, with the branches of the driver that support it. NVIDIA's "CUDA Toolkit,
// Driver, and Architecture Matrix" has the last branches, and with each toolkit's driver the first ones; "Current
// graphics driver releases" has those before Kepler (docs.nvidia.com and forums.developer.nvidia.com, read 2026-11-28).
type generation struct {
	name        string
	first, last int // branches; 0 is no limit
	// kind is the kernel module that supports it: the open one needs Turing's GSP, and the closed one ends with Ada and
	// Hopper.
	kind moduleKind
}

type moduleKind int

const (
	anyModule moduleKind = iota
	closedOnly
	openOnly
)

var (
	tesla     = generation{"Tesla", 0, 340, closedOnly}
	fermi     = generation{"Fermi", 0, 390, closedOnly}
	kepler    = generation{"Kepler", 0, 470, closedOnly}
	maxwell   = generation{"Maxwell", 0, 580, closedOnly}
	pascal    = generation{"Pascal", 0, 580, closedOnly}
	volta     = generation{"Volta", 384, 580, closedOnly}
	turing    = generation{"Turing", 410, 0, anyModule}
	ampere    = generation{"Ampere", 450, 0, anyModule}
	hopper    = generation{"Hopper", 520, 0, anyModule}
	ada       = generation{"Ada", 520, 0, anyModule}
	blackwell = generation{"Blackwell", 570, 0, openOnly}
)

// generations are by device ids, which are not in one range for each. Up to Ada they are of pci.ids (2023-04-11), by
// the names of chips; Blackwell's were written without a list at hand.
var generations = []struct {
	first, last int
	generation
}{
	{0x06c0, 0x06df, fermi}, {0x06e0, 0x0dbf, tesla}, {0x0dc0, 0x0fbf, fermi}, {0x0fc0, 0x103f, kepler},
	{0x1040, 0x10bf, fermi}, {0x10c0, 0x10df, tesla}, {0x1140, 0x117f, fermi}, {0x1180, 0x11ff, kepler},
	{0x1200, 0x127f, fermi}, {0x1280, 0x133f, kepler}, {0x1340, 0x15ef, maxwell}, {0x15f0, 0x15ff, pascal},
	{0x1600, 0x16ff, maxwell}, {0x1725, 0x172f, pascal}, {0x1740, 0x17ff, maxwell}, {0x1b00, 0x1d7f, pascal},
	{0x1d80, 0x1dff, volta}, {0x1e00, 0x1fff, turing}, {0x2080, 0x20ff, ampere}, {0x2180, 0x21ff, turing},
	{0x2200, 0x228f, ampere}, {0x2300, 0x23ff, hopper}, {0x2400, 0x25ff, ampere}, {0x2680, 0x28ff, ada},
	{0x2900, 0x2fff, blackwell}, {0x3180, 0x31ff, blackwell},
}

// generationOf returns the generation of a GPU. ok is false for device ids that are in no list, as those of newer ones.
func generationOf(g hostinfo.PCIDevice) (of generation, id int64, ok bool) {
	id, err := strconv.ParseInt(strings.TrimPrefix(g.DeviceID, "0x"), 16, 32)
	if err != nil {
		return generation{}, 0, false
	}
	for _, row := range generations {
		if int(id) >= row.first && int(id) <= row.last {
			return row.generation, id, true
		}
	}
	return generation{}, id, false
}

// branches says which drivers support a generation: "580 (the last one for Pascal)", "570 or later".
func (g generation) branches() string {
	switch {
	case g.last > 0:
		return fmt.Sprintf("%d (the last one for %s)", g.last, g.name)
	case g.kind == openOnly:
		return fmt.Sprintf("%d or later, with the open kernel module", g.first)
	}
	return fmt.Sprintf("%d or later", max(g.first, 525)) // the first of CUDA 12
}

// lastCUDA is the newest CUDA that the last branch of a generation supports.
func (g generation) lastCUDA() string {
	return map[int]string{340: "6.5", 390: "9.1", 470: "11.4", 580: "13.0"}[g.last]
}

// driverOf returns the driver that is for a GPU, and where that is read: the loaded one, or else the one that is
// installed, if all that is found of it has one branch.
func driverOf(h *hostinfo.Host, g hostinfo.PCIDevice) (version, where string) {
	n := h.NVIDIA
	switch {
	case n.DriverVersion != "":
		return n.DriverVersion, "the loaded module"
	case g.Driver != "" && g.Driver != "nouveau", h.Virt.Container != "" || h.Virt.WSL:
		return "", ""
	}
	for _, l := range n.Libraries {
		if isCompat(l.Path) || !l.Linked && !slices.Contains(loaderDirs, path.Dir(l.Path)) {
			continue
		}
		if version != "" && branchOf(version) != branchOf(l.Version) {
			return "", ""
		}
		version, where = l.Version, l.Path
	}
	for _, b := range n.ModuleBuilds {
		if b.Version == "" {
			continue
		}
		if version != "" && branchOf(version) != branchOf(b.Version) {
			return "", ""
		}
		version, where = b.Version, b.Path
	}
	return version, where
}

// branchOf returns the 580 of 580.95.05, and 0 for what is no version.
func branchOf(version string) int {
	if numbers := versionOf(version); len(numbers) > 0 {
		return numbers[0]
	}
	return 0
}

// What the page says of drivers in general.
const (
	lastBranches  = "580 for Maxwell, Pascal and Volta, 470 for Kepler, 390 for Fermi"
	firstBranches = "570 or later, with the open kernel module, for Blackwell"
	anyBranches   = "580 or later for CUDA 13, 525 for CUDA 12"
)

// unsupported reports whether the driver does not support a GPU: with the cause on the finding's page, its values, and
// the evidence.
func unsupported(h *hostinfo.Host, g hostinfo.PCIDevice) (because string, values findings.Values, seen string, is bool) {
	gen, id, known := generationOf(g)
	version, where := driverOf(h, g)
	branch := branchOf(version)
	if !known || branch == 0 {
		return "", nil, "", false
	}
	what := fmt.Sprintf("%s (10de:%04x) is a %s GPU", g.Address, id, gen.name)
	values = findings.Values{"architecture": gen.name}
	switch {
	case gen.last > 0 && branch > gen.last:
		values["branch"], values[lastBranches] = strconv.Itoa(gen.last), gen.branches()
		return "branch", values, fmt.Sprintf("%s, which driver %d was the last to support; this driver is %s (%s)", what, gen.last, version, where), true
	case branch < gen.first:
		values["branch"], values[firstBranches] = strconv.Itoa(gen.first), gen.branches()
		return "first", values, fmt.Sprintf("%s, which driver %d was the first to support; this driver is %s (%s)", what, gen.first, version, where), true
	case h.NVIDIA.OpenModule && gen.kind == closedOnly:
		return "open", nil, fmt.Sprintf("%s, older than Turing, and the open kernel module %s is loaded", what, version), true
	case h.NVIDIA.DriverVersion != "" && !h.NVIDIA.OpenModule && !h.NVIDIA.ModuleKindUnknown && gen.kind == openOnly:
		return "closed", values, fmt.Sprintf("%s, and the closed kernel module %s is loaded (/proc/driver/nvidia/version)", what, version), true
	}
	return "", nil, "", false
}

// tooOld finds GPUs that the driver does not support. Where CUDA shows no GPU each has to be: one that is supported
// works. Others work beside those that are not.
func tooOld(f *Facts) []Finding {
	if len(f.Devices) == 0 && f.NVML != nil && f.NVML.Count > 0 {
		return nil
	}
	var out Finding
	gpus := f.Host.GPUs
	if len(f.Devices) > 0 {
		gpus = nil
		for _, one := range f.services() {
			if one.finding == tooOldID {
				gpus = append(gpus, one.PCIDevice)
			}
		}
	}
	for _, g := range gpus {
		because, values, seen, is := unsupported(f.Host, g)
		if !is {
			return nil
		}
		out.because, out.values = because, values
		out.Evidence = append(out.Evidence, seen)
	}
	if len(out.Evidence) == 0 {
		return nil
	}
	if len(f.Devices) > 0 {
		some := findings.Values{"this GPU": fmt.Sprintf("%d of %d GPUs", len(out.Evidence), len(f.Host.GPUs))}
		maps.Copy(some, out.values)
		out.Severity, out.values = Warning, some
	}
	return finding(out)
}
