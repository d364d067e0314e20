package cudart_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/dynlib"
	"github.com/gopinned/pinned/internal/testgpu"
)

// These tests are about libcuda instead of libcudart. All others run with it as well: see
// testgpu.

// A partialLibrary is a simulated library that lacks some functions.
type partialLibrary struct {
	*cudasim.Sim
	lacks []string
}

func (l partialLibrary) Symbol(name string) uintptr {
	if slices.Contains(l.lacks, name) {
		return 0
	}
	return l.Sim.Symbol(name)
}

// driverSim starts a simulated libcuda and opens it.
func driverSim(t *testing.T, cfg cudasim.Config) (*cudasim.Sim, *cudart.Runtime, *cudart.Device) {
	t.Helper()
	cfg.API = cudart.DriverAPI
	sim, rt := testgpu.Sim(t, cfg)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return sim, rt, dev
}

// callOf calls a function of a simulated library as other code of the process would.
func callOf(t *testing.T, sim *cudasim.Sim, fn string, args ...uintptr) {
	t.Helper()
	entry := sim.Symbol(fn)
	require.NotZero(t, entry, fn)
	require.Zero(t, dynlib.Call(entry, args...), fn)
}

func TestLibraryNamesItsAPI(t *testing.T) {
	t.Parallel()
	for _, version := range []cudart.Version{11080, 12040, 12080, 13000} {
		_, rt, dev := driverSim(t, cudasim.Config{Version: version})
		lib := rt.Library()
		assert.Equal(t, cudart.DriverAPI, lib.API)
		assert.Equal(t, version, lib.Runtime)
		assert.Equal(t, version, lib.Driver)
		assert.Empty(t, lib.Missing, "%v", version)
		assert.Equal(t, version >= 12080, rt.Library().CopyBatch)
		assert.Equal(t, "Simulated GPU", dev.Name())
		assert.Equal(t, "GPU-73696d75-6c61-7465-642d-677075000000", dev.UUID())
	}
	_, rt := testgpu.Sim(t, cudasim.Config{API: cudart.RuntimeAPI})
	assert.Equal(t, cudart.RuntimeAPI, rt.Library().API)
	assert.Equal(t, []string{"any API", "runtime API", "driver API"}, []string{cudart.AnyAPI.String(), cudart.RuntimeAPI.String(), cudart.DriverAPI.String()})
}

// A library of the other API is refused, by a name in Options as by one in the environment.
func TestAPIThatIsAskedForIsRequired(t *testing.T) {
	sim := newSim(t, cudasim.Config{API: cudart.DriverAPI})
	_, err := cudart.Open(context.Background(), cudart.Options{Source: sim, API: cudart.RuntimeAPI})
	require.ErrorContains(t, err, "it exports the driver API, and Options.API or PINNED_CUDA_API asks for the runtime API")
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim, API: cudart.DriverAPI})
	require.NoError(t, err)
	require.NoError(t, rt.Close())

	t.Setenv("PINNED_CUDA_API", "runtime")
	rt, err = cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err, "a Source needs no environment")
	require.NoError(t, rt.Close())

	_, err = cudart.Open(context.Background(), cudart.Options{API: 3})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	t.Setenv("PINNED_CUDA_API", "nvidia")
	_, err = cudart.Open(context.Background(), cudart.Options{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorContains(t, err, "PINNED_CUDA_API=nvidia: must be runtime or driver")
}

// Drivers before 11.3 have no cuGetProcAddress: functions are found by their exported names.
func TestFunctionsAreFoundByNameWithoutProcAddress(t *testing.T) {
	t.Parallel()
	for _, version := range []cudart.Version{11080, 13000} {
		sim := newSim(t, cudasim.Config{API: cudart.DriverAPI, Version: version})
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: partialLibrary{sim, []string{"cuGetProcAddress", "cuGetProcAddress_v2"}}})
		require.NoError(t, err)
		assert.Empty(t, rt.Library().Missing)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		require.NoError(t, useDevice(t.Context(), dev))
		require.NoError(t, rt.Close())
	}
}

