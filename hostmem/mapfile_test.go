//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

func (g *fixture) mapFile(path string, o FileOptions) *Buffer {
	g.Helper()
	f, err := MapFile(g.Context(), g.Dev, path, o)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, f.Close()) })
	return f
}

func TestMapFile(t *testing.T) {
	t.Parallel()
	const size = 5*mib + 123
	path, _ := diskFile(t, size)
	want := filled(size, 7)
	for name, tc := range map[string]struct {
		o        FileOptions
		from, to int
		spans    int
	}{
		"all":            {to: size, spans: 1},
		"in chunks":      {o: FileOptions{Chunk: 2 * mib}, to: size, spans: 3},
		"from a page on": {o: FileOptions{Offset: 8192}, from: 8192, to: size, spans: 1},
		"from the midst": {o: FileOptions{Offset: 4099, Chunk: 2 * mib}, from: 4099, to: size, spans: 3},
		"a part":         {o: FileOptions{Offset: mib + 1, Length: 10_000}, from: mib + 1, to: mib + 10_001, spans: 1},
		"the first byte": {o: FileOptions{Length: 1}, to: 1, spans: 1},
		"the last byte":  {o: FileOptions{Offset: size - 1}, from: size - 1, to: size, spans: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newFixture(t)
			f := g.mapFile(path, tc.o)
			assert.Equal(t, tc.to-tc.from, f.Len())
			assert.Len(t, slices.Collect(f.Spans(0, f.Len())), tc.spans)
			assert.True(t, f.readOnly)
			assert.Contains(t, f.String(), path)
			assert.Empty(t, f.Info().Notes)
			require.Equal(t, want[tc.from:tc.to], f.Bytes())
			g.requireCopies(f)
			require.NoError(t, f.Close())
			require.NoError(t, f.Close())
			assert.Nil(t, f.Bytes())
			require.ErrorIs(t, f.CopyToDevice(g.Stream, 0, 0, 1), cudart.ErrClosed)
		})
	}
}

func TestAMappedFileShowsWhatIsWritten(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	path, fd := diskFile(t, 10_000)
	f := g.mapFile(path, FileOptions{Label: "weights"})
	assert.Equal(t, `file "weights" of 10000 bytes`, f.String())
	_, err := unix.Pwrite(fd, []byte("changed"), 5000)
	require.NoError(t, err)
	dst := g.Device(7)
	require.NoError(t, f.CopyToDevice(g.Stream, dst, 5000, 7))
	g.Synchronize()
	assert.Equal(t, "changed", string(g.Download(dst, 7)))
	// The name may go: the mapping keeps the file.
	require.NoError(t, os.Remove(path))
	g.requireCopies(f)
}

