//go:build linux && !android && (amd64 || arm64)

package kernel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
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
		n := min(l.Grid.X*l.Block.X, int(l.Uint64(3)))
		y, x := cudasim.Elements[float32](l.Write(l.Ptr(0), 4*n)), cudasim.Elements[float32](l.Read(l.Ptr(1), 4*n))
		for i := range y {
			y[i] += l.Float32(2) * x[i]
		}
	},
	"shared_size": func(l *cudasim.Launch) { cudasim.Elements[uint32](l.Write(l.Ptr(0), 4))[0] = uint32(l.SharedBytes) },
	"store_all": func(l *cudasim.Launch) {
		out := cudasim.Elements[uint64](l.Write(l.Ptr(0), 48))
		for i := range out {
			out[i] = l.Uint64(i + 1)
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

func newMemory(tb testing.TB, dev *cudart.Device) *kernel.Memory {
	tb.Helper()
	m, err := kernel.NewMemory(tb.Context(), dev)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, m.Close()) })
	return m
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
	require.NoError(t, saxpy.Launch(s, kernel.Threads(4, 2), kernel.Ptr(py), kernel.Ptr(px), kernel.Float32(-2), kernel.Uint32(4)))
	assert.Equal(t, []float32{8, 16, 24, 32, 50}, testgpu.CopyToHost[float32](t, s, py, 5))

	all, err := m.Kernel(t.Context(), "store_all")
	require.NoError(t, err)
	out := testgpu.Malloc(t, dev, 64)
	require.NoError(t, s.Memset(out, 0, 64))
	require.NoError(t, all.Launch(s, kernel.Threads(1, 1), kernel.Ptr(out), kernel.Uint8(200), kernel.Uint16(65000), kernel.Uint32(1<<31),
		kernel.Uint64(1<<63), kernel.Float32(1.5), kernel.Float64(math.Pi)))
	assert.Equal(t, []uint64{200, 65000, 1 << 31, 1 << 63, uint64(math.Float32bits(1.5)), math.Float64bits(math.Pi)}, testgpu.CopyToHost[uint64](t, s, out, 6))

	shared, err := m.Kernel(t.Context(), "shared_size")
	require.NoError(t, err)
	require.NoError(t, shared.Launch(s, kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}, SharedBytes: 48 << 10}, kernel.Ptr(out)))
	assert.EqualValues(t, 48<<10, testgpu.CopyToHost[uint32](t, s, out, 1)[0])
	large := kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}, SharedBytes: 60 << 10}
	assert.ErrorIs(t, shared.Launch(s, large, kernel.Ptr(out)), cudart.ErrInvalidValue)
	require.NoError(t, shared.AllowShared(60<<10), "every device since 7.5 has 64 KiB")
	require.NoError(t, shared.Launch(s, large, kernel.Ptr(out)))
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
	require.NoError(t, saxpy.Launch(s, kernel.Threads(4, 2), kernel.Ptr(py), kernel.Ptr(px), kernel.Float32(-2), kernel.Uint32(4)))
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
				err = saxpy.Launch(s, kernel.Threads(len(ones), 64), kernel.Ptr(y), kernel.Ptr(x), kernel.Float32(1), kernel.Uint32(uint32(len(ones))))
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
	var jit *cudart.JITError
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
func TestFillsAndChecks(t *testing.T) {
	dev, s := gpu(t)
	ctx := context.Background()
	m := newMemory(t, dev)
	const guard = 64
	size := 100_005
	if testgpu.Real() {
		size = 3<<20 + 5
	}
	p := testgpu.Malloc(t, dev, size+2*guard+16)
	contents := []kernel.Content{
		{Seed: 0x123456789abcdef1}, {Kind: kernel.Constant, Seed: 0xAA55AA55AA55AA55}, {Kind: kernel.WalkingBit},
		{Kind: kernel.Counter, Mask: 0x9393939393939393}, {Kind: kernel.Random, Seed: 42},
	}
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 255, 4097, 65536, size} {
		for align := range 16 {
			if n > 5000 && align%5 != 0 {
				continue
			}
			for i, at := range []uint64{0, 1, 6, 16, 1<<34 + 3} {
				c := contents[(n+align+i)%len(contents)]
				name := fmt.Sprintf("%+v, %d bytes at %d, position %d", c, n, align, at)
				start := p + guard + cudart.DevPtr(align)
				require.NoError(t, s.Memset(p, 0xD6, size+2*guard+16))
				require.NoError(t, m.Fill(s, start, n, c, at))
				got := testgpu.CopyToHost[byte](t, s, p, n+align+2*guard)
				want := bytes.Repeat([]byte{0xD6}, len(got))
				c.Fill(want[guard+align:][:n], at)
				require.True(t, bytes.Equal(want, got), name)

				found, err := m.Compare(ctx, s, start, n, c, at)
				require.NoError(t, err)
				require.Equal(t, kernel.Found{First: -1}, found, name)

				// The first, the last and any byte wrong.
				wrong := map[int]bool{0: true, n - 1: true, random.IntN(n): true}
				first := n
				for off := range wrong {
					if random.IntN(2) == 0 && len(wrong) > 1 {
						delete(wrong, off)
						continue
					}
					b := got[guard+align+off] ^ byte(1<<random.IntN(8))
					testgpu.CopyToDevice(t, dev, start+cudart.DevPtr(off), []byte{b})
					first = min(first, off)
				}
				found, err = m.Compare(ctx, s, start, n, c, at)
				require.NoError(t, err)
				require.Equal(t, kernel.Found{Mismatches: len(wrong), First: first}, found, name)
			}
		}
	}
	// All wrong: another seed.
	require.NoError(t, m.Fill(s, p, size, kernel.Content{Kind: kernel.Constant}, 0))
	found, err := m.Compare(ctx, s, p, size, kernel.Content{Kind: kernel.Constant, Mask: math.MaxUint64}, 0)
	require.NoError(t, err)
	assert.Equal(t, kernel.Found{Mismatches: size, First: 0}, found)
	require.NoError(t, m.Fill(s, 0, 0, kernel.Content{}, 0))
	assert.ErrorIs(t, m.Fill(s, p, -1, kernel.Content{}, 0), cudart.ErrInvalidValue)
}

