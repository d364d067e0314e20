package bench

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Of a link model every method has the rate that the model gives it, and the crossover is where the model has it.
func TestBlocksOfAKnownLink(t *testing.T) {
	t.Parallel()
	const latency, ns = 8000.0, 1.0
	device := known
	device.Link.OnDevice = cudasim.Speed{Rate: 10} // which slows the kernel
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{device}})
	sizes := []int{4 << 10, 64 << 10, 256 << 10}
	env := measure.Env{Devices: rt.Devices(), Options: measure.Options{Sizes: sizes, Duration: time.Millisecond}}
	b := run(t, blocks(), env)
	for _, size := range sizes {
		for _, count := range []int{1, 16} {
			n := float64(size * count)
			for method, want := range map[string]float64{
				byKernel:  2000*ns + max(n/10, latency+n/25),
				byEngine:  float64(count) * (latency + float64(size)/25),
				byCopies:  float64(count) * (latency + float64(size)/25),
				byOneCopy: latency + n/25,
			} {
				for _, direction := range bothDirections {
					where := []result.Label{label(result.Direction, direction), label(result.Method, method), label(result.Size, strconv.Itoa(size)), label(result.Blocks, strconv.Itoa(count))}
					s := b.Find(seriesBlocks, where...)
					require.NotNil(t, s, where)
					assert.InEpsilon(t, n/want, s.Median, 0.15, where)
					assert.True(t, s.Verified, where)
					assert.Equal(t, size*count, s.BytesPerSample)
					rate := b.Find(seriesBlockRate, where...)
					require.NotNil(t, rate, where)
					assert.InEpsilon(t, s.Median*1e9/float64(size), rate.Median, 1e-6, where)
				}
			}
		}
	}
	for _, direction := range bothDirections {
		// 16 blocks of 256 KiB: 128 + 168 µs by engines, 2 + 419 by the kernel; of 64 KiB 128 + 42, and 2 + 105.
		for count, from := range map[string]float64{"1": 4 << 10, "16": 256 << 10} {
			s := b.Find(seriesEnginesFrom, label(result.Direction, direction), label(result.Blocks, count))
			require.NotNil(t, s, count)
			assert.Equal(t, []float64{from}, s.Samples, count)
		}
	}
	answers := strings.Join(b.Answers, "\n")
	for _, direction := range []string{"to", "from"} {
		assert.Contains(t, answers, "Copies "+direction+" GPU are faster by copy engines than by the kernel from these sizes of a block up: 4 KiB (1 block), 256 KiB (16 blocks).")
	}
	for _, method := range []string{byQuickest, byKernel, byEngine, byOneCopy, byCopies, engineKernel, kernelEngine} {
		s := b.Find(seriesBlocks, label(result.Direction, result.Both), label(result.Method, method))
		require.NotNil(t, s, method)
		assert.True(t, s.Verified, method)
		assert.Equal(t, 4096*1024*2, s.BytesPerSample, method)
	}
	for _, count := range []string{"16", "1024"} {
		for _, method := range []string{byQuickest, byKernel, byEngine, byCopies} {
			s := b.Find(seriesBlockLatency, label(result.Blocks, count), label(result.Method, method), label(result.Direction, result.DeviceToHost))
			require.NotNil(t, s, method)
			assert.True(t, s.Verified, method)
		}
	}
	for _, v := range b.Views {
		if v.Series != seriesBlocks && v.Series != seriesBlockRate {
			assert.NotEmpty(t, b.Select(v), v.Title)
		}
	}
}