func TestDriverWithoutAFunctionIsRefusedOrReported(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{API: cudart.DriverAPI})
	open := func(lacks ...string) (*cudart.Runtime, error) {
		lacks = append(lacks, "cuGetProcAddress_v2")
		return cudart.Open(context.Background(), cudart.Options{Source: partialLibrary{sim, lacks}})
	}
	_, err := open("cuLaunchHostFunc")
	require.NotErrorIs(t, err, cudart.ErrInsufficientDriver)
	require.NotErrorIs(t, err, cudart.ErrNoLibrary)
	require.ErrorContains(t, err, "the driver's library is not whole: simulated libcuda 13.0, for up to CUDA 13.0, does not export cuLaunchHostFunc")
	require.ErrorContains(t, err, "what helps: see which package its libcuda.so.1 belongs to")

	rt, err := open("cuMemcpyBatchAsync_v2")
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close()) }()
	assert.Equal(t, []string{"cuMemcpyBatchAsync_v2"}, rt.Library().Missing)
	assert.False(t, rt.Library().CopyBatch)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, host, mem := stream(t, dev), pinned(t, dev, 64), device(t, dev, 64)
	var batch cudart.CopyBatch
	batch.ToDevice(mem, unsafe.Pointer(&host[0]), 64)
	err = s.CopyBatch(&batch)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "cuMemcpyBatchAsync_v2: not exported by simulated libcuda 13.0")
}

// A libcuda that refuses has its code, its remedy, and both names of the code in the error.
func TestDriverThatRefusesIsExplained(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		fn     string
		code   cudart.Code
		text   string
		remedy string
	}{
		{"", cudart.ErrStubLibrary, "cudaErrorStubLibrary (34): CUDA driver is a stub library (the driver's CUDA_ERROR_STUB_LIBRARY)", "stubs directory"},
		{"cuInit", cudart.ErrSystemNotReady, "cuInit: for cudaGetDeviceCount", "fabricmanager"},
		{"cuInit", cudart.ErrSystemDriverMismatch, "(the driver's CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)", "reload the nvidia modules"},
		{"cuInit", cudart.ErrCompatNotSupportedOnDevice, "(the driver's CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE)", "compat directory"},
		{"cuInit", cudart.ErrUnknown, "(the driver's CUDA_ERROR_UNKNOWN)", "nvidia_uvm"},
		{"cudaGetDeviceCount", cudart.ErrDevicesUnavailable, "(the driver's CUDA_ERROR_DEVICE_UNAVAILABLE)", "compute mode"},
	} {
		sim := newSim(t, cudasim.Config{API: cudart.DriverAPI})
		sim.Fail(tt.fn, cudasim.Fault{Code: tt.code, Times: -1})
		_, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.ErrorIs(t, err, tt.code)
		assert.ErrorContains(t, err, tt.text)
		var open *cudart.OpenError
		require.ErrorAs(t, err, &open)
		assert.Contains(t, open.Remedy(), tt.remedy)
	}

	sim := newSim(t, cudasim.Config{API: cudart.DriverAPI, Devices: []cudasim.DeviceConfig{}})
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err, "a host without devices")
	assert.Zero(t, rt.DeviceCount())
	require.NoError(t, rt.Close())
}

// The driver's library is asked for, and there is none: that is no driver, and no missing
// libcudart.
func TestMissingDriverLibraryIsNoDriver(t *testing.T) {
	if testgpu.Real() {
		t.Skip("this machine has a driver")
	}
	_, err := cudart.Open(context.Background(), cudart.Options{API: cudart.DriverAPI})
	require.ErrorIs(t, err, cudart.ErrNoDriver)
	assert.NotContains(t, err.Error(), "libcudart")
}

func TestErrorsHaveBothNames(t *testing.T) {
	t.Parallel()
	_, _, dev := driverSim(t, cudasim.Config{})
	_, err := dev.Malloc(1 << 50)
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.ErrorContains(t, err, "cudaMalloc: 1125899906842624 bytes")
	assert.ErrorContains(t, err, "cudaErrorMemoryAllocation (2): out of memory (the driver's CUDA_ERROR_OUT_OF_MEMORY)")

	_, rt := testgpu.Sim(t, cudasim.Config{API: cudart.RuntimeAPI})
	dev, err = rt.Device(0)
	require.NoError(t, err)
	_, err = dev.Malloc(1 << 50)
	assert.NotContains(t, err.Error(), "CUDA_ERROR")
}

// onNewThread calls f on an OS thread of its own.
func onNewThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with the goroutine
		f()
	}()
	<-done
}

