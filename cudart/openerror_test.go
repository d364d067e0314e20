package cudart_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// The code that CUDA returns decides the remedy, because files of the host show little of
// it.
func TestOpenExplainsWhatCUDAReturns(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{})
	remedies := map[string]bool{}
	for code, says := range map[cudart.Code][]string{
		cudart.ErrMemoryAllocation:           {"memory", "is full", "nvidia-smi", "container's limit"},
		cudart.ErrInitializationError:        {"cannot be opened", "/dev/nvidia*", "fork"},
		cudart.ErrStubLibrary:                {"stub", "linking only", "LD_LIBRARY_PATH", "/etc/ld.so.conf.d"},
		cudart.ErrInsufficientDriver:         {"driver is older than the library", "update the driver", "580", "525", "450", "PINNED_CUDART"},
		cudart.ErrDevicesUnavailable:         {"busy", "exclusive", "prohibited", "MIG"},
		cudart.ErrInvalidDevice:              {"does not exist", "CUDA_VISIBLE_DEVICES", "nvidia-smi -L"},
		cudart.ErrSystemNotReady:             {"not running", "nvidia-fabricmanager", "driver's version"},
		cudart.ErrSystemDriverMismatch:       {"different versions", "after an upgrade", "reload"},
		cudart.ErrCompatNotSupportedOnDevice: {"forward compatibility", "/usr/local/cuda/compat", "update the driver"},
		cudart.ErrUnknown:                    {"suspend", "dmesg", "nvidia_uvm", "/dev/nvidia-uvm"},
	} {
		var open *cudart.OpenError
		for _, function := range []string{"cudaDriverGetVersion", "cudaRuntimeGetVersion", "cudaGetDeviceCount"} {
			sim.Fail(function, cudasim.Fault{Code: code})
			_, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
			require.ErrorIs(t, err, code)
			require.ErrorContains(t, err, function)
			require.ErrorContains(t, err, code.Error())
			require.ErrorAs(t, err, &open)
			require.ErrorContains(t, err, "what helps: "+open.Remedy())
			require.NotContains(t, err.Error(), "driver: libcuda", "the host's driver has nothing to do with it")
		}
		for _, word := range says {
			assert.Contains(t, open.Remedy(), word, "%v", code)
		}
		assert.False(t, remedies[open.Remedy()], "%v: its own remedy", code)
		remedies[open.Remedy()] = true
	}
}

// cudaErrorNoDevice of cudaGetDeviceCount is a result, of other calls an error.
func TestOpenWithoutDevices(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{})
	sim.Fail("cudaGetDeviceCount", cudasim.Fault{Code: cudart.ErrNoDevice})
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	assert.Empty(t, rt.Devices())
	require.NoError(t, rt.Close())

	sim.Fail("cudaGetDeviceProperties", cudasim.Fault{Code: cudart.ErrNoDevice})
	_, err = cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.ErrorIs(t, err, cudart.ErrNoDevice)
	require.ErrorContains(t, err, "what helps: CUDA shows this process no GPU: see CUDA_VISIBLE_DEVICES")
}

func TestRemedyOfAnyError(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]string{
		cudart.ErrNoLibrary: "install CUDA's runtime library",
		fmt.Errorf("%w that libcudart.so.12 can use", cudart.ErrNoDriver):         "install an NVIDIA driver",
		&cudart.Error{Op: "cudaGetDeviceCount", Code: cudart.ErrECCUncorrectable}: "see the error",
		errors.New("odd"): "see the error",
	} {
		assert.Contains(t, (&cudart.OpenError{Err: err}).Remedy(), want, "%v", err)
	}
}

// What the driver's library says itself outweighs a libcudart that cannot use it, and a missing driver everything
// else; then comes the error of a library that was
// called, then a library that is too new, then files that are not a library.
func TestOpenReportsTheMostRelevantReason(t *testing.T) {
	t.Parallel()
	called := func(code cudart.Code) error { return &cudart.Error{Op: "cudaGetDeviceCount", Code: code} }
	driver := fmt.Errorf("%w that x can use", cudart.ErrNoDriver)
	tooNew, notReady, unknown := called(cudart.ErrInsufficientDriver), called(cudart.ErrSystemNotReady), called(cudart.ErrUnknown)
	dlopen := errors.New("dlopen: no such file")
	stub := &cudart.Error{Op: "cudaDriverGetVersion", Code: cudart.ErrStubLibrary, API: cudart.DriverAPI}
	damaged := fmt.Errorf("%w: an empty file", cudart.ErrDamagedDriver)
	for _, tt := range []struct {
		errs []error
		want error
	}{
		{nil, cudart.ErrNoLibrary},
		{[]error{dlopen, errors.New("no function cudaRuntimeGetVersion in it")}, cudart.ErrNoLibrary},
		{[]error{tooNew, dlopen}, tooNew},
		{[]error{tooNew, notReady, dlopen, unknown}, notReady},
		{[]error{dlopen, tooNew, unknown, driver}, driver},
		{[]error{driver, stub}, stub},
		{[]error{driver, dlopen, damaged}, damaged},
		{[]error{tooNew, damaged}, tooNew},
	} {
		var attempts []cudart.Attempt
		for _, err := range tt.errs {
			attempts = append(attempts, cudart.Attempt{Err: err})
		}
		assert.Equal(t, tt.want, cudart.Verdict(attempts), "%v", tt.errs)
	}
}

// Without a driver a runtime library alone does not help.
func TestNoLibraryAndNoDriver(t *testing.T) {
	t.Parallel()
	neither := cudart.OpenError{Err: cudart.ErrNoLibrary}
	require.Contains(t, neither.Remedy(), "; and an NVIDIA GPU with its driver")
	require.ErrorContains(t, &neither, "what helps: "+neither.Remedy())
	for _, other := range []cudart.OpenError{
		{Err: cudart.ErrNoLibrary, Driver: cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"}},
		{Err: cudart.ErrNoDriver},
	} {
		assert.NotContains(t, other.Error(), "NVIDIA GPU with its driver", "%v", other)
	}
}

func TestDriverFactsNameEachPart(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "libcuda none, kernel module none, device nodes none", cudart.DriverFacts{}.String())
	assert.Equal(t, "libcuda /usr/lib/libcuda.so.1, kernel module 580.159.04, device nodes /dev/nvidia0 /dev/nvidiactl", cudart.DriverFacts{
		LibPath: "/usr/lib/libcuda.so.1", KernelModuleVersion: "580.159.04", DeviceNodes: []string{"/dev/nvidia0", "/dev/nvidiactl"},
	}.String())
}
