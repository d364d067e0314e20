//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// kernel lets the fixture's host report a release.
func (g *fixture) kernel(major, minor int) *hostmemtest.System {
	sys := g.watch()
	sys.Kernel = linux.Release{Major: major, Minor: minor}
	return sys
}

// tried returns how often memory was to be registered and allocated.
func (g *fixture) tried() [2]int {
	return [2]int{g.Sim.Calls("cudaHostRegister"), g.Sim.Calls("cudaHostAlloc")}
}

func requireZeros(tb testing.TB, mem []byte) {
	tb.Helper()
	require.Equal(tb, len(mem), bytes.Count(mem, []byte{0}), "zeros")
}

// Alloc works on every kind of host, and its buffers are alike in everything but the
// method: size, zeros, copies, Find, the ledger.
func TestAllocOnEveryHost(t *testing.T) {
	t.Parallel()
	methods := map[string]Method{
		"confidential computing": HostAllocated, "no cudaHostRegister": HostAllocated, "shared page tables": SharedPageTables,
	}
	for name, cfg := range cudasim.Hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cfg)
			sys := g.watch()
			for _, n := range []int{1, 4096, 5*mib + 1} {
				b, err := Alloc(g.Context(), g.Dev, n, Options{Label: name})
				require.NoError(t, err)
				require.Equal(t, methods[name], b.Info().Method)
				require.Len(t, b.Bytes(), n)
				requireZeros(t, b.Bytes())
				require.Equal(t, (n+sys.Page-1)/sys.Page*sys.Page, b.Info().Reserved)
				require.Equal(t, []Span{{0, n}}, slices.Collect(b.Spans(0, b.Len())))
				require.Zero(t, uintptr(b.Pointer())%uintptr(sys.Page))
				if b.Info().Method != Registered {
					require.NotEmpty(t, b.Info().Notes)
				}
				fill(b.Bytes(), byte(n))
				g.requireCopies(b)
				p, off, ok := Find(b.Bytes()[n/2:])
				require.True(t, ok, "a copier finds it, and copies directly")
				require.Equal(t, n/2, off)
				require.Same(t, b, p)
				mem := b.Bytes()
				require.NoError(t, b.Close())
				require.NoError(t, b.Close())
				require.Nil(t, b.Bytes())
				require.Nil(t, b.Pointer())
				require.Equal(t, methods[name], b.Info().Method, "after Close")
				if p, _, ok := Find(mem); ok { // other tests' memory may be there
					require.NotSame(t, b, p)
				}
				require.ErrorIs(t, b.CopyToDevice(g.Stream, 0, 0, 1), cudart.ErrClosed)
			}
			require.Zero(t, g.Sim.Outstanding().HostAllocs+g.Sim.Outstanding().Registrations)
			require.Zero(t, sys.Mapped.Load())
		})
	}
}

func TestMethodsHaveNames(t *testing.T) {
	t.Parallel()
	for m, want := range map[Method]string{
		Registered: "registered", RegisteredInSpans: "registered in spans", HostAllocated: "cudaHostAlloc",
		SharedPageTables: "shared page tables", -1: "unknown", 4: "unknown",
	} {
		assert.Equal(t, want, m.String())
	}
}

