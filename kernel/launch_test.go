//go:build linux && !android && (amd64 || arm64)

package kernel_test

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

// ptx has kernels of all sizes of parameters; the simulated library runs none of it.
const ptx = `.version 7.0
.target sm_75
.address_size 64
.visible .entry mixed(.param .u64 a, .param .f32 b, .param .u8 c, .param .u16 d, .param .f64 e, .param .s32 f) { ret; }
.visible .entry empty() { ret; }
.visible .entry wide(.param .align 8 .b8 a[24]) { ret; }
`

var names = map[string]int{"mixed": 6, "empty": 0, "wide": 0}

// versions are of a library whose runtime loads code, and of one where the driver does.
var versions = []cudart.Version{13000, 11080}

type fixture struct {
	*testgpu.Kernels
	dev    *cudart.Device
	module *kernel.Module
	stream *cudart.Stream
}

func newFixture(t *testing.T, v cudart.Version, code string) *fixture {
	t.Helper()
	k, dev := testgpu.NewKernels(t, cudasim.Config{Version: v})
	k.Names = names
	m, err := kernel.Load(t.Context(), dev, []byte(code))
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
		_, unloaded := k.Loaded()
		assert.Equal(t, 1, unloaded)
	})
	return &fixture{k, dev, m, s}
}

func (r *fixture) kernel(t *testing.T, name string) *kernel.Kernel {
	t.Helper()
	k, err := r.module.Kernel(t.Context(), name)
	require.NoError(t, err)
	return k
}

func each(t *testing.T, f func(t *testing.T, v cudart.Version)) {
	for _, v := range versions {
		t.Run(v.String(), func(t *testing.T) { f(t, v) })
	}
}

func TestLaunchPassesShapeAndArguments(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		k := r.kernel(t, "mixed")
		assert.Equal(t, kernel.Limits{BlockThreads: testgpu.KernelThreads, StaticShared: testgpu.KernelStatic,
			DynamicShared: testgpu.KernelDynamic, Registers: testgpu.KernelRegisters, LocalBytes: 16}, k.Limits())
		shape := kernel.Config{Grid: kernel.Dim{X: 1 << 20, Y: 3}, Block: kernel.Dim{X: 8, Y: 4, Z: 2}, SharedBytes: 100}
		require.NoError(t, k.Launch(r.stream, shape, kernel.Arg(0x123456789a), kernel.Arg(float32(-1.5)), kernel.Arg(uint8(200)),
			kernel.Arg(uint16(65000)), kernel.Arg(float64(math.Pi)), kernel.Arg(int32(-7))))
		require.NoError(t, r.kernel(t, "empty").Launch(r.stream, kernel.Threads(257, 256)))
		minus := int32(-7)
		assert.Equal(t, []testgpu.Launched{
			{Kernel: "mixed", Grid: [3]uint32{1 << 20, 3, 1}, Block: [3]uint32{8, 4, 2}, Shared: 100, Stream: uintptr(r.stream.Handle()),
				Args: []uint64{0x123456789a, uint64(math.Float32bits(-1.5)), 200, 65000, math.Float64bits(math.Pi), uint64(uint32(minus))}},
			{Kernel: "empty", Grid: [3]uint32{2, 1, 1}, Block: [3]uint32{256, 1, 1}, Stream: uintptr(r.stream.Handle())},
		}, r.Launches())
		codes, _ := r.Loaded()
		assert.Equal(t, []string{ptx}, codes, "with a zero byte at the end")
	})
}

// Neither packing nor launching allocates, whichever library launches.
func TestLaunchDoesNotAllocate(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		k, _ := testgpu.NewKernels(t, cudasim.Config{Version: v})
		k.Names, k.Quick = names, true
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: k}) // anew: it binds what Quick changes
		require.NoError(t, err)
		defer rt.Close()
		dev, err := rt.Device(0)
		require.NoError(t, err)
		m, err := kernel.Load(t.Context(), dev, []byte(ptx))
		require.NoError(t, err)
		mixed, err := m.Kernel(t.Context(), "mixed")
		require.NoError(t, err)
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		n := 1.0
		launch := func() {
			n++
			err = errors.Join(err, mixed.Launch(s, kernel.Threads(1000, 256), kernel.Arg(8), kernel.Arg(float32(n)), kernel.Arg(uint8(1)),
				kernel.Arg(uint16(2)), kernel.Arg(float64(n)), kernel.Arg(int32(3))))
		}
		launch()
		if !testgpu.Race { // its own bookkeeping allocates
			assert.Zero(t, testing.AllocsPerRun(1000, launch))
		}
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
	})
}

