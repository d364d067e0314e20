//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// code has a kernel of one pointer, and one of others.
const code = `.version 7.0
.target sm_75
.address_size 64
.visible .entry run(.param .u64 p) { ret; }
.visible .entry narrow(.param .u8 a, .param .u16 b, .param .f32 c, .param .f64 d, .param .align 8 .b8 e[24]) .maxntid 64, 1, 1 { ret; }
.visible .entry missing() { ret; }
`

// withRun is a simulator whose kernel run is f.
func withRun(f cudasim.KernelFunc) cudasim.Config {
	return cudasim.Config{Kernels: map[string]cudasim.KernelFunc{"run": f, "narrow": func(*cudasim.Launch) {}}}
}

// load loads code until the end of the test.
func (l *lib) load(code string) (module uintptr) {
	l.t.Helper()
	module = l.loadDirty(code)
	l.t.Cleanup(func() { l.ok("cuModuleUnload", module) })
	return module
}

func (l *lib) loadDirty(code string) uintptr {
	l.t.Helper()
	return get[uintptr](l, "cuModuleLoadDataEx", addr(&append([]byte(code), 0)[0]), 0, 0, 0)
}

func (l *lib) kernel(module uintptr, name string) uintptr {
	l.t.Helper()
	return get[uintptr](l, "cuModuleGetFunction", module, addr(&append([]byte(name), 0)[0]))
}

// launch launches one thread with arguments of 8 bytes.
func (l *lib) launch(kernel, stream uintptr, args ...uint64) cudart.Code {
	l.t.Helper()
	values, list := append([]uint64(nil), args...), []uintptr{0}
	for i := range values {
		list = append(list[:i], addr(&values[i]), 0)
	}
	return l.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, addr(&list[0]), 0)
}

func TestKernelsRunInTheOrderOfTheirStream(t *testing.T) {
	t.Parallel()
	locked(t)
	var saw []byte
	l := open(t, withRun(func(l *cudasim.Launch) {
		b := l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 2)
		saw = append(saw, b[0])
		b[1]++
	}))
	s, p, host := l.stream(), l.device(2), l.pinned(2)
	run := l.kernel(l.load(code), "run")
	l.ok("cudaMemset", p, 0, 2)
	l.Hold()
	for i := range uintptr(3) {
		l.ok("cudaMemsetAsync", p, i+1, 1, s)
		require.Equal(t, cudart.Code(0), l.launch(run, s, uint64(p)))
	}
	l.ok("cudaMemcpyAsync", addr(&host[0]), p, 2, 2, s)
	assert.Empty(t, saw)
	assert.Equal(t, 7, l.PendingCopies())
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, []byte{1, 2, 3}, saw)
	assert.Equal(t, []byte{3, 3}, host[:2])
}

// What a launch was called with is what the function gets, whatever becomes of it after the call.
func TestArgumentsAreThoseOfTheCall(t *testing.T) {
	t.Parallel()
	locked(t)
	var got *cudasim.Launch
	cfg := withRun(nil)
	cfg.Kernels["narrow"] = func(l *cudasim.Launch) { got = l }
	l := open(t, cfg)
	narrow, s := l.kernel(l.load(code), "narrow"), l.stream()
	a, b, c, d, e := uint32(0xffffff01), uint32(0xffff0203), float32(1.5), -2.5, [4]uint64{1, 2, 3, 4}
	list := []uintptr{addr(&a), addr(&b), addr(&c), addr(&d), addr(&e)}
	l.Hold()
	l.ok("cuLaunchKernel", narrow, 5, 6, 7, 8, 4, 2, 100, s, addr(&list[0]), 0)
	a, b, c, d, e[0] = 0, 0, 0, 0, 0
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	require.NotNil(t, got)
	assert.Equal(t, []any{uint64(1), uint64(0x203), float32(1.5), -2.5}, []any{cudasim.Arg[uint64](got, 0), cudasim.Arg[uint64](got, 1), cudasim.Arg[float32](got, 2), cudasim.Arg[float64](got, 3)})
	assert.Equal(t, []uint64{1, 2, 3}, cudasim.Elements[uint64](got.Raw(4)))
	assert.Equal(t, []any{"narrow", 0, [3]int{5, 6, 7}, [3]int{8, 4, 2}, 100},
		[]any{got.Kernel, got.Device, got.Grid, got.Block, got.SharedBytes})
}

