package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// guestChecks are about GPUs of virtual machines and sandboxes: what the other side decides.
var guestChecks = []Check{
	{ID: "confidential_not_ready", Explains: []cudart.Code{cudart.ErrSystemNotReady}, Host: unlessUsable(confidentialNotReady)},
	{ID: "confidential_vm_plain_gpu", Explains: notReached, Host: unlessUsable(plainGPU)},
	{ID: "sandbox_refuses", Explains: slices.Concat(notReached, []cudart.Code{cudart.ErrNotSupported, cudart.ErrMemoryAllocation}), Host: unlessUsable(sandboxRefuses)},
	{ID: "wsl_gpu_blocked", Explains: notReached, Host: unlessUsable(wslBlocked)},
	{ID: "vgpu_unlicensed", Explains: []cudart.Code{cudart.ErrDevicesUnavailable, cudart.ErrNotPermitted, cudart.ErrNotSupported},
		Suppresses: []string{"slow_copies", "busy", "asymmetric_copies", "unsteady_copies", "slow_pinning", "slow_small_copies", "unjudged_copies"},
		Host:       unlessUsable(unlicensed), Device: slowUnlicensed},
	{ID: "gpu_not_initialized", Explains: notReached, Suppresses: []string{"missing_gpus"}, Host: either(loggedInit, unlessUsable(notInitialized))},
}

// called reports whether CUDA was asked to start, and answered with an error.
func (f *Facts) called() bool {
	return f.Opening != nil && !strings.Contains(f.Opening.Error, cudart.ErrNoLibrary.Error()) && !strings.Contains(f.Opening.Error, notReturned) &&
		!slices.ContainsFunc(f.Probes, func(p Probe) bool { return p.Stage == StageOpen && !p.State.Ended() })
}

// confidential reports whether the GPU computes confidentially, as far as that shows.
func (f *Facts) confidential() bool {
	return f.NVML != nil && isTrue(f.NVML.ConfidentialComputing)
}

// byDesign reports whether calls are slower here, or fewer are offered, than on a card of its own in a host: the
// platform is made so, and that is no trouble.
func (f *Facts) byDesign(d *Device) bool {
	v := f.Host.Virt
	return v.WSL || v.Tegra || v.Sandbox != "" || v.Confidential != "" || f.confidential() || vgpuName.MatchString(d.Name) ||
		d.Attributes != nil && d.Attributes.Integrated
}

// noteIf returns Note where a condition holds, or else the severity of the page.
func noteIf(condition bool) Severity {
	if condition {
		return Note
	}
	return ""
}

// confidentialNotReady is 802 of a GPU that waits to be told that it was attested.
func confidentialNotReady(f *Facts) []Finding {
	if f.Opening == nil || cudart.Code(f.Opening.Code) != cudart.ErrSystemNotReady || !f.confidential() && f.Host.Virt.Confidential == "" {
		return nil
	}
	out := f.start()
	out.Summary = "the confidential GPU is not set to ready"
	if f.confidential() {
		out.Evidence = append(out.Evidence, "NVML: confidential computing is on")
	} else {
		out.Certainty = Likely
	}
	if f.Host.Virt.Confidential != "" {
		out.Evidence = append(out.Evidence, "The memory of the virtual machine is encrypted ("+f.Host.Virt.Confidential+")")
	}
	return finding(out)
}

// plainGPU is a GPU without confidential computing in a confidential virtual machine: it cannot reach memory.
func plainGPU(f *Facts) []Finding {
	v := f.Host.Virt.Confidential
	if v == "" || !f.called() || f.confidential() || f.NVML == nil || f.NVML.Count > 0 {
		return nil
	}
	return seen(f.Opening.Error, "The memory of the virtual machine is encrypted ("+v+")", "NVML shows neither a GPU nor confidential computing")
}

func sandboxRefuses(f *Facts) []Finding {
	v := f.Host.Virt
	if v.Sandbox == "" || !f.called() || !f.Host.NVIDIA.HasGPUNode() || f.Opening.DriverLibrary == "" {
		return nil
	}
	return seen(f.Opening.Error, "The kernel is that of "+v.Sandbox+" (/proc/version)", "The GPU's device nodes and libcuda.so.1 exist")
}