// Past 4 GiB offsets need more than 32 bits.
func TestGPUFillsAndChecksPast4GiB(t *testing.T) {
	dev, s := realGPU(t, "the memory of a simulated one is the host's, and its kernels are slow")
	const n = 5<<30 + 3
	free, _, err := dev.MemInfo()
	require.NoError(t, err)
	if free < 2*n {
		t.Skipf("%d bytes of device memory are free, which are too few for %d", free, n)
	}
	m := newMemory(t, dev)
	p := testgpu.Malloc(t, dev, n)
	c := kernel.Content{Seed: 5}
	require.NoError(t, m.Fill(s, p, n, c, 0))
	for _, at := range []int{0, 1<<32 - 8, 1<<32 + 1, n - 100} {
		got, want := testgpu.CopyToHost[byte](t, s, p+cudart.DevPtr(at), 100), make([]byte, 100)
		c.Fill(want, uint64(at))
		require.Equal(t, want, got)
	}
	testgpu.CopyToDevice(t, dev, p+(n-2), []byte{^testgpu.CopyToHost[byte](t, s, p+(n-2), 1)[0]})
	found, err := m.Compare(context.Background(), s, p, n, c, 0)
	require.NoError(t, err)
	assert.Equal(t, kernel.Found{Mismatches: 1, First: n - 2}, found)
}