// A kernel that accesses what the device cannot access ends there, and the device is unusable.
func TestIllegalAccessesBreakTheDevice(t *testing.T) {
	t.Parallel()
	plain := make([]byte, 100)
	for name, tt := range map[string]struct {
		at     func(l *lib) (p uintptr)
		n      int
		read   bool
		detail string
		code   cudart.Code
	}{
		"nothing":       {func(*lib) uintptr { return 0 }, 8, true, "reads 8 bytes at 0x0, which is host memory that is neither pinned nor managed", cudart.ErrIllegalAddress},
		"freed":         {func(l *lib) uintptr { p := get[uintptr](l, "cudaMalloc", 8); l.ok("cudaFree", p); return p }, 8, true, "which no device has allocated", cudart.ErrIllegalAddress},
		"beyond":        {func(l *lib) uintptr { return get[uintptr](l, "cudaMalloc", 8) + 1 }, 8, false, "where the allocation of 8 bytes", cudart.ErrIllegalAddress},
		"before":        {func(l *lib) uintptr { return get[uintptr](l, "cudaMalloc", 8) - 1 }, 8, false, "which no device has allocated", cudart.ErrIllegalAddress},
		"all":           {func(l *lib) uintptr { return get[uintptr](l, "cudaMalloc", 8) }, -1, false, "more than there are addresses", cudart.ErrIllegalAddress},
		"pageable":      {func(*lib) uintptr { return addr(&plain[0]) }, 8, true, "neither pinned nor managed", cudart.ErrIllegalAddress},
		"beyond pinned": {func(l *lib) uintptr { return addr(&l.pinnedDirty(8192)[8000]) }, 193, true, "neither pinned nor managed", cudart.ErrIllegalAddress},
		"of another": {func(l *lib) uintptr {
			l.ok("cudaSetDevice", 1)
			defer l.ok("cudaSetDevice", 0)
			return get[uintptr](l, "cudaMalloc", 8)
		}, 8, true, "of device 1", cudart.ErrIllegalAddress},
		"not a multiple": {func(l *lib) uintptr { return get[uintptr](l, "cudaMalloc", 16) + 4 }, 8, true, "values of 8 bytes at an address that is no multiple of 8", cudart.ErrMisalignedAddress},
		"read-only":      {func(l *lib) uintptr { return addr(&l.readOnly(4096)[0]) }, 8, false, "registered as read-only", cudart.ErrIllegalAddress},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := openDirty(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), Kernels: withRun(func(l *cudasim.Launch) {
				b := l.Write
				if tt.read {
					b = l.Read
				}
				cudasim.Elements[uint64](b(cudasim.Arg[cudart.DevPtr](l, 0), tt.n))
				t.Error("the kernel went on")
			}).Kernels})
			run, p, s := l.kernel(l.loadDirty(code), "run"), tt.at(l), l.stream2()
			require.Equal(t, cudart.Code(0), l.launch(run, s, uint64(p)))
			assert.Equal(t, tt.code, l.call("cudaStreamSynchronize", s))
			assert.Equal(t, tt.code, l.call("cudaMalloc", addr(new(uintptr)), 8))
			require.Len(t, l.Misuses(), 1)
			m := l.Misuses()[0]
			assert.Equal(t, "illegal access", m.Kind)
			assert.Equal(t, "kernel run", m.Call)
			assert.Contains(t, m.Detail, tt.detail)
		})
	}
}

// stream2 is a stream that the test need not destroy.
func (l *lib) stream2() uintptr { return get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0) }

// pinnedDirty is registered memory that stays so.
func (l *lib) pinnedDirty(n int) []byte {
	m := mapped(l.t, n)
	l.ok("cudaHostRegister", addr(&m[0]), uintptr(n), 0)
	return m
}

