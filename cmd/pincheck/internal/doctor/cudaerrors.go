package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A meaning is where the meaning of a code is written: a cause of a page of cmd/pincheck/internal/findings.
type meaning struct{ page, cause string }

// meanings are what codes mean when a call fails on a GPU that was opened.
var meanings = []struct {
	codes []cudart.Code
	means meaning
	own   bool // the check of the page reports these codes, and not failed_call
}{
	{[]cudart.Code{cudart.ErrECCUncorrectable}, meaning{page: "uncorrectable_ecc"}, true},
	{[]cudart.Code{cudart.ErrNvlinkUncorrectable}, meaning{page: "nvlink_error"}, true},
	{[]cudart.Code{cudart.ErrIllegalAddress, cudart.ErrLaunchTimeout, cudart.Code(714), cudart.ErrIllegalInstruction,
		cudart.ErrMisalignedAddress, cudart.Code(717), cudart.Code(718), cudart.ErrLaunchFailure, cudart.ErrContextIsDestroyed}, meaning{page: "gpu_fault"}, true},
	{[]cudart.Code{cudart.ErrNotSupported, cudart.ErrCallRequiresNewerDriver}, meaning{"failed_call", "not_supported"}, false},
	{[]cudart.Code{cudart.ErrInsufficientDriver}, meaning{page: "driver_too_old"}, false},
	{[]cudart.Code{cudart.ErrSystemDriverMismatch}, meaning{page: "driver_mismatch"}, false},
	{[]cudart.Code{cudart.ErrSystemNotReady}, meaning{page: "fabric_not_ready"}, false},
	{[]cudart.Code{cudart.ErrCompatNotSupportedOnDevice}, meaning{page: "compat_library"}, false},
	{[]cudart.Code{cudart.ErrStubLibrary}, meaning{page: "stub_library"}, false},
	{[]cudart.Code{cudart.ErrInitializationError}, meaning{page: "driver_init_failed"}, false},
	{[]cudart.Code{cudart.ErrUnknown}, meaning{page: "driver_unknown_error"}, false},
	{[]cudart.Code{cudart.ErrMemoryAllocation}, meaning{page: "open_out_of_memory"}, false},
	{[]cudart.Code{cudart.ErrNoDevice}, meaning{"failed_call", "no_device"}, false},
	{[]cudart.Code{cudart.ErrInvalidDevice}, meaning{"failed_call", "invalid_device"}, false},
	{[]cudart.Code{cudart.ErrDevicesUnavailable, cudart.Code(216)}, meaning{"failed_call", "unavailable"}, false},
	{[]cudart.Code{cudart.ErrInvalidValue}, meaning{"failed_call", "invalid_value"}, false},
	{[]cudart.Code{cudart.ErrNotPermitted}, meaning{"failed_call", "not_permitted"}, false},
	{[]cudart.Code{cudart.ErrHostMemoryAlreadyRegistered}, meaning{"failed_call", "already_registered"}, false},
	{[]cudart.Code{cudart.ErrHostMemoryNotRegistered}, meaning{"failed_call", "not_registered"}, false},
	{[]cudart.Code{cudart.ErrOperatingSystem}, meaning{"failed_call", "operating_system"}, false},
	{[]cudart.Code{cudart.ErrInvalidResourceHandle}, meaning{"failed_call", "invalid_handle"}, false},
	{[]cudart.Code{cudart.Code(201)}, meaning{"failed_call", "no_context"}, false},
	{[]cudart.Code{cudart.ErrNoKernelImageForDevice}, meaning{"failed_call", "no_kernel_image"}, false},
}

// meaningOf returns the meaning of a code: none for success, and for codes of which nothing is known.
// Own is whether the check of that page reports it.
func meaningOf(code cudart.Code) (means meaning, own bool) {
	for _, m := range meanings {
		if slices.Contains(m.codes, code) {
			return m.means, m.own
		}
	}
	return meaning{}, false
}

// failedCode matches a call with its code, as the errors of cudart have them:
// "cudaMalloc: 4096 bytes: cudaErrorMemoryAllocation (2): out of memory".
var failedCode = regexp.MustCompile(`cudaError\w* \((\d+)\)`)

// codeIn returns the code in a text, 0 if there is none.
func codeIn(text string) cudart.Code {
	m := failedCode.FindStringSubmatch(text)
	if m == nil {
		return 0
	}
	n, err := strconv.ParseInt(m[1], 10, 32)
	if err != nil {
		return 0
	}
	return cudart.Code(n)
}

// meaningIn returns the meaning of the code in a text.
func meaningIn(text string) meaning {
	means, _ := meaningOf(codeIn(text))
	return means
}

