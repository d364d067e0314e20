//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// memfd is a file descriptor of n bytes of memory.
func memfd(tb testing.TB, n int) int {
	tb.Helper()
	fd, err := unix.MemfdCreate("pinned-test", unix.MFD_CLOEXEC)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, unix.Close(fd)) })
	require.NoError(tb, unix.Ftruncate(fd, int64(n)))
	return fd
}

// diskFile is a file of n bytes with its descriptor.
func diskFile(tb testing.TB, n int) (path string, fd int) {
	tb.Helper()
	path = filepath.Join(tb.TempDir(), "weights")
	require.NoError(tb, os.WriteFile(path, filled(n, 7), 0o600))
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, unix.Close(fd)) })
	return path, fd
}

// register registers memory until the end.
func (g *fixture) register(mem []byte, o RegisterOptions) *Buffer {
	g.Helper()
	r, err := Register(g.Context(), g.Dev, mem, o)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, r.Close()) })
	return r
}

// requireCopies proves that all bytes go to the device and, where they may,
// come back.
func (g *fixture) requireCopies(m *Buffer) {
	g.Helper()
	n := m.Len()
	dst := g.Device(n)
	want := append([]byte(nil), m.Bytes()...)
	require.NoError(g, m.CopyToDevice(g.Stream, dst, 0, n))
	g.Synchronize()
	require.Equal(g, want, g.Download(dst, n))
	if m.readOnly {
		require.ErrorIs(g, m.CopyFromDevice(g.Stream, dst, 0, n), ErrReadOnly)
		return
	}
	back := filled(n, 99)
	g.Upload(dst, back[:n])
	require.NoError(g, m.CopyFromDevice(g.Stream, dst, 0, n))
	g.Synchronize()
	require.Equal(g, back, m.Bytes())
}

var globalBytes [3 * 4096]byte

func TestRegisterMemoryOfOthers(t *testing.T) {
	t.Parallel()
	const n = 3*mib + 123
	of := func(prot, flags int) func(testing.TB) []byte {
		return func(tb testing.TB) []byte { return mapped(tb, memfd(tb, n), n, prot, flags) }
	}
	for name, tc := range map[string]struct {
		memory   func(testing.TB) []byte
		readOnly bool
		onDisk   bool
	}{
		"memfd":                    {memory: of(readWrite, shared)},
		"memfd, private, writable": {memory: of(readWrite, private)},
		"memfd, for reading":       {memory: of(unix.PROT_READ, shared), readOnly: true},
		"anonymous":                {memory: func(tb testing.TB) []byte { return mapped(tb, -1, n, readWrite, private) }},
		"anonymous, shared":        {memory: func(tb testing.TB) []byte { return mapped(tb, -1, n, readWrite, shared) }},
		"a global":                 {memory: func(testing.TB) []byte { return globalBytes[:] }},
		"a file": {onDisk: true, memory: func(tb testing.TB) []byte {
			_, fd := diskFile(tb, n)
			return mapped(tb, fd, n, readWrite, shared)
		}},
		"a file, for reading": {readOnly: true, memory: func(tb testing.TB) []byte {
			_, fd := diskFile(tb, n)
			return mapped(tb, fd, n, unix.PROT_READ, shared)
		}},
		"a memfd's second mapping": {memory: func(tb testing.TB) []byte {
			fd := memfd(tb, n)
			first := mapped(tb, fd, n, readWrite, shared)
			copy(first, filled(n, 3))
			second := mapped(tb, fd, n, readWrite, shared)
			require.Equal(tb, filled(n, 3), second)
			return second
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newFixture(t)
			mem := tc.memory(t)
			if !tc.readOnly {
				copy(mem, filled(len(mem), 5))
			}
			for _, bounds := range [][2]int{{0, len(mem)}, {1, len(mem) - 1}, {4095, 4097}, {4096, 8192}, {77, 78}} {
				before := append([]byte(nil), mem...)
				part := mem[bounds[0]:bounds[1]]
				r, err := Register(t.Context(), g.Dev, part, RegisterOptions{Label: name})
				if testgpu.Real() && errors.Is(err, errors.ErrUnsupported) && tc.onDisk {
					require.ErrorContains(t, err, "writes through to a file") // Linux 6.5 and later
					continue
				}
				require.NoError(t, err)
				assert.Equal(t, tc.readOnly, r.Info().ReadOnly)
				assert.Equal(t, len(part), r.Len())
				assert.Equal(t, unsafe.Pointer(&part[0]), r.Pointer())
				assert.Equal(t, []Span{{Len: len(part)}}, slices.Collect(r.Spans(0, r.Len())))
				assert.Empty(t, r.Info().Notes)
				assert.Equal(t, fmt.Sprintf("registration %q of %d bytes", name, len(part)), r.String())
				g.requireCopies(r)
				require.NoError(t, r.Close())
				require.Equal(t, before[:bounds[0]], mem[:bounds[0]], "bytes before")
				require.Equal(t, before[bounds[1]:], mem[bounds[1]:], "bytes after")
			}
		})
	}
}

