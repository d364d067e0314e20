package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/internal/units"
)

// refusedChecks find why memory cannot be pinned here, or not as much as asked for. None
// of them tries: on some kernels each failed attempt leaks memory.
var refusedChecks = []Check{
	{ID: "confidential_computing", Suppresses: []string{"no_host_register"}, Device: confidentialComputing},
	{ID: "leaked_pins", Host: leakedPins},
	{ID: "pin_refused", Device: pinRefused},
	{ID: "pin_over_2gib_leaks", Host: pinOver2GiB},
	{ID: "no_host_register", Device: noHostRegister},
	{ID: "few_mappings", Host: fewMappings},
	{ID: "wsl_pin_limit", Host: wslPinLimit},
	{ID: "integrated_gpu", Device: integratedGPU},
	{ID: "large_pages_fault", Host: largePagesFault},
	{ID: "pin_512gib", Host: pin512GiB},
}

func confidentialComputing(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "confidential_computing")
	if len(texts) == 0 {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(f.confidential() || f.Host.Virt.Confidential != ""), // as it is made
		Summary:  "cudaHostRegister is not supported, as with confidential computing",
		Evidence: texts[:min(len(texts), 2)],
	})
}

func pinRefused(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "pin_refused")
	if len(texts) == 0 {
		return nil
	}
	out := Finding{Summary: "the driver refused to pin memory", Evidence: texts[:min(len(texts), 2)]}
	switch m := f.Host.Memory; {
	case f.Host.Virt.WSL:
		out.because = "wsl"
		out.Evidence = append(out.Evidence, "Kernel "+f.Host.Kernel.Release+", under WSL")
	case m.Total > 0 && m.Movable+m.CMA > m.Total/2:
		out.because = "movable"
		out.Evidence = append(out.Evidence, fmt.Sprintf("/proc/zoneinfo and /proc/meminfo: %s of %s is in movable zones or CMA", units.Bytes(m.Movable+m.CMA), units.Bytes(m.Total)))
	case slices.Contains(f.Host.Kernel.Parameters, "mem_encrypt=on"):
		out.because = "encrypted"
		out.Evidence = append(out.Evidence, "/proc/cmdline contains mem_encrypt=on")
	default:
		out.means = meaningIn(texts[0])
	}
	if left, source, ok := f.headroom(); ok {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s can be pinned (%s)", units.Bytes(left), source))
	}
	return finding(out)
}

// unmended matches the kernels in which a failed pin of more than 2 GiB is never undone: 6.11, and 6.12 before it
// was released (94efde1d1539 came between 6.12-rc7 and 6.12).
var unmended = regexp.MustCompile(`^6\.11\.|^6\.12(\.0)?-rc[1-7]\b|^6\.12(\.0)?-0\.rc[1-7]\.`)

// leaky reports whether a kernel is one of these. Where the GPU uses the host's page tables nothing is pinned.
func (f *Facts) leaky() bool {
	return unmended.MatchString(f.Host.Kernel.Release) && !slices.ContainsFunc(f.names(), reference.Coherent) && !slices.ContainsFunc(f.Devices, func(d Device) bool {
		return d.Attributes != nil && d.Attributes.UsesHostPageTables
	})
}

func pinOver2GiB(f *Facts) []Finding {
	if !f.leaky() || f.Host.NVIDIA.DriverVersion == "" {
		return nil
	}
	severity := Severity("") // the page's
	if !slices.ContainsFunc(f.names(), func(name string) bool { return name != "" }) {
		severity = Note // of a GPU that is not known to pin at all
	}
	return finding(Finding{Severity: severity, Evidence: []string{"Kernel " + f.Host.Kernel.Release + " (6.11 is affected; distributions may have fixed theirs under the same number)"}})
}