// Open makes no context. The first call that needs one makes it, once for all threads; if that
// fails, the error is that of making it.
func TestPrimaryContextIsRetainedOnce(t *testing.T) {
	t.Parallel()
	sim, _, dev := driverSim(t, cudasim.Config{})
	assert.Empty(t, sim.Contexts())
	_, err := dev.Attribute(cudart.AttrIntegrated)
	require.NoError(t, err)
	assert.Empty(t, sim.Contexts())

	sim.Fail("cuDevicePrimaryCtxRetain", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, _, err = dev.MemInfo()
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	require.ErrorContains(t, err, "cuDevicePrimaryCtxRetain: for cudaMemGetInfo")
	assert.Empty(t, sim.Contexts())

	retained := sim.Calls("cuDevicePrimaryCtxRetain")
	for range 20 {
		onNewThread(func() {
			_, _, err := dev.MemInfo()
			assert.NoError(t, err)
		})
	}
	assert.Equal(t, []int{0}, sim.Contexts())
	assert.Equal(t, 1, sim.Calls("cuDevicePrimaryCtxRetain")-retained)
	assert.Equal(t, 20, sim.Calls("cudaMemGetInfo"), "calls that found no context do not count")
}

// On a thread without a context some functions call their arguments invalid: cuMemcpyBatchAsync does.
func TestBatchesOfNewThreads(t *testing.T) {
	t.Parallel()
	_, _, dev := driverSim(t, cudasim.Config{})
	s, host, mem := stream(t, dev), pinned(t, dev, 64), device(t, dev, 64)
	for range 20 {
		onNewThread(func() {
			var batch cudart.CopyBatch
			batch.ToDevice(mem, unsafe.Pointer(&host[0]), len(host))
			assert.NoError(t, s.CopyBatch(&batch))
		})
	}
	require.NoError(t, s.Synchronize(t.Context()))

	var outside cudart.CopyBatch
	outside.ToDevice(mem+64, unsafe.Pointer(&host[0]), len(host))
	require.ErrorIs(t, s.CopyBatch(&outside), cudart.ErrInvalidValue)
}

// Another library retains and releases the same context.
func TestContextOfAnotherLibraryIsShared(t *testing.T) {
	t.Parallel()
	sim, _, dev := driverSim(t, cudasim.Config{})
	context := new(uintptr)
	callOf(t, sim, "cuDevicePrimaryCtxRetain", uintptr(unsafe.Pointer(context)), 0)
	s, mem := stream(t, dev), device(t, dev, 64)
	callOf(t, sim, "cuDevicePrimaryCtxRelease_v2", 0)
	require.NoError(t, s.Memset(mem, 1, 64))
	require.NoError(t, s.Synchronize(t.Context()))
	assert.Equal(t, []int{0}, sim.Contexts())
}

// Other code resets the device. What was made before is lost, and says so; what is made
// afterwards works, with one device and with several.
func TestDeviceThatIsResetBeneath(t *testing.T) {
	t.Parallel()
	for _, devices := range []int{1, 2} {
		sim := newSim(t, cudasim.Config{API: cudart.DriverAPI, Devices: make([]cudasim.DeviceConfig, devices)})
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(devices - 1)
		require.NoError(t, err)
		lost, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		mem, err := dev.Malloc(64)
		require.NoError(t, err)
		require.NoError(t, lost.Memset(mem, 1, 64))
		end := lost.Timeline().End()
		callOf(t, sim, "cuDevicePrimaryCtxReset_v2", uintptr(devices-1))

		onNewThread(func() { assert.ErrorIs(t, lost.Memset(mem, 1, 64), cudart.ErrContextIsDestroyed) })
		require.ErrorIs(t, lost.Memset(mem, 1, 64), cudart.ErrContextIsDestroyed)
		onNewThread(func() { assert.ErrorIs(t, lost.Close(), cudart.ErrContextIsDestroyed) })
		require.NoError(t, lost.Close(), "the stream went with its context")
		assert.Empty(t, sim.Contexts(), "none of these calls has made one")
		require.NoError(t, end.Wait(t.Context()), "work of a context that is gone uses no memory")

		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		again, err := dev.Malloc(64)
		require.NoError(t, err)
		require.NoError(t, s.Memset(again, 1, 64))
		require.NoError(t, s.SynchronizeBlocking())
		assert.Equal(t, []int{devices - 1}, sim.Contexts())
		assert.Empty(t, sim.Misuses())
		require.NoError(t, s.Close())
		require.NoError(t, dev.Free(again))
		require.NoError(t, rt.Close())
	}
}

// Copies of no bytes and of each kind take the driver's function for it.
func TestCopiesTakeTheFunctionOfTheirKind(t *testing.T) {
	t.Parallel()
	sim, _, dev := driverSim(t, cudasim.Config{})
	s, host, a, b := stream(t, dev), pinned(t, dev, 64), device(t, dev, 64), device(t, dev, 64)
	p := unsafe.Pointer(&host[0])
	copy(host, strings.Repeat("pinned! ", 8))
	want := string(host)
	require.NoError(t, s.CopyToDevice(a, p, 64))
	require.NoError(t, s.CopyOnDevice(b, a, 64))
	require.NoError(t, s.Memset(a, 0, 64))
	require.NoError(t, s.Memset(a, 0, 0))
	require.NoError(t, s.CopyToHost(p, a, 64))
	require.NoError(t, s.Synchronize(context.Background()))
	assert.Equal(t, strings.Repeat("\x00", 64), string(host))
	require.NoError(t, dev.CopyToHost(p, b, 64))
	assert.Equal(t, want, string(host))
	require.NoError(t, dev.CopyToDevice(a, p, 0))
	require.NoError(t, s.CopyToDevice(a, p, 0))
	assert.Equal(t, []int{3, 1}, []int{sim.Calls("cudaMemcpyAsync"), sim.Calls("cudaMemsetAsync")}, "none of 0 bytes")
	require.ErrorIs(t, s.CopyToHost(nil, a, 64), cudart.ErrInvalidValue)

	heap := cudart.DevPtr(uintptr(unsafe.Pointer(new([64]byte)))) // a copy by addresses alone would accept it
	require.ErrorIs(t, s.CopyToDevice(heap, p, 64), cudart.ErrInvalidValue)
	require.ErrorIs(t, s.CopyToHost(p, heap, 64), cudart.ErrInvalidValue)
	require.ErrorIs(t, s.CopyOnDevice(a, heap, 64), cudart.ErrInvalidValue)
	require.ErrorIs(t, dev.CopyToDevice(heap, p, 64), cudart.ErrInvalidValue)
	require.ErrorIs(t, dev.CopyToHost(p, heap, 64), cudart.ErrInvalidValue)
}

// libcudart makes one kind of memory of several attributes of libcuda.
func TestPointerAttributesAreTheSameByBothAPIs(t *testing.T) {
	t.Parallel()
	for _, api := range []cudart.API{cudart.RuntimeAPI, cudart.DriverAPI} {
		_, rt := testgpu.Sim(t, cudasim.Config{API: api, Devices: make([]cudasim.DeviceConfig, 2)})
		dev, err := rt.Device(1)
		require.NoError(t, err)
		managed, err := dev.MallocManaged(64)
		require.NoError(t, err)
		host, mem, heap := uintptr(pointer(pinned(t, dev, 64))), device(t, dev, 64), uintptr(unsafe.Pointer(new([64]byte)))
		for _, tt := range []struct {
			at   uintptr
			want cudart.PointerAttributes
		}{
			{uintptr(mem) + 8, cudart.PointerAttributes{Type: cudart.MemoryDevice, Device: 1, DevicePtr: mem + 8}},
			{host + 8, cudart.PointerAttributes{Type: cudart.MemoryHost, Device: 1, DevicePtr: cudart.DevPtr(host + 8), HostPtr: host + 8}},
			{uintptr(managed), cudart.PointerAttributes{Type: cudart.MemoryManaged, Device: 1, DevicePtr: cudart.DevPtr(managed), HostPtr: uintptr(managed)}},
			{heap, cudart.PointerAttributes{Type: cudart.MemoryUnregistered, Device: -2, HostPtr: heap}},
		} {
			got, err := dev.PointerAttributes(tt.at)
			require.NoError(t, err)
			assert.Equal(t, tt.want, got, "%v", api)
		}
		require.NoError(t, dev.Free(cudart.DevPtr(managed)))
	}
}

// libcuda refuses access to the same context with the code of a thread that has none.
func TestDeviceIsNoPeerOfItself(t *testing.T) {
	t.Parallel()
	_, _, dev := driverSim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	require.ErrorIs(t, dev.EnablePeerAccess(dev), cudart.ErrInvalidDevice)
}