// classify returns the check that reports a failure: one that knows more of it, or
// failed_call.
func classify(f *Facts, d *Device, text string) string {
	code := codeIn(text)
	pins := strings.Contains(text, "cudaHostRegister") || strings.Contains(text, "cudaHostAlloc") || strings.Contains(text, "cudaMallocHost")
	if means, own := meaningOf(code); own {
		return means.page
	}
	switch {
	case pins && code == cudart.ErrNotSupported:
		return "confidential_computing"
	case pins && (code == cudart.ErrMemoryAllocation || code == cudart.ErrInvalidValue) && f.hostShort():
		return "host_memory_short"
	case pins && code == cudart.ErrMemoryAllocation && d.seenFull():
		return "gpu_full"
	case pins && code != 0:
		return "pin_refused"
	case code == cudart.ErrMemoryAllocation && d.full():
		return "gpu_full"
	case code == cudart.ErrMemoryAllocation && f.hostShort():
		return "host_memory_short"
	}
	return "failed_call"
}

// full reports whether the GPU has next to no free memory, or too little to say.
func (d *Device) full() bool {
	return d.MemoryTotal == 0 || d.MemoryFree < max(512<<20, d.MemoryTotal/50)
}

// seenFull reports whether the GPU's memory is known to be full: by its size, or since CUDA has none for its own use.
func (d *Device) seenFull() bool {
	return d.MemoryTotal > 0 && d.full() || slices.ContainsFunc(d.Errors, func(text string) bool {
		return strings.Contains(text, "cudaMemGetInfo") && codeIn(text) == cudart.ErrMemoryAllocation
	})
}

// hostShort reports whether the host or the container has little memory left to pin.
func (f *Facts) hostShort() bool {
	left, _, ok := f.headroom()
	return ok && left < 1<<30
}