// What works is remembered: where registering is not supported it is tried once, and
// nothing is mapped from then on. When cudaHostAlloc fails it is forgotten.
func TestConfidentialComputing(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	sys := g.watch()
	first := g.alloc(3*mib, Options{})
	require.Equal(t, [2]int{1, 1}, g.tried())
	require.Len(t, first.Info().Notes, 1)
	require.Contains(t, first.Info().Notes[0], "confidential computing")
	require.Contains(t, first.Info().Notes[0], "cudaHostAlloc")
	require.Zero(t, sys.Mapped.Load(), "what could not be registered is unmapped")

	var calls []string
	sys.Calls = sys.Calls.Before(func(call string) error { calls = append(calls, call); return nil })
	again := g.alloc(5000, Options{
		HugePages: HugePagesNever, Chunk: 2 * mib, Node: AnyNode, Fork: true, Dump: true, Workers: 2, Label: "again",
	})
	require.Equal(t, [2]int{1, 2}, g.tried())
	require.Empty(t, calls)
	require.Equal(t, first.Info().Notes, again.Info().Notes[:1])
	require.Equal(t, []string{
		"Options.HugePages, Options.Chunk, Options.Node, Options.Fork, Options.Dump: ignored, because cudaHostAlloc chooses the pages",
	}, again.Info().Notes[1:])

	g.Sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, err := Alloc(g.Context(), g.Dev, 5000, Options{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	for _, part := range []string{
		"hostmem: allocate 5000 bytes: a registration of 3 MiB was refused (registering is not supported here: hosts with confidential computing refuse it)",
		"in its place cudaHostAlloc: 8192 bytes", "RLIMIT_MEMLOCK",
	} {
		require.ErrorContains(t, err, part)
	}
	require.Equal(t, [2]int{1, 3}, g.tried())
	g.alloc(5000, Options{})
	require.Equal(t, [2]int{2, 4}, g.tried(), "registering was tried again")
	g.alloc(5000, Options{})
	require.Equal(t, [2]int{2, 5}, g.tried())

	for _, n := range []int{0, -1, math.MaxInt, math.MaxInt - 4096} {
		_, err := Alloc(g.Context(), g.Dev, n, Options{})
		require.ErrorContains(t, err, "size must be positive and fit the address space")
	}
	require.Equal(t, [2]int{2, 5}, g.tried())
}

// An attribute says that the device cannot register: it is not tried.
func TestDevicesWithoutRegistering(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.NoHostRegister())
	b := g.alloc(5000, Options{})
	require.Equal(t, HostAllocated, b.Info().Method)
	require.Contains(t, b.Info().Notes[0], "attribute 99 is 0")
	require.Equal(t, [2]int{0, 1}, g.tried())
	g.Sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, err := Alloc(g.Context(), g.Dev, 5000, Options{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	require.ErrorContains(t, err, "attribute 99 is 0")
}

// Each device has its own memory of what works.
func TestWhatWorksIsOfADevice(t *testing.T) {
	t.Parallel()
	cfg := cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}
	cfg.Devices[1].Attributes = map[cudart.Attr]int{cudart.AttrHostRegisterSupported: 0}
	g := newSimFixture(t, cfg)
	second, err := g.Dev.Runtime().Device(1)
	require.NoError(t, err)
	require.Equal(t, HostAllocated, g.on(second).alloc(kib, Options{}).Info().Method)
	require.Equal(t, Registered, g.alloc(kib, Options{}).Info().Method)
}

// An attribute that cannot be read is an error, and is queried again.
func TestAttributesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	for nth := 1; nth <= 2; nth++ {
		g.Sim.Fail("cudaDeviceGetAttribute", cudasim.Fault{Nth: nth, Code: cudart.ErrUnknown})
		_, err := Alloc(t.Context(), g.Dev, kib, Options{})
		require.ErrorIs(t, err, cudart.ErrUnknown)
	}
	require.Equal(t, Registered, g.alloc(kib, Options{}).Info().Method)
}

// An alignment that cudaHostAlloc does not give has its price, which Reserved, the
// ledger and the limits have in them.
func TestAlignmentOfHostAllocatedMemory(t *testing.T) {
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	before := ReadStats()
	const n, align = 5*mib + 1, 64 * mib
	b, err := Alloc(t.Context(), g.Dev, n, Options{Align: align})
	require.NoError(t, err)
	require.Zero(t, uintptr(b.Pointer())%align)
	require.Equal(t, n, b.Len())
	requireZeros(t, b.Bytes())
	page := os.Getpagesize()
	exact := (n + page - 1) / page * page
	if b.Info().Reserved != exact { // unless CUDA's address happened to be aligned
		require.Equal(t, exact+align, b.Info().Reserved)
	}
	require.Equal(t, b.Info().Reserved, g.Sim.Outstanding().HostBytes)
	now := ReadStats()
	require.Equal(t, b.Info().Reserved, now.ReservedBytes-before.ReservedBytes)
	require.Equal(t, b.Info().Reserved, now.PinnedBytes-before.PinnedBytes)
	fill(b.Bytes(), 3)
	g.requireCopies(b)
	require.NoError(t, b.Close())
	require.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)

	// The first allocation is freed.
	require.NoError(t, SetLimits(Limits{MaxBytes: before.PinnedBytes + exact}))
	defer func() { require.NoError(t, SetLimits(Limits{})) }()
	neighbours := func() error {
		for range 2 { // they cannot both be aligned
			b, err := Alloc(t.Context(), g.Dev, n, Options{Align: align})
			if err != nil {
				return err
			}
			defer func() { require.NoError(t, b.Close()) }()
		}
		return nil
	}
	require.ErrorIs(t, neighbours(), ErrLimit)
	require.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
	require.Zero(t, g.Sim.Outstanding().HostAllocs)
	require.NoError(t, SetLimits(Limits{}))
	g.Sim.Fail("cudaFreeHost", cudasim.Fault{Code: cudart.ErrUnknown})
	require.NoError(t, neighbours(), "the next try frees it")
	require.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
	require.Zero(t, g.Sim.Outstanding().HostAllocs)
}

