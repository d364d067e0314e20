package doctor

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A startCode is a check of the error with which CUDA failed to start.
type startCode struct {
	id    string
	codes []cudart.Code
	// also are other codes that its cause can lead to, and examine is the check where the code alone does not
	// tell: nil for those of which it does.
	also    []cudart.Code
	examine func(*Facts) []Finding
	// logged finds it in the kernel's log, without a code.
	logged func(*Facts) []Finding
}

// startCodes are the codes that name a state of the host. Their pages have the same cause and remedy
// as the errors of package cudart.
var startCodes = []startCode{
	{id: "stub_library", codes: []cudart.Code{cudart.ErrStubLibrary}, examine: stub},
	{id: "compat_library", codes: []cudart.Code{cudart.ErrCompatNotSupportedOnDevice}, examine: compat,
		also: []cudart.Code{cudart.ErrSystemDriverMismatch, cudart.ErrNoDevice, cudart.ErrUnknown, cudart.ErrInitializationError, cudart.ErrInsufficientDriver}},
	{id: "driver_mismatch", codes: []cudart.Code{cudart.ErrSystemDriverMismatch}, examine: mismatch, logged: loggedMismatch, also: []cudart.Code{cudart.ErrInsufficientDriver}},
	{id: "driver_too_old", codes: []cudart.Code{cudart.ErrInsufficientDriver}, examine: tooOldDriver},
	{id: "fabric_not_ready", codes: []cudart.Code{cudart.ErrSystemNotReady}, examine: fabric},
	{id: "gpus_unavailable", codes: []cudart.Code{cudart.ErrDevicesUnavailable}, examine: func(f *Facts) []Finding { return finding(f.holds(f.start(), f.managed())) }},
	{id: "open_out_of_memory", codes: []cudart.Code{cudart.ErrMemoryAllocation}},
	{id: "mps_unavailable", codes: []cudart.Code{cudart.ErrMpsConnectionFailed, cudart.Code(806),
		cudart.ErrMpsServerNotReady, cudart.Code(808), cudart.Code(809), cudart.Code(810)}},
	{id: "driver_init_failed", codes: []cudart.Code{cudart.ErrInitializationError}},
	{id: "driver_unknown_error", codes: []cudart.Code{cudart.ErrUnknown}},
}

// failedOpenID is the finding of a code that no other check has something to say about.
const failedOpenID = "failed_open"

// otherCodes are those without a page of their own with which CUDA fails to start; 127 is a failure of the
// runtime itself.
var otherCodes = []cudart.Code{0, cudart.ErrOperatingSystem, cudart.ErrNotPermitted, cudart.ErrNotSupported,
	cudart.ErrInvalidValue, cudart.Code(216), cudart.Code(127), cudart.ErrCallRequiresNewerDriver}

// codeChecks are those of startCodes.
func codeChecks() (all []Check) {
	for _, s := range startCodes {
		explains := slices.Concat(s.codes, s.also)
		all = append(all, Check{ID: s.id, Explains: explains, Host: unlessUsable(func(f *Facts) []Finding {
			if s.logged != nil {
				if found := s.logged(f); len(found) > 0 {
					return found
				}
			}
			if f.Opening == nil || !slices.Contains(explains, cudart.Code(f.Opening.Code)) {
				return nil
			}
			if s.examine != nil {
				return s.examine(f)
			}
			return finding(f.start())
		})})
	}
	return all
}

// startChecks find why CUDA does not start on a host that has what it needs.
var startChecks = slices.Concat(
	[]Check{
		// That pincheck could not start itself again is no fault of the driver.
		{ID: notStartedID, Host: func(f *Facts) []Finding { return seen(f.unstarted()...) }},
		{ID: "driver_hangs", Suppresses: []string{"failed_open", "driver_init_failed", "driver_unknown_error", "no_device", "missing_gpus"},
			Host: hung, Device: hungDevice},
		{ID: "driver_crashes", Suppresses: []string{"failed_open"}, Host: func(f *Facts) []Finding { return crashedDevice(f, nil) }, Device: crashedDevice},
	},
	limitChecks,
	guestChecks,
	[]Check{
		{ID: "hmm_breaks_start", Explains: []cudart.Code{0, cudart.ErrInitializationError, cudart.ErrUnknown, cudart.ErrSystemNotReady},
			Suppresses: []string{"driver_hangs"}, Host: unlessUsable(hmm)},
		{ID: "uvm_after_suspend", Explains: []cudart.Code{cudart.ErrInitializationError, cudart.ErrUnknown, cudart.ErrOperatingSystem}, Host: unlessUsable(afterSuspend)},
	},
	codeChecks(),
	[]Check{{ID: failedOpenID, Explains: otherCodes, Host: unlessUsable(failedOpen)}},
)

