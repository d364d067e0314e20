//go:build linux && !android && (amd64 || arm64)

package gpukernels_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/pattern"
	"github.com/gopinned/pinned/internal/testgpu"
)

// gpu opens a simulated device, or the machine's GPU.
func gpu(tb testing.TB) (*cudart.Device, *cudart.Stream) {
	tb.Helper()
	dev := testgpu.Device(tb)
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

func newMemory(tb testing.TB, dev *cudart.Device) *gpukernels.Memory {
	tb.Helper()
	m, err := gpukernels.NewMemory(tb.Context(), dev)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, m.Close()) })
	return m
}

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
	contents := []pattern.Content{
		{Seed: 0x123456789abcdef1}, {Kind: pattern.Constant, Seed: 0xAA55AA55AA55AA55}, {Kind: pattern.WalkingBit},
		{Kind: pattern.Counter, Mask: 0x9393939393939393}, {Kind: pattern.Random, Seed: 42},
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
				require.Equal(t, gpukernels.Found{First: -1}, found, name)

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
				require.Equal(t, gpukernels.Found{Mismatches: len(wrong), First: first}, found, name)
			}
		}
	}
	// All wrong: another seed.
	require.NoError(t, m.Fill(s, p, size, pattern.Content{Kind: pattern.Constant}, 0))
	found, err := m.Compare(ctx, s, p, size, pattern.Content{Kind: pattern.Constant, Mask: math.MaxUint64}, 0)
	require.NoError(t, err)
	assert.Equal(t, gpukernels.Found{Mismatches: size, First: 0}, found)
	require.NoError(t, m.Fill(s, 0, 0, pattern.Content{}, 0))
	assert.ErrorIs(t, m.Fill(s, p, -1, pattern.Content{}, 0), cudart.ErrInvalidValue)
}

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
	c := pattern.Content{Seed: 5}
	require.NoError(t, m.Fill(s, p, n, c, 0))
	for _, at := range []int{0, 1<<32 - 8, 1<<32 + 1, n - 100} {
		got, want := testgpu.CopyToHost[byte](t, s, p+cudart.DevPtr(at), 100), make([]byte, 100)
		c.Fill(want, uint64(at))
		require.Equal(t, want, got)
	}
	testgpu.CopyToDevice(t, dev, p+(n-2), []byte{^testgpu.CopyToHost[byte](t, s, p+(n-2), 1)[0]})
	found, err := m.Compare(context.Background(), s, p, n, c, 0)
	require.NoError(t, err)
	assert.Equal(t, gpukernels.Found{Mismatches: 1, First: n - 2}, found)
}

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
				c := pattern.Content{Seed: uint64(i)}
				c.Fill(memory[:n], 9)
				to, from := cudart.DevPtr(off[0]), cudart.DevPtr(off[1])
				require.NoError(t, s.Memset(a, 0, size+64))
				require.NoError(t, m.Copy(s, a+to, mapped, n, blocks))
				require.NoError(t, m.Copy(s, b+from, a+to, n, blocks))
				require.NoError(t, m.Copy(s, mapped+size, b+from, n, blocks))
				found, err := m.Compare(ctx, s, a+to, n, c, 9)
				require.NoError(t, err)
				require.Equal(t, gpukernels.Found{First: -1}, found, "up: %d bytes, %v", n, off)
				require.True(t, bytes.Equal(memory[:n], memory[size:][:n]), "back: %d bytes, %v", n, off)
			}
		}
	}
	// What the GPU reads over the link is what the host wrote.
	pattern.Content{Seed: 99}.Fill(memory[:size], 0)
	found, err := m.Compare(ctx, s, mapped, size, pattern.Content{Seed: 99}, 0)
	require.NoError(t, err)
	assert.Equal(t, gpukernels.Found{First: -1}, found)
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
	p, result := testgpu.ToDevice(t, dev, chain), testgpu.Malloc(t, dev, gpukernels.ResultBytes)
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
	begin, err := dev.NewEvent()
	require.NoError(t, err)
	end, err := dev.NewEvent()
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
	assert.ErrorIs(t, m.Busy(s, gpukernels.MaxBusy+1), cudart.ErrInvalidValue)
}

func TestCloseWaitsForRunningKernels(t *testing.T) {
	dev, s := gpu(t)
	m, err := gpukernels.NewMemory(t.Context(), dev)
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
	launch := func() { err = errors.Join(err, m.Fill(s, p, 64, pattern.Content{}, 0)) }
	launch()
	require.NoError(t, s.Synchronize(context.Background()))
	assert.Zero(t, testing.AllocsPerRun(100, launch))
	require.NoError(t, err)
	require.NoError(t, s.Synchronize(context.Background()))
}

func BenchmarkMemory(b *testing.B) {
	dev, s := realGPU(b, "a simulated one has no times of its own")
	ctx := context.Background()
	m := newMemory(b, dev)
	const n = 4 << 30
	p, q, result := testgpu.Malloc(b, dev, n), testgpu.Malloc(b, dev, n), testgpu.Malloc(b, dev, gpukernels.ResultBytes)
	const linked = 256 << 20
	host, err := dev.HostAlloc(linked, cudart.HostAllocMapped)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dev.FreeHost(host)) })
	mapped, err := dev.HostDevicePointer(host)
	require.NoError(b, err)
	begin, err := dev.NewEvent()
	require.NoError(b, err)
	end, err := dev.NewEvent()
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
	for _, c := range []pattern.Content{{}, {Kind: pattern.Random}, {Kind: pattern.Counter}} {
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

// A call into the library that never returns holds up no Compare past its context.
func TestCompareEndsWithItsContext(t *testing.T) {
	t.Parallel()
	k, dev := testgpu.NewKernels(t, cudasim.Config{})
	k.Names = map[string]int{"pinned_fill": 6, "pinned_check": 7, "pinned_copy": 3, "pinned_chase": 4, "pinned_busy": 2}
	m, err := gpukernels.NewMemory(t.Context(), dev)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	functions := []string{"cudaMalloc", "cudaMemcpy", "cudaFree"}
	over := make(chan error, len(functions))
	var unblock []func()
	for _, fn := range functions {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		unblock = append(unblock, k.Block(fn, cudasim.Fault{}))
		go func() {
			_, err := m.Compare(ctx, s, 0x1000, 64, pattern.Content{}, 0)
			over <- err
			_ = s.Close()
		}()
		require.NoError(t, k.AwaitBlocked(t.Context(), fn, 1))
	}
	cancel()
	for range functions {
		err := <-over
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, bounded.ErrStuck)
	}
	for _, f := range unblock {
		f()
	}
	require.NoError(t, m.Close())
}