// The process's limit holds for cudaHostAlloc as for memory that is mapped.
func TestHostAllocatedMemoryCountsForTheLimits(t *testing.T) {
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	held := ReadStats().PinnedBytes
	require.NoError(t, SetLimits(Limits{MaxBytes: held + mib}))
	defer func() { require.NoError(t, SetLimits(Limits{})) }()
	first, err := Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	_, err = Alloc(t.Context(), g.Dev, held+2*mib, Options{})
	require.ErrorIs(t, err, ErrTooLarge)
	_, err = Alloc(endsWaiting(t), g.Dev, kib, Options{})
	require.ErrorIs(t, err, ErrLimit)
	require.NoError(t, first.Close())
	second, err := Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	require.NoError(t, SetLimits(Limits{MaxShare: 1e-12}))
	_, err = Alloc(t.Context(), g.Dev, kib, Options{})
	require.ErrorIs(t, err, ErrLimit, "the guard is asked")
	require.NotErrorIs(t, err, errors.ErrUnsupported, "and it is a limit that refuses")
	require.NoError(t, second.Close())
	require.Equal(t, held, ReadStats().PinnedBytes)
	require.Equal(t, 1, g.Sim.Calls("cudaHostRegister"))
}

// Hugetlb pages do not count for the guard; what cudaHostAlloc takes in their place
// does.
func TestTheGuardChecksPagesInPlaceOfReservedOnes(t *testing.T) {
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	sys := g.watch()
	sys.Plenty()
	require.NoError(t, SetLimits(Limits{MaxShare: 1e-12}))
	defer func() { require.NoError(t, SetLimits(Limits{})) }()
	held := ReadStats().PinnedBytes
	_, err := Alloc(g.Context(), g.Dev, 2*mib, Options{HugePages: HugeTLB})
	require.ErrorIs(t, err, ErrLimit)
	require.Equal(t, [2]int{1, 0}, g.tried())
	require.Equal(t, held, ReadStats().PinnedBytes)
	require.Zero(t, sys.Mapped.Load())
}

// A copy in progress keeps the memory, whatever the method.
func TestCloseWaitsForCopiesOnEveryHost(t *testing.T) {
	t.Parallel()
	for name, cfg := range cudasim.Hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cfg)
			b, err := Alloc(t.Context(), g.Dev, mib, Options{})
			require.NoError(t, err)
			mem := b.Bytes()
			src := g.Device(mib)
			g.Upload(src, filled(mib, 9))
			open := g.Stall(g.Stream)
			require.NoError(t, b.CopyFromDevice(g.Stream, src, 0, mib))
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, b.CloseContext(ctx), context.DeadlineExceeded)
			require.Nil(t, b.Bytes())
			requireZeros(t, mem)
			open()
			g.Synchronize()
			require.True(t, bytes.Equal(filled(mib, 9), mem))
			require.NoError(t, b.Close())
		})
	}
}

// After an error of cudaFreeHost the memory stays, and Close can be called again. If
// the call has freed it all the same, it is not freed twice.
func TestCloseOfHostAllocatedMemoryFails(t *testing.T) {
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	before := ReadStats()
	b, err := Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	g.Sim.Fail("cudaFreeHost", cudasim.Fault{Code: cudart.ErrUnknown})
	err = b.Close()
	require.ErrorIs(t, err, cudart.ErrUnknown)
	require.ErrorContains(t, err, "Close may be tried again")
	require.Equal(t, 1, g.Sim.Outstanding().HostAllocs)
	require.Equal(t, before.PinnedBytes+mib, ReadStats().PinnedBytes)
	require.NoError(t, b.Close())

	b, err = Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	g.Sim.Fail("cudaFreeHost", cudasim.Fault{Code: cudart.ErrUnknown, Late: true})
	calls := g.Sim.Calls("cudaFreeHost")
	require.NoError(t, b.Close())
	require.Equal(t, calls+1, g.Sim.Calls("cudaFreeHost"))
	require.Equal(t, before.PinnedBytes, ReadStats().PinnedBytes)
	require.Zero(t, g.Sim.Outstanding().HostAllocs)
}

