package bench

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// known is the link of a device of the tests.
var known = cudasim.DeviceConfig{Link: cudasim.Link{
	HostToDevice: cudasim.Speed{Rate: 25, Latency: 8 * time.Microsecond},
	DeviceToHost: cudasim.Speed{Rate: 25, Latency: 8 * time.Microsecond},
	OnDevice:     cudasim.Speed{Rate: 400, Latency: 2 * time.Microsecond},
}}

// simulated returns what an experiment runs on: so many devices with the known link. It
// takes as few samples as it may.
func simulated(t *testing.T, devices int, sizes ...int) (*cudasim.Sim, measure.Env) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: slices.Repeat([]cudasim.DeviceConfig{known}, devices)})
	return sim, measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: sizes, Duration: time.Millisecond}}
}

// modelled is the rate of a copy of n bytes on the known link, in GB/s.
func modelled(n int) float64 { return float64(n) / (8000 + float64(n)/25) }

func run(t *testing.T, e measure.Experiment, env measure.Env) *result.Bench {
	t.Helper()
	b, err := measure.Run(t.Context(), e, env, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	assert.True(t, b.Complete)
	for _, s := range b.Series {
		assert.Positive(t, s.Min, "%s %v", s.Name, s.Labels)
	}
	return b
}

// A link of 25 GB/s with a latency of 8 µs is measured as such, to 2%.
func TestBandwidthOfAKnownLink(t *testing.T) {
	t.Parallel()
	sizes := []int{4 << 10, 64 << 10, 200_001, 4 << 20}
	_, env := simulated(t, 1, sizes...)
	b := run(t, Bandwidth(), env)
	for _, memory := range []string{memoryRegistered, memoryHostAlloc, memoryWriteCombined} {
		for _, direction := range bothDirections {
			all := copiesOf(b, "0", memory, direction)
			if memory == memoryRegistered {
				assert.Len(t, all, len(sizes), "%s %s", memory, direction)
			} else {
				assert.Len(t, all, 1, "%s %s: a quick run", memory, direction)
			}
			for _, s := range all {
				want := modelled(s.Labels.Size())
				assert.InDelta(t, want, s.Median, want/50, "%s %v", s.Name, s.Labels)
				assert.True(t, s.Verified, "%v", s.Labels)
			}
		}
	}
	for _, s := range copiesOf(b, "0", memoryRegistered, result.Both) {
		want := 2 * modelled(s.Labels.Size())
		assert.InDelta(t, want, s.Median, want/50, "%v", s.Labels)
		assert.True(t, s.Verified, "%v", s.Labels)
	}
	own := b.Find(seriesDeviceMemory)
	require.NotNil(t, own)
	want := 2 * float64(4<<20) / (2000 + float64(4<<20)/400)
	assert.InDelta(t, want, own.Median, want/50)
	assert.True(t, own.Verified)
}

// The clock of both ways runs from the first copy of either to the last, whichever of them takes
// longer, and neither begins before the clock, which the stream's earlier work holds up.
func TestBothWaysAreTimedTogether(t *testing.T) {
	t.Parallel()
	const n, copies = 1 << 20, 3
	fast, slow := cudasim.Speed{Rate: 25}, cudasim.Speed{Rate: 5}
	for _, link := range []cudasim.Link{{HostToDevice: fast, DeviceToHost: slow}, {HostToDevice: slow, DeviceToHost: fast}} {
		_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: link}}})
		r := &copyFixture{resources: resources{dev: rt.Devices()[0]}, kind: registered, n: n}
		require.NoError(t, r.open(t.Context()))
		for before := range 3 { // copies that the clock's stream has yet to make
			require.NoError(t, r.queue(t.Context(), result.HostToDevice, n, before))
			took, err := r.take(t.Context(), result.Both, n, copies)
			require.NoError(t, err)
			want := time.Duration(copies * n / 5) // ns at 5 GB/s
			assert.InDelta(t, want, took, float64(want)/50, "%+v after %d", link, before)
		}
		require.NoError(t, r.close())
	}
}