// errorsOf returns the errors of a GPU that one check reports.
func errorsOf(f *Facts, d *Device, check string) (texts []string) {
	all := slices.Concat(d.Errors, benchErrors(append(d.measurements(), d.Trials)...))
	if d.Verify != nil {
		for _, one := range d.Verify.Failures {
			if classify(f, d, one.Error) != "failed_call" { // failed_round_trips has the others
				all = append(all, one.String())
			}
		}
		// A kind of memory that this GPU does not offer is left out. That it cannot be
		// registered is more than that.
		for _, s := range d.Verify.Skipped {
			if classify(f, d, s.Reason) != "failed_call" {
				all = append(all, s.Reason)
			}
		}
	}
	for _, text := range all {
		if classify(f, d, text) == check && !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return texts
}

// benchErrors returns why something was not measured, or not in full. Wrong bytes have a
// check of their own.
func benchErrors(benches ...*result.Bench) (all []string) {
	for _, b := range benches {
		if b == nil {
			continue
		}
		all = append(all, slices.DeleteFunc(slices.Clone(b.Errors), func(e string) bool {
			return slices.ContainsFunc(b.Series, func(s result.Series) bool { return s.Mismatch != "" && strings.HasSuffix(e, s.Mismatch) })
		})...)
		if len(b.Series) == 0 {
			all = append(all, b.Notes...)
		}
	}
	return all
}

// callChecks report calls that failed.
var callChecks = []Check{
	{ID: "uncorrectable_ecc", Device: uncorrectableECC},
	{ID: "gpu_fault", Device: reported("gpu_fault", "the GPU stopped this process's work")},
	{ID: "nvlink_error", Device: reported("nvlink_error", "a link between GPUs failed")},
	{ID: "compute_mode_prohibited", Explains: notReached, Suppresses: []string{"failed_call", "failed_round_trips"}, Host: unlessUsable(computeModes(2)), Device: computeMode(2)},
	{ID: "failed_call", Host: failedDevices, Device: failedCall},
	{ID: "gpu_full", Suppresses: []string{"skipped_round_trips"}, Device: gpuFull},
	{ID: "host_memory_short", Explains: []cudart.Code{0, cudart.ErrInitializationError, cudart.ErrMemoryAllocation}, Suppresses: []string{"driver_crashes"}, Host: unlessUsable(memoryToStart), Device: hostMemoryShort},
	{ID: "compute_mode_exclusive", Explains: []cudart.Code{cudart.ErrDevicesUnavailable}, Host: unlessUsable(computeModes(3)), Device: computeMode(3)},
}

// reported returns a check of errors whose codes are its own.
func reported(id, summary string) func(*Facts, *Device) []Finding {
	return func(f *Facts, d *Device) []Finding {
		texts := errorsOf(f, d, id)
		if len(texts) == 0 {
			return nil
		}
		return finding(Finding{Summary: summary, Evidence: texts[:min(len(texts), 3)]})
	}
}

func uncorrectableECC(f *Facts, d *Device) []Finding {
	const summary = "GPU memory has uncorrectable errors"
	out := reported("uncorrectable_ecc", summary)(f, d)
	if h := d.Health; h != nil && h.UncorrectedVolatile != nil && *h.UncorrectedVolatile > 0 {
		counted := fmt.Sprintf("NVML: %d uncorrectable errors since the driver was loaded", *h.UncorrectedVolatile)
		if len(out) == 0 {
			out = finding(Finding{Summary: summary, because: "counted"})
		}
		out[0].Evidence = append(out[0].Evidence, counted)
	}
	return out
}

// failedDevices are GPUs that could not be described at all. The others are examined.
func failedDevices(f *Facts) (out []Finding) {
	for _, text := range f.DeviceErrors {
		out = append(out, Finding{Summary: "CUDA counts a GPU whose properties cannot be read", Evidence: []string{text}, because: "device", means: meaningIn(text)})
	}
	return append(append(out, failedTogether(f)...), failedProofs(f)...)
}

// failedProofs are paths between GPUs whose proof did not come to its end.
func failedProofs(f *Facts) []Finding {
	var out Finding
	var paths []string
	for _, p := range f.PeerPaths {
		if p.Error != "" {
			paths = append(paths, fmt.Sprintf("from GPU %d to GPU %d", p.From, p.To))
			out.Evidence = append(out.Evidence, p.Error)
		}
	}
	if len(paths) == 0 {
		return nil
	}
	out.Severity, out.because = Warning, "peer"
	out.Summary = "copies " + strings.Join(paths[:min(len(paths), 3)], ", ") + " could not be verified"
	if len(paths) > 3 {
		out.Summary = fmt.Sprintf("copies on %d paths between GPUs could not be verified", len(paths))
	}
	out.Evidence = out.Evidence[:min(len(out.Evidence), 3)]
	return finding(out)
}

// failedTogether are copies of all GPUs at once. A GPU that fails alone is why.
func failedTogether(f *Facts) []Finding {
	if f.Together == nil || len(f.Together.Errors) == 0 {
		return nil // that there was too little memory is a note
	}
	errs := benchErrors(f.Together)
	alone := slices.ContainsFunc(f.Devices, func(d Device) bool {
		return len(d.Errors) > 0 || len(benchErrors(d.Bandwidth)) > 0
	})
	if len(errs) == 0 || alone {
		return nil
	}
	one := Finding{Severity: Warning, Summary: "copies of all GPUs at once failed; those of each alone did not", Evidence: errs[:min(len(errs), 3)], because: "together"}
	if f.hostShort() {
		one.Severity = Note
	}
	return finding(one)
}

// failedCall makes one finding of the calls that failed for one cause: those with one meaning, or one code.
func failedCall(f *Facts, d *Device) (out []Finding) {
	type cause struct {
		meaning
		code cudart.Code
		text string // of an error without a code
	}
	alike := map[cause][]string{}
	var causes []cause // in the order of their first calls
	for _, text := range errorsOf(f, d, "failed_call") {
		c := cause{meaning: meaningIn(text)}
		if c.meaning == (meaning{}) {
			if c.code = codeIn(text); c.code == 0 {
				c.text = text
			}
		}
		if alike[c] == nil {
			causes = append(causes, c)
		}
		alike[c] = append(alike[c], text)
	}
	for _, c := range causes {
		texts := alike[c]
		one := Finding{Summary: "not everything could be examined", Evidence: slices.Clone(texts[:min(len(texts), 4)]), means: c.meaning}
		if c.meaning.cause == "unavailable" {
			means, seen := f.whyUnavailable(d)
			one.means, one.Evidence = cmp.Or(means, one.means), append(one.Evidence, seen...)
		}
		if len(texts) > 1 {
			one.Summary += fmt.Sprintf(": %d calls failed", len(texts))
		}
		out = append(out, one)
	}
	return out
}

func gpuFull(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "gpu_full")
	if len(texts) == 0 {
		return nil
	}
	out := Finding{Summary: "GPU memory is full, so not everything was examined", Evidence: texts[:min(len(texts), 2)]}
	if d.MemoryTotal > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s of %s is free", units.Bytes(d.MemoryFree), units.Bytes(d.MemoryTotal)))
	}
	if cache, ok := f.cacheOn(d); ok && (d.Health == nil || len(d.Health.Processes) == 0) {
		out.because = "page_cache"
		out.Evidence = append(out.Evidence, cache)
	}
	if d.Health != nil {
		for _, p := range d.Health.Processes {
			out.Evidence = append(out.Evidence, strings.TrimSpace(fmt.Sprintf("Process %d %s: %s", p.PID, p.Name, units.Bytes(p.Memory))))
		}
	}
	return finding(out)
}