func TestRegistrationsMayShareAPage(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	mem := mapped(t, memfd(t, 16*kib), 16*kib, readWrite, shared)
	copy(mem, filled(len(mem), 1))
	ends := []int{0, 5000, 5001, 8192, 16 * kib}
	for i := range len(ends) - 1 {
		r := g.register(mem[ends[i]:ends[i+1]], RegisterOptions{})
		g.requireCopies(r)
	}
}

func TestRegisterInChunks(t *testing.T) {
	t.Parallel()
	const n = 7*mib + 1234
	g := newFixture(t)
	mem := mapped(t, memfd(t, n+17), n+17, readWrite, shared)[17:]
	copy(mem, filled(n, 2))
	r := g.register(mem, RegisterOptions{Chunk: 2 * mib})
	spans := slices.Collect(r.Spans(0, r.Len()))
	require.Len(t, spans, 4)
	at := 0
	for _, s := range spans {
		assert.Equal(t, at, s.Off)
		at += s.Len
	}
	assert.Equal(t, n, at)
	g.requireCopies(r)
}

func TestRegisterOverlap(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	mem := mapped(t, memfd(t, 64*kib), 64*kib, readWrite, shared)
	g.register(mem[100:5000], RegisterOptions{})
	buf := g.alloc(64*kib, Options{})
	for name, part := range map[string][]byte{
		"the same": mem[100:5000], "inside": mem[200:300], "around": mem, "its end": mem[4999:6000], "a buffer": buf.Bytes()[1:100],
	} {
		_, err := Register(t.Context(), g.Dev, part, RegisterOptions{})
		require.ErrorIs(t, err, cudart.ErrHostMemoryAlreadyRegistered, name)
		require.ErrorContains(t, err, "registered already", name)
	}
	r := g.register(mem[5000:], RegisterOptions{})
	g.requireCopies(r)
}

func TestRegisterRefusesWithoutCallingCUDA(t *testing.T) {
	t.Parallel()
	_, fd := diskFile(t, 64*kib)
	twoPages := mapped(t, -1, 8*kib, readWrite, private)
	require.NoError(t, unix.Mprotect(twoPages[4*kib:], unix.PROT_NONE))
	low := uintptr(0x8000) // where the kernel maps nothing
	for _, tc := range []struct {
		name string
		mem  []byte
		o    RegisterOptions
		want string
		is   error
	}{
		{name: "nil", want: "no bytes"},
		{name: "empty", mem: []byte{}, want: "no bytes"},
		{name: "Go heap", mem: make([]byte, mib), is: ErrGoMemory},
		{name: "a little of the Go heap", mem: new([3]byte)[:], is: ErrGoMemory},
		{name: "a file's private mapping, for reading", mem: mapped(t, fd, 64*kib, unix.PROT_READ, private), want: "the driver hangs"},
		{name: "the same, a slice", mem: mapped(t, fd, 64*kib, unix.PROT_READ, private)[100:200], want: "the driver hangs"},
		{name: "anonymous, for reading", mem: mapped(t, -1, 64*kib, unix.PROT_READ, private), want: "mapped privately"},
		{name: "no access", mem: mapped(t, -1, 64*kib, unix.PROT_NONE, private), want: "cannot be read"},
		{name: "no access to the end", mem: twoPages[1:], want: "cannot be read"},
		{name: "nothing there", mem: unsafe.Slice(*(**byte)(unsafe.Pointer(&low)), 100), want: "nothing is mapped at 0x8000"},
		{name: "a negative chunk", mem: twoPages[:1], o: RegisterOptions{Chunk: -2 * mib}, want: "Options.Chunk of -2097152 bytes"},
		{name: "too many workers", mem: twoPages[:1], o: RegisterOptions{Workers: math.MaxInt}, want: "Options.Workers of 9223372036854775807: must be from 0 to 1024"},
		{name: "fewer workers than none", mem: twoPages[:1], o: RegisterOptions{Workers: -1}, want: "Options.Workers of -1"},
		{name: "a wrong chunk", mem: twoPages[:1], o: RegisterOptions{Chunk: 1000}, want: "Options.Chunk of 1000 bytes: must be a multiple of 2 MiB"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{})
			_, err := Register(t.Context(), g.Dev, tc.mem, tc.o)
			require.ErrorContains(t, err, fmt.Sprintf("hostmem: register %d bytes", len(tc.mem)))
			require.ErrorContains(t, err, tc.want)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
		})
	}
}

