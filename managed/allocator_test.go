package managed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestNewRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	for _, tt := range []struct {
		dev  *cudart.Device
		o    Options
		want string
	}{
		{nil, Options{}, "managed: new allocator: the device is nil"},
		{dev, Options{Reserve: -1}, "Options.Reserve of -1"},
		{dev, Options{LogAbove: -1}, "Options.LogAbove of -1"},
	} {
		_, err := New(t.Context(), tt.dev, tt.o)
		assert.ErrorContains(t, err, tt.want)
	}
	require.NoError(t, rt.Close())
	_, err = New(t.Context(), dev, Options{})
	assert.ErrorIs(t, err, cudart.ErrClosed)
}

func TestNewRefusesADeviceWithoutManagedMemory(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrManagedMemory: 0}}}})
	_, err := New(t.Context(), rt.Devices()[0], Options{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "ManagedMemory is 0")
}

// Where CPU and GPU may not access managed memory at once, an error says so before
// anything crashes, and what is allowed works.
func TestDeviceWithoutConcurrentAccess(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, exclusive(), Options{})
	_, err := New(t.Context(), g.dev, Options{})
	require.ErrorIs(t, err, ErrNotConcurrent)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "Options.AllowExclusive")
	_, err = New(t.Context(), g.dev, Options{AllowExclusive: true, Oversubscribe: true})
	require.ErrorIs(t, err, ErrNotConcurrent)
	assert.ErrorContains(t, err, "Options.Oversubscribe")
	assert.Contains(t, strings.Join(g.a.Notes(), "\n"), "ConcurrentManagedAccess is 0")

	m := g.alloc(mib)
	for what, err := range map[string]error{
		"prefetch": m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()),
		"advise":   m.Whole().Advise(t.Context(), cudart.AdviseReadMostly, cudart.HostLocation()),
		"unadvise": m.Whole().Advise(t.Context(), cudart.AdviseUnsetReadMostly, cudart.HostLocation()),
		"discard":  m.Whole().Discard(t.Context(), g.s),
	} {
		assert.ErrorIs(t, err, ErrNotConcurrent, what)
		assert.ErrorContains(t, err, "managed: ", what)
	}
	require.NoError(t, g.s.Memset(m.Ptr(), 7, mib))
	b, err := m.HostBytes(t.Context()) // waits for the device
	require.NoError(t, err)
	assert.True(t, g.sim.TouchManaged(uintptr(m.Ptr()), mib, false))
	assert.Empty(t, g.sim.Misuses())
	assert.Equal(t, bytes.Repeat([]byte{7}, mib), b)

	moved, err := g.a.Reclaim(t.Context(), g.s, 1<<50)
	require.ErrorIs(t, err, ErrNotConcurrent)
	assert.Zero(t, moved)
}

// The simulated GPU shows what the real one punishes with a crash.
func TestTheSimulatorReportsTouchesOfBusyMemoryWithoutConcurrentAccess(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(exclusive())
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer func() { assert.NoError(t, sim.Close()) }()
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	dev := rt.Devices()[0]
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	p, err := dev.MallocManaged(mib)
	require.NoError(t, err)
	sim.Hold()
	require.NoError(t, s.Memset(cudart.DevPtr(uintptr(p)), 1, mib))
	sim.TouchManaged(uintptr(p), 1, false)
	sim.Release()
	require.NoError(t, s.Synchronize(t.Context()))
	require.Len(t, sim.Misuses(), 1)
	assert.Equal(t, "busy managed memory", sim.Misuses()[0].Kind)
	require.NoError(t, dev.Free(cudart.DevPtr(uintptr(p))))
	require.NoError(t, s.Close())
	require.NoError(t, rt.Close())
}

func TestForceDeviceAllocIsReported(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{}, Options{})
	for value, want := range map[string]bool{"": false, "0": false, "1": true} {
		t.Setenv("CUDA_MANAGED_FORCE_DEVICE_ALLOC", value)
		a, err := New(t.Context(), g.dev, Options{Reserve: 1})
		require.NoError(t, err)
		text := strings.Join(a.Notes(), "\n")
		assert.Equal(t, want, strings.Contains(text, "CUDA_MANAGED_FORCE_DEVICE_ALLOC=1"), "%q", value)
		assert.Equal(t, want, strings.Contains(text, "Options.Reserve matter"), "%q", value)
		require.NoError(t, a.Close())
	}
}