func (l *lib) readOnly(n int) []byte {
	m := mapped(l.t, n)
	l.ok("cudaHostRegister", addr(&m[0]), uintptr(n), 8)
	return m
}

// Pinned host memory across the seams of registrations, managed memory and the memory of an
// enabled peer are a kernel's, too.
func TestKernelsAccessMemoryOfAllKinds(t *testing.T) {
	t.Parallel()
	locked(t)
	cfg := withRun(func(l *cudasim.Launch) {
		for i := range l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 8192) {
			l.Write(cudasim.Arg[cudart.DevPtr](l, 0)+cudart.DevPtr(i), 1)[0] = byte(i)
		}
	})
	cfg.Devices = make([]cudasim.DeviceConfig, 2)
	l := open(t, cfg)
	run, s := l.kernel(l.load(code), "run"), l.stream()
	host := mapped(t, 8192)
	l.ok("cudaHostRegister", addr(&host[0]), 4096, 0)
	l.ok("cudaHostRegister", addr(&host[4096]), 4096, 0)
	managed := get[uintptr](l, "cudaMallocManaged", 8192, 1)
	l.ok("cudaSetDevice", 1)
	peer := get[uintptr](l, "cudaMalloc", 8192)
	l.ok("cudaSetDevice", 0)
	l.ok("cudaDeviceEnablePeerAccess", 1, 0)
	want := make([]byte, 8192)
	for i := range want {
		want[i] = byte(i)
	}
	for name, p := range map[string]uintptr{"host": addr(&host[0]), "managed": managed, "peer": peer} {
		require.Equal(t, cudart.Code(0), l.launch(run, s, uint64(p)), name)
		l.ok("cudaStreamSynchronize", s)
		got := mapped(t, 8192)
		if name == "host" { // copies end at the seams of registrations
			got = host
		} else {
			if name == "peer" {
				l.ok("cudaSetDevice", 1)
			}
			l.ok("cudaMemcpy", addr(&got[0]), p, 8192, 4)
			l.ok("cudaSetDevice", 0)
		}
		assert.Equal(t, want, got, name)
	}
	assert.Equal(t, map[int]int{0: 8192}, l.ManagedResidence(managed, 8192))
	l.ok("cudaDeviceDisablePeerAccess", 1)
	l.ok("cudaSetDevice", 1)
	l.ok("cudaFree", peer)
	l.ok("cudaSetDevice", 0)
	l.ok("cudaFree", managed)
	l.ok("cudaHostUnregister", addr(&host[0]))
	l.ok("cudaHostUnregister", addr(&host[4096]))
}

