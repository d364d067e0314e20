package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
)

// A startCode is a check of the error with which CUDA failed to start.
type startCode struct {
	id    string
	codes []cudart.Code
}

// startCodes are the codes that name a state of the host. Their pages have the same cause and remedy
// as the errors of package cudart.
var startCodes = []startCode{
	{"stub_library", []cudart.Code{cudart.ErrStubLibrary}},
	{"driver_too_old", []cudart.Code{cudart.ErrInsufficientDriver}},
	{"driver_mismatch", []cudart.Code{cudart.ErrSystemDriverMismatch}},
	{"compat_library", []cudart.Code{cudart.ErrCompatNotSupportedOnDevice}},
	{"fabric_not_ready", []cudart.Code{cudart.ErrSystemNotReady}},
	{"gpus_unavailable", []cudart.Code{cudart.ErrDevicesUnavailable}},
	{"open_out_of_memory", []cudart.Code{cudart.ErrMemoryAllocation}},
	{"mps_unavailable", []cudart.Code{cudart.ErrMpsConnectionFailed, cudart.ErrMpsRpcFailure,
		cudart.ErrMpsServerNotReady, cudart.ErrMpsMaxClientsReached, cudart.ErrMpsMaxConnectionsReached, cudart.ErrMpsClientTerminated}},
	{"driver_init_failed", []cudart.Code{cudart.ErrInitializationError}},
	{"driver_unknown_error", []cudart.Code{cudart.ErrUnknown}},
}

// startChecks find why CUDA does not start on a host that has what it needs.
var startChecks = slices.Concat(
	[]Check{
		{ID: "driver_hangs", Suppresses: []string{"failed_open", "driver_init_failed", "driver_unknown_error", "no_device", "missing_gpus"},
			Host: hung, Device: hungDevice},
		{ID: "driver_crashes", Suppresses: []string{"failed_open"}, Host: crashed, Device: crashedDevice},
		{ID: "hmm_breaks_start", Suppresses: []string{"driver_hangs", "driver_init_failed", "driver_unknown_error"}, Host: unlessUsable(hmm)},
	},
	codeChecks(),
	[]Check{{ID: "failed_open", Host: unlessUsable(failedOpen)}},
)

func codeChecks() (all []Check) {
	for _, s := range startCodes {
		all = append(all, Check{ID: s.id, Host: unlessUsable(func(f *Facts) []Finding {
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
	out := Finding{Summary: fmt.Sprintf("CUDA does not start: %v", code), Evidence: []string{f.Opening.Error}}
	if code == cudart.ErrSystemDriverMismatch {
		for _, l := range f.Host.NVIDIA.Libraries {
			out.Evidence = append(out.Evidence, fmt.Sprintf("%s beside kernel module %s", l.Path, f.Host.NVIDIA.DriverVersion))
		}
	}
	return out
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
	means, _ := meaningOf(code)
	return finding(Finding{Summary: "CUDA does not start", Evidence: []string{f.Opening.Error}, means: means})
}
