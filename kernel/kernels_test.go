//go:build linux && !android && (amd64 || arm64)

package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

// userKernels are those of testdata/user.ptx for simulated devices.
var userKernels = map[string]cudasim.KernelFunc{
	"saxpy": func(l *cudasim.Launch) {
		n := min(l.Grid[0]*l.Block[0], int(cudasim.Arg[uint64](l, 3)))
		y, x := cudasim.Elements[float32](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 4*n)), cudasim.Elements[float32](l.Read(cudasim.Arg[cudart.DevPtr](l, 1), 4*n))
		for i := range y {
			y[i] += cudasim.Arg[float32](l, 2) * x[i]
		}
	},
	"shared_size": func(l *cudasim.Launch) {
		cudasim.Elements[uint32](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 4))[0] = uint32(l.SharedBytes)
	},
	"store_all": func(l *cudasim.Launch) {
		out := cudasim.Elements[uint64](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 48))
		for i := range out {
			out[i] = cudasim.Arg[uint64](l, i+1)
		}
	},
}

// gpu opens a simulated device, or the machine's GPU.
func gpu(tb testing.TB) (*cudart.Device, *cudart.Stream) {
	tb.Helper()
	dev := testgpu.DeviceWith(tb, cudasim.Config{Kernels: userKernels})
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return dev, s
}

// realGPU opens the machine's GPU for what a simulated one cannot show.
func realGPU(tb testing.TB, why string) (*cudart.Device, *cudart.Stream) {
	tb.Helper()
	if !testgpu.Real() {
		tb.Skipf("needs a real GPU, which %s=1 requests: %s", testgpu.Env, why)
	}
	return gpu(tb)
}

func TestKernelsOfUsersRun(t *testing.T) {
	dev, s := gpu(t)
	code, err := os.ReadFile("testdata/user.ptx")
	require.NoError(t, err)
	m, err := kernel.Load(t.Context(), dev, code)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()

	saxpy, err := m.Kernel(t.Context(), "saxpy")
	require.NoError(t, err)
	assert.Positive(t, saxpy.Limits().BlockThreads)
	assert.Positive(t, saxpy.Limits().Registers)
	x, y := []float32{1, 2, 3, 4, 5}, []float32{10, 20, 30, 40, 50}
	px, py := testgpu.ToDevice(t, dev, x), testgpu.ToDevice(t, dev, y)
	require.NoError(t, saxpy.Launch(s, kernel.Threads(4, 2), kernel.Arg(py), kernel.Arg(px), kernel.Arg(float32(-2)), kernel.Arg(uint32(4))))
	assert.Equal(t, []float32{8, 16, 24, 32, 50}, testgpu.CopyToHost[float32](t, s, py, 5))

	all, err := m.Kernel(t.Context(), "store_all")
	require.NoError(t, err)
	out := testgpu.Malloc(t, dev, 64)
	require.NoError(t, s.Memset(out, 0, 64))
	require.NoError(t, all.Launch(s, kernel.Threads(1, 1), kernel.Arg(out), kernel.Arg(uint8(200)), kernel.Arg(uint16(65000)), kernel.Arg(uint32(1<<31)),
		kernel.Arg(uint64(1<<63)), kernel.Arg(float32(1.5)), kernel.Arg(float64(math.Pi))))
	assert.Equal(t, []uint64{200, 65000, 1 << 31, 1 << 63, uint64(math.Float32bits(1.5)), math.Float64bits(math.Pi)}, testgpu.CopyToHost[uint64](t, s, out, 6))

	shared, err := m.Kernel(t.Context(), "shared_size")
	require.NoError(t, err)
	require.NoError(t, shared.Launch(s, kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}, SharedBytes: 48 << 10}, kernel.Arg(out)))
	assert.EqualValues(t, 48<<10, testgpu.CopyToHost[uint32](t, s, out, 1)[0])
	large := kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}, SharedBytes: 60 << 10}
	assert.ErrorIs(t, shared.Launch(s, large, kernel.Arg(out)), cudart.ErrInvalidValue)
	require.NoError(t, shared.AllowShared(60<<10), "every device since 7.5 has 64 KiB")
	require.NoError(t, shared.Launch(s, large, kernel.Arg(out)))
	assert.EqualValues(t, 60<<10, testgpu.CopyToHost[uint32](t, s, out, 1)[0])
	assert.ErrorIs(t, shared.AllowShared(16<<20), cudart.ErrInvalidValue)

	_, err = m.Kernel(t.Context(), "none")
	assert.ErrorIs(t, err, cudart.ErrSymbolNotFound)
}

// A fat binary, of a cubin for 9.0 and compressed PTX for all others, runs as PTX does.
func TestGPURunsAFatBinary(t *testing.T) {
	dev, s := realGPU(t, "a simulated one runs no machine code")
	code, err := os.ReadFile("testdata/user.fatbin")
	require.NoError(t, err)
	m, err := kernel.Load(t.Context(), dev, code)
	require.NoError(t, err)
	saxpy, err := m.Kernel(t.Context(), "saxpy")
	require.NoError(t, err)
	px, py := testgpu.ToDevice(t, dev, []float32{1, 2, 3, 4}), testgpu.ToDevice(t, dev, []float32{10, 20, 30, 40})
	require.NoError(t, saxpy.Launch(s, kernel.Threads(4, 2), kernel.Arg(py), kernel.Arg(px), kernel.Arg(float32(-2)), kernel.Arg(uint32(4))))
	assert.Equal(t, []float32{8, 16, 24, 32}, testgpu.CopyToHost[float32](t, s, py, 4))
	require.NoError(t, m.Close())
}

