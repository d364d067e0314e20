//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestDriverExports(t *testing.T) {
	t.Parallel()
	tests := map[string]map[cudart.Version]bool{
		"cuMemAlloc_v2":         {11080: true, 12040: true, 12080: true, 13000: true},
		"cuGetProcAddress":      {11080: true},
		"cuGetProcAddress_v2":   {12040: true, 12080: true, 13000: true},
		"cuMemPrefetchAsync":    {11080: true, 12040: true, 12080: true},
		"cuMemPrefetchAsync_v2": {12040: true, 12080: true, 13000: true},
		"cuMemcpyBatchAsync":    {12080: true},
		"cuMemcpyBatchAsync_v2": {13000: true},
		"cuStreamGetId":         {12040: true, 12080: true, 13000: true},
		"cudaMalloc":            {},
		"cuModuleLoadDataEx":    {11080: true, 12040: true, 12080: true, 13000: true},
	}
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		l := open(t, cudasim.Config{API: cudart.DriverAPI, Version: v})
		for name, in := range tests {
			assert.Equal(t, in[v], l.Symbol(name) != 0, "%s in %s", name, v)
		}
		assert.Equal(t, "simulated libcuda "+v.String(), l.String())
	}
	_, err := cudasim.New(cudasim.Config{API: cudart.DriverAPI, NoDriver: true})
	require.Error(t, err)
	_, err = cudasim.New(cudasim.Config{API: 7})
	require.Error(t, err)
}

// cuGetProcAddress returns the function of the version that it is asked for.
func TestProcAddressIsOfTheVersion(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{API: cudart.DriverAPI, Version: 12080})
	find := func(name string, version uintptr) (cudart.Code, uintptr, int32) {
		cName := append([]byte(name), 0)
		out := new(struct {
			entry  uintptr
			status int32
		})
		code := l.call("cuGetProcAddress_v2", addr(&cName[0]), addr(&out.entry), version, 1, addr(&out.status))
		return code, out.entry, out.status
	}
	for name, versions := range map[string]map[uintptr]string{
		"cuMemAlloc":         {11040: "cuMemAlloc_v2", 13000: "cuMemAlloc_v2"},
		"cuMemPrefetchAsync": {11040: "cuMemPrefetchAsync", 12020: "cuMemPrefetchAsync_v2"},
		"cuMemcpyBatchAsync": {12080: "cuMemcpyBatchAsync"},
	} {
		for version, want := range versions {
			code, entry, status := find(name, version)
			assert.Equal(t, cudart.Code(0), code, name)
			assert.Equal(t, l.Symbol(want), entry, "%s of %d", name, version)
			assert.Zero(t, status)
		}
	}
	code, entry, status := find("cuMemcpyBatchAsync", 11040)
	assert.Equal(t, []any{cudart.ErrSymbolNotFound, uintptr(0), int32(2)}, []any{code, entry, status}, "newer than the version")
	code, entry, status = find("cuNoSuchFunction", 13000)
	assert.Equal(t, []any{cudart.ErrSymbolNotFound, uintptr(0), int32(1)}, []any{code, entry, status})
}

// No thread has a context from the start, and calls without one are neither counted nor fail
// by a fault. A reset takes the context from all threads.
func TestThreadsNeedAContext(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{API: cudart.DriverAPI, Devices: make([]cudasim.DeviceConfig, 2)})
	assert.Equal(t, cudart.ErrInitializationError, l.call("cuDeviceGetCount", addr(new(int32))))
	l.ok("cuInit", 0)
	l.Fail("cuMemAlloc_v2", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	p := new(uintptr)
	assert.Equal(t, cudart.Code(201), l.call("cuMemAlloc_v2", addr(p), 64))
	assert.Equal(t, cudart.Code(201), l.call("cuCtxGetDevice", addr(new(int32))))
	assert.Equal(t, cudart.Code(201), l.call("cuCtxSetCurrent", 4711))
	assert.Zero(t, l.Calls("cudaMalloc"))

	context := get[uintptr](l, "cuDevicePrimaryCtxRetain", 1)
	assert.Equal(t, []int{1}, l.Contexts())
	l.ok("cuCtxSetCurrent", context)
	assert.EqualValues(t, 1, get[int32](l, "cuCtxGetDevice"))
	assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cuMemAlloc_v2", addr(p), 64), "the fault")
	l.ok("cuMemAlloc_v2", addr(p), 64)
	assert.Equal(t, 2, l.Calls("cudaMalloc"))
	l.ok("cuMemFree_v2", *p)
	done := make(chan cudart.Code)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		done <- l.call("cuMemAlloc_v2", addr(p), 64)
	}()
	assert.Equal(t, cudart.Code(201), <-done, "another thread")

	l.ok("cuDevicePrimaryCtxReset_v2", 1)
	assert.Equal(t, cudart.ErrContextIsDestroyed, l.call("cuMemAlloc_v2", addr(p), 64))
	active := new(int32)
	l.ok("cuDevicePrimaryCtxGetState", 1, addr(new(uint32)), addr(active))
	assert.Zero(t, *active)
	assert.Equal(t, context, get[uintptr](l, "cuDevicePrimaryCtxRetain", 1), "the same handle")
	l.ok("cuMemAlloc_v2", addr(p), 64)
	l.ok("cuMemFree_v2", *p)
	l.ok("cuDevicePrimaryCtxRelease_v2", 1)
	l.ok("cuDevicePrimaryCtxRelease_v2", 1)
	assert.Empty(t, l.Contexts())
	assert.Equal(t, cudart.Code(201), l.call("cuDevicePrimaryCtxRelease_v2", 1))
}

// Every function of libcuda that stands for one of libcudart is counted, and fails, as that one.
func TestDriverFunctionsCountAsTheRuntimes(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{API: cudart.DriverAPI})
	l.ok("cuInit", 0)
	l.ok("cuCtxSetCurrent", get[uintptr](l, "cuDevicePrimaryCtxRetain", 0))
	a, b := get[uintptr](l, "cuMemAlloc_v2", 64), get[uintptr](l, "cuMemAlloc_v2", 64)
	host := get[uintptr](l, "cuMemHostAlloc", 64, 0)
	var seen []string
	l.OnCall(func(fn string, _ int) { seen = append(seen, fn) })
	l.ok("cuMemcpyHtoDAsync_v2", a, host, 64, 0)
	l.ok("cuMemcpyDtoDAsync_v2", b, a, 64, 0)
	l.ok("cuMemcpyDtoHAsync_v2", host, b, 64, 0)
	l.ok("cuMemcpyAsync", a, host, 64, 0)
	l.ok("cuStreamSynchronize", 0)
	l.OnCall(nil)
	assert.Equal(t, []string{"cudaMemcpyAsync", "cudaMemcpyAsync", "cudaMemcpyAsync", "cudaMemcpyAsync", "cudaStreamSynchronize"}, seen)
	l.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 2, Code: cudart.ErrUnknown})
	l.ok("cuMemcpyHtoDAsync_v2", a, host, 64, 0)
	assert.Equal(t, cudart.ErrUnknown, l.call("cuMemcpyDtoHAsync_v2", host, a, 64, 0))
	assert.Equal(t, 6, l.Calls("cudaMemcpyAsync"))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cuMemcpyHtoD_v2", host+4096, host, 64), "not the device's")
	for _, p := range []uintptr{a, b} {
		l.ok("cuMemFree_v2", p)
	}
	l.ok("cuMemFreeHost", host)
}