func TestBandwidthOfAllKinds(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1, 64<<10, 1<<20)
	env.Expect = func(s *result.Series) *result.Expected {
		if s.Labels.Get(result.Direction) == result.Both {
			return nil
		}
		return &result.Expected{Value: 50, Source: "a link of the test"}
	}
	b := run(t, Bandwidth(), env)
	for _, kind := range hostKinds() {
		for _, direction := range bothDirections {
			all := copiesOf(b, "0", kind.name, direction)
			require.NotEmpty(t, all, "%s %s", kind.name, direction)
			for _, s := range all {
				assert.True(t, s.Verified, "%v", s.Labels)
			}
		}
	}
	// A prefetch, by the simulated link.
	managed := copiesOf(b, "0", memoryManaged, result.HostToDevice)[0]
	want := float64(1<<20) / (10_000 + float64(1<<20)/47.3)
	assert.InDelta(t, want, managed.Median, want/20)

	assert.Empty(t, b.Notes)
	for _, direction := range bothDirections {
		for _, s := range copiesOf(b, "0", memoryMapped, direction) {
			assert.True(t, s.Verified, "%v", s.Labels)
		}
	}
	text := strings.Join(b.Answers, "\n")
	for _, part := range []string{
		"Pinned copies reach 21.0 GB/s to GPU and 21.0 from GPU, 42% of the reference.",
		"Pinned memory uploads ", " times as fast as pageable memory.",
		"A copy within GPU 0 reads and writes ",
	} {
		assert.Contains(t, text, part)
	}
	assert.NotContains(t, text, "Both ways", "they add up")
	assert.Equal(t, []string{"at 1 MiB", "1 MiB by kind of memory"}, titles(b))
}

func TestBandwidthOfAllDevicesAtOnce(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 3, 1<<20)
	b := run(t, Bandwidth(), env)
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		sum := b.Find(seriesTogether, result.Label{Key: result.Device, Value: allDevices}, result.Label{Key: result.Direction, Value: direction})
		require.NotNil(t, sum)
		want := 3 * modelled(1<<20)
		assert.InDelta(t, want, sum.Median, want/50)
		for d := range 3 {
			one := b.Find(seriesTogether, result.Label{Key: result.Device, Value: strconv.Itoa(d)}, result.Label{Key: result.Direction, Value: direction})
			require.NotNil(t, one)
			assert.Len(t, one.Samples, len(sum.Samples), "the same samples")
			assert.InDelta(t, want/3, one.Median, want/3/50)
			assert.True(t, one.Verified)
		}
		assert.NotEmpty(t, copiesOf(b, "2", memoryRegistered, direction))
	}
	all := b.Figures[len(b.Figures)-1]
	assert.Equal(t, "All 3 GPUs at once", all.Title)
	assert.InDelta(t, 62.9, all.Rows[0].Cells[0].Value, 1)
	assert.InDelta(t, 1, all.Rows[0].Cells[1].Value, 0.03)
	assert.Empty(t, all.Rows[0].Note)
}

// A byte that arrives wrong is found, in every kind of memory and direction, and so are
// copies that were not made.
func TestWrongBytesAreFound(t *testing.T) {
	t.Parallel()
	const n, at = 3<<20 + 5, 70_001
	for _, kind := range hostKinds() {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			_, env := simulated(t, 1)
			r := &copyFixture{resources: resources{dev: env.Devices[0]}, kind: kind, n: n}
			defer func() { require.NoError(t, r.close()) }()
			require.NoError(t, r.open(t.Context()))
			for _, direction := range []string{result.HostToDevice, result.DeviceToHost, result.Both, onDevice} {
				if kind.moves && direction == onDevice {
					continue
				}
				require.NoError(t, r.prepare(t.Context(), direction, n))
				if !kind.moves {
					require.ErrorContains(t, r.verify(t.Context(), direction, n), "wrong bytes: byte ", "nothing was copied: %s", direction)
					require.NoError(t, r.prepare(t.Context(), direction, n), direction)
				}
				_, err := r.take(t.Context(), direction, n, 1)
				require.NoError(t, err)
				require.NoError(t, r.verify(t.Context(), direction, n), direction)
				switch {
				case kind.moves:
					r.target.Bytes()[at]++
				case direction == result.DeviceToHost || direction == result.Both:
					r.target.Bytes()[at]++
				default:
					require.NoError(t, errors.Join(r.dev.Memset(r.in+at, 7, 16), r.dev.Synchronize(t.Context())))
				}
				require.ErrorContains(t, r.verify(t.Context(), direction, n), fmt.Sprintf("wrong bytes: byte %d is ", at), direction)
				if kind.moves {
					r.target.Bytes()[at]--
				}
			}
		})
	}
}