// Copies by the multiprocessors: between device memory and, both ways, pinned host memory.
func TestKernelsCopy(t *testing.T) {
	dev, s := gpu(t)
	ctx := context.Background()
	m := newMemory(t, dev)
	const size = 1<<20 + 77
	host, err := dev.HostAlloc(2*size, cudart.HostAllocMapped)
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.FreeHost(host)) }()
	mapped, err := dev.HostDevicePointer(host)
	require.NoError(t, err)
	memory := unsafe.Slice((*byte)(host), 2*size)
	a, b := testgpu.Malloc(t, dev, size+64), testgpu.Malloc(t, dev, size+64)
	for i, n := range []int{1, 15, 16, 100, 4096, size} {
		for _, off := range [][2]int{{0, 0}, {5, 5}, {0, 16}, {1, 2}} {
			for _, blocks := range []int{0, 1} {
				c := kernel.Content{Seed: uint64(i)}
				c.Fill(memory[:n], 9)
				to, from := cudart.DevPtr(off[0]), cudart.DevPtr(off[1])
				require.NoError(t, s.Memset(a, 0, size+64))
				require.NoError(t, m.Copy(s, a+to, mapped, n, blocks))
				require.NoError(t, m.Copy(s, b+from, a+to, n, blocks))
				require.NoError(t, m.Copy(s, mapped+size, b+from, n, blocks))
				found, err := m.Compare(ctx, s, a+to, n, c, 9)
				require.NoError(t, err)
				require.Equal(t, kernel.Found{First: -1}, found, "up: %d bytes, %v", n, off)
				require.True(t, bytes.Equal(memory[:n], memory[size:][:n]), "back: %d bytes, %v", n, off)
			}
		}
	}
	// What the GPU reads over the link is what the host wrote.
	kernel.Content{Seed: 99}.Fill(memory[:size], 0)
	found, err := m.Compare(ctx, s, mapped, size, kernel.Content{Seed: 99}, 0)
	require.NoError(t, err)
	assert.Equal(t, kernel.Found{First: -1}, found)
}

func TestKernelsChaseAChain(t *testing.T) {
	dev, s := gpu(t)
	m := newMemory(t, dev)
	const n = 10_000
	order := rand.New(rand.NewPCG(3, 4)).Perm(n)
	chain := make([]uint64, n)
	for i, at := range order {
		chain[at] = uint64(order[(i+1)%n])
	}
	p, result := testgpu.ToDevice(t, dev, chain), testgpu.Malloc(t, dev, kernel.ResultBytes)
	for _, steps := range []int{0, 1, 7, n, 3*n + 11} {
		require.NoError(t, m.Chase(s, p, order[5], steps, result))
		got := testgpu.CopyToHost[uint64](t, s, result, 2)
		assert.EqualValues(t, order[(5+steps)%n], got[0], "%d steps", steps)
		if steps > n {
			perStep := float64(got[1]) / float64(steps)
			assert.Greater(t, perStep, 10.0, "cycles a load")
			assert.Less(t, perStep, 10_000.0, "cycles a load")
		}
	}
	assert.ErrorIs(t, m.Chase(s, p, -1, 1, result), cudart.ErrInvalidValue)
}

func TestBusyTakesItsTime(t *testing.T) {
	dev, s := gpu(t)
	m := newMemory(t, dev)
	begin, err := dev.NewEvent(cudart.EventOptions{Timing: true})
	require.NoError(t, err)
	end, err := dev.NewEvent(cudart.EventOptions{Timing: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, errors.Join(begin.Close(), end.Close())) }()
	require.NoError(t, m.Busy(s, 0)) // what a first run costs
	for _, d := range []time.Duration{100 * time.Microsecond, 5 * time.Millisecond, 50 * time.Millisecond} {
		require.NoError(t, s.Record(begin))
		require.NoError(t, m.Busy(s, d))
		require.NoError(t, s.Record(end))
		require.NoError(t, s.Synchronize(context.Background()))
		took, err := end.Since(begin)
		require.NoError(t, err)
		t.Logf("busy for %v took %v", d, took)
		assert.GreaterOrEqual(t, took, d*9/10)
		assert.Less(t, took, 2*d+10*time.Millisecond)
	}
	assert.ErrorIs(t, m.Busy(s, -1), cudart.ErrInvalidValue)
	assert.ErrorIs(t, m.Busy(s, kernel.MaxBusy+1), cudart.ErrInvalidValue)
}

// Close waits for kernels that run.
func TestCloseWaitsForRunningKernels(t *testing.T) {
	dev, s := gpu(t)
	m, err := kernel.NewMemory(t.Context(), dev)
	require.NoError(t, err)
	require.NoError(t, m.Busy(s, 300*time.Millisecond))
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.CloseContext(ctx), context.DeadlineExceeded)
	assert.ErrorIs(t, m.Busy(s, 0), os.ErrClosed)
	require.NoError(t, m.Close())
	done, err := s.Query()
	require.NoError(t, err)
	assert.True(t, done)
}