// start makes the finding of the code with which CUDA failed to start.
func (f *Facts) start() Finding {
	return Finding{Summary: fmt.Sprintf("CUDA does not start: %v", cudart.Code(f.Opening.Code)), Evidence: []string{f.Opening.Error}}
}

// stub names the stub that was loaded: the error proves that it is one. Its directory is in LD_LIBRARY_PATH, or else
// the loader's cache has it.
func stub(f *Facts) []Finding {
	out := f.start()
	named := strings.FieldsFunc(f.Host.Env["LD_LIBRARY_PATH"], func(c rune) bool { return c == ':' || c == ';' })
	dir := path.Dir(f.Opening.DriverLibrary)
	if i := slices.IndexFunc(named, func(d string) bool { return strings.HasSuffix(strings.TrimRight(d, "/"), "/stubs") }); i >= 0 && !slices.Contains(named, dir) {
		dir = path.Clean(named[i])
	}
	if searched := slices.ContainsFunc(named, func(d string) bool { return path.Clean(d) == dir }); !searched && path.Base(dir) != "stubs" {
		return finding(out) // it may be a link, or a copy in the driver's place
	}
	out.Summary, out.values = "libcuda.so.1 in "+dir+" is the toolkit's stub, not the driver", findings.Values{"DIR": word(dir)}
	out.because = "cache"
	if slices.ContainsFunc(named, func(d string) bool { return path.Clean(d) == dir }) {
		out.because = "library_path"
		out.Evidence = append(out.Evidence, "LD_LIBRARY_PATH contains "+dir)
	}
	for _, l := range f.Host.NVIDIA.Libraries {
		if path.Dir(l.Path) != dir && !isCompat(l.Path) {
			out.Evidence = append(out.Evidence, "The driver's own library is "+l.Path)
			break
		}
	}
	return finding(out)
}

// tooOldDriver tells a driver that can be updated from the last one that supports the GPU: then the runtime has to be
// older.
func tooOldDriver(f *Facts) []Finding {
	out := f.start()
	for _, g := range f.Host.GPUs {
		gen, id, known := generationOf(g)
		if branch := branchOf(f.Host.NVIDIA.DriverVersion); known && gen.last > 0 && branch >= gen.last {
			out.because = "last_branch"
			out.values = findings.Values{"architecture": gen.name, "branch": strconv.Itoa(gen.last), "an older CUDA": "CUDA " + gen.lastCUDA()}
			out.Evidence = append(out.Evidence, fmt.Sprintf("%s (10de:%04x) is a %s GPU, and the driver is %s", g.Address, id, gen.name, f.Host.NVIDIA.DriverVersion))
			break
		}
	}
	return finding(out)
}

// mismatch compares the versions of the kernel module and of the library that was loaded. Where that is one for
// compatibility, compat says more.
func mismatch(f *Facts) []Finding {
	out := f.start()
	module := f.Host.NVIDIA.DriverVersion
	if f.Opening.Code == int(cudart.ErrInsufficientDriver) {
		// An old libcuda in front of the driver's: the runtime says that the driver is too old.
		lib, ok := f.loaded()
		if !ok || module == "" || lib.Version == module || isCompat(lib.Path) {
			return nil
		}
		out.Summary = fmt.Sprintf("%s is from driver %s, and the kernel module from %s", lib.Path, lib.Version, module)
		out.because, out.values = "other_library", findings.Values{"LIBRARY": word(lib.Path)}
		return finding(out)
	}
	for _, l := range f.Host.NVIDIA.Libraries {
		out.Evidence = append(out.Evidence, fmt.Sprintf("Found %s; the kernel module is %s", l.Path, module))
	}
	switch lib, ok := f.loaded(); {
	case ok && lib.Version == module:
		out.Against = []string{fmt.Sprintf("%s, which is found first, has the module's version", lib.Path)}
		out.Certainty = Likely
	case ok && slices.ContainsFunc(f.Host.NVIDIA.Libraries, func(l hostinfo.DriverLibrary) bool { return l.Version == module }):
		out.because, out.values = "other_library", findings.Values{"LIBRARY": word(lib.Path)}
	case !ok || f.Host.Virt.Container != "":
		out.Certainty = Likely
	}
	return finding(out)
}