// When ctx ends while the memory is cleared, it is freed.
func TestHostAllocatedMemoryIsFreedWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	g.Sim.Fail("cudaHostAlloc", cudasim.Fault{After: cancel})
	_, err := Alloc(ctx, g.Dev, mib, Options{})
	require.ErrorIs(t, err, context.Canceled)
	hostmemtest.Eventually(t, "freed", func() bool { return g.Sim.Outstanding().HostAllocs == 0 })
}

// The largest registration that works is remembered: the next Alloc does not try a
// larger one. When it is refused, smaller ones are tried.
func TestTheSizeThatWorksIsRemembered(t *testing.T) {
	t.Parallel()
	const n = 300 * mib
	host := cudasim.Driver580()
	host.MaxRegister = 160 * mib
	g := newSimFixture(t, host)
	sys := g.watch()
	sys.Unpopulated()
	first := g.alloc(n, Options{})
	require.Equal(t, RegisteredInSpans, first.Info().Method)
	require.Equal(t, []Span{{0, 150 * mib}, {150 * mib, 150 * mib}}, slices.Collect(first.Spans(0, first.Len())))
	require.Equal(t, [2]int{3, 0}, g.tried())
	require.Contains(t, strings.Join(first.Info().Notes, "\n"), "a registration of 300 MiB was refused")
	second := g.alloc(n, Options{})
	require.Equal(t, slices.Collect(first.Spans(0, first.Len())), slices.Collect(second.Spans(0, second.Len())))
	require.Equal(t, [2]int{5, 0}, g.tried(), "no larger one was tried")
	require.Contains(t, strings.Join(second.Info().Notes, "\n"), "registrations are of at most 150 MiB here")
	require.Equal(t, Registered, g.alloc(100*mib, Options{}).Info().Method)
	require.Equal(t, [2]int{6, 0}, g.tried())

	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	third := g.alloc(n, Options{})
	require.Len(t, slices.Collect(third.Spans(0, third.Len())), 5)
	require.LessOrEqual(t, slices.Collect(third.Spans(0, third.Len()))[0].Len, 75*mib)
	mem := mapped(t, -1, n, readWrite, private)
	r, err := Register(g.Context(), g.Dev, mem, RegisterOptions{})
	require.NoError(t, err)
	require.Equal(t, RegisteredInSpans, r.Info().Method)
	require.Equal(t, slices.Collect(third.Spans(0, third.Len())), slices.Collect(r.Spans(0, r.Len())), "Register follows")
	before := r.Info()
	require.NoError(t, r.Close())
	require.Equal(t, before, r.Info(), "as it was")
}