func TestTheSizeOfADimNeverWraps(t *testing.T) {
	t.Parallel()
	for d, want := range map[kernel.Dim]int{
		{}: 0, {X: 5}: 5, {X: 2, Y: 3, Z: 4}: 24, {X: 2, Z: 4}: 8, {Y: 3, Z: 3}: 0,
		{X: -2, Y: -3}: 0, {X: 3, Y: math.MinInt}: 0, {X: 3, Y: 1, Z: -1}: 0,
		{X: math.MaxInt}: math.MaxInt, {X: math.MaxInt, Y: 2}: math.MaxInt, {X: 1 << 31, Y: 1 << 31, Z: 2}: math.MaxInt,
		{X: 1 << 32, Y: 1 << 32}: math.MaxInt, {Y: math.MaxInt, Z: math.MaxInt}: 0,
	} {
		assert.Equal(t, want, d.Size(), "%+v", d)
	}
}

func TestWrongLaunchesAreRefused(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		mixed, empty := r.kernel(t, "mixed"), r.kernel(t, "empty")
		one := kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}}
		right := []kernel.Value{kernel.Arg(1), kernel.Arg(float32(1)), kernel.Arg(uint8(1)), kernel.Arg(uint16(1)), kernel.Arg(float64(1)), kernel.Arg(uint32(1))}
		wrong := append(append([]kernel.Value(nil), right[:5]...), kernel.Arg(1))
		shape := func(change func(c *kernel.Config)) kernel.Config {
			c := one
			change(&c)
			return c
		}
		for text, call := range map[string]func() error{
			"0 arguments: the kernel has 6":               func() error { return mixed.Launch(r.stream, one) },
			"7 arguments: the kernel has 6":               func() error { return mixed.Launch(r.stream, one, append(right, right[0])...) },
			"argument 5 has 8 bytes: the parameter has 4": func() error { return mixed.Launch(r.stream, one, wrong...) },
			"argument 1 has 0 bytes: the parameter has 4": func() error {
				return mixed.Launch(r.stream, one, slices.Replace(slices.Clone(right), 1, 2, kernel.Value{})...)
			},
			"33 arguments: at most 32":                         func() error { return mixed.Launch(r.stream, one, make([]kernel.Value, 33)...) },
			"grid {X:0 Y:0 Z:0}: the number of blocks must be": func() error { return empty.Launch(r.stream, kernel.Threads(0, 256)) },
			"grid {X:1 Y:-1 Z:0}: the number of blocks must":   func() error { return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Grid.Y = -1 })) },
			"grid {X:1 Y:65536 Z:0}: at most":                  func() error { return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Grid.Y = 65536 })) },
			"grid {X:2147483648 Y:0 Z:0}: at most":             func() error { return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Grid.X = 1 << 31 })) },
			"block {X:0 Y:0 Z:0}: the number of threads must":  func() error { return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Block.X = 0 })) },
			"block {X:513 Y:0 Z:0}: at most 512 threads":       func() error { return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Block.X = 513 })) },
			"block {X:257 Y:2 Z:0}: at most 512 threads": func() error {
				return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Block.X, c.Block.Y = 257, 2 }))
			},
			"block {X:4294967296 Y:4294967296 Z:0}: at most": func() error {
				return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.Block.X, c.Block.Y = 1<<32, 1<<32 }))
			},
			"45057 bytes of shared memory: 0 to 45056 (AllowShared raises it)": func() error {
				return empty.Launch(r.stream, shape(func(c *kernel.Config) { c.SharedBytes = testgpu.KernelDynamic + 1 }))
			},
		} {
			err := call()
			require.ErrorIs(t, err, cudart.ErrInvalidValue, text)
			assert.ErrorContains(t, err, text)
			assert.True(t, strings.HasPrefix(err.Error(), "kernel: launch kernel "), err.Error())
		}
		assert.ErrorContains(t, empty.Launch(nil, one), "the stream is nil")
		err := r.kernel(t, "wide").Launch(r.stream, one, kernel.Arg(1))
		assert.ErrorIs(t, err, errors.ErrUnsupported)
		assert.ErrorContains(t, err, "parameter 0 is a struct by value")

		r.Codes["cuLaunchKernel"] = cudart.ErrLaunchOutOfResources
		assert.ErrorIs(t, empty.Launch(r.stream, one), cudart.ErrLaunchOutOfResources)
		assert.Empty(t, r.Launches())

		// With more shared memory allowed, the launch passes.
		clear(r.Codes)
		require.NoError(t, empty.AllowShared(200_000))
		assert.Equal(t, 200_000, r.Shared())
		require.NoError(t, empty.Launch(r.stream, shape(func(c *kernel.Config) { c.SharedBytes = 200_000 })))
		assert.ErrorIs(t, empty.AllowShared(-1), cudart.ErrInvalidValue)
		assert.Equal(t, 200_000, r.Shared())
	})
}

