package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestManaged(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	env := measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: []int{1 << 20}, Duration: 1}}
	b, err := measure.Run(t.Context(), managedMemory, env, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	for _, v := range b.Views {
		assert.NotEmpty(t, b.Select(v), "view %q", v.Title)
	}
	for _, device := range []string{"0", "1"} {
		for _, method := range []string{cpuFirstTouch, gpuFirstTouch, prefetchToDevice, prefetchToHost, moveToDevice, moveToHost, gpuFaults, cpuFaults, gpuReads} {
			s := b.Find(seriesManaged, label(result.Device, device), label(result.Method, method))
			require.NotNil(t, s, method)
			assert.Positive(t, s.Median, method)
			assert.True(t, s.Verified, method)
		}
		for _, method := range []string{byPlan, byPlanInPlace, byFaults, byExplicit} {
			for _, access := range []string{"read", "write"} {
				require.NotNil(t, b.Find(seriesManagedBudget, label(result.Device, device), label(result.Method, method), label(accessLabel, access)))
			}
		}
		for _, advice := range []string{noAdvice, adviseFromAfar} {
			require.NotNil(t, b.Find(seriesManagedPingPong, label(result.Device, device), label(adviceLabel, advice)))
		}
	}
	for _, s := range b.Series {
		assert.True(t, s.Verified, "%s %v", s.Name, s.Labels)
	}
	text := strings.Join(b.Answers, "\n")
	assert.Contains(t, text, "Managed memory moves ")
	assert.Equal(t, []string{"at 1 MiB", "64 MiB, an eighth of it on the GPU"}, titles(b))
	assert.Contains(t, strings.Join(b.Notes, "\n"), "managed memory of the group on GPU 0: ")
	assert.Positive(t, raw.TrafficOf(sim).FaultsOnDevice)
}

// Each sample moves the memory from where it is: a prefetch of what is there takes no time, and
// says nothing.
func TestManagedMemoryIsMovedFromTheOtherSide(t *testing.T) {
	t.Parallel()
	const n, host = 1 << 20, -1
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)

	m := &managedFixture{resources: resources{dev: dev}}
	require.NoError(t, m.open(t.Context(), n))
	t.Cleanup(func() { assert.NoError(t, m.shut()) })
	kind := hostKinds()[slices.IndexFunc(hostKinds(), func(k hostKind) bool { return k.moves })]
	c := &copyFixture{resources: resources{dev: dev}, kind: kind, n: n}
	require.NoError(t, c.open(t.Context()))
	t.Cleanup(func() { assert.NoError(t, c.close()) })

	start := func(b []byte, sample func(context.Context) (float64, error)) map[int]int {
		var at map[int]int // where the memory is when the last prefetch is queued
		sim.OnCall(func(fn string, _ int) {
			if fn == "cudaMemPrefetchAsync" {
				at = sim.ManagedResidence(uintptr(unsafe.Pointer(&b[0])), n)
			}
		})
		defer sim.OnCall(nil)
		_, err := sample(t.Context())
		require.NoError(t, err)
		return at
	}
	for range 2 { // also when the sample before has moved it
		for _, one := range m.bySize(n) {
			switch one.Labels.Get(result.Method) {
			case prefetchToDevice:
				assert.Equal(t, map[int]int{host: n}, start(m.m.Bytes(), one.Sample))
			case prefetchToHost:
				assert.Equal(t, map[int]int{0: n}, start(m.m.Bytes(), one.Sample))
			}
		}
	}
	up, down := c.bandwidth(seriesBandwidth, result.HostToDevice, n, 1), c.bandwidth(seriesBandwidth, result.DeviceToHost, n, 1)
	for range 2 {
		assert.Equal(t, map[int]int{host: n}, start(c.source.Bytes(), up.Sample))
		assert.Equal(t, map[int]int{0: n}, start(c.target.Bytes(), down.Sample))
	}
}