// compat finds libraries of cuda-compat in front of the driver's. An older one than the kernel module cannot
// work, and a newer one not with every GPU.
func compat(f *Facts) []Finding {
	out := f.start()
	if f.Opening.Code == int(cudart.ErrCompatNotSupportedOnDevice) {
		return finding(out)
	}
	module := f.Host.NVIDIA.DriverVersion
	lib, ok := f.loaded()
	if !ok || !isCompat(lib.Path) {
		i := slices.IndexFunc(f.Host.NVIDIA.Libraries, func(l hostinfo.DriverLibrary) bool { return isCompat(l.Path) && l.Searched })
		if ok || i < 0 {
			return nil
		}
		lib, out.Certainty = f.Host.NVIDIA.Libraries[i], Likely
	}
	if module == "" || lib.Version == module {
		return nil
	}
	out.Evidence = append(out.Evidence, fmt.Sprintf("%s has version %s, the kernel module %s", lib.Path, lib.Version, module))
	out.Summary, out.because = fmt.Sprintf("the compat library %s is newer than the driver and found first", lib.Path), "newer"
	if slices.Compare(versionOf(lib.Version), versionOf(module)) < 0 {
		out.Summary, out.because = fmt.Sprintf("the compat library %s is older than the driver and found first", lib.Path), "older"
		if out.Certainty == "" && f.Opening.Code == int(cudart.ErrSystemDriverMismatch) {
			out.Certainty = Certain
		}
	}
	out.values = findings.Values{"DIR": word(path.Dir(lib.Path))}
	return finding(out)
}

// names lists what GPUs are called, by NVML, by the kernel module, or by CUDA.
func (f *Facts) names() (names []string) {
	for _, g := range f.managed() {
		names = append(names, g.Name)
	}
	for _, b := range f.Host.NVIDIA.Boards {
		names = append(names, b.Model)
	}
	for _, d := range f.Devices {
		names = append(names, d.Name)
	}
	return names
}

// switched matches GPUs on boards with NVSwitch, and switchless those that have none.
var (
	switched   = regexp.MustCompile(`SXM|HGX|HBM3|\b(?:H20|H200|H800|B200|B300|GB200|GB300)\b`)
	switchless = regexp.MustCompile(`PCIe|NVL\b|GeForce|RTX|GH200|Tesla [TP]|\b(?:L4|L40S?|A10G?|A16|A30|A40|T4)\b`)
	// nvlink5 are GPUs whose switches are managed over InfiniBand's driver.
	nvlink5 = regexp.MustCompile(`\b(?:B200|B300|GB200|GB300)\b`)
)

// fabric is one of four causes of 802. Without NVSwitch it is none.
func fabric(f *Facts) []Finding {
	out := f.start()
	matches := func(what *regexp.Regexp) bool { return slices.ContainsFunc(f.names(), what.MatchString) }
	n := f.Host.NVIDIA
	has := n.NVSwitches > 0 || n.HasNode("/dev/nvidia-nvswitchctl") || matches(switched)
	switch {
	case n.NVSwitches == 0 && matches(switchless):
		out.Against, out.Certainty = []string{"this kind of GPU has no NVSwitch"}, Possible
	case has && matches(nvlink5) && f.Host.InfiniBand == 0 && !n.HasModule("mlx5_ib") && f.Host.Virt.Container == "":
		out.because = "infiniband"
		out.Evidence = append(out.Evidence, "/sys/class/infiniband is empty, and the module mlx5_ib is not loaded")
	}
	if n.NVSwitches > 0 {
		out.Evidence = append(out.Evidence, "This host has "+units.Things(n.NVSwitches, "NVSwitch", "NVSwitches"))
	}
	return finding(out)
}

// notReturned is in the errors of calls that had not returned at their limit.
const notReturned = "has not returned"

// hmm is known of two kinds: on kernels of Enterprise Linux 9 and 10, and some others, with the open module
// (open-gpu-kernel-modules #797, #901, #947), and as error 802 with KASLR on some kernels, without any NVSwitch (release notes of CUDA 12.9).
func hmm(f *Facts) []Finding {
	h := f.Host
	if f.Opening == nil || !h.NVIDIA.OpenModule || h.NVIDIA.HMMDisabled == nil || *h.NVIDIA.HMMDisabled {
		return nil
	}
	enterprise := strings.Contains(h.Kernel.Release, ".el9") || strings.Contains(h.Kernel.Release, ".el10")
	out := Finding{
		Summary: "HMM (heterogeneous memory management) keeps CUDA from starting on this kernel",
		Evidence: []string{f.Opening.Error, "Kernel " + h.Kernel.Release + ", open kernel module " + h.NVIDIA.DriverVersion,
			"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"},
	}
	switch code := cudart.Code(f.Opening.Code); {
	case code == cudart.ErrSystemNotReady:
		if slices.Contains(h.Kernel.Parameters, "nokaslr") || h.NVIDIA.NVSwitches > 0 || f.confidential() || !slices.ContainsFunc(f.names(), switchless.MatchString) {
			return nil
		}
		out.because = "kaslr"
		out.Evidence = append(out.Evidence, "This host has no NVSwitch, and nokaslr is not on the kernel command line")
	case !enterprise && code == cudart.ErrInitializationError && f.called():
		out.Summary, out.because = "HMM (heterogeneous memory management) may keep CUDA from starting on this kernel", "other_kernels"
	case !enterprise || code != cudart.ErrInitializationError && code != cudart.ErrUnknown && !strings.Contains(f.Opening.Error, notReturned):
		return nil
	}
	return finding(out)
}

