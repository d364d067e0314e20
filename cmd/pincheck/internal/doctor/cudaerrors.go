package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A codeMeaning is what a cudaError_t means when a call fails on a GPU that was opened.
type codeMeaning struct {
	codes []cudart.Code
	// check is the one that reports it, empty for failed_call.
	check     string
	means, do string
}

const restartProcess = "restart the process: its CUDA context cannot be used any more; if it happens again run compute-sanitizer on the program, and see dmesg for Xid lines"

var meanings = []codeMeaning{
	{[]cudart.Code{cudart.ErrECCUncorrectable}, "uncorrectable_ecc",
		"the GPU's memory has an error that its ECC could not correct",
		"end the programs on this GPU, reset it (sudo nvidia-smi -r -i N) and look at nvidia-smi -q -d ECC,ROW_REMAPPER; if it comes back have the card replaced"},
	{[]cudart.Code{cudart.ErrNvlinkUncorrectable}, "nvlink_error",
		"a link between GPUs failed", "see nvidia-smi nvlink -e and dmesg for Xid 74; reset all GPUs together (sudo nvidia-smi -r) or reboot; on hosts with NVSwitch see the log of the fabric manager"},
	{[]cudart.Code{cudart.ErrIllegalAddress, cudart.ErrLaunchTimeout, cudart.ErrHardwareStackError, cudart.ErrIllegalInstruction,
		cudart.ErrMisalignedAddress, cudart.ErrInvalidAddressSpace, cudart.ErrInvalidPc, cudart.ErrLaunchFailure, cudart.ErrContextIsDestroyed}, "gpu_fault",
		"the GPU stopped the work of this process: a kernel accessed what it may not, or the GPU is broken", restartProcess},
	{[]cudart.Code{cudart.ErrNotSupported, cudart.ErrCallRequiresNewerDriver}, "",
		"this driver or this GPU does not offer the call", "see whether confidential computing is on (nvidia-smi conf-compute -f), whether the GPU is a vGPU, and update the driver"},
	{[]cudart.Code{cudart.ErrInsufficientDriver, cudart.ErrSystemDriverMismatch, cudart.ErrSystemNotReady, cudart.ErrCompatNotSupportedOnDevice,
		cudart.ErrStubLibrary, cudart.ErrInitializationError, cudart.ErrNoDevice, cudart.ErrInvalidDevice, cudart.ErrUnknown, cudart.ErrMemoryAllocation}, "", "", ""}, // as when CUDA starts
	{[]cudart.Code{cudart.ErrDevicesUnavailable, cudart.ErrDeviceAlreadyInUse}, "",
		"another process holds the GPU exclusively, or it is closed to all", "see nvidia-smi for the processes and the compute mode (sudo nvidia-smi -c DEFAULT resets it)"},
	{[]cudart.Code{cudart.ErrInvalidValue}, "",
		"an argument is not valid here; of calls that pin memory also: the driver found no memory for its tables, or the kernel refused to pin the pages",
		"see dmesg for NVRM: lines such as 'Cannot map memory' and 'failed to allocate page table', and free memory on the host"},
	{[]cudart.Code{cudart.ErrNotPermitted}, "", "the call is not allowed where it was made, such as in a callback of a stream", "see the error"},
	{[]cudart.Code{cudart.ErrHostMemoryAlreadyRegistered}, "", "a part of the memory is pinned already", "unregister it first, or register it once as a whole"},
	{[]cudart.Code{cudart.ErrHostMemoryNotRegistered}, "", "the memory is not pinned, or was unpinned by someone else", "pass the address that was registered"},
	{[]cudart.Code{cudart.ErrOperatingSystem}, "", "the kernel refused a call of the driver", "see dmesg, the limits of the process (ulimit -a) and of its container"},
	{[]cudart.Code{cudart.ErrInvalidResourceHandle}, "", "a stream or an event of another GPU, or a destroyed one", "report it: pincheck should not do this"},
	{[]cudart.Code{cudart.ErrDeviceUninitialized}, "", "the thread has no CUDA context, or that of another GPU", "report it: pincheck should not do this"},
	{[]cudart.Code{cudart.ErrNoKernelImageForDevice}, "", "the program has no code for this GPU", "build it for the GPU's compute capability, or update it"},
}