// cacheOn returns how much memory of a GPU without a memory of its own, or with one that the kernel uses too, the page
// cache holds: what is available and not free.
func (f *Facts) cacheOn(d *Device) (evidence string, much bool) {
	unified := isTrue(d.pageTables()) || d.Attributes != nil && d.Attributes.Integrated || f.Host.Virt.Tegra
	if !unified || f.Host.Memory.Available == 0 {
		return "", false
	}
	free := 0
	for _, n := range f.Host.NUMA {
		free += n.Free
	}
	cache := f.Host.Memory.Available - free
	return fmt.Sprintf("/proc/meminfo: %s is available, and %s of it free: the rest is page cache", units.Bytes(f.Host.Memory.Available), units.Bytes(free)),
		free > 0 && cache > f.Host.Memory.Total/4
}

func hostMemoryShort(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "host_memory_short")
	if len(texts) == 0 {
		return nil
	}
	left, source, _ := f.headroom()
	out := Finding{
		Summary:  fmt.Sprintf("only %s of host memory is available, too little for the whole examination", units.Bytes(left)),
		Evidence: append(slices.Clone(texts[:min(len(texts), 2)]), source+": "+units.Bytes(left)),
	}
	if seen, ok := f.sharedHolds(); ok {
		out.because, out.Evidence = "shared", append(out.Evidence, seen)
	}
	return finding(out)
}

// startBytes is the host memory for each GPU below which CUDA may not start: with 8 GB left it did not on eight
// V100s (NVIDIA/libnvidia-container #107).
const startBytes = 1 << 30

func memoryToStart(f *Facts) []Finding {
	left, source, ok := f.headroom()
	gpus := max(1, reachable(f.Host))
	killed := f.killedOpening()
	if !ok || killed == "" && (!f.called() || f.Opening.Code == 0) || left >= gpus*startBytes {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("only %s of host memory is available, too little to start CUDA on %s", units.Bytes(left), units.Things(gpus, "GPU", "GPUs")),
		Evidence: []string{cmp.Or(killed, f.Opening.Error), source + ": " + units.Bytes(left)},
		because:  "start",
	})
}

// computeModes returns a check of the compute modes that NVML shows where CUDA shows no GPU. A GPU for one process
// is closed if there is one; all have to be.
func computeModes(mode int) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		known := f.managed()
		if len(known) == 0 {
			return nil
		}
		var evidence []string
		for _, g := range known {
			closed := g.ComputeMode != nil && *g.ComputeMode == mode && (mode == 2 || len(g.Processes) > 0)
			if !closed {
				return nil
			}
			evidence = append(evidence, fmt.Sprintf("NVML: GPU %d has compute mode %d, and %s", g.Index, mode, f.holders(g)))
		}
		out := Finding{Severity: Problem, Summary: "the compute mode allows one process per GPU, and each GPU has one", Evidence: evidence}
		if mode == 2 {
			out.Summary, out.values = "the compute mode allows no process on any GPU", findings.Values{"N": strconv.Itoa(known[0].Index)}
			return finding(out)
		}
		return finding(f.besideMPS(out))
	}
}

// besideMPS returns a finding of an exclusive GPU, which has another cause where MPS needs the mode: its server is the
// one process, or its control daemon has a pipe.
func (f *Facts) besideMPS(out Finding) Finding {
	served := func(g *nvml.GPU) bool { return strings.Contains(f.holders(g), "(nvidia-cuda-mps") }
	switch known := f.managed(); {
	case slices.ContainsFunc(known, served):
		if out.Severity == Problem {
			out.Summary = "an MPS server has each GPU, whose compute mode allows one process"
		} else {
			out.Evidence = append(out.Evidence, "NVML: "+f.holders(known[slices.IndexFunc(known, served)]))
		}
	case f.Host.NVIDIA.MPS != "":
		out.Evidence = append(out.Evidence, f.Host.NVIDIA.MPS+" exists")
	default:
		return out
	}
	out.because = "mps"
	return out
}

// computeMode returns a check of the compute mode.
func computeMode(mode int) func(*Facts, *Device) []Finding {
	return func(f *Facts, d *Device) []Finding {
		if f.partial() && d.Health != nil && d.Health.ComputeMode != nil {
			d = &Device{Ordinal: d.Ordinal, Attributes: &Attributes{ComputeMode: *d.Health.ComputeMode}} // nvidia-smi's
		}
		if d.Attributes == nil || d.Attributes.ComputeMode != mode {
			return nil
		}
		out := Finding{Summary: "only one process at a time may use this GPU", Evidence: []string{"The attribute ComputeMode is 3 (exclusive process)"}}
		if mode == 2 {
			out.Summary, out.Evidence = "the compute mode allows no process on this GPU", []string{"The attribute ComputeMode is 2 (prohibited)"}
			out.values = findings.Values{"N": strconv.Itoa(d.Ordinal)}
			return finding(out)
		}
		return finding(f.besideMPS(out))
	}
}