// Of code that is not PTX the parameters are unknown: CUDA finds what is wrong, or not.
func TestArgumentsAreCheckedForPTXOnly(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		fatbin, err := os.ReadFile("testdata/user.fatbin")
		require.NoError(t, err)
		r := newFixture(t, v, string(fatbin))
		require.NoError(t, r.kernel(t, "mixed").Launch(r.stream, kernel.Threads(1, 1), slices.Repeat([]kernel.Value{kernel.Arg(1)}, 6)...))
		err = r.kernel(t, "mixed").Launch(r.stream, kernel.Threads(1, 1), kernel.Arg(complex(1, 2)))
		assert.ErrorContains(t, err, "argument 0 has 16 bytes: Arg makes arguments of 1, 2, 4 and 8")
		_, err = r.module.Kernel(t.Context(), "other")
		assert.ErrorIs(t, err, cudart.ErrSymbolNotFound)
	})
}

func TestUnknownKernelErrorListsKernels(t *testing.T) {
	r := newFixture(t, 13000, ptx)
	_, err := r.module.Kernel(t.Context(), "mixd")
	assert.ErrorIs(t, err, cudart.ErrSymbolNotFound)
	assert.ErrorContains(t, err, `kernel: look up "mixd": the code has the kernels empty, mixed, wide: `)
}

// A compiler's log is in the error, also if CUDA compiles only when a kernel is looked up.
func TestFailedCompilationHasItsLog(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		const log = "ptxas application ptx input, line 7; error   : Unknown symbol 'x'"
		k, dev := testgpu.NewKernels(t, cudasim.Config{Version: v})
		k.Names, k.Log = names, log+"\n"
		for _, fn := range []string{"cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute"} {
			clear(k.Codes)
			k.Codes[fn] = cudart.ErrInvalidPtx
			m, err := kernel.Load(t.Context(), dev, []byte(ptx))
			if fn != "cuModuleLoadDataEx" {
				require.NoError(t, err)
				_, err = m.Kernel(t.Context(), "mixed")
				defer m.Close()
			}
			require.ErrorIs(t, err, cudart.ErrInvalidPtx)
			var jit *kernel.JITError
			require.ErrorAs(t, err, &jit)
			assert.Equal(t, log, jit.Log)
			assert.ErrorContains(t, err, log)
		}
	})
}

// Close waits for kernels under way and unloads once. An interrupted one can be called again.
func TestCloseWaitsForKernels(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		empty := r.kernel(t, "empty")
		p, err := r.dev.Malloc(1)
		require.NoError(t, err)
		r.Hold()
		require.NoError(t, r.stream.Memset(p, 0, 1)) // in the kernel's place: the stream is busy
		require.NoError(t, empty.Launch(r.stream, kernel.Threads(1, 1)))
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		err = r.module.CloseContext(ctx)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "its kernels may be running")
		_, unloaded := r.Loaded()
		assert.Zero(t, unloaded)

		for _, err := range []error{empty.Launch(r.stream, kernel.Threads(1, 1)), empty.AllowShared(1), func() error { _, err := r.module.Kernel(t.Context(), "empty"); return err }()} {
			assert.ErrorIs(t, err, os.ErrClosed)
			assert.ErrorIs(t, err, cudart.ErrClosed)
		}
		r.Sim.Release()
		require.NoError(t, r.module.Close())
		require.NoError(t, r.module.Close())
		_, unloaded = r.Loaded()
		assert.Equal(t, 1, unloaded)
		require.NoError(t, r.dev.Free(p))
	})
}

// Close comes between launches of many goroutines: those that entered before it run, and the code
// is unloaded after them, once.
func TestCloseDuringLaunches(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		empty := r.kernel(t, "empty")
		const goroutines = 8
		launched, errs := make(chan struct{}, goroutines), make(chan error, goroutines)
		for range goroutines {
			go func() {
				for n := 0; ; n++ {
					if err := empty.Launch(r.stream, kernel.Threads(1, 1)); err != nil {
						errs <- err
						return
					}
					if _, unloaded := r.Loaded(); unloaded > 0 && n == 0 {
						errs <- errors.New("launched after the code was unloaded")
						return
					}
					if n == 0 {
						launched <- struct{}{}
					}
				}
			}()
		}
		for range goroutines {
			<-launched
		}
		closed := make(chan error, 2)
		for range 2 {
			go func() { closed <- r.module.Close() }()
		}
		require.NoError(t, <-closed)
		require.NoError(t, <-closed)
		n := len(r.Launches())
		for range goroutines {
			assert.ErrorIs(t, <-errs, cudart.ErrClosed)
		}
		assert.Len(t, r.Launches(), n, "none after Close")
		_, unloaded := r.Loaded()
		assert.Equal(t, 1, unloaded)
	})
}