func TestRegisterOnDevicesThatCannot(t *testing.T) {
	t.Parallel()
	mem := mapped(t, memfd(t, 4*kib), 4*kib, readWrite, shared)
	frozen := mapped(t, memfd(t, 4*kib), 4*kib, unix.PROT_READ, shared)

	g := withAttribute(t, cudart.AttrHostRegisterReadOnlySupported, 0)
	_, err := Register(t.Context(), g.Dev, frozen, RegisterOptions{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "for reading only (attribute 113")
	g.register(mem, RegisterOptions{})
	assert.Equal(t, 1, g.Sim.Calls("cudaHostRegister"))

	g = withAttribute(t, cudart.AttrHostRegisterSupported, 0)
	_, err = Register(t.Context(), g.Dev, mem, RegisterOptions{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "attribute 99")
	assert.Zero(t, g.Sim.Calls("cudaHostRegister"))

	g = newSimFixture(t, cudasim.Config{})
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Code: cudart.ErrNotSupported})
	_, err = Register(t.Context(), g.Dev, mem, RegisterOptions{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, err, cudart.ErrNotSupported)

	g = withAttribute(t, cudart.AttrPageableMemoryAccessUsesHostPageTables, 1)
	r := g.register(mem, RegisterOptions{})
	require.Len(t, r.Info().Notes, 1)
	assert.Contains(t, r.Info().Notes[0], "nothing was registered")
}

func TestRegistrationBoundsAndClose(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	mem := mapped(t, memfd(t, 8*kib), 8*kib, readWrite, shared)
	r := g.register(mem[10:5010], RegisterOptions{})
	dst := g.Device(8 * kib)
	for _, bounds := range [][2]int{{-1, 1}, {0, 5001}, {5000, 1}, {1, -1}, {5001, 0}, {1, int(^uint(0) >> 1)}} {
		require.ErrorContains(t, r.CopyToDevice(g.Stream, dst, bounds[0], bounds[1]), "not all within registration of 5000 bytes")
		require.ErrorContains(t, r.CopyFromDevice(g.Stream, dst, bounds[0], bounds[1]), "not all within")
	}
	assert.Equal(t, mem[10:5010], r.Bytes())
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	require.NoError(t, r.CloseContext(hostmemtest.Ended()))
	assert.Nil(t, r.Bytes())
	assert.Nil(t, r.Pointer())
	require.ErrorIs(t, r.CopyToDevice(g.Stream, dst, 0, 1), cudart.ErrClosed)
	require.ErrorIs(t, r.CopyFromDevice(g.Stream, dst, 0, 1), cudart.ErrClosed)
	mem[10] = 1 // still mapped
	g.register(mem[10:5010], RegisterOptions{})
}

func TestCloseOfARegistrationWaitsForCopies(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	mem := mapped(t, memfd(t, mib), mib, readWrite, shared)
	r := g.register(mem, RegisterOptions{})
	src := g.Device(mib)
	want := filled(mib, 8)
	g.Upload(src, want[:mib])
	g.Hold()
	require.NoError(t, r.CopyFromDevice(g.Stream, src, 0, mib))

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, r.CloseContext(ctx), context.DeadlineExceeded)
	require.Equal(t, 1, g.Registrations())
	require.Equal(t, make([]byte, mib), mem, "not copied yet, and still mapped")

	closed := make(chan error)
	go func() { closed <- r.Close() }()
	g.Sim.Release()
	require.NoError(t, <-closed)
	assert.Zero(t, g.Registrations())
	assert.Equal(t, want, mem)
}