// When a run is interrupted at any copy, everything is released: testgpu fails the test for
// what is not.
func TestBandwidthInterruptedAtAnyCopy(t *testing.T) {
	t.Parallel()
	for i, name := range hosttest.Sample([]string{"cudaMemcpyAsync", "cudaMemcpy", "cudaMemPrefetchAsync", "cudaHostAlloc", "cudaMalloc", "cudaMemsetAsync"}) {
		for j, at := range []int{1, 2, 7, 40} {
			if !long() && i%4 != j {
				continue
			}
			t.Run(fmt.Sprint(name, " ", at), func(t *testing.T) {
				sim, env := simulated(t, 2, 1<<16)
				ctx, cancel := context.WithCancelCause(t.Context())
				stop := errors.New("interrupt")
				sim.Fail(name, cudasim.Fault{Nth: at, After: func() { cancel(stop) }})
				b, err := measure.Run(ctx, Bandwidth(), env, nil)
				if sim.Calls(name) < at {
					require.NoError(t, err)
					cancel(nil)
					return
				}
				require.ErrorIs(t, err, stop)
				require.NotNil(t, b)
				assert.False(t, b.Complete)
				assert.Empty(t, b.Errors)
			})
		}
	}
}

// A call that fails is reported, everything is released, and other kinds are measured.
func TestBandwidthGoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	sim, env := simulated(t, 1, 1<<16)
	sim.Fail("cudaHostAlloc", cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
	sim.Fail("cudaMallocManaged", cudasim.Fault{Times: -1, Code: cudart.ErrNotSupported})
	b, err := measure.Run(t.Context(), Bandwidth(), env, nil)
	require.NoError(t, err)
	require.Len(t, b.Errors, 3, "cudaHostAlloc in all forms")
	assert.Contains(t, b.Errors[0], "GPU 0, cuda_host_alloc memory: cudaHostAlloc")
	require.Len(t, b.Notes, 1)
	assert.Contains(t, b.Notes[0], "GPU 0, managed memory: not measured: cudaMallocManaged")
	assert.NotEmpty(t, copiesOf(b, "0", memoryStaged, result.HostToDevice))
}

func TestSizing(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1)
	assert.Equal(t, []int{16 << 10, 256 << 10, 4 << 20}, newSizing(env).sizes)
	env.Quick = false
	z := newSizing(env)
	assert.Equal(t, []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}, z.sizes)
	assert.Equal(t, []int{4 << 10, 16 << 10}, z.upTo(16<<10))
	assert.Equal(t, 256, z.count(4<<10))
	assert.Equal(t, 2, z.count(4<<20))
	assert.Equal(t, 1, z.count(1<<30))
	env.Sizes = []int{7, 3, 7}
	z = newSizing(env)
	assert.Equal(t, []int{3, 7}, z.sizes)
	assert.Equal(t, []int{3, 7}, z.upTo(5), "the user's")

	small := known
	small.Memory = 1 << 20
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{small}})
	z = newSizing(measure.Env{Devices: rt.Devices()})
	assert.Equal(t, []int{4 << 10, 16 << 10, 64 << 10, 256 << 10}, z.sizes, "a quarter of the device's memory at most")
	small.Memory = 8 << 10
	_, rt = testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{small}})
	_, err := measure.Run(t.Context(), Bandwidth(), measure.Env{Devices: rt.Devices()}, nil)
	require.EqualError(t, err, "measure: bandwidth: there is not memory enough for a copy of any size")

	_, err = measure.Run(t.Context(), Bandwidth(), measure.Env{}, nil)
	require.EqualError(t, err, "measure: bandwidth: no device")
	env.Sizes = []int{1 << 50}
	_, err = measure.Run(t.Context(), Bandwidth(), env, nil)
	require.ErrorContains(t, err, "name smaller sizes")
}

// A large copy that would take seconds is not begun: nothing could interrupt it.
func TestCopiesThatTakeTooLongAreLeftOut(t *testing.T) {
	t.Parallel()
	sim, env := simulated(t, 1)
	r := &copyFixture{resources: resources{dev: env.Devices[0]}, kind: registered, rate: 0.2}
	before := sim.TotalCalls()
	_, err := r.bandwidth(seriesBandwidth, result.HostToDevice, 1<<30, 1).Sample(t.Context())
	require.EqualError(t, err, "a sample would take 5.37 s: unsupported operation")
	assert.Equal(t, before, sim.TotalCalls())
}

func TestPatterns(t *testing.T) {
	t.Parallel()
	b := make([]byte, 3*patternPeriod+17)
	require.NoError(t, uploaded.fill(t.Context(), b))
	require.NoError(t, uploaded.compare(t.Context(), b, 0))
	require.NoError(t, uploaded.compare(t.Context(), b[2*patternPeriod+5:], 2*patternPeriod+5))
	require.ErrorContains(t, downloaded.compare(t.Context(), b, 0), "wrong bytes: byte ")
	require.ErrorContains(t, uploaded.compare(t.Context(), b[4096:], 0), "wrong bytes: byte ")
	b[len(b)-1]++
	require.ErrorContains(t, uploaded.compare(t.Context(), b, 0), fmt.Sprintf("byte %d is", len(b)-1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, uploaded.fill(ctx, b), context.Canceled)
}
