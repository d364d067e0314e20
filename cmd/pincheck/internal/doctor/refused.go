package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

// refusedChecks find why memory cannot be pinned here, or not as much as asked for. None
// of them tries: on some kernels each failed attempt leaks memory.
var refusedChecks = []Check{
	{ID: "confidential_computing", Title: "registering memory is not supported", Severity: Problem,
		Implies: []string{"no_host_register"}, Device: confidentialComputing},
	{ID: "leaked_pins", Title: "memory that no program owns", Severity: Problem, Host: leakedPins},
	{ID: "pin_refused", Title: "pinning memory was refused", Severity: Problem, Device: pinRefused},
	{ID: "pin_over_2gib_leaks", Title: "this kernel leaks when more than 2 GiB are pinned at once", Severity: Warning, Host: pinOver2GiB},
	{ID: "no_host_register", Title: "the GPU cannot register host memory", Severity: Warning, Device: noHostRegister},
	{ID: "few_mappings", Title: "few mappings are left for registrations", Severity: Warning, Host: fewMappings},
	{ID: "wsl_pin_limit", Title: "Windows limits pinned memory", Severity: Note, Host: wslPinLimit},
	{ID: "integrated_gpu", Title: "registering locks no memory here", Severity: Note, Device: integratedGPU},
	{ID: "pin_512gib", Title: "one call pins less than 512 GiB", Severity: Note, Host: pin512GiB},
}

func confidentialComputing(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "confidential_computing")
	if len(texts) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  "cudaHostRegister is not supported here, as with confidential computing",
		Evidence: texts[:min(len(texts), 2)],
		Cause:    "with confidential computing on, the GPU cannot access memory of the guest; every copy goes through bounce buffers and is encrypted",
		Cost:     "programs that register memory fail; copies reach about a tenth of the link (4.9 GiB/s on an H200)",
		Remedy:   "see nvidia-smi conf-compute -f; use cudaHostAlloc, which works there, or turn confidential computing off for this GPU (in the host's firmware and with nvidia_gpu_tools --set-cc-mode=off)",
	})
}

func pinRefused(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "pin_refused")
	if len(texts) == 0 {
		return nil
	}
	out := Finding{Summary: "the driver refused to pin memory", Evidence: texts[:min(len(texts), 2)],
		Cost: "programs that pin memory fail, or go on with pageable memory at a fraction of the speed"}
	out.Cause, out.Remedy = textOf(texts[0])
	if left, source, ok := f.headroom(); ok {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s can be pinned (%s)", units.Bytes(left), source))
	}
	return finding(out)
}

// leaky reports whether a kernel is one of 6.11 to 6.13, in which a failed pin of more
// than 2 GiB is never undone.
func leaky(h *hostinfo.Host) bool {
	release := h.Kernel.Release
	return strings.HasPrefix(release, "6.11.") || strings.HasPrefix(release, "6.12.") || strings.HasPrefix(release, "6.13.")
}

func pinOver2GiB(f *Facts) []Finding {
	if f.Host == nil || !leaky(f.Host) || f.Host.NVIDIA.DriverVersion == "" {
		return nil
	}
	return finding(Finding{
		Summary:  "this kernel may refuse to pin more than 2 GiB by one call, and leak the memory each time",
		Evidence: []string{"kernel " + f.Host.Kernel.Release + " (6.11 to 6.13 are affected; distributions may have mended theirs under the same number)"},
		Cause:    "a fault in the kernel's pin_user_pages (mended by aa6f8b2593b5 and 94efde1d1539): 2047 MiB work, 2049 fail with 'invalid argument'",
		Cost:     "big pinned buffers fail, and what was pinned until then is lost until the next boot",
		Remedy:   "boot a kernel of 6.14 or later, or 6.8; until then pin in pieces below 2 GiB",
	})
}

func leakedPins(f *Facts) []Finding {
	if f.Host == nil || !leaky(f.Host) {
		return nil
	}
	m := f.Host.Memory
	lost, ok := m.Unowned.Finite()
	if !ok || lost < 8<<30 || lost < m.Total/10 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("%s of memory belong to no program, and do not come back", units.Bytes(lost)),
		Evidence: []string{fmt.Sprintf("/proc/meminfo: %s in all, and %s that no field of it accounts for", units.Bytes(m.Total), units.Bytes(lost)), "kernel " + f.Host.Kernel.Release},
		Cause:    "failed attempts to pin more than 2 GiB on this kernel leak what they had pinned",
		Cost:     "that much memory is lost",
		Remedy:   "reboot, into a kernel of 6.14 or later, or 6.8; do not pin more than 2 GiB by one call until then",
	})
}