func TestAllocAndClose(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	for _, n := range []int{0, -1} {
		_, err := g.a.Alloc(t.Context(), n, AllocOptions{})
		require.ErrorContains(t, err, "the size must be positive")
	}
	m, err := g.a.Alloc(t.Context(), 3*mib+1, AllocOptions{})
	require.NoError(t, err)
	assert.Equal(t, 3*mib+1, m.Len())
	assert.False(t, m.OnHost())
	assert.Len(t, m.Bytes(), 3*mib+1)
	assert.Equal(t, uintptr(unsafe.Pointer(&m.Bytes()[0])), uintptr(m.Ptr()))
	m.Bytes()[3*mib] = 5
	at, err := g.dev.PointerAttributes(uintptr(m.Ptr()))
	require.NoError(t, err)
	assert.Equal(t, cudart.MemoryManaged, at.Type)

	require.ErrorIs(t, g.a.Close(), cudart.ErrInUse)
	_, err = g.a.Alloc(t.Context(), 1, AllocOptions{})
	require.ErrorIs(t, err, cudart.ErrClosed)
	require.ErrorIs(t, err, os.ErrClosed)
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	assert.Nil(t, m.Bytes())
	assert.Zero(t, m.Ptr())
	for what, err := range map[string]error{
		"prefetch": m.Whole().Prefetch(t.Context(), g.s, cudart.HostLocation()),
		"advise":   m.Whole().Advise(t.Context(), cudart.AdviseReadMostly, cudart.HostLocation()),
		"bytes":    func() error { _, err := m.HostBytes(t.Context()); return err }(),
		"mapped":   func() error { _, err := m.Range(0, 1).MappedByHost(); return err }(),
	} {
		assert.ErrorIs(t, err, cudart.ErrClosed, what)
	}
	require.NoError(t, g.a.Close())
	require.NoError(t, g.a.Close())
}

func TestStatsCountByLabel(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	a, err := g.a.Alloc(t.Context(), 100, AllocOptions{Label: "x"})
	require.NoError(t, err)
	b, err := g.a.Alloc(t.Context(), 50, AllocOptions{Label: "y"})
	require.NoError(t, err)
	require.NoError(t, a.Close())
	_, err = g.a.Alloc(t.Context(), -1, AllocOptions{})
	require.Error(t, err)
	assert.Equal(t, Stats{Counts: Counts{50, 150, 2, 1}, Failures: 1, Labels: map[string]Counts{"x": {0, 100, 1, 1}, "y": {50, 50, 1, 0}}}, g.a.Stats())
	require.NoError(t, b.Close())
	assert.Equal(t, Counts{0, 150, 2, 2}, g.a.Stats().Counts)
}

// The peak is exact: with every goroutine holding its memory at a barrier, it is what they
// hold together, and what is left at the end is nothing.
func TestStatsAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	const workers, rounds, n = 8, 20, 4096
	var wg, held sync.WaitGroup
	held.Add(workers)
	for i := range workers {
		wg.Go(func() {
			for round := range rounds {
				m, err := g.a.Alloc(t.Context(), n, AllocOptions{Label: []string{"even", "odd"}[i%2]})
				if !assert.NoError(t, err) {
					return
				}
				if round == 0 {
					held.Done()
					held.Wait()
				}
				assert.NoError(t, m.Close())
			}
		})
	}
	wg.Wait()
	s := g.a.Stats()
	assert.Equal(t, Counts{0, workers * n, workers * rounds, workers * rounds}, s.Counts)
	assert.Equal(t, workers*rounds/2, s.Labels["even"].Allocs)
	assert.Equal(t, s.Labels["even"], s.Labels["odd"])
}

func TestLargeAllocationsAreLogged(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	g := newFixture(t, Options{Logger: slog.New(slog.NewJSONHandler(&out, nil)), LogAbove: 1000})
	g.alloc(999)
	assert.Empty(t, out.String())
	m, err := g.a.Alloc(t.Context(), 1000, AllocOptions{Label: "big"})
	require.NoError(t, err)
	defer m.Close()
	var record map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &record))
	delete(record, "time")
	assert.Equal(t, map[string]any{"level": "INFO", "msg": "managed: allocated", "bytes": 1000.0, "label": "big",
		"on_host": false, "allocated": 1999.0, "peak": 1999.0, "allocs": 2.0, "device": 0.0}, record)
}