// Where the number of registrations is limited, cudaHostAlloc is used until one is
// unregistered.
func TestTheNumberOfRegistrationsIsLimited(t *testing.T) {
	t.Parallel()
	host := cudasim.MaxMapCount()
	host.MaxRegistrations = 1
	g := newSimFixture(t, host)
	first, err := Alloc(t.Context(), g.Dev, kib, Options{})
	require.NoError(t, err)
	require.Equal(t, Registered, first.Info().Method)
	require.Equal(t, HostAllocated, g.alloc(kib, Options{}).Info().Method)
	require.Equal(t, [2]int{2, 1}, g.tried())
	require.Equal(t, HostAllocated, g.alloc(kib, Options{}).Info().Method)
	require.Equal(t, [2]int{2, 2}, g.tried())
	mem := mapped(t, -1, 4096, readWrite, private)
	_, err = Register(t.Context(), g.Dev, mem, RegisterOptions{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	require.ErrorContains(t, err, "a registration of 4 KiB was refused (the driver limits the size or the number")
	require.ErrorContains(t, err, "package transfer")
	require.Equal(t, [2]int{3, 2}, g.tried(), "Register moves nothing")

	require.NoError(t, first.Close())
	require.Equal(t, Registered, g.alloc(kib, Options{}).Info().Method)
}

// More chunks than the host registers become as few registrations as possible.
func TestChunksThatAreTooMany(t *testing.T) {
	t.Parallel()
	host := cudasim.MaxMapCount()
	host.MaxRegistrations = 2
	g := newSimFixture(t, host)
	b := g.alloc(8*mib, Options{Chunk: 2 * mib})
	require.Equal(t, Registered, b.Info().Method)
	require.Equal(t, 1, g.Registrations())
	require.Contains(t, strings.Join(b.Info().Notes, "\n"), "registering chunks of 2 MiB was refused")
	fill(b.Bytes(), 4)
	g.requireCopies(b)
	require.Equal(t, RegisteredInSpans, newSimFixture(t, cudasim.Config{}).alloc(8*mib, Options{Chunk: 2 * mib}).Info().Method)

	// Chunks that were registered and cannot be unregistered stay, with the memory.
	loose := &fixture{Fixture: hostmemtest.Loose(t, host)}
	loose.Sim.Fail("cudaHostUnregister", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	_, err := Alloc(t.Context(), loose.Dev, 8*mib, Options{Chunk: 2 * mib, Workers: 1})
	require.ErrorIs(t, err, cudart.ErrUnknown)
	require.ErrorContains(t, err, "stay mapped")
	require.Equal(t, [2]int{3, 0}, loose.tried(), "nothing else was tried")
}

// WSL bounds all that is pinned. The error names every attempt, and memory that is
// released can be pinned again.
func TestWSL(t *testing.T) {
	t.Parallel()
	host := cudasim.WSL()
	host.MaxPinned = 8 * mib
	g := newSimFixture(t, host)
	first, err := Alloc(t.Context(), g.Dev, 6*mib, Options{})
	require.NoError(t, err)
	require.Equal(t, Registered, first.Info().Method)
	for range 2 {
		_, err = Alloc(t.Context(), g.Dev, 6*mib, Options{})
		require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
		require.ErrorContains(t, err, "a registration of 6 MiB was refused (the driver limits the size or the number of registrations, or all that is pinned)")
		require.ErrorContains(t, err, "in its place cudaHostAlloc: 6291456 bytes")
	}
	require.Equal(t, [2]int{3, 2}, g.tried())
	require.NoError(t, first.Close())
	require.Equal(t, Registered, g.alloc(6*mib, Options{}).Info().Method)
}

// A host that is short of memory gets an error with the figures, and no more attempts.
func TestAHostThatIsShortOfMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{HostMemory: mib})
	for range 2 {
		_, err := Alloc(t.Context(), g.Dev, 2*mib, Options{})
		require.ErrorIs(t, err, cudart.ErrInvalidValue)
		require.ErrorContains(t, err, "memory is short (available are ")
		require.ErrorContains(t, err, "MemAvailable")
		require.ErrorContains(t, err, "RLIMIT_MEMLOCK is ")
	}
	require.Equal(t, [2]int{2, 0}, g.tried())
	require.Equal(t, Registered, g.alloc(kib, Options{}).Info().Method)
}

// The same with the code that limits have, too: what the kernel reports distinguishes
// them. Not parallel, for it takes the place of the process's limits.
func TestAShortageIsNoLimit(t *testing.T) {
	real := limits
	defer func() { limits = real }()
	limits = budget.New(func(int) (linux.Headroom, error) {
		return linux.Headroom{Available: 10 * mib, Total: gib, Source: "/proc/meminfo MemAvailable"}, nil
	})
	limits.Set(0, 2) // no guard
	for name, o := range map[string]Options{"whole": {}, "chunks": {Chunk: 64 * mib}} {
		t.Run(name, func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{MaxRegister: mib})
			g.watch().Unpopulated()
			_, err := Alloc(g.Context(), g.Dev, 200*mib, o)
			require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			require.ErrorContains(t, err, "memory is short (available are 10 MiB of 1 GiB (/proc/meminfo MemAvailable), RLIMIT_MEMLOCK is ")
			require.Zero(t, g.Sim.Calls("cudaHostAlloc"))
			require.Less(t, g.Sim.Calls("cudaHostRegister"), 6)
		})
	}
	limits = budget.New(func(int) (linux.Headroom, error) { return linux.Headroom{}, fs.ErrNotExist })
	g := newSimFixture(t, cudasim.Config{MaxRegister: mib})
	b, err := Alloc(t.Context(), g.Dev, 2*mib, Options{})
	require.NoError(t, err, "nothing is known of a shortage")
	require.Equal(t, HostAllocated, b.Info().Method)
	require.NoError(t, b.Close())
	g.Sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, err = Alloc(t.Context(), g.Dev, 2*mib, Options{})
	require.ErrorContains(t, err, "(RLIMIT_MEMLOCK is ")
}