func TestWrongCallsForCodeAreRefused(t *testing.T) {
	t.Parallel()
	locked(t)
	cfg := withRun(func(*cudasim.Launch) {})
	cfg.Devices = make([]cudasim.DeviceConfig, 2)
	l := openDirty(t, cfg)
	out, name := addr(new(uintptr)), func(s string) uintptr { return addr(&append([]byte(s), 0)[0]) }
	log := make([]byte, 40)
	values := []uintptr{addr(&log[0]), uintptr(len(log))}
	options := []uint32{5, 6}
	other := ".version 7.0\n.target sm_75\n.entry f() {}\n"
	require.Equal(t, cudart.ErrNoKernelImageForDevice, l.call("cuModuleLoadDataEx", out, name(other), 2, addr(&options[0]), addr(&values[0])))
	assert.Equal(t, "simulated libcudart 13.0 runs Go functi\x00", string(log), "as much as fits")
	assert.Equal(t, cudart.ErrInvalidKernelImage, l.call("cuModuleLoadDataEx", out, name("no code"), 0, 0, 0))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cuModuleLoadDataEx", 0, name(code), 0, 0, 0))
	assert.Equal(t, cudart.ErrNoKernelImageForDevice, l.call("cuModuleLoadDataEx", out, name("\x7fELF..."), 0, 0, 0))
	assert.Equal(t, cudart.ErrUnsupportedPtxVersion, l.call("cuModuleLoadDataEx", out, name(".version 9.1\n.target sm_75\n"), 0, 0, 0))

	m := l.loadDirty(code)
	assert.Equal(t, cudart.ErrSymbolNotFound, l.call("cuModuleGetFunction", out, m, name("rum")))
	assert.Equal(t, cudart.ErrNoKernelImageForDevice, l.call("cuModuleGetFunction", out, m, name("missing")))
	run, narrow, s := l.kernel(m, "run"), l.kernel(m, "narrow"), l.stream2()
	limit := func(kernel, attribute uintptr) int32 { return get[int32](l, "cuFuncGetAttribute", attribute, kernel) }
	assert.Equal(t, []int32{1024, 64, 49152, 0}, []int32{limit(run, 0), limit(narrow, 0), limit(run, 8), limit(run, 1)})
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cuFuncGetAttribute", out, 15, run))
	args := make([]uintptr, 5)
	for i := range args {
		args[i] = addr(new([3]uint64))
	}
	shape := func(kernel uintptr, dims [6]uintptr, shared, stream uintptr) cudart.Code {
		return l.call("cuLaunchKernel", kernel, dims[0], dims[1], dims[2], dims[3], dims[4], dims[5], shared, stream, addr(&args[0]), 0)
	}
	for _, tt := range []struct {
		kernel uintptr
		dims   [6]uintptr
		shared uintptr
		want   cudart.Code
	}{
		{run, [6]uintptr{1, 1, 1, 1024, 1, 1}, 49152, cudart.Code(0)},
		{run, [6]uintptr{1, 1, 1, 1025, 1, 1}, 0, cudart.ErrInvalidValue},
		{run, [6]uintptr{0, 1, 1, 1, 1, 1}, 0, cudart.ErrInvalidValue},
		{run, [6]uintptr{1, 65536, 1, 1, 1, 1}, 0, cudart.ErrInvalidValue},
		{run, [6]uintptr{1, 1, 1, 1, 1, 65}, 0, cudart.ErrInvalidValue},
		{run, [6]uintptr{1, 1, 1, 1 << 31, 1 << 31, 1}, 0, cudart.ErrInvalidValue},
		{run, [6]uintptr{1, 1, 1, 1, 1, 1}, 49153, cudart.ErrInvalidValue},
		{narrow, [6]uintptr{1, 1, 1, 64, 1, 1}, 0, cudart.Code(0)},
		{narrow, [6]uintptr{1, 1, 1, 65, 1, 1}, 0, cudart.ErrLaunchOutOfResources},
	} {
		assert.Equal(t, tt.want, shape(tt.kernel, tt.dims, tt.shared, s), "%+v", tt)
	}
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cuLaunchKernel", run, 1, 1, 1, 1, 1, 1, 0, s, 0, 0), "no arguments")
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cuFuncSetAttribute", run, 8, 1<<20))
	l.ok("cuFuncSetAttribute", run, 8, 100_000)
	assert.Equal(t, cudart.Code(0), shape(run, [6]uintptr{1, 1, 1, 1, 1, 1}, 100_000, s))
	assert.Empty(t, l.Misuses())
	assert.Equal(t, cudart.Code(0), l.call("cudaGetLastError"), "the driver sets none")

	l.ok("cudaSetDevice", 1)
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.launch(run, l.stream2(), 0))
	l.ok("cudaSetDevice", 0)
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, 1, l.Outstanding().Modules)
	l.ok("cuModuleUnload", m)
	assert.Zero(t, l.Outstanding().Modules)
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.launch(run, s, 0), "a kernel ends with its module")
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cuModuleUnload", m))
	var kinds []string
	for _, m := range l.Misuses() {
		kinds = append(kinds, m.Kind)
	}
	assert.Equal(t, []string{"stale handle", "stale handle"}, kinds)
}