func TestManyGoroutinesRegister(t *testing.T) {
	t.Parallel()
	const each, goroutines, rounds = 10_000, 8, 20
	g := newFixture(t)
	mem := mapped(t, memfd(t, goroutines*each), goroutines*each, readWrite, shared)
	copy(mem, filled(len(mem), 4))
	dst := g.Device(len(mem))
	var wg sync.WaitGroup
	for i := range goroutines {
		wg.Go(func() {
			part, at := mem[i*each:(i+1)*each], dst+cudart.DevPtr(i*each)
			for range rounds {
				r, err := Register(t.Context(), g.Dev, part, RegisterOptions{})
				if !assert.NoError(t, err) {
					return
				}
				assert.NoError(t, r.CopyToDevice(g.Stream, at, 0, each))
				var closers sync.WaitGroup
				for range 2 {
					closers.Go(func() { assert.NoError(t, r.Close()) })
				}
				closers.Wait()
			}
		})
	}
	wg.Wait()
	require.Equal(t, filled(len(mem), 4), g.Download(dst, len(mem)))
}

// sweep makes every CUDA call of an operation fail, one at a time. The
// operation pins, copies and closes.
func sweep(t *testing.T, operate func(g *fixture) error) {
	t.Helper()
	count := func(g *fixture) int { return g.Sim.TotalCalls() }
	g := newSimFixture(t, cudasim.Config{})
	before := count(g)
	require.NoError(t, operate(g))
	calls := count(g) - before
	require.Greater(t, calls, 5)
	for k := 1; k <= calls; k++ {
		for _, code := range hostmemtest.OneOf([]cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrNotSupported}, k) {
			g.Sim.FailCall(count(g)+k, code)
			begin := ReadStats()
			err := operate(g)
			g.Sim.ResetFaults()
			if err != nil {
				require.ErrorIs(t, err, code, "call %d", k)
			}
			requireIdle(t, begin)
			requireNoForeign(t, begin)
			require.Zero(t, g.Registrations(), "call %d: %v", k, err)
			require.NoError(t, operate(g), "after call %d: %v", k, err)
		}
	}
}

// requireNoForeign requires that registrations and files are as many as before.
func requireNoForeign(t testing.TB, before Stats) {
	t.Helper()
	now := ReadStats()
	require.Equal(t, before.Registrations, now.Registrations, "registrations")
	require.Equal(t, before.RegisteredBytes, now.RegisteredBytes, "bytes registered")
	require.Equal(t, before.Files, now.Files, "files")
	require.Equal(t, before.FileBytes, now.FileBytes, "bytes of files")
}

func TestEveryCUDACallOfARegistrationFails(t *testing.T) {
	mem := mapped(t, memfd(t, 2*mib+8*kib), 2*mib+8*kib, readWrite, shared)[3:]
	frozen := mapped(t, memfd(t, 2*mib+8*kib), 2*mib+8*kib, unix.PROT_READ, shared)[3:]
	for name, tc := range map[string]struct {
		mem []byte
		o   RegisterOptions
	}{
		"one": {mem: mem}, "chunks": {mem, RegisterOptions{Chunk: 2 * mib, Workers: 1}}, "read-only": {mem: frozen},
	} {
		t.Run(name, func(t *testing.T) {
			sweep(t, func(g *fixture) error {
				r, err := Register(t.Context(), g.Dev, tc.mem, tc.o)
				if err != nil {
					return err
				}
				return use(g, r)
			})
		})
	}
}

// use copies and closes, and closes again if that failed.
func use(g *fixture, f *Buffer) error {
	g.Helper()
	dst, err := g.Dev.Malloc(f.Len())
	if err == nil {
		err = f.CopyToDevice(g.Stream, dst, 0, f.Len())
		err = errors.Join(err, g.Stream.Synchronize(context.Background()))
	}
	if closing := f.Close(); closing != nil {
		err = errors.Join(err, closing)
		require.NoError(g, f.Close())
	}
	if freeing := g.Dev.Free(dst); freeing != nil {
		err = errors.Join(err, freeing)
		require.NoError(g, g.Dev.Free(dst))
	}
	return err
}