func TestGPULaunchDoesNotAllocate(t *testing.T) {
	dev, s := realGPU(t, "a simulated one allocates itself")
	m := newMemory(t, dev)
	p := testgpu.Malloc(t, dev, 64)
	var err error
	launch := func() { err = errors.Join(err, m.Fill(s, p, 64, kernel.Content{}, 0)) }
	launch()
	require.NoError(t, s.Synchronize(context.Background()))
	assert.Zero(t, testing.AllocsPerRun(100, launch))
	require.NoError(t, err)
	require.NoError(t, s.Synchronize(context.Background()))
}

// BenchmarkLaunch is beside testdata/baseline/launch.cu, which does the same in C++.
func BenchmarkLaunch(b *testing.B) {
	dev, s := realGPU(b, "a simulated one has no times of its own")
	ctx := context.Background()
	m := newMemory(b, dev)
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
			return saxpy.Launch(s, kernel.Threads(16, 16), kernel.Ptr(p), kernel.Ptr(p), kernel.Float32(0), kernel.Uint32(16))
		})
	})
	b.Run("saxpy and synchronize", func(b *testing.B) {
		for range b.N {
			if err := errors.Join(saxpy.Launch(s, kernel.Threads(16, 16), kernel.Ptr(p), kernel.Ptr(p), kernel.Float32(0), kernel.Uint32(16)), s.SynchronizeBlocking()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("fill", func(b *testing.B) {
		rounds(b, func() error { return m.Fill(s, p, 64, kernel.Content{}, 0) })
	})
	require.NoError(b, s.Synchronize(ctx))
}

// BenchmarkMemory reports GB/s by the device's time.
func BenchmarkMemory(b *testing.B) {
	dev, s := realGPU(b, "a simulated one has no times of its own")
	ctx := context.Background()
	m := newMemory(b, dev)
	const n = 4 << 30
	p, q, result := testgpu.Malloc(b, dev, n), testgpu.Malloc(b, dev, n), testgpu.Malloc(b, dev, kernel.ResultBytes)
	const linked = 256 << 20
	host, err := dev.HostAlloc(linked, cudart.HostAllocMapped)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dev.FreeHost(host)) })
	mapped, err := dev.HostDevicePointer(host)
	require.NoError(b, err)
	begin, err := dev.NewEvent(cudart.EventOptions{Timing: true})
	require.NoError(b, err)
	end, err := dev.NewEvent(cudart.EventOptions{Timing: true})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, errors.Join(begin.Close(), end.Close())) })
	run := func(name string, bytes int, f func() error) {
		b.Run(name, func(b *testing.B) {
			require.NoError(b, f())
			require.NoError(b, s.Record(begin))
			for range b.N {
				require.NoError(b, f())
			}
			require.NoError(b, s.Record(end))
			require.NoError(b, s.Synchronize(ctx))
			took, err := end.Since(begin)
			require.NoError(b, err)
			b.ReportMetric(float64(b.N)*float64(bytes)/1e9/took.Seconds(), "GB/s")
		})
	}
	require.NoError(b, m.ResetResult(s, result))
	for _, c := range []kernel.Content{{}, {Kind: kernel.Random}, {Kind: kernel.Counter}} {
		run("fill "+c.Kind.String(), n, func() error { return m.Fill(s, p, n, c, 0) })
		run("check "+c.Kind.String(), n, func() error { return m.Check(s, p, n, c, 0, result) })
	}
	run("memset", n, func() error { return s.Memset(p, 0, n) })
	run("copy on device, read and written", 2*n, func() error { return m.Copy(s, q, p, n, 0) })
	run("copy to device", linked, func() error { return m.Copy(s, p, mapped, linked, 0) })
	run("copy to host", linked, func() error { return m.Copy(s, mapped, p, linked, 0) })
	found, err := m.ReadResult(ctx, result)
	require.NoError(b, err)
	assert.Zero(b, found.Mismatches)
}