// Kernels run on any goroutine, whatever thread it is on.
func TestKernelsRunOnManyGoroutines(t *testing.T) {
	dev, _ := gpu(t)
	code, err := os.ReadFile("testdata/user.ptx")
	require.NoError(t, err)
	m, err := kernel.Load(t.Context(), dev, code)
	require.NoError(t, err)
	saxpy, err := m.Kernel(t.Context(), "saxpy")
	require.NoError(t, err)
	ones := make([]float32, 1000)
	for i := range ones {
		ones[i] = 1
	}
	x := testgpu.ToDevice(t, dev, ones)
	const goroutines, launches = 16, 200
	errs := make(chan error, goroutines)
	for range goroutines {
		y := testgpu.ToDevice(t, dev, make([]float32, len(ones)))
		go func() {
			s, err := dev.NewStream(cudart.StreamOptions{})
			for i := 0; i < launches && err == nil; i++ {
				err = saxpy.Launch(s, kernel.Threads(len(ones), 64), kernel.Arg(y), kernel.Arg(x), kernel.Arg(float32(1)), kernel.Arg(uint32(len(ones))))
			}
			if err == nil {
				err = s.Synchronize(context.Background())
			}
			got := make([]float32, len(ones))
			if err == nil {
				err = dev.CopyToHost(unsafe.Pointer(&got[0]), y, 4*len(got))
			}
			for i, v := range got {
				if v != launches && err == nil {
					err = fmt.Errorf("element %d is %v", i, v)
				}
			}
			errs <- errors.Join(err, s.Close())
		}()
	}
	for range goroutines {
		assert.NoError(t, <-errs)
	}
	require.NoError(t, m.Close())
}

func TestGPUReportsWhatDoesNotCompile(t *testing.T) {
	dev, _ := realGPU(t, "a simulated one compiles nothing")
	broken := "\n.version 7.0\n.target sm_75\n.address_size 64\n.visible .entry f()\n{\n\tadd.s32 %nothing, 1, 2;\n\tret;\n}\n"
	m, err := kernel.Load(t.Context(), dev, []byte(broken))
	if err == nil { // compiled only now
		_, err = m.Kernel(t.Context(), "f")
		defer m.Close()
	}
	require.ErrorIs(t, err, cudart.ErrInvalidPtx)
	var jit *kernel.JITError
	require.ErrorAs(t, err, &jit)
	assert.Contains(t, jit.Log, "nothing", "the compiler names what it does not know")

	m, err = kernel.Load(t.Context(), dev, []byte("no code at all"))
	if err == nil {
		_, err = m.Kernel(t.Context(), "f")
		defer m.Close()
	}
	assert.Error(t, err)

	newer := ".version 99.0\n.target sm_75\n.address_size 64\n.visible .entry f() { ret; }\n"
	m, err = kernel.Load(t.Context(), dev, []byte(newer))
	if err == nil {
		_, err = m.Kernel(t.Context(), "f")
		defer m.Close()
	}
	assert.ErrorIs(t, err, cudart.ErrUnsupportedPtxVersion)
}

// What the GPU writes is what Go computes, no byte beside is touched, and a check on the GPU
// finds exactly the bytes that were changed.
// Past 4 GiB offsets need more than 32 bits.
// Copies by the multiprocessors: between device memory and, both ways, pinned host memory.
// Close waits for kernels that run.
// BenchmarkLaunch is beside testdata/baseline/launch.cu, which does the same in C++.
func BenchmarkLaunch(b *testing.B) {
	dev, s := realGPU(b, "a simulated one has no times of its own")
	ctx := context.Background()
	p := testgpu.Malloc(b, dev, 64)
	code, err := os.ReadFile("testdata/user.ptx")
	require.NoError(b, err)
	user, err := kernel.Load(b.Context(), dev, code)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, user.Close()) })
	saxpy, err := user.Kernel(b.Context(), "saxpy")
	require.NoError(b, err)
	// The stream must not fill, or the launch waits for the GPU. The median is of such
	// rounds, as in C++.
	const batch = 256
	rounds := func(b *testing.B, launch func() error) {
		b.ReportAllocs()
		var took []float64
		for done := 0; done < b.N; done += batch {
			b.StopTimer()
			require.NoError(b, s.Synchronize(ctx))
			b.StartTimer()
			n := min(batch, b.N-done)
			began := time.Now()
			for range n {
				if err := launch(); err != nil {
					b.Fatal(err)
				}
			}
			took = append(took, float64(time.Since(began).Nanoseconds())/float64(n))
		}
		slices.Sort(took)
		b.ReportMetric(took[len(took)/2], "median-ns")
	}
	b.Run("saxpy", func(b *testing.B) {
		rounds(b, func() error {
			return saxpy.Launch(s, kernel.Threads(16, 16), kernel.Arg(p), kernel.Arg(p), kernel.Arg(float32(0)), kernel.Arg(uint32(16)))
		})
	})
	b.Run("saxpy and synchronize", func(b *testing.B) {
		for range b.N {
			if err := errors.Join(saxpy.Launch(s, kernel.Threads(16, 16), kernel.Arg(p), kernel.Arg(p), kernel.Arg(float32(0)), kernel.Arg(uint32(16))), s.SynchronizeBlocking()); err != nil {
				b.Fatal(err)
			}
		}
	})
	require.NoError(b, s.Synchronize(ctx))
}

// BenchmarkMemory reports GB/s by the device's time.