// Verify finds that nothing was copied, or one wrong byte, and what one case copied to is no other's fault.
func TestWrongBytesOfBlocksAreFound(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	f := &blocksFixture{resources: resources{dev: dev}, pool: 8 << 20, window: 3<<20 + 4, kernel: true}
	require.NoError(t, f.open(t.Context()))
	var err error
	f.check, err = f.pinned(t.Context(), 1<<20) // blocks lie across its end
	require.NoError(t, err)

	for _, method := range []string{byQuickest, byKernel, byEngine, byOneCopy, byCopies, engineKernel, kernelEngine} {
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost, result.Both} {
			c := f.newCase(direction, method, 1000, 1500)
			name := method + " " + direction
			require.NoError(t, c.prepare(t.Context()), name)
			require.ErrorIs(t, c.verify(t.Context()), measure.ErrMismatch, name)
			_, err := c.time(t.Context())
			require.NoError(t, err, name)
			require.NoError(t, c.verify(t.Context()), name)
			if direction != result.DeviceToHost {
				require.NoError(t, errors.Join(dev.Memset(f.in+1_499_999, 1, 1), dev.Synchronize(t.Context())))
				require.ErrorIs(t, c.verify(t.Context()), measure.ErrMismatch, name)
			} else {
				f.host.Bytes()[c.download.at(1499)+999]++
				require.ErrorIs(t, c.verify(t.Context()), measure.ErrMismatch, name)
			}
		}
	}
	require.NoError(t, f.close())
}

// The blocks of a list are others each time, all of them if as many are wanted, and none is there twice.
func TestRandomBlocksAreDistinct(t *testing.T) {
	t.Parallel()
	f := &blocksFixture{pool: 1000, lists: map[int][]uint32{}}
	up, down := f.random(10, 50)
	all := slices.Sorted(slices.Values(slices.Concat(up, down)))
	for i, at := range all {
		require.EqualValues(t, i, at)
	}
	assert.False(t, slices.IsSorted(up))
	up, _ = f.random(10, 3)
	assert.Len(t, up, 3)
}

// What a plan takes is what the memory admits, blocks that do not fit are refused, and a device that cannot
// access host memory by its address is measured without the kernel.
func TestBlockPlans(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1, 8<<20)
	_, _, err := measure.Estimate(blocks(), env)
	require.ErrorContains(t, err, "blocks of 8 MiB: the memory that is available admits 4 MiB at most")
	env.Sizes, env.Duration = nil, 0
	for quick, largest := range map[bool]time.Duration{false: 20 * time.Second, true: 2 * time.Second} {
		env.Quick = quick
		took, footprint, err := measure.Estimate(blocks(), env)
		require.NoError(t, err)
		assert.Less(t, took, largest)
		assert.Equal(t, measure.Footprint{Pinned: simulatedPool + maxSimulated, Device: 2 * maxSimulated}, footprint)
	}
	for _, c := range [][4]int{ // available and free memory, the pool, and the window
		{1 << 40, 1 << 40, blockPool, blockWindow}, {4<<30 + 5, 1 << 40, 2 << 30, blockWindow}, {1 << 30, 1 << 40, 512 << 20, 256 << 20},
		{1 << 40, 1 << 30, blockPool, 256 << 20}, {60 << 20, 1 << 40, 0, 0},
	} {
		f := blocksFixture{pool: blockPool, window: blockWindow}
		f.fit(c[0], c[1])
		assert.Equal(t, [2]int{c[2], c[3]}, [2]int{f.pool, f.window}, c)
	}
	f := blocksFixture{window: 1000}
	assert.Equal(t, []int{1, 16}, f.counts(60, []int{1, 16, 17}))
	assert.Equal(t, []int{2}, f.counts(500, []int{16, 17}))

	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrCanUseHostPointerForRegisteredMem: 0}}}})
	env = measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: []int{4096}, Duration: 1}}
	b := run(t, blocks(), env)
	assert.Equal(t, []string{"GPU 0, blocks by the kernel: not measured: the device cannot access host memory by its address: unsupported operation"}, b.Notes)
	assert.Nil(t, b.Find(seriesBlocks, label(result.Method, byKernel)))
	assert.NotNil(t, b.Find(seriesBlocks, label(result.Method, byQuickest)))
	assert.Nil(t, b.Find(seriesEnginesFrom))
}

func TestBlocksInterruptedAnywhere(t *testing.T) {
	t.Parallel()
	interruptAnywhere(t, func(*cudart.Device) measure.Experiment { return blocks() }, 64<<10)
}