func wslBlocked(f *Facts) []Finding {
	if !f.Host.Virt.WSL || !f.called() || f.Opening.DriverLibrary == "" || !f.Host.NVIDIA.HasNode("/dev/dxg") {
		return nil
	}
	out := Finding{Evidence: []string{f.Opening.Error, "/dev/dxg and " + f.Opening.DriverLibrary + " exist"}}
	if !strings.HasPrefix(f.Opening.DriverLibrary, "/usr/lib/wsl/") && f.Host.Virt.Container == "" { // which gets it elsewhere
		out.Summary, out.because = "WSL loads libcuda.so.1 of a Linux driver instead of Windows' one", "linux_driver"
	}
	return finding(out)
}

// vgpuName matches names of virtual GPUs: NVIDIA A10-24Q, GRID A100-4-20C. The letter is the licence.
var vgpuName = regexp.MustCompile(`-\d{1,3}[ABCQ]$`)

// vgpu returns the name of a virtual GPU that is here.
func (f *Facts) vgpu() (name string, ok bool) {
	return first(f.names(), vgpuName.MatchString)
}

// vgpuGuestDriver finds the host's package of vGPU, or a driver of bare metal, in the guest.
func vgpuGuestDriver(f *Facts) []Finding {
	r, ok := f.requirement("driver_library")
	name, is := f.vgpu()
	if !ok || r.State != Missing || !is || f.Host.Virt.Container != "" {
		return nil
	}
	return seen(capital(r.Detail), "The GPU is "+name)
}

// licence adds what the host shows of a vGPU's licence.
func (f *Facts) licence(out Finding) Finding {
	switch server := f.Host.NVIDIA.LicenceServer; {
	case server == nil:
		out.Certainty = Possible
	case *server:
		out.Against = []string{"/etc/nvidia/gridd.conf names a license server, or there is a token"}
	default:
		out.Evidence = append(out.Evidence, "/etc/nvidia/gridd.conf names no license server, and there is no token")
	}
	return out
}

// unlicensed is 46 of a vGPU that nobody uses. Its licence does not show in CUDA.
func unlicensed(f *Facts) []Finding {
	name, ok := f.vgpu()
	if !ok || f.Opening == nil || slices.ContainsFunc(f.managed(), used) {
		return nil
	}
	out := f.licence(Finding{Summary: "the vGPU has no license, so CUDA creates no context", Evidence: []string{f.Opening.Error, "The GPU is " + name + ", and idle"}})
	if out.Certainty == Possible {
		out.Certainty = Likely // what else keeps an idle GPU is not here
	}
	return finding(out)
}

// slowUnlicensed are copies of a vGPU that are far slower than the GPU: without a licence it is slowed down some
// minutes after the start.
func slowUnlicensed(f *Facts, d *Device) []Finding {
	most := slowVGPU
	if due := f.due(d); due > 0 {
		most = unlicensedShare * due
	}
	if !vgpuName.MatchString(d.Name) || !d.measured() || f.ExpectedRate > 0 || d.Slowest() <= 0 || d.Slowest() > most {
		return nil
	}
	evidence := []string{"The GPU is " + d.Name}
	for _, s := range d.copies() {
		evidence = append(evidence, fmt.Sprintf("%s %s", capital(directionText(&s)), units.Rate(s.Median)))
	}
	return finding(f.licence(Finding{Summary: "the vGPU is slowed down, as it is without a license", Evidence: evidence}))
}

// unlicensedShare is the share of what is due that a vGPU without a licence does not reach, and slowVGPU, in GB/s,
// what it does not reach where nothing is known of the link.
const (
	unlicensedShare = 0.5
	slowVGPU        = 3.0
)

// due returns the lowest rate that the copies of a GPU should reach; 0 is unknown.
func (f *Facts) due(d *Device) (rate float64) {
	for _, s := range d.copies() {
		if e := f.Reference(d, &s); e != nil && (rate == 0 || e.Value < rate) {
			rate = e.Value
		}
	}
	return rate
}

func used(g *nvml.GPU) bool {
	return len(g.Processes) > 0 || g.Utilization != nil && *g.Utilization >= busyGPU
}