func noHostRegister(_ *Facts, d *Device) []Finding {
	if d.Attributes == nil || d.Attributes.HostRegisterSupported {
		return nil
	}
	return finding(Finding{
		Summary:  "this GPU cannot use memory that a program has allocated itself",
		Evidence: []string{"attribute HostRegisterSupported is 0"},
		Cause:    "confidential computing, a vGPU, or an integrated GPU",
		Cost:     "pinning goes by cudaHostAlloc only, which is several times slower and holds no files",
		Remedy:   "use cudaHostAlloc; see nvidia-smi conf-compute -f",
	})
}

// usualMappings is vm.max_map_count as the kernel sets it.
const usualMappings = 65530

func fewMappings(f *Facts) (out []Finding) {
	if f.Host == nil {
		return nil
	}
	most, ok := f.Host.Memory.MaxMappings.Finite()
	if !ok {
		return nil
	}
	const remedy = "sudo sysctl vm.max_map_count=1048576 (and a line in /etc/sysctl.d); register few large buffers in place of many small ones"
	const cost = "the call that needs one more mapping fails with out of memory or invalid argument, though there is memory"
	if most < usualMappings {
		out = append(out, Finding{
			Summary:  fmt.Sprintf("a process may have %d mappings only", most),
			Evidence: []string{fmt.Sprintf("vm.max_map_count is %d; the kernel's own value is %d", most, usualMappings)},
			Cost:     cost, Remedy: remedy,
		})
	}
	for _, p := range f.Processes {
		if p.Mappings > most/10*8 {
			out = append(out, Finding{
				Summary:  fmt.Sprintf("process %d (%s) has %d of the %d mappings that it may have", p.PID, p.Name, p.Mappings, most),
				Evidence: []string{fmt.Sprintf("lines of /proc/%d/maps, and vm.max_map_count", p.PID)},
				Cause:    "each registration splits a mapping",
				Cost:     cost, Remedy: remedy,
			})
		}
	}
	return out
}

func wslPinLimit(f *Facts) []Finding {
	if f.Host == nil || !f.Host.Virt.WSL {
		return nil
	}
	return finding(Finding{
		Summary:  "under WSL, Windows limits how much memory can be pinned",
		Evidence: []string{"kernel " + f.Host.Kernel.Release},
		Cause:    "Windows' display driver model locks about half of the machine's memory at most, for all processes together; in Docker under WSL 500 MB to 1 GB were seen",
		Cost:     "larger pinned buffers fail with out of memory or invalid argument",
		Remedy:   "pin small rings and stage copies through them; give WSL more memory (memory= in .wslconfig)",
	})
}

func integratedGPU(_ *Facts, d *Device) []Finding {
	a := d.Attributes
	if a == nil || !a.Integrated && !a.UsesHostPageTables {
		return nil
	}
	out := Finding{
		Summary:  "this GPU shares the host's memory",
		Evidence: []string{"attribute Integrated is 1"},
		Cost:     "copies between host and GPU memory copy within the same memory",
		Remedy:   "use mapped or managed memory in place of copies",
	}
	if a.UsesHostPageTables {
		out.Summary = "the GPU uses the host's page tables, so that registering memory locks nothing"
		out.Evidence = append(out.Evidence[:0], "attribute PageableMemoryAccessUsesHostPageTables is 1")
		out.Cost = "memory that is registered can be moved or swapped out"
		out.Remedy = "use mlock where memory must stay; registering is not needed for access"
	}
	return finding(out)
}

func pin512GiB(f *Facts) []Finding {
	if f.Host == nil || f.Host.Memory.Total <= 512<<30 {
		return nil
	}
	major, _, _ := strings.Cut(f.Host.NVIDIA.DriverVersion, ".")
	if n, err := strconv.Atoi(major); err != nil || n < 580 {
		return nil
	}
	return finding(Finding{
		Summary:  "one call pins less than 512 GiB",
		Evidence: []string{"driver " + f.Host.NVIDIA.DriverVersion + ", " + units.Bytes(f.Host.Memory.Total) + " of memory"},
		Cause:    "drivers from 580 on make one table of 16 bytes a page, which the kernel limits to 2 GiB ('NVRM: failed to allocate page table')",
		Cost:     "cudaHostRegister of 512 GiB and more fails with out of memory (2), and the error shows up at a later call if it is not cleared",
		Remedy:   "register in pieces of 256 GiB, and split copies where pieces meet",
	})
}
