package bench

import (
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
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A cudaMemcpyAsync of pageable memory returns when CUDA has staged the bytes. The rate is that
// of the link all the same, in each direction, and in both at once on links of two speeds.
func TestPageableCopiesAreTimedUntilTheBytesArrive(t *testing.T) {
	t.Parallel()
	const n, copies = 1 << 20, 4
	for _, link := range []cudasim.Link{
		{PageableHostToDevice: cudasim.Speed{Rate: 3.4}, PageableDeviceToHost: cudasim.Speed{Rate: 12}},
		{PageableHostToDevice: cudasim.Speed{Rate: 12}, PageableDeviceToHost: cudasim.Speed{Rate: 3.4}},
	} {
		_, rt := testgpu.Sim(t, cudasim.Config{StagedUploads: true, Devices: []cudasim.DeviceConfig{{Link: link}}})
		dev := rt.Devices()[0]
		r := &copyFixture{resources: resources{dev: dev, now: simClock(t, dev)}, kind: unpinned, n: n}
		require.NoError(t, r.open(t.Context()))
		for way, rate := range map[string]float64{
			result.HostToDevice: link.PageableHostToDevice.Rate, result.DeviceToHost: link.PageableDeviceToHost.Rate, result.Both: 2 * 3.4,
		} {
			c := r.bandwidth(seriesBandwidth, way, n, copies)
			for range 3 {
				got, err := c.Sample(t.Context())
				require.NoError(t, err)
				tolerance := 0.02
				if way == result.Both { // which of the two calls is first is up to the scheduler
					tolerance = 0.3
				}
				assert.InEpsilon(t, rate, got, tolerance, way)
			}
			require.NoError(t, c.Verify(t.Context()), way)
		}
		require.NoError(t, r.close())
	}
}

// The sum of all devices is that of the time from the first byte of any to the last of all: also
// if the links differ, and one device begins late because it has other work to end.
func TestAllDevicesAreTimedTogether(t *testing.T) {
	t.Parallel()
	const n, copies = 1 << 20, 3
	for _, rates := range [][]float64{{25, 5}, {5, 25}} {
		var devices []cudasim.DeviceConfig
		for _, rate := range rates {
			way := cudasim.Speed{Rate: rate}
			devices = append(devices, cudasim.DeviceConfig{Link: cudasim.Link{HostToDevice: way, DeviceToHost: way}})
		}
		_, rt := testgpu.Sim(t, cudasim.Config{Devices: devices})
		for _, way := range []string{result.HostToDevice, result.DeviceToHost, result.Both} {
			g := together(rt.Devices(), n, copies, []string{way})
			require.NoError(t, g.Open(t.Context()))
			c := g.Cases[0]
			bytes := float64(len(devices) * copies * n * len(directionsOf(way)))
			slowest := time.Duration(copies * n / 5)
			for range 3 {
				got, err := c.Sample(t.Context())
				require.NoError(t, err)
				assert.InEpsilon(t, bytes/float64(slowest), got, 0.02, "%v %s", rates, way)
				for i, also := range c.Also {
					v, ok := also.Last()
					require.True(t, ok)
					assert.InEpsilon(t, rates[i]*float64(len(directionsOf(way))), v, 0.02, "%v %s device %d", rates, way, i)
				}
			}
			require.NoError(t, c.Verify(t.Context()))
			require.NoError(t, g.Close())
		}
	}
}

// Devices that begin one after the other take longer together than the slowest of them.
func TestDevicesThatBeginLateCountForAll(t *testing.T) {
	t.Parallel()
	const n, copies = 1 << 20, 2
	way := cudasim.Speed{Rate: 10}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{HostToDevice: way}}, {Link: cudasim.Link{HostToDevice: way}}}})
	var fixtures []*copyFixture
	for _, dev := range rt.Devices() {
		r := &copyFixture{resources: resources{dev: dev}, kind: registered, n: n}
		require.NoError(t, r.open(t.Context()))
		fixtures = append(fixtures, r)
	}
	c := allAtOnce(fixtures, result.HostToDevice, n, copies)
	_, err := c.Sample(t.Context())
	require.NoError(t, err)
	alone := float64(2 * 10)
	for late := range 2 { // work of one device from before the sample, which is not the sample's
		require.NoError(t, fixtures[late].queue(t.Context(), result.HostToDevice, n, 5))
		got, err := c.Sample(t.Context())
		require.NoError(t, err)
		assert.InEpsilon(t, alone, got, 0.02, "device %d is late", late)
	}
	for _, r := range fixtures {
		require.NoError(t, r.close())
	}
}

// Times of a few steps of the device's clock say little: samples are long enough for it.
func TestCoarseClocksOfTheDevice(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{0, time.Microsecond, 100 * time.Microsecond} {
		_, rt := testgpu.Sim(t, cudasim.Config{EventResolution: step, Devices: []cudasim.DeviceConfig{known}})
		env := measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: []int{4 << 10, 256 << 10}, Duration: time.Millisecond}}
		b := run(t, Link(LinkPlan{SizeBytes: 64 << 10, Copies: 1, Samples: 3}), env)
		require.Len(t, b.Series, 2)
		for _, s := range b.Series {
			assert.InEpsilon(t, modelled(64<<10), s.Median, 0.05, "%v: %v", step, s.Labels)
		}
		lat := run(t, Latency(), env)
		for _, n := range []int{4 << 10, 256 << 10} {
			s := lat.Find(seriesLatency, label(result.Method, byDevice), label(result.Size, strconv.Itoa(n)), label(result.Direction, result.HostToDevice))
			require.NotNil(t, s, fmt.Sprint(step, n))
			assert.InEpsilon(t, 8e-6+float64(n)/25e9, s.Median, 0.1, "%v: %v", step, s.Labels)
		}
	}
}

// Of two GPUs every experiment speaks of both, or says that it measured one of them, and why.
func TestEveryExperimentSpeaksOfAllDevices(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	env := measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: []int{64 << 10}, Duration: 1}}
	for _, e := range hosttest.Sample(All()) {
		b, err := measure.Run(t.Context(), e, env, nil)
		require.NoError(t, err)
		require.Empty(t, b.Errors, e.Name)
		alone := strings.Contains(strings.Join(b.Notes, "\n"), "measured on GPU 0 alone: ")
		second := slices.ContainsFunc(b.Series, func(s result.Series) bool { return s.Labels.Get(result.Device) == "1" })
		assert.NotEqual(t, alone, second, e.Name)
	}
}