// Memory beyond the capacity is refused before a call of CUDA, with the figures.
func TestOversubscriptionIsRefused(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{Reserve: 16 * mib})
	m := g.alloc(40 * mib)
	_, err := g.a.Alloc(t.Context(), 8*mib+1, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
	for _, figure := range []string{"requested 8 MiB + 1 B", "40 MiB of managed memory are allocated",
		"16 MiB reserved", "of a capacity of 64 MiB", "64 MiB free of 64 MiB", "Options.Oversubscribe"} {
		assert.ErrorContains(t, err, figure)
	}
	assert.Equal(t, 1, g.sim.Calls("cudaMallocManaged"))
	g.alloc(8 * mib)

	// What is on the device is not counted twice.
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	g.sync()
	_, err = g.a.Alloc(t.Context(), 1, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
	assert.ErrorContains(t, err, "24 MiB free")
	_, err = g.a.Alloc(t.Context(), 1<<62, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
}

// Memory of another allocator of the same device counts, and device memory that was
// allocated by other means since.
func TestOversubscriptionCountsMemoryOfAllAllocators(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	other, err := New(t.Context(), g.dev, Options{})
	require.NoError(t, err)
	m, err := other.Alloc(t.Context(), 30*mib, AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	g.sync()
	_, err = g.a.Alloc(t.Context(), 35*mib, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
	p, err := g.dev.Malloc(20 * mib)
	require.NoError(t, err)
	_, err = g.a.Alloc(t.Context(), 15*mib, AllocOptions{})
	require.ErrorIs(t, err, ErrOversubscribed)
	g.alloc(14 * mib)
	require.NoError(t, g.dev.Free(p))
	require.NoError(t, m.Close())
	require.NoError(t, other.Close())
}

// A request that is refused, or fails, leaves no trace in what may be allocated.
func TestFailedAllocationIsNotCounted(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	g.sim.Fail("cudaMallocManaged", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, err := g.a.Alloc(t.Context(), 40*mib, AllocOptions{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.Equal(t, Stats{Failures: 1, Labels: map[string]Counts{}}, g.a.Stats())
	g.alloc(64 * mib)
}

// With the option, memory beyond the capacity stays on the host, so that the reserve is kept
// although the GPU accesses the memory.
func TestMemoryBeyondTheCapacityStaysOnTheHost(t *testing.T) {
	t.Parallel()
	for _, v := range versions {
		cfg := small(64 * mib)
		cfg.Version = v
		g := newSimFixture(t, cfg, Options{Oversubscribe: true, Reserve: 16 * mib})
		in, beyond := g.alloc(40*mib), g.alloc(100*mib)
		assert.False(t, in.OnHost())
		assert.True(t, beyond.OnHost())
		assert.Equal(t, 100*mib, g.a.Stats().OnHost)
		at, err := g.attributes(beyond, 0, beyond.Len())
		require.NoError(t, err)
		assert.Equal(t, cudart.RangeAttributes{Preferred: cudart.HostLocation(), AccessedBy: []cudart.Location{g.dev.Location()}}, at)
		for _, m := range []*Memory{in, beyond} {
			require.NoError(t, g.s.Memset(m.Ptr(), 1, m.Len()))
		}
		g.sync()
		assert.Equal(t, map[int]int{0: 40 * mib}, g.at(in.Whole()))
		assert.Equal(t, map[int]int{onHost: 100 * mib}, g.at(beyond.Whole()))
		free, _, err := g.dev.MemInfo()
		require.NoError(t, err)
		assert.Equal(t, 24*mib, free)

		require.NoError(t, beyond.Range(0, 8*mib).Prefetch(t.Context(), g.s, g.dev.Location()))
		g.sync()
		err = beyond.Range(8*mib, 64*kib).Prefetch(t.Context(), g.s, g.dev.Location())
		require.ErrorIs(t, err, ErrReserve)
		assert.ErrorContains(t, err, "16 MiB free of 64 MiB")
	}
}

func TestReclaimMovesTheLeastRecentlyUsedMemoryFirst(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	a, b, c := g.alloc(16*mib), g.alloc(16*mib), g.alloc(16*mib)
	for _, m := range []*Memory{b, a, c} {
		require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	}
	g.sync()
	_, err := g.dev.Malloc(32 * mib) // as cuBLAS does
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	moved, err := g.a.Reclaim(t.Context(), g.s, 40*mib)
	require.NoError(t, err)
	assert.Equal(t, 32*mib, moved)
	assert.Equal(t, map[int]int{onHost: 16 * mib}, g.at(b.Whole()))
	assert.Equal(t, map[int]int{onHost: 16 * mib}, g.at(a.Whole()))
	assert.Equal(t, map[int]int{0: 16 * mib}, g.at(c.Whole()))
	p, err := g.dev.Malloc(32 * mib)
	require.NoError(t, err)

	_, err = g.a.Reclaim(t.Context(), g.s, 60*mib)
	require.ErrorIs(t, err, ErrReserve)
	assert.ErrorContains(t, err, "other memory occupies the device")
	moved, err = g.a.Reclaim(t.Context(), g.s, 0)
	require.NoError(t, err)
	assert.Zero(t, moved)
	require.NoError(t, g.dev.Free(p))
}

// Prefetching to the host leaves copies of memory that is read mostly on the device.
func TestReclaimDropsCopiesOfReadMostlyMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, small(64*mib), Options{})
	m := g.alloc(32 * mib)
	g.fillByCPU(m)
	require.NoError(t, m.Whole().Advise(t.Context(), cudart.AdviseReadMostly, cudart.HostLocation()))
	require.NoError(t, m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()))
	g.sync()
	moved, err := g.a.Reclaim(t.Context(), g.s, 64*mib)
	require.NoError(t, err)
	assert.Equal(t, 32*mib, moved)
	assert.Equal(t, map[int]int{onHost: 32 * mib}, g.at(m.Whole()))
	at, err := g.attributes(m, 0, m.Len())
	require.NoError(t, err)
	assert.True(t, at.ReadMostly, "advised as before")
}

func TestReclaimRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	g := newFixture(t, Options{})
	_, err := g.a.Reclaim(noContext, g.s, 1)
	require.ErrorIs(t, err, errNilContext)
	_, err = g.a.Reclaim(t.Context(), nil, 1)
	require.ErrorIs(t, err, errNilStream)
	_, err = g.a.Reclaim(t.Context(), g.s, -1)
	require.ErrorContains(t, err, "must not be negative")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = g.a.Reclaim(ctx, g.s, 1)
	require.ErrorIs(t, err, context.Canceled)
}