// What a launch uses must stay until it has run: its code, and the memory that its arguments
// point to.
func TestMemoryAndCodeOfPendingLaunchesAreInUse(t *testing.T) {
	t.Parallel()
	locked(t)
	ran := 0
	l := openDirty(t, withRun(func(l *cudasim.Launch) { ran++ }))
	m, s, host := l.loadDirty(code), l.stream2(), l.pinnedDirty(4096)
	run, p := l.kernel(m, "run"), get[uintptr](l, "cudaMalloc", 8)
	l.Hold()
	require.Equal(t, cudart.Code(0), l.launch(run, s, uint64(addr(&host[5]))))
	l.ok("cudaHostUnregister", addr(&host[0]))
	l.ok("cuModuleUnload", m)
	l.ok("cudaFreeAsync", p, s)
	run = l.kernel(l.loadDirty(code), "run")
	require.Equal(t, cudart.Code(0), l.launch(run, s, uint64(p)))
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, 2, ran)
	var got []string
	for _, m := range l.Misuses() {
		got = append(got, fmt.Sprint(m.Kind, ", ", m.Call))
	}
	assert.Equal(t, []string{"busy memory, cudaHostUnregister", "busy module, cuModuleUnload", "freed memory, cuLaunchKernel"}, got)
}

// Launches fail, stall and block as copies do.
func TestLaunchesHaveFaults(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, withRun(func(*cudasim.Launch) {}))
	run, s, other := l.kernel(l.loadDirty(code), "run"), l.stream2(), l.stream2()
	l.Fail("cuLaunchKernel", cudasim.Fault{Stream: handle(s), Code: cudart.ErrLaunchOutOfResources})
	require.Equal(t, cudart.Code(0), l.launch(run, other, 0))
	require.Equal(t, cudart.ErrLaunchOutOfResources, l.launch(run, s, 0))
	l.Fail("cuModuleLoadDataEx", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cuModuleLoadDataEx", addr(new(uintptr)), addr(&append([]byte(code), 0)[0]), 0, 0, 0))

	unblock := l.Block("cuLaunchKernel", cudasim.Fault{})
	launched := l.begin("cuLaunchKernel", run, 1, 1, 1, 1, 1, 1, 0, s, addr(&[]uintptr{addr(new(uint64))}[0]), 0)
	l.awaitBlocked("cuLaunchKernel", 1)
	unblock()
	require.Equal(t, cudart.Code(0), <-launched)

	l.Fail("cuLaunchKernel", cudasim.Fault{Async: true, Code: cudart.ErrLaunchFailure})
	require.Equal(t, cudart.Code(0), l.launch(run, s, 0))
	assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaStreamSynchronize", s))
	assert.Equal(t, cudart.ErrLaunchFailure, l.launch(run, s, 0))
}

// Kernels take the time that the link's model gives them.
func TestKernelsTakeTheirTime(t *testing.T) {
	t.Parallel()
	locked(t)
	ptx, err := os.ReadFile("../../internal/gpukernels/src/memory.ptx")
	require.NoError(t, err)
	l := open(t, cudasim.Config{})
	module, s := l.load(string(ptx)), l.stream()
	const overhead = 2*time.Microsecond + 500*time.Nanosecond // of a launch and the record after it
	takes := func(want time.Duration, kernel string, args ...uint64) {
		t.Helper()
		got := elapsed(l, s, func() { require.Equal(t, cudart.Code(0), l.launch(l.kernel(module, kernel), s, args...)) })
		assert.InDelta(t, float64(overhead+want), float64(got), 100, kernel) // events have milliseconds in a float
	}
	takes(time.Millisecond, "pinned_busy", 1e6, 1e9)
	takes(100*time.Microsecond, "pinned_busy", 1e6, 198_000) // until so many cycles
	p, host := l.device(mib), l.pinned(mib)
	up := 22577 * time.Nanosecond // 3.65 µs, and 1 MiB at 55.4 GB/s
	takes(up, "pinned_copy", uint64(p), uint64(addr(&host[0])), mib)
}

// A reset of the device unloads its code.
func TestResetUnloadsCode(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, withRun(func(*cudasim.Launch) {}))
	l.loadDirty(code)
	l.ok("cudaDeviceReset")
	assert.Zero(t, l.Outstanding())
}