func TestMapFileRefusesWithoutCallingCUDA(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	empty, pipe := filepath.Join(dir, "empty"), filepath.Join(dir, "pipe")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	path, _ := diskFile(t, 10_000)
	for _, tc := range []struct {
		name, path string
		o          FileOptions
		want       string
		is         error
	}{
		{name: "no such file", path: filepath.Join(dir, "none"), is: os.ErrNotExist},
		{name: "empty", path: empty, want: "it is empty"},
		{name: "of /proc", path: "/proc/self/status", want: "it is empty, or its file system does not report its size"},
		{name: "directory", path: dir, want: "it is a directory"},
		{name: "pipe", path: pipe, is: errors.ErrUnsupported, want: "UploadFrom"},
		{name: "device", path: "/dev/zero", is: errors.ErrUnsupported, want: "UploadFrom"},
		{name: "offset at the end", path: path, o: FileOptions{Offset: 10_000}, want: "not all within the 10000"},
		{name: "offset past the end", path: path, o: FileOptions{Offset: 1 << 40}, want: "not all within"},
		{name: "too long", path: path, o: FileOptions{Offset: 1, Length: 10_000}, want: "10000 bytes from 1 on are not all within the 10000"},
		{name: "the largest offset", path: path, o: FileOptions{Offset: math.MaxInt64}, want: "not all within the 10000"},
		{name: "the largest length", path: path, o: FileOptions{Offset: 1, Length: math.MaxInt}, want: "9223372036854775807 bytes from 1 on are not all within the 10000"},
		{name: "the largest of both", path: path, o: FileOptions{Offset: math.MaxInt64, Length: math.MaxInt}, want: "not all within the 10000"},
		{name: "too many workers", path: path, o: FileOptions{Workers: 1025}, want: "Options.Workers of 1025: must be from 0 to 1024"},
		{name: "fewer workers than none", path: path, o: FileOptions{Workers: -1}, want: "Options.Workers of -1"},
		{name: "negative offset", path: path, o: FileOptions{Offset: -1}, want: "negative"},
		{name: "negative length", path: path, o: FileOptions{Length: -1}, want: "negative"},
		{name: "a wrong chunk", path: path, o: FileOptions{Chunk: 1}, want: "Options.Chunk of 1 bytes: must be a multiple of 2 MiB"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newSimFixture(t, cudasim.Config{})
			sys := g.watch()
			_, err := MapFile(g.Context(), g.Dev, tc.path, tc.o)
			require.ErrorContains(t, err, "hostmem: map file "+tc.path+": ")
			require.ErrorContains(t, err, tc.want)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
			assert.Zero(t, sys.Mapped.Load())
		})
	}
}

func TestMapFileOnDevicesThatCannot(t *testing.T) {
	t.Parallel()
	path, _ := diskFile(t, 10_000)
	for _, a := range []cudart.Attr{cudart.AttrHostRegisterReadOnlySupported, cudart.AttrHostRegisterSupported} {
		g := withAttribute(t, a, 0)
		_, err := MapFile(t.Context(), g.Dev, path, FileOptions{})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "transfer")
		assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
	}
	g := withAttribute(t, cudart.AttrPageableMemoryAccessUsesHostPageTables, 1)
	f := g.mapFile(path, FileOptions{})
	require.Len(t, f.Info().Notes, 1)
	assert.Contains(t, f.Info().Notes[0], "nothing was registered")
}