// The CPU time of moving memory to where a sample begins is not the sample's. Not parallel: it is
// that of the process.
func TestManagedCPUTimeIsOfWhatIsTimed(t *testing.T) {
	if hostos.CPUTime() < 0 {
		t.Skip("the CPU time of a process is not known on this platform")
	}
	const n = 64 << 10
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	m := &managedFixture{resources: resources{dev: dev}}
	require.NoError(t, m.open(t.Context(), n))
	t.Cleanup(func() { assert.NoError(t, m.shut()) })
	kind := hostKinds()[slices.IndexFunc(hostKinds(), func(k hostKind) bool { return k.moves })]
	c := &copyFixture{resources: resources{dev: dev}, kind: kind, n: n}
	require.NoError(t, c.open(t.Context()))
	t.Cleanup(func() { assert.NoError(t, c.close()) })
	prefetch := m.bySize(n)[slices.IndexFunc(m.bySize(n), func(c measure.Case) bool { return c.Labels.Get(result.Method) == prefetchToDevice })]

	const burnt = 50 * time.Millisecond
	for name, one := range map[string]measure.Case{"managed": prefetch, "bandwidth": c.bandwidth(seriesBandwidth, result.HostToDevice, n, 1)} {
		for timed := range 2 { // of the two prefetches of a sample, the one that takes CPU time
			prefetches := 0
			_, err := one.Sample(t.Context()) // which prepares
			require.NoError(t, err)
			sim.OnCall(func(fn string, _ int) {
				if fn != "cudaMemPrefetchAsync" {
					return
				}
				if prefetches++; prefetches == timed+1 {
					began := hostos.CPUTime()
					for now := began; now-began < burnt; now = hostos.CPUTime() {
					}
				}
			})
			before := one.CPU()
			_, err = one.Sample(t.Context())
			require.NoError(t, err)
			sim.OnCall(nil)
			assert.Equal(t, 2, prefetches, name)
			assert.Equal(t, timed == 1, one.CPU()-before >= burnt, "%s: %v", name, one.CPU()-before)
		}
	}
}

// A plan that leaves memory on the host leaves no advice there: work without a plan has page
// faults after it, and none with it.
func TestPlansInPlaceAreUndone(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	const n, budget, chunk = 64 << 20, 8 << 20, 2 << 20
	r := &managedFixture{resources: resources{dev: dev}}
	require.NoError(t, r.open(t.Context(), n))
	t.Cleanup(func() { assert.NoError(t, r.shut()) })
	faults := func(run func(context.Context, int, int, bool) (time.Duration, error)) int {
		before := raw.TrafficOf(sim).FaultsOnDevice
		took, err := run(t.Context(), budget, chunk, true)
		require.NoError(t, err)
		require.Positive(t, took)
		return int(raw.TrafficOf(sim).FaultsOnDevice - before)
	}
	all := faults(r.faulting)
	require.Positive(t, all)
	for range 2 {
		require.Zero(t, faults(r.inPlace))
		require.Equal(t, all, faults(r.faulting))
	}
}

// Sizes that would fill the card are left out, so that no other program of it suffers.
func TestManagedLeavesRoomOnTheCard(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 400 << 20}}})
	groups, err := planManaged(measure.Env{Devices: rt.Devices(), Options: measure.Options{Sizes: []int{1 << 20, 101 << 20}}})
	require.NoError(t, err)
	var names []string
	for _, g := range groups {
		names = append(names, g.Name)
		assert.LessOrEqual(t, g.Footprint.Device, 400<<20/2, g.Name)
	}
	assert.Equal(t, []string{"managed memory, 1 MiB on GPU 0", "managed pages on GPU 0", "a budget of 8 MiB on GPU 0"}, names)
}

func TestManagedWithoutConcurrentAccessIsLeftOut(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrConcurrentManagedAccess: 0}}}})
	b, err := measure.Run(t.Context(), managedMemory, measure.Env{Devices: rt.Devices(), Options: measure.Options{Quick: true, Sizes: []int{1 << 20}, Duration: 1}}, nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	assert.Empty(t, b.Series)
	assert.Contains(t, strings.Join(b.Notes, "\n"), "ConcurrentManagedAccess is 0")
}

// managedCases opens a rig on a device with the test's clock, and returns all of its cases.
func managedCases(t *testing.T, dev *cudart.Device, n int) (*managedFixture, []measure.Case) {
	t.Helper()
	r := &managedFixture{resources: resources{dev: dev, now: simClock(t, dev)}}
	require.NoError(t, r.open(t.Context(), n))
	t.Cleanup(func() { assert.NoError(t, r.shut()) })
	return r, slices.Concat(r.bySize(n), r.byPage(n), r.budgeted(n))
}