func TestCloseAfterAFailureTriesAgain(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		r.Codes["cuModuleUnload"] = cudart.ErrUnknown
		assert.ErrorIs(t, r.module.Close(), cudart.ErrUnknown)
		clear(r.Codes)
		require.NoError(t, r.module.Close())
	})
}

// After Runtime.Close a module can still be released, so deferred calls may come in any order.
func TestCloseAfterTheRuntime(t *testing.T) {
	each(t, func(t *testing.T, v cudart.Version) {
		r := newFixture(t, v, ptx)
		empty := r.kernel(t, "empty")
		require.NoError(t, r.dev.Runtime().Close())
		assert.ErrorIs(t, empty.Launch(r.stream, kernel.Threads(1, 1)), os.ErrClosed)
		require.NoError(t, r.module.Close())
	})
}

func TestLaunchOnAnotherDeviceIsRefused(t *testing.T) {
	k, dev := testgpu.NewKernels(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	k.Names = names
	m, err := kernel.Load(t.Context(), dev, []byte(ptx))
	require.NoError(t, err)
	empty, err := m.Kernel(t.Context(), "empty")
	require.NoError(t, err)
	other, err := dev.Runtime().Device(1)
	require.NoError(t, err)
	s, err := other.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	assert.ErrorIs(t, empty.Launch(s, kernel.Threads(1, 1)), cudart.ErrInvalidValue)
	require.NoError(t, s.Close())
	require.NoError(t, m.Close())
}

// A simulated GPU has Go functions instead of kernels. Code without them is refused, and
// the error names what is missing, when it is loaded or when the kernel is looked up.
func TestCodeWithoutFunctionsIsRefused(t *testing.T) {
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		_, rt := testgpu.Sim(t, cudasim.Config{Version: v, Kernels: map[string]cudasim.KernelFunc{"known": func(*cudasim.Launch) {}}})
		dev, err := rt.Device(0)
		require.NoError(t, err)
		assert.Empty(t, rt.Library().Missing)
		_, err = kernel.Load(t.Context(), dev, []byte(ptx))
		require.ErrorIs(t, err, cudart.ErrNoKernelImageForDevice)
		assert.ErrorContains(t, err, "has none for empty, mixed, wide")

		m, err := kernel.Load(t.Context(), dev, []byte(ptx+".visible .entry known() { ret; }"))
		require.NoError(t, err)
		_, err = m.Kernel(t.Context(), "known")
		require.NoError(t, err)
		_, err = m.Kernel(t.Context(), "mixed")
		require.ErrorIs(t, err, cudart.ErrNoKernelImageForDevice)
		assert.ErrorContains(t, err, "has none for mixed")
		require.NoError(t, m.Close())

		fatbin, err := os.ReadFile("testdata/user.fatbin")
		require.NoError(t, err)
		_, err = kernel.Load(t.Context(), dev, fatbin)
		require.ErrorIs(t, err, cudart.ErrNoKernelImageForDevice)
		assert.ErrorContains(t, err, "this is a cubin or a fat binary")

		_, err = kernel.Load(t.Context(), dev, []byte(".version 9.1\n.target sm_75\n.entry known() { ret; }"))
		require.ErrorIs(t, err, cudart.ErrUnsupportedPtxVersion)
	}
}

// BenchmarkLaunchOwnCost is what a launch costs beside the library's part.
func BenchmarkLaunchOwnCost(b *testing.B) {
	for _, v := range versions {
		b.Run(v.String(), func(b *testing.B) {
			k, _ := testgpu.NewKernels(b, cudasim.Config{Version: v})
			k.Names, k.Quick = names, true
			rt, err := cudart.Open(context.Background(), cudart.Options{Source: k})
			require.NoError(b, err)
			defer rt.Close()
			dev, err := rt.Device(0)
			require.NoError(b, err)
			m, err := kernel.Load(b.Context(), dev, []byte(ptx))
			require.NoError(b, err)
			mixed, err := m.Kernel(b.Context(), "mixed")
			require.NoError(b, err)
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(b, err)
			b.ReportAllocs()
			for range b.N {
				_ = mixed.Launch(s, kernel.Threads(1000, 256), kernel.Arg(8), kernel.Arg(float32(1)), kernel.Arg(uint8(1)), kernel.Arg(uint16(2)), kernel.Arg(float64(3)), kernel.Arg(int32(3)))
			}
			require.NoError(b, s.Close())
			require.NoError(b, m.Close())
		})
	}
}