func leakedPins(f *Facts) []Finding {
	if !f.leaky() {
		return nil
	}
	m := f.Host.Memory
	lost, ok := m.Unowned.Finite()
	if !ok || lost < 8<<30 || lost < m.Total/10 {
		return nil
	}
	if balloon := m.Balloon; balloon != "" && f.Host.Virt.VM {
		return finding(Finding{
			Severity: Note,
			Summary:  fmt.Sprintf("%s of memory belongs to no process: the hypervisor has it, or failed pins", units.Bytes(lost)),
			Evidence: []string{fmt.Sprintf("/proc/meminfo: %s in total, and %s that no field accounts for", units.Bytes(m.Total), units.Bytes(lost)), "The balloon driver " + balloon + " is in use", "Kernel " + f.Host.Kernel.Release},
			because:  "balloon",
		})
	}
	return summarized(fmt.Sprintf("%s of memory is pinned that no process owns", units.Bytes(lost)),
		fmt.Sprintf("/proc/meminfo: %s in total, and %s that no field accounts for", units.Bytes(m.Total), units.Bytes(lost)), "Kernel "+f.Host.Kernel.Release)
}

func noHostRegister(f *Facts, d *Device) []Finding {
	if d.Attributes == nil || d.Attributes.HostRegisterSupported {
		return nil
	}
	return finding(Finding{Severity: noteIf(f.byDesign(d)), Evidence: []string{"The attribute HostRegisterSupported is 0"}})
}

// defaultMappings is vm.max_map_count as the kernel sets it.
const defaultMappings = 65530

func fewMappings(f *Facts) (out []Finding) {
	limit, ok := f.Host.Memory.MaxMappings.Finite()
	if !ok {
		return nil
	}
	if limit < defaultMappings {
		out = append(out, Finding{
			Summary:  fmt.Sprintf("a process may have only %d mappings", limit),
			Evidence: []string{fmt.Sprintf("vm.max_map_count is %d; the kernel's default is %d", limit, defaultMappings)},
			because:  "limit",
		})
	}
	for _, p := range f.Processes {
		if p.Mappings > limit/10*8 {
			out = append(out, Finding{
				Summary:  fmt.Sprintf("process %d (%s) has %d of at most %d mappings", p.PID, p.Name, p.Mappings, limit),
				Evidence: []string{fmt.Sprintf("Lines of /proc/%d/maps, and vm.max_map_count", p.PID)},
				because:  "registrations",
			})
		}
	}
	return out
}

func wslPinLimit(f *Facts) []Finding {
	if !f.Host.Virt.WSL {
		return nil
	}
	return seen("Kernel " + f.Host.Kernel.Release)
}

func integratedGPU(_ *Facts, d *Device) []Finding {
	a := d.Attributes
	if a == nil || !a.Integrated && !a.UsesHostPageTables {
		return nil
	}
	out := Finding{Evidence: []string{"The attribute Integrated is 1"}}
	if a.UsesHostPageTables {
		out.Summary = "the GPU uses the host's page tables, so registering memory locks nothing"
		out.Evidence = append(out.Evidence[:0], "The attribute PageableMemoryAccessUsesHostPageTables is 1")
		out.because = "page_tables"
	}
	return finding(out)
}

func pin512GiB(f *Facts) []Finding {
	if f.Host.Memory.Total <= 512<<30 {
		return nil
	}
	major, _, _ := strings.Cut(f.Host.NVIDIA.DriverVersion, ".")
	if n, err := strconv.Atoi(major); err != nil || n < 580 {
		return nil
	}
	return seen("Driver " + f.Host.NVIDIA.DriverVersion + ", " + units.Bytes(f.Host.Memory.Total) + " of memory")
}

// firstWithFault is the first branch whose mappings of 4 GiB and more fault on kernels with pages of 64 KiB.
const firstWithFault = 590

// hugeOf64K is the size of a huge page where a page has 64 KiB.
const hugeOf64K = 512 << 20

func largePagesFault(f *Facts) []Finding {
	if branchOf(f.Host.NVIDIA.DriverVersion) < firstWithFault || !strings.HasPrefix(f.Host.CPU.Model, "arm64") {
		return nil
	}
	if f.Host.Memory.THP.PageSize != hugeOf64K && !strings.Contains(f.Host.Kernel.Release, "64k") {
		return nil
	}
	return seen("Kernel "+f.Host.Kernel.Release+" has pages of 64 KiB", "Driver "+f.Host.NVIDIA.DriverVersion+" (590, 595 and 610 are affected, 580 is not)")
}