func TestMapFileOnFileSystemsThatRefuse(t *testing.T) {
	t.Parallel()
	path, _ := diskFile(t, 10_000)
	for errno, unsupported := range map[unix.Errno]bool{unix.ENODEV: true, unix.EOPNOTSUPP: true, unix.ENOMEM: false, unix.EPERM: false} {
		g := newSimFixture(t, cudasim.Config{})
		sys := g.watch()
		sys.Calls = sys.Calls.Before(func(call string) error {
			if call == "MapFile" {
				return errno
			}
			return nil
		})
		_, err := MapFile(g.Context(), g.Dev, path, FileOptions{})
		require.ErrorIs(t, err, errno)
		assert.Equal(t, unsupported, errors.Is(err, errors.ErrUnsupported), "%v", err)
	}
	// What the driver refuses can still be copied.
	g := newSimFixture(t, cudasim.Config{})
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Code: cudart.ErrInvalidValue})
	_, err := MapFile(t.Context(), g.Dev, path, FileOptions{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorContains(t, err, "UploadFrom")
}

// A kernel before 5.14 does not have MADV_POPULATE_READ.
func TestMapFileOnAnOldKernel(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	path, _ := diskFile(t, 5*mib)
	sys := g.watch()
	sys.Calls.Advise = func(unsafe.Pointer, int, pages.Advice) error { return unix.EINVAL }
	f := g.mapFile(path, FileOptions{})
	require.Len(t, f.Info().Notes, 1)
	assert.Contains(t, f.Info().Notes[0], "slower")
	g.requireCopies(f)
	require.NoError(t, f.Close())
	assert.Zero(t, sys.Mapped.Load())
}

func TestAFileThatShrinksWhileItIsMapped(t *testing.T) {
	t.Parallel()
	t.Run("before its pages are read", func(t *testing.T) {
		g := newSimFixture(t, cudasim.Config{})
		path, _ := diskFile(t, 64*kib)
		sys := g.watch()
		mapFile := sys.Calls.MapFile
		sys.Calls.MapFile = func(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error) {
			p, err := mapFile(f, off, n, write)
			require.NoError(t, os.Truncate(path, 5000))
			return p, err
		}
		_, err := MapFile(g.Context(), g.Dev, path, FileOptions{})
		require.Error(t, err)
		assert.Zero(t, sys.Mapped.Load())
		assert.Zero(t, g.Registrations())
	})
	t.Run("while it is registered", func(t *testing.T) {
		g := newSimFixture(t, cudasim.Config{})
		path, _ := diskFile(t, 64*kib)
		sys := g.watch()
		g.Sim.OnCall(func(fn string, _ int) {
			if fn == "cudaHostRegister" {
				assert.NoError(t, os.Truncate(path, 5000))
			}
		})
		_, err := MapFile(g.Context(), g.Dev, path, FileOptions{Offset: 10})
		require.ErrorContains(t, err, "it shrank meanwhile")
		require.ErrorContains(t, err, "within the 5000 that it has")
		assert.Equal(t, 1, g.Sim.Calls("cudaHostUnregister"))
		assert.Zero(t, sys.Mapped.Load())
	})
}

func TestEveryCUDACallOfAFileFails(t *testing.T) {
	path, _ := diskFile(t, 2*mib+8*kib)
	for name, o := range map[string]FileOptions{
		"one": {Offset: 3}, "chunks": {Chunk: 2 * mib, Workers: 1},
	} {
		t.Run(name, func(t *testing.T) {
			sweep(t, func(g *fixture) error {
				sys := g.watch()
				defer func() { require.Zero(t, sys.Mapped.Load()) }()
				f, err := MapFile(g.Context(), g.Dev, path, o)
				if err != nil {
					return err
				}
				return use(g, f)
			})
		})
	}
}

func TestEverySystemCallOfAFileFails(t *testing.T) {
	path, _ := diskFile(t, 2*mib+8*kib)
	g := newSimFixture(t, cudasim.Config{})
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.EFAULT, unix.EINVAL} {
		for nth := int32(1); ; nth++ {
			sys := g.watch()
			var calls atomic.Int32
			var fault string
			sys.Calls = sys.Calls.Before(func(call string) error {
				if calls.Add(1) == nth {
					fault = call
					return errno
				}
				return nil
			})
			before := ReadStats()
			f, err := MapFile(g.Context(), g.Dev, path, FileOptions{Workers: 1})
			if err == nil {
				if err = f.Close(); err != nil {
					require.Equal(t, "Unmap", fault)
					require.NoError(t, f.Close())
				}
			}
			if err != nil {
				require.ErrorIs(t, err, errno, fault)
			}
			requireNoForeign(t, before)
			require.Zero(t, sys.Mapped.Load(), fault)
			require.Zero(t, g.Registrations(), fault)
			if fault == "" {
				break
			}
		}
	}
}

func TestALostFileIsCountedAndStays(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	path, _ := diskFile(t, 10_000)
	before := ReadStats()
	base := loseFile(t, g, path)
	requireLost(t, before, Holding{Kind: "file", Label: "lost file", Bytes: 10_000})
	assert.Equal(t, 1, g.Registrations())
	require.NoError(t, g.Dev.HostUnregister(base))
	require.NoError(t, unix.MunmapPtr(base, 12*kib))
}

//go:noinline
func loseFile(t *testing.T, g *fixture, path string) unsafe.Pointer {
	f, err := MapFile(t.Context(), g.Dev, path, FileOptions{Label: "lost file"})
	require.NoError(t, err)
	return f.Pointer()
}

func TestMapFileEndsWithItsContext(t *testing.T) {
	t.Parallel()
	path, _ := diskFile(t, 10_000)
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	_, err := MapFile(sys.With(hostmemtest.Ended()), g.Dev, path, FileOptions{})
	require.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, sys.Mapped.Load())
	assert.Zero(t, g.Sim.Calls("cudaHostRegister"))
}