// codeText returns what a code means, and what to do. Both are empty for success, and the
// remedy is for a code of which nothing is known.
func codeText(code cudart.Code) (means, do string) {
	for _, m := range meanings {
		if !slices.Contains(m.codes, code) {
			continue
		}
		if m.do == "" {
			return explain(code)
		}
		return m.means, m.do
	}
	return "", ""
}

// failedCode matches a call with its code, as the errors of cudart have them:
// "cudaMalloc: 4096 bytes: cudaErrorMemoryAllocation (2): out of memory".
var failedCode = regexp.MustCompile(`cudaError\w* \((\d+)\)`)

// codeIn returns the code in a text, 0 if there is none.
func codeIn(text string) cudart.Code {
	m := failedCode.FindStringSubmatch(text)
	if m == nil {
		return cudart.Success
	}
	n, err := strconv.ParseInt(m[1], 10, 32)
	if err != nil {
		return cudart.Success
	}
	return cudart.Code(n)
}

// textOf returns what the code in a text means, and what to do.
func textOf(text string) (means, do string) { return codeText(codeIn(text)) }

// classify returns the check that reports a failure: one that knows more of it, or
// failed_call.
func classify(f *Facts, d *Device, text string) string {
	code := codeIn(text)
	pins := strings.Contains(text, "cudaHostRegister") || strings.Contains(text, "cudaHostAlloc") || strings.Contains(text, "cudaMallocHost")
	for _, m := range meanings {
		if m.check != "" && slices.Contains(m.codes, code) {
			return m.check
		}
	}
	switch {
	case pins && code == cudart.ErrNotSupported:
		return "confidential_computing"
	case pins && (code == cudart.ErrMemoryAllocation || code == cudart.ErrInvalidValue) && f.hostShort():
		return "host_memory_short"
	case pins && code != cudart.Success:
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

// hostShort reports whether the host or the container has little memory left to pin.
func (f *Facts) hostShort() bool {
	left, _, ok := f.headroom()
	return ok && left < 1<<30
}

// errorsOf returns the errors of a GPU that one check reports.
func errorsOf(f *Facts, d *Device, check string) (texts []string) {
	all := slices.Concat(d.Errors, benchErrors(d.Bandwidth), benchErrors(d.Slower), benchErrors(d.Trials))
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
func benchErrors(b *result.Bench) []string {
	if b == nil {
		return nil
	}
	errs := slices.DeleteFunc(slices.Clone(b.Errors), func(e string) bool {
		return slices.ContainsFunc(b.Series, func(s result.Series) bool { return s.Mismatch != "" && strings.HasSuffix(e, s.Mismatch) })
	})
	if len(b.Series) == 0 {
		errs = append(errs, b.Notes...)
	}
	return errs
}

// callChecks report calls that failed.
var callChecks = []Check{
	{ID: "uncorrectable_ecc", Title: "the GPU's memory has uncorrectable errors", Severity: Problem, Device: uncorrectableECC},
	{ID: "gpu_fault", Title: "the GPU stopped the work of the process", Severity: Problem, Device: reported("gpu_fault", "the GPU stopped the work of this process")},
	{ID: "nvlink_error", Title: "a link between GPUs failed", Severity: Problem, Device: reported("nvlink_error", "a link between GPUs failed")},
	{ID: "compute_mode_prohibited", Title: "the GPU's compute mode is prohibited", Severity: Problem,
		Implies: []string{"failed_call", "failed_round_trips"}, Device: computeMode(2)},
	{ID: "failed_call", Title: "a call failed", Severity: Problem, Host: failedDevices, Device: failedCall},
	{ID: "gpu_full", Title: "the GPU's memory is full", Severity: Warning, Device: gpuFull},
	{ID: "host_memory_short", Title: "the host or the container has too little memory", Severity: Warning, Device: hostMemoryShort},
	{ID: "compute_mode_exclusive", Title: "one process at a time may use the GPU", Severity: Note, Device: computeMode(3)},
}

// reported returns a check of errors of which the table says what they mean.
func reported(id, summary string) func(*Facts, *Device) []Finding {
	return func(f *Facts, d *Device) []Finding {
		texts := errorsOf(f, d, id)
		if len(texts) == 0 {
			return nil
		}
		out := Finding{Summary: summary, Evidence: texts[:min(len(texts), 3)], Cost: "the work on this GPU is lost, and nothing more was measured"}
		out.Cause, out.Remedy = textOf(texts[0])
		return finding(out)
	}
}

func uncorrectableECC(f *Facts, d *Device) []Finding {
	const summary = "the GPU's memory has errors that could not be corrected"
	out := reported("uncorrectable_ecc", summary)(f, d)
	if h := d.Health; h != nil && h.UncorrectedVolatile != nil && *h.UncorrectedVolatile > 0 {
		counted := fmt.Sprintf("NVML: %d uncorrectable since the driver was loaded", *h.UncorrectedVolatile)
		if len(out) == 0 {
			out = finding(Finding{Summary: summary, Cost: "programs that meet them are ended"})
			out[0].Cause, out[0].Remedy = codeText(cudart.ErrECCUncorrectable)
		}
		out[0].Evidence = append(out[0].Evidence, counted)
	}
	return out
}

// failedDevices are GPUs that could not be described at all. The others are examined.
func failedDevices(f *Facts) (out []Finding) {
	for _, text := range f.DeviceErrors {
		one := Finding{Summary: "a GPU that CUDA counts cannot be described", Evidence: []string{text}, Cost: "it was not examined, and programs that use it fail",
			Remedy: "see dmesg for NVRM: and Xid lines; reset the GPU (sudo nvidia-smi -r -i N) or reboot"}
		if means, do := textOf(text); do != "" {
			one.Cause, one.Remedy = means, do
		}
		out = append(out, one)
	}
	return append(out, failedTogether(f)...)
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
	one := Finding{Severity: Warning, Summary: "copies of all GPUs at once failed, and those of each alone did not", Evidence: errs[:min(len(errs), 3)],
		Cost: "what they reach together is not known", Remedy: "see the error; free host memory, 80 MiB a GPU"}
	if f.hostShort() {
		one.Severity = Note
	}
	return finding(one)
}

func failedCall(f *Facts, d *Device) (out []Finding) {
	for _, text := range errorsOf(f, d, "failed_call") {
		one := Finding{Summary: "could not be examined in full", Evidence: []string{text}, Cost: "what was not examined may be wrong", Remedy: "see the error, and run nvidia-smi"}
		if means, do := textOf(text); do != "" {
			one.Cause, one.Remedy = means, do
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
	out := Finding{
		Summary:  "the GPU's memory is full: it is busy, and was not examined in full",
		Evidence: texts[:min(len(texts), 2)],
		Cause:    "other processes hold its memory",
		Cost:     "what could not be allocated was not measured and not proved",
		Remedy:   "see nvidia-smi for the processes, and run pincheck when they have ended",
	}
	if d.MemoryTotal > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%s of %s are free", units.Bytes(d.MemoryFree), units.Bytes(d.MemoryTotal)))
	}
	if d.Health != nil {
		for _, p := range d.Health.Processes {
			out.Evidence = append(out.Evidence, strings.TrimSpace(fmt.Sprintf("process %d %s: %s", p.PID, p.Name, units.Bytes(p.Memory))))
		}
	}
	return finding(out)
}

func hostMemoryShort(f *Facts, d *Device) []Finding {
	texts := errorsOf(f, d, "host_memory_short")
	if len(texts) == 0 {
		return nil
	}
	left, source, _ := f.headroom()
	return finding(Finding{
		Summary:  fmt.Sprintf("only %s of host memory can be used here, too little for the whole examination", units.Bytes(left)),
		Evidence: append(slices.Clone(texts[:min(len(texts), 2)]), source),
		Cost:     "what could not be allocated was not measured and not proved; it is no fault of the GPU",
		Remedy:   "free memory, or raise the container's limit",
	})
}

// computeMode returns a check of the compute mode.
func computeMode(mode int) func(*Facts, *Device) []Finding {
	return func(_ *Facts, d *Device) []Finding {
		if d.Attributes == nil || d.Attributes.ComputeMode != mode {
			return nil
		}
		out := Finding{
			Summary: "the compute mode lets one process at a time use this GPU", Evidence: []string{"compute mode: exclusive process"},
			Cost: "a second process gets error 46 (busy or unavailable)", Remedy: "sudo nvidia-smi -c DEFAULT, unless a scheduler wants it so",
		}
		if mode == 2 {
			out.Summary, out.Evidence = "the compute mode lets no process use this GPU", []string{"compute mode: prohibited"}
			out.Cost, out.Remedy = "no program can compute on it", "sudo nvidia-smi -c DEFAULT -i "+strconv.Itoa(d.Ordinal)
		}
		return finding(out)
	}
}