func TestALostRegistrationIsCountedAndStays(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	mem := mapped(t, memfd(t, 8*kib), 8*kib, readWrite, shared)
	before := ReadStats()
	_, err := Register(t.Context(), g.Dev, mem[1:], RegisterOptions{Label: "lost registration"})
	require.NoError(t, err)
	requireLost(t, before, Holding{Kind: "registration", Label: "lost registration", Bytes: 8*kib - 1})
	assert.Equal(t, 1, g.Registrations())
	require.NoError(t, g.Dev.HostUnregister(unsafe.Pointer(&mem[1])))
}

// requireLost waits until the garbage collector has found what was dropped.
func requireLost(t *testing.T, before Stats, want Holding) {
	t.Helper()
	require.Eventually(t, func() bool {
		runtime.GC()
		return ReadStats().LostObjects > before.LostObjects
	}, 10*time.Second, time.Millisecond)
	assert.Equal(t, want.Bytes, ReadStats().LostBytes-before.LostBytes)
	for _, h := range Outstanding() {
		if h.Label == want.Label {
			assert.True(t, h.Lost)
			assert.Equal(t, []any{want.Kind, want.Bytes}, []any{h.Kind, h.Bytes})
			return
		}
	}
	t.Fatal("not among what is outstanding")
}

func TestStatisticsOfRegistrations(t *testing.T) {
	g := newFixture(t)
	mem := mapped(t, memfd(t, mib), mib, readWrite, shared)
	before := ReadStats()
	r, err := Register(t.Context(), g.Dev, mem[1:], RegisterOptions{})
	require.NoError(t, err)
	now := ReadStats()
	assert.Equal(t, 1, now.Registrations-before.Registrations)
	assert.Equal(t, mib-1, now.RegisteredBytes-before.RegisteredBytes)
	assert.Equal(t, before.ReservedBytes, now.ReservedBytes)
	assert.Equal(t, 1, now.Opened-before.Opened)
	assert.Greater(t, now.PinTime, before.PinTime)
	require.NoError(t, r.Close())
	requireNoForeign(t, before)

	_, err = Register(t.Context(), g.Dev, make([]byte, 1), RegisterOptions{})
	require.Error(t, err)
	assert.Equal(t, before.Failures+1, ReadStats().Failures)
}

func TestRegisterEndsWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	mem := mapped(t, memfd(t, mib), mib, readWrite, shared)
	_, err := Register(hostmemtest.Ended(), g.Dev, mem, RegisterOptions{})
	require.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
}

// Linux refuses to pin a file's pages that are written to; CUDA says no more of
// it than InvalidValue.
func TestRegisteringWhatWritesThroughToAFileIsExplained(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Times: 2, Code: cudart.ErrInvalidValue})
	_, fd := diskFile(t, 4096)
	_, err := Register(t.Context(), g.Dev, mapped(t, fd, 4096, readWrite, shared), RegisterOptions{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorContains(t, err, "writes through to a file")
	_, err = Register(t.Context(), g.Dev, mapped(t, memfd(t, 4096), 4096, readWrite, shared), RegisterOptions{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.NotErrorIs(t, err, errors.ErrUnsupported, "a memfd only looks like a file")
}

// BenchmarkRegisterAmongMappings registers a page of a process with 40,000 other
// mappings, which Register must not all read. BenchmarkMaps in internal/linux
// measures the lookups alone, also as kernels before 6.11 have to make them.
func BenchmarkRegisterAmongMappings(b *testing.B) {
	for _, n := range []int{0, 40_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			g := newSimFixture(b, cudasim.Config{})
			others := mapped(b, -1, (n+1)*4*kib, unix.PROT_READ, private|unix.MAP_NORESERVE)
			for i := 0; i < n; i += 2 {
				if err := unix.Mprotect(others[i*4*kib:][:4*kib], unix.PROT_NONE); err != nil {
					b.Skipf("%d mappings are more than this host allows (vm.max_map_count): %v", n, err)
				}
			}
			mem := mapped(b, -1, 4*kib, readWrite, private)
			b.ReportAllocs()
			for b.Loop() {
				r, err := Register(b.Context(), g.Dev, mem, RegisterOptions{})
				require.NoError(b, err)
				require.NoError(b, r.Close())
			}
		})
	}
}