// Each case of managed memory compares what it moved and wrote: bytes that are wrong afterwards are
// found, and the next case begins with right ones.
func TestWrongBytesOfManagedMemoryAreFound(t *testing.T) {
	t.Parallel()
	const n = 64 << 20
	_, rt := testgpu.Sim(t, cudasim.Config{})
	r, cases := managedCases(t, rt.Devices()[0], n)
	for _, c := range hosttest.Sample(cases) {
		name := c.Name + " " + c.Labels.Get(result.Method) + " " + c.Labels.Get(adviceLabel) + " " + c.Labels.Get(accessLabel) + " " + c.Labels.Get(orderLabel)
		require.NotNil(t, c.Verify, name)
		for range 2 {
			_, err := c.Sample(t.Context())
			require.NoError(t, err, name)
		}
		memory := r.m.Bytes()
		switch {
		case r.fresh != nil:
			memory = r.fresh.Bytes()
		case c.Labels.Get(result.Method) == byExplicit:
			memory = r.host.Bytes()
		}
		at := n/2 + hostPage // where each case writes
		memory[at/gpuPage*gpuPage] ^= 0x80
		require.ErrorIs(t, c.Verify(t.Context()), measure.ErrMismatch, name)
		_, err := c.Sample(t.Context())
		require.NoError(t, err, name)
		require.NoError(t, c.Verify(t.Context()), name)
		if c.Labels.Get(accessLabel) == "read" || c.Labels.Get(result.Method) == gpuReads {
			_, err := c.Sample(t.Context())
			require.NoError(t, err, name)
			require.NoError(t, errors.Join(r.dev.Memset(r.sink, poison, sinkBytes), r.dev.Synchronize(t.Context())))
			require.ErrorIs(t, c.Verify(t.Context()), measure.ErrMismatch, "%s: what was read", name)
		}
	}
}

// Work that reads takes as long by explicit copies as by a plan where the card's memory decides:
// both read all of it there.
func TestExplicitCopiesDoTheWorkOfPlans(t *testing.T) {
	t.Parallel()
	const n, slow = 64 << 20, 2.0
	link := cudasim.Link{OnDevice: cudasim.Speed{Rate: slow}, PrefetchToDevice: cudasim.Speed{Rate: 50}, PrefetchToHost: cudasim.Speed{Rate: 50},
		HostToDevice: cudasim.Speed{Rate: 50}, DeviceToHost: cudasim.Speed{Rate: 50}, FaultToDevice: cudasim.Speed{Rate: 50}}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: link}}})
	_, cases := managedCases(t, rt.Devices()[0], n)
	for _, access := range []string{"read", "write"} {
		for _, method := range []string{byExplicit, byPlan} {
			i := slices.IndexFunc(cases, func(c measure.Case) bool {
				return c.Labels.Get(accessLabel) == access && c.Labels.Get(result.Method) == method
			})
			got, err := cases[i].Sample(t.Context())
			require.NoError(t, err)
			assert.InEpsilon(t, slow, got, 0.15, "%s %s", access, method)
		}
	}
}

// Work of the GPU that begins late counts until its end.
func TestLateWorkOnManagedMemoryIsTimed(t *testing.T) {
	t.Parallel()
	const n, late = 1 << 20, 5 * time.Millisecond
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{OnDevice: cudasim.Speed{Rate: 100, Latency: late}}}}})
	_, cases := managedCases(t, rt.Devices()[0], n)
	for method, works := range map[string]int{gpuFirstTouch: 1, gpuFaults: 1, gpuReads: 2} {
		i := slices.IndexFunc(cases, func(c measure.Case) bool { return c.Name == seriesManaged && c.Labels.Get(result.Method) == method })
		got, err := cases[i].Sample(t.Context())
		require.NoError(t, err)
		longest := float64(works*n) / float64(time.Duration(works)*late)
		assert.Less(t, got, longest, method)
		assert.Greater(t, got, longest/1.5, method)
		assert.Equal(t, works*n, cases[i].BytesPerSample, "%s: what the rate is of", method)
	}
}