// On Linux 6.11 no call may be of more than 2 GiB, because what is refused
// leaks. Not parallel, for it switches the guard off: nothing here is populated.
func TestLinux611LeaksNothing(t *testing.T) {
	require.NoError(t, SetLimits(Limits{MaxShare: 2}))
	defer func() { require.NoError(t, SetLimits(Limits{})) }()
	const n = 5*gib/2 + 1
	confidential := cudasim.Linux611()
	confidential.NoRegister = true
	limited := cudasim.Linux611()
	limited.MaxRegister = 300 * mib
	for name, o := range map[string]Options{"whole": {}, "chunks": {Chunk: 64 * mib}, "large chunks": {Chunk: 4 * gib}} {
		for host, cfg := range map[string]cudasim.Config{"no limit": cudasim.Linux611(), "limited": limited} {
			t.Run(name+", "+host, func(t *testing.T) {
				g := newSimFixture(t, cfg)
				g.kernel(6, 11).Unpopulated()
				b, err := Alloc(g.Context(), g.Dev, n, o)
				require.NoError(t, err)
				require.Equal(t, RegisteredInSpans, b.Info().Method)
				for _, s := range slices.Collect(b.Spans(0, b.Len())) {
					require.LessOrEqual(t, s.Len, gib)
				}
				require.NoError(t, b.Close())

				mem := mapped(t, -1, n, readWrite, private|unix.MAP_NORESERVE)
				r, err := Register(g.Context(), g.Dev, mem, RegisterOptions{Chunk: o.Chunk})
				require.NoError(t, err)
				require.NoError(t, r.Close())
				require.Zero(t, g.Sim.LeakedBytes())
			})
		}
	}
	t.Run("cudaHostAlloc", func(t *testing.T) {
		g := newSimFixture(t, confidential)
		g.kernel(6, 11).Unpopulated()
		for range 2 {
			_, err := Alloc(g.Context(), g.Dev, n, Options{})
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "was not tried: Linux 6.11 leaks")
		}
		require.Zero(t, g.Sim.Calls("cudaHostAlloc"))
		require.Equal(t, HostAllocated, g.alloc(mib, Options{}).Info().Method)
		_, err := Alloc(g.Context(), g.Dev, gib+gib/2, Options{Align: 64 * gib}) // no mapping has that by chance
		require.ErrorContains(t, err, "was not tried", "nor with what the alignment takes")
		require.Zero(t, g.Sim.LeakedBytes())
	})
	// A kernel that has the defect under another release leaks once: no smaller
	// registrations are tried, and no cudaHostAlloc.
	g := newSimFixture(t, cudasim.Linux611())
	g.kernel(6, 12).Unpopulated()
	_, err := Alloc(g.Context(), g.Dev, n, Options{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.Equal(t, [2]int{1, 0}, g.tried())
	require.Equal(t, n, g.Sim.LeakedBytes())
}

// Where the GPU uses the host's page tables nothing is registered, and all that can be
// done with memory can be done.
func TestSharedPageTables(t *testing.T) {
	t.Parallel()
	host := cudasim.SharedPageTables()
	host.Devices[0].Attributes[cudart.AttrHostRegisterSupported] = 0
	host.Devices[0].Attributes[cudart.AttrHostRegisterReadOnlySupported] = 0
	g := newSimFixture(t, host)
	sys := g.watch()
	b := g.alloc(5*mib+1, Options{Chunk: 2 * mib})
	require.Equal(t, SharedPageTables, b.Info().Method)
	require.Equal(t, []Span{{0, 5*mib + 1}}, slices.Collect(b.Spans(0, b.Len())))
	require.Contains(t, strings.Join(b.Info().Notes, "\n"), "nothing was registered")
	if !emulated(t) {
		vec := make([]byte, (b.Info().Reserved+sys.Page-1)/sys.Page)
		require.NoError(t, sys.Calls.Resident(b.Pointer(), b.Info().Reserved, vec))
		for _, page := range vec {
			require.NotZero(t, page&1, "populated")
		}
	}

	mem := mapped(t, -1, mib, readWrite, private)
	fill(mem, 2)
	r := g.register(mem[100:mib-100], RegisterOptions{})
	require.Equal(t, SharedPageTables, r.Info().Method)
	require.False(t, r.Info().ReadOnly)
	g.requireCopies(r)
	_, off, ok := Find(mem[200:300])
	require.True(t, ok)
	require.Equal(t, 100, off)

	fd := memfd(t, mib)
	_, err := unix.Pwrite(fd, filled(mib, 5), 0)
	require.NoError(t, err)
	frozen := g.register(mapped(t, fd, mib, unix.PROT_READ, shared), RegisterOptions{})
	require.Equal(t, SharedPageTables, frozen.Info().Method)
	require.True(t, frozen.Info().ReadOnly)
	require.ErrorIs(t, frozen.CopyFromDevice(g.Stream, 0, 0, 1), ErrReadOnly)

	path, _ := diskFile(t, 10_000)
	f := g.mapFile(path, FileOptions{})
	require.Equal(t, SharedPageTables, f.Info().Method)
	require.Contains(t, strings.Join(f.Info().Notes, "\n"), "nothing was registered")
	dst := g.Device(10_000)
	require.NoError(t, f.CopyToDevice(g.Stream, dst, 0, 10_000))
	g.Synchronize()
	require.Equal(t, filled(10_000, 7), g.Download(dst, 10_000))
	require.ErrorIs(t, f.CopyFromDevice(g.Stream, dst, 0, 1), ErrReadOnly)

	// What cannot be pinned for other reasons is refused all the same.
	_, err = Register(t.Context(), g.Dev, make([]byte, 4096), RegisterOptions{})
	require.ErrorIs(t, err, ErrGoMemory)
	require.Equal(t, [2]int{}, g.tried())
	require.Equal(t, [2]int{}, [2]int{g.Sim.Calls("cudaHostUnregister"), g.Sim.Calls("cudaFreeHost")})
}

// Register and MapFile do not move memory: they say what was tried and what to do.
func TestRegisterAndMapFileOnHostsThatRefuse(t *testing.T) {
	t.Parallel()
	for _, h := range []cudasim.Config{cudasim.ConfidentialComputing(), cudasim.NoHostRegister()} {
		g := newSimFixture(t, h)
		sys := g.watch()
		mem := mapped(t, -1, mib, readWrite, private)
		path, _ := diskFile(t, 10_000)
		for range 2 {
			_, err := Register(g.Context(), g.Dev, mem, RegisterOptions{})
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "hostmem: register 1048576 bytes at ")
			require.ErrorContains(t, err, "copy it by package transfer, or keep it in memory from Alloc")
			_, err = MapFile(g.Context(), g.Dev, path, FileOptions{})
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.Equal(t, 1, strings.Count(err.Error(), "package transfer"), "%v", err)
			require.Zero(t, sys.Mapped.Load())
			require.Zero(t, g.Sim.Calls("cudaHostAlloc"))
			mem[0] = 1 // is still there
		}
		// Once Alloc has found out, they do not even make pages resident.
		require.Equal(t, HostAllocated, g.alloc(kib, Options{}).Info().Method)
		calls := g.tried()
		_, err := Register(g.Context(), g.Dev, mem, RegisterOptions{})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "package transfer")
		_, err = MapFile(g.Context(), g.Dev, path, FileOptions{})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.Equal(t, calls, g.tried())
	}
}

// Allocs of many goroutines share what was found out.
func TestConcurrentAllocsOnEveryHost(t *testing.T) {
	t.Parallel()
	for name, cfg := range cudasim.Hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg.MaxRegistrations = 3
			g := newSimFixture(t, cfg)
			var group sync.WaitGroup
			for i := range 8 {
				group.Go(func() {
					for range 20 {
						b, err := Alloc(t.Context(), g.Dev, 1000*(i+1), Options{})
						if !assert.NoError(t, err) {
							return
						}
						requireZeros(t, b.Bytes())
						fill(b.Bytes(), byte(i))
						assert.NoError(t, b.Close())
					}
				})
			}
			group.Wait()
			require.Zero(t, g.Sim.Outstanding().HostAllocs+g.Registrations())
		})
	}
}

// A system has a page larger than CUDA's alignment: the memory is aligned all the same.
func TestPagesLargerThanCUDAsAlignment(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	g.alloc(kib, Options{})
	sys := g.watch()
	sys.System = &pages.System{Page: mib, Calls: sys.Calls}
	b := g.alloc(kib, Options{})
	require.Zero(t, uintptr(b.Pointer())%mib)
	require.Zero(t, b.Info().Reserved%mib)
}