// afterSuspend finds nvidia_uvm without its state: NVML works, the nodes open, and the host was suspended since
// boot.
func afterSuspend(f *Facts) []Finding {
	times, known := f.Host.Kernel.Suspended.Finite()
	if !known || times == 0 || !f.called() || f.Host.Virt.WSL || len(f.NodeErrors) > 0 || f.NVML != nil && f.NVML.Count == 0 {
		return nil
	}
	return seen(f.Opening.Error, fmt.Sprintf("/sys/power/suspend_stats/success is %d", times))
}

func failedOpen(f *Facts) []Finding {
	if f.Opening == nil {
		return nil
	}
	code := cudart.Code(f.Opening.Code)
	own := code == cudart.ErrNoDevice || code == cudart.ErrInvalidDevice // visibility.go
	for _, s := range startCodes {
		own = own || slices.Contains(s.codes, code)
	}
	if own {
		return nil
	}
	means, _ := meaningOf(code)
	out := Finding{Summary: "CUDA does not start", Evidence: []string{f.Opening.Error}, means: means}
	if code == cudart.ErrSymbolNotFound && f.Host.Virt.WSL && f.Host.Virt.Container != "" {
		out.because = "wsl"
	}
	return finding(out)
}

// unavailableID has the causes of error 46, of the start and of a call.
const unavailableID = "gpus_unavailable"

// holds adds to a finding of error 46 why GPUs are unavailable: the driver asks for a reset, a process uses them, or
// neither shows. A container does not see the processes of others.
func (f *Facts) holds(out Finding, gpus []*nvml.GPU) Finding {
	idle := len(gpus) > 0
	for _, g := range gpus {
		at := fmt.Sprintf("NVML: GPU %d", g.Index)
		switch {
		case g.Recovery != "" && g.Recovery != "none":
			out.because = "recovery"
			out.Evidence = append(out.Evidence, at+" has the recovery action "+g.Recovery)
		case strings.Contains(g.Error, "needs a reset"):
			out.because = "recovery"
			out.Evidence = append(out.Evidence, at+": "+g.Error)
		case len(g.Processes) > 0:
			out.Evidence = append(out.Evidence, at+" has "+f.holders(g))
		}
		idle = idle && !used(g) && g.ComputeMode != nil && *g.ComputeMode == 0 && !isTrue(g.MIG) && g.Error == ""
	}
	switch {
	case out.because != "":
	case idle && !vgpuName.MatchString(gpus[0].Name):
		out.because = "idle"
		out.Evidence = append(out.Evidence, "NVML: the compute mode is default, MIG is off, and no process has a GPU")
		if f.Host.Virt.Container != "" {
			out.Certainty = Possible
			out.Evidence = append(out.Evidence, "This container does not show processes outside of it")
		}
	}
	return out
}

// holders names the processes on a GPU, as far as their names show.
func (f *Facts) holders(g *nvml.GPU) string {
	text := units.Things(len(g.Processes), "process", "processes")
	for i, p := range g.Processes[:min(len(g.Processes), maxPinners)] {
		text += []string{": ", ", "}[min(i, 1)] + fmt.Sprint(p.PID)
		if k := slices.IndexFunc(f.Processes, func(o Process) bool { return o.PID == p.PID }); k >= 0 {
			text += " (" + f.Processes[k].Name + ")"
		} else if p.Name != "" {
			text += " (" + p.Name + ")"
		}
	}
	return text
}

// whyUnavailable returns the meaning of error 46 on one GPU, and its evidence.
func (f *Facts) whyUnavailable(d *Device) (means meaning, evidence []string) {
	if d.Health == nil {
		return meaning{}, nil
	}
	out := f.holds(Finding{}, []*nvml.GPU{d.Health})
	if out.because == "" || out.Certainty != "" {
		return meaning{}, nil
	}
	return meaning{unavailableID, out.because}, out.Evidence
}
