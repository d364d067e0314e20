package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
)

// A startCode is a check of the error with which CUDA failed to start.
type startCode struct {
	id, title string
	codes     []cudart.Code
}

// startCodes are the codes that name a state of the host. Cause and remedy are those of
// cudart.
var startCodes = []startCode{
	{"stub_library", "libcuda is a stub", []cudart.Code{cudart.ErrStubLibrary}},
	{"driver_too_old", "the driver is older than the runtime", []cudart.Code{cudart.ErrInsufficientDriver}},
	{"driver_mismatch", "kernel module and libcuda differ", []cudart.Code{cudart.ErrSystemDriverMismatch}},
	{"compat_library", "a compat libcuda that this GPU does not support", []cudart.Code{cudart.ErrCompatNotSupportedOnDevice}},
	{"fabric_not_ready", "the fabric manager does not run", []cudart.Code{cudart.ErrSystemNotReady}},
	{"gpus_unavailable", "every GPU is busy or closed", []cudart.Code{cudart.ErrDevicesUnavailable}},
	{"open_out_of_memory", "no memory to start CUDA", []cudart.Code{cudart.ErrMemoryAllocation}},
	{"mps_unavailable", "the MPS server does not answer", []cudart.Code{cudart.ErrMpsConnectionFailed, cudart.ErrMpsRpcFailure,
		cudart.ErrMpsServerNotReady, cudart.ErrMpsMaxClientsReached, cudart.ErrMpsMaxConnectionsReached, cudart.ErrMpsClientTerminated}},
	{"driver_init_failed", "the driver could not be initialized", []cudart.Code{cudart.ErrInitializationError}},
	{"driver_unknown_error", "the driver failed and gives no reason", []cudart.Code{cudart.ErrUnknown}},
}

// startChecks find why CUDA does not start on a host that has what it needs.
var startChecks = slices.Concat(
	[]Check{
		{ID: "driver_hangs", Title: "the driver hangs", Severity: Problem, Implies: []string{"failed_open", "driver_init_failed", "driver_unknown_error", "no_device", "missing_gpus"},
			Host: hung, Device: hungDevice},
		{ID: "driver_crashes", Title: "the driver ends the process", Severity: Problem, Implies: []string{"failed_open"}, Host: crashed, Device: crashedDevice},
		{ID: "hmm_breaks_start", Title: "HMM keeps CUDA from starting", Severity: Problem,
			Implies: []string{"driver_hangs", "driver_init_failed", "driver_unknown_error"}, Host: unlessUsable(hmm)},
	},
	codeChecks(),
	[]Check{{ID: "failed_open", Title: "CUDA does not start", Severity: Problem, Host: unlessUsable(failedOpen)}},
)

func codeChecks() (all []Check) {
	for _, s := range startCodes {
		all = append(all, Check{ID: s.id, Title: s.title, Severity: Problem, Host: unlessUsable(func(f *Facts) []Finding {
			if f.Opening == nil || !slices.Contains(s.codes, cudart.Code(f.Opening.Code)) {
				return nil
			}
			return finding(f.start(s))
		})})
	}
	return all
}

// start makes the finding of a code with which CUDA failed to start.
func (f *Facts) start(s startCode) Finding {
	code := cudart.Code(f.Opening.Code)
	out := Finding{Summary: fmt.Sprintf("CUDA does not start: %v", code), Evidence: []string{f.Opening.Error}, Cost: noCUDA}
	out.Cause, out.Remedy = explain(code)
	if code == cudart.ErrSystemDriverMismatch {
		for _, l := range f.Host.NVIDIA.Libraries {
			out.Evidence = append(out.Evidence, fmt.Sprintf("%s beside kernel module %s", l.Path, f.Host.NVIDIA.DriverVersion))
		}
	}
	if len(s.codes) > 1 { // MPS
		out.Cause = "this process is a client of CUDA's Multi-Process Service, by CUDA_MPS_PIPE_DIRECTORY or a control daemon on the host, and the service does not serve it"
		out.Remedy = "see that nvidia-cuda-mps-control runs as the same user and has fewer clients than it allows; restart it (echo quit | nvidia-cuda-mps-control), or unset CUDA_MPS_PIPE_DIRECTORY to do without; in a container share /tmp/nvidia-mps and the IPC namespace"
	}
	return out
}

// explain returns what a code means when CUDA starts, and what to do, as cudart says it.
func explain(code cudart.Code) (means, do string) {
	text := (&cudart.OpenError{Err: code}).Remedy()
	if means, do, ok := strings.Cut(text, ": "); ok {
		return means, do
	}
	return "", text
}

// notReturned is in the errors of calls that had not returned at their limit.
const notReturned = "has not returned"

// hmm is open-gpu-kernel-modules #901: with HMM on, CUDA fails to start on kernels of
// Enterprise Linux 9.
func hmm(f *Facts) []Finding {
	h := f.Host
	started := f.Opening == nil || !slices.Contains([]cudart.Code{cudart.ErrInitializationError, cudart.ErrUnknown}, cudart.Code(f.Opening.Code)) && !strings.Contains(f.Opening.Error, notReturned)
	if started || !strings.Contains(h.Kernel.Release, ".el9") || !h.NVIDIA.OpenModule || h.NVIDIA.HMMDisabled == nil || *h.NVIDIA.HMMDisabled {
		return nil
	}
	return finding(Finding{
		Summary: "CUDA does not start, as is known of heterogeneous memory management (HMM) on this kernel",
		Evidence: []string{f.Opening.Error, "kernel " + h.Kernel.Release + ", open kernel module " + h.NVIDIA.DriverVersion,
			"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm is N"},
		Cause:  "the open kernel module's HMM fails on kernels of Enterprise Linux 9",
		Cost:   noCUDA,
		Remedy: "echo 'options nvidia_uvm uvm_disable_hmm=1' | sudo tee /etc/modprobe.d/uvm.conf; then reload nvidia_uvm (sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm) or reboot",
	})
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
	out := Finding{Summary: "CUDA does not start", Evidence: []string{f.Opening.Error}, Cost: noCUDA,
		Remedy: "see the error, whether nvidia-smi works, and dmesg for lines with NVRM and Xid"}
	if means, remedy := codeText(code); remedy != "" {
		out.Cause, out.Remedy = means, remedy
	}
	return finding(out)
}
