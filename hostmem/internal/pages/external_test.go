//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// countResident returns how many pages of mem, which starts a page, are resident.
func countResident(t *testing.T, mem []byte) (n int) {
	t.Helper()
	vec := make([]byte, len(mem)/os.Getpagesize())
	require.NoError(t, realCalls().Resident(unsafe.Pointer(&mem[0]), len(mem), vec))
	for _, page := range vec {
		n += int(page & 1)
	}
	return n
}

func TestBorrowedMemoryIsPopulatedAndStays(t *testing.T) {
	t.Parallel()
	page := os.Getpagesize()
	for _, bounds := range [][2]int{{0, 5 * mib}, {page - 1, page + 1}, {2*page - 1, 5*mib - 1}, {page, page + 1}, {3*page + 5, 4*mib + 7}} {
		mem, err := unix.Mmap(-1, 0, 5*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		require.NoError(t, err)
		require.NoError(t, unix.Madvise(mem, unix.MADV_NOHUGEPAGE))
		part := mem[bounds[0]:bounds[1]]
		r, err := Borrow(hostSystem(), Memory{Bytes: part})
		require.NoError(t, err)
		assert.Equal(t, unsafe.Pointer(&part[0]), r.base)
		assert.Equal(t, []int{len(part), len(part)}, []int{r.Len(), r.Mapped()})
		require.NoError(t, r.Populate(t.Context(), Populate{Threads: 2}))
		assert.Empty(t, r.Notes())
		if !emulated(t) {
			want := (bounds[1]+page-1)/page - bounds[0]/page
			assert.Equal(t, want, countResident(t, mem), "%v: its pages and no others", bounds)
		}
		require.NoError(t, r.Unmap())
		require.NoError(t, r.Unmap())
		assert.Nil(t, r.Bytes())
		mem[0] = 1 // still mapped
		require.NoError(t, unix.Munmap(mem))
	}
}

// External memory may be a device's: it is never touched.
func TestBorrowedMemoryIsNotTouchedWhereAdviceIsUnknown(t *testing.T) {
	t.Parallel()
	mem, err := unix.Mmap(-1, 0, 5*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	for _, readOnly := range []bool{false, true} {
		sys := hostSystem()
		sys.Calls = sys.Calls.Before(func(call string) error {
			assert.NotEqual(t, "Touch", call)
			return unix.EINVAL
		})
		r, err := Borrow(sys, Memory{Bytes: mem, ReadOnly: readOnly})
		require.NoError(t, err)
		require.NoError(t, r.Populate(t.Context(), Populate{}))
		require.Len(t, r.Notes(), 1)
		assert.Contains(t, r.Notes()[0], "slower")
	}
}

func TestItemsOfBorrowedMemoryCoverItOnce(t *testing.T) {
	t.Parallel()
	mem, err := unix.Mmap(-1, 0, 7*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	part := mem[123 : 6*mib+500]
	r, err := Borrow(hostSystem(), Memory{Bytes: part})
	require.NoError(t, err)
	covered := 0
	require.NoError(t, r.Populate(t.Context(), Populate{Threads: 1, Item: 2 * mib, Done: func(off, n int) error {
		assert.Equal(t, covered, off)
		assert.Less(t, off, r.Len())
		covered += n
		return nil
	}}))
	assert.GreaterOrEqual(t, covered, r.Len())
	assert.Less(t, covered-r.Len(), os.Getpagesize())
}

func TestMapFile(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "file")
	want := make([]byte, 3*mib+5)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	require.NoError(t, os.WriteFile(name, want, 0o600))
	for _, bounds := range [][2]int{{0, len(want)}, {1, len(want)}, {4096, 8192}, {4097, 4098}, {len(want) - 1, len(want)}} {
		f, err := os.Open(name)
		require.NoError(t, err)
		sys := hostSystem()
		mapped := 0
		real := sys.Calls
		sys.Calls.MapFile = func(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error) {
			mapped += n
			return real.MapFile(f, off, n, write)
		}
		sys.Calls.Unmap = func(p unsafe.Pointer, n int) error {
			mapped -= n
			return real.Unmap(p, n)
		}
		r, err := MapFile(sys, f, int64(bounds[0]), bounds[1]-bounds[0], false)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, r.Populate(t.Context(), Populate{}))
		assert.Empty(t, r.Notes())
		require.Equal(t, want[bounds[0]:bounds[1]], r.Bytes())
		assert.Positive(t, mapped)
		require.NoError(t, r.Unmap())
		assert.Zero(t, mapped)
	}
}

// A page past a file's end is an error, not a signal.
func TestAFilesMissingPage(t *testing.T) {
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1*mib))
	r, err := MapFile(hostSystem(), f, 0, mib, false)
	require.NoError(t, err)
	defer func() { assert.NoError(t, r.Unmap()) }()
	require.NoError(t, f.Truncate(1))
	err = r.Populate(t.Context(), Populate{})
	if emulated(t) {
		return // advice does nothing there
	}
	require.ErrorIs(t, err, ErrFault)
}

// Of a hugetlbfs the kernel maps and unmaps whole huge pages only, at offsets that are
// multiples of their size: with any other size munmap fails for ever. The file system
// here is a plain one that says that it has huge pages, so that no reserve is needed.
func TestMapFileOfAPartOfAHugetlbfs(t *testing.T) {
	t.Parallel()
	const huge = 64 << 10 // any size larger than a base page will do
	name := filepath.Join(t.TempDir(), "file")
	want := make([]byte, 4*huge)
	for i := range want {
		want[i] = byte(i * 5 >> 4)
	}
	require.NoError(t, os.WriteFile(name, want, 0o600))
	f, err := os.Open(name)
	require.NoError(t, err)
	defer f.Close()
	for _, bounds := range [][2]int{{0, 1}, {0, 4 * huge}, {1, huge}, {huge - 1, huge + 1}, {2*huge + 5000, 3 * huge}, {huge, 2 * huge}} {
		sys := hostSystem()
		real := sys.Calls
		var path string
		mapped := 0
		sys.Calls.FileSystem = func(p string) (FileSystem, error) {
			path = p
			return FileSystem{Page: huge, Memory: true}, nil
		}
		sys.Calls.MapFile = func(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error) {
			if off%huge != 0 {
				return nil, unix.EINVAL
			}
			mapped = (n + huge - 1) / huge * huge
			return real.MapFile(f, off, n, write)
		}
		sys.Calls.Unmap = func(p unsafe.Pointer, n int) error {
			if n%huge != 0 {
				return unix.EINVAL
			}
			mapped -= n
			return real.Unmap(p, n)
		}
		r, err := MapFile(sys, f, int64(bounds[0]), bounds[1]-bounds[0], false)
		require.NoError(t, err, "%v", bounds)
		assert.Equal(t, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), path)
		assert.Equal(t, Reserved, r.Backing())
		assert.Equal(t, r.Len(), r.InUse(), "hugetlb pages come out of their reserve")
		require.NoError(t, r.Populate(t.Context(), Populate{}))
		require.Equal(t, want[bounds[0]:bounds[1]], r.Bytes())
		require.NoError(t, r.Unmap(), "%v", bounds)
		assert.Zero(t, mapped, "%v", bounds)
	}
}

func TestFileSystemsAndTheirPages(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]FileSystem{"/dev": {Memory: true}, "/proc": {}} {
		got, err := fileSystem(path)
		require.NoError(t, err)
		assert.Equal(t, want, got, path)
	}
	_, err := fileSystem("/no/such/file")
	require.ErrorIs(t, err, os.ErrNotExist)
	assert.Equal(t, []Backing{PageCache, Ordinary, Reserved}, []Backing{FileSystem{}.Backing(), FileSystem{Memory: true}.Backing(), FileSystem{Page: 2 * mib, Memory: true}.Backing()})
}

// What is in use already does not come out of what the host has available.
func TestBytesInUse(t *testing.T) {
	if emulated(t) {
		t.Skip("/proc/self/pagemap is another process's here (user-mode emulation?)")
	}
	const n = 1 * mib
	page := os.Getpagesize()
	fd, err := unix.MemfdCreate("pinned-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, n))
	name := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(name, make([]byte, n), 0o600))
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	require.NoError(t, err)
	defer file.Close()
	const private, shared = unix.MAP_PRIVATE, unix.MAP_SHARED
	write := func(mem []byte, upTo int) {
		for i := 0; i < upTo; i += page {
			mem[i] = 1
		}
	}
	read := func(mem []byte, upTo int) {
		for i := 0; i < upTo; i += page {
			_ = mem[i]
		}
	}
	for _, tc := range []struct {
		name  string
		fd    int
		flags int
		touch func(mem []byte, upTo int)
		upTo  int
		kind  Backing
		want  int
	}{
		{"nothing is resident", -1, private | unix.MAP_ANONYMOUS, write, 0, Ordinary, 0},
		{"all is", -1, private | unix.MAP_ANONYMOUS, write, n, Ordinary, n},
		{"half of it", -1, private | unix.MAP_ANONYMOUS, write, n / 2, Ordinary, n / 2},
		{"read only, so of the zero page", -1, private | unix.MAP_ANONYMOUS, read, n, Ordinary, 0},
		{"shared", -1, shared | unix.MAP_ANONYMOUS, write, n / 4, Ordinary, n / 4},
		{"a memfd", fd, shared, write, n, Ordinary, n},
		{"a file that is mapped privately, read", int(file.Fd()), private, read, n, Ordinary, 0},
		{"the same, written to", int(file.Fd()), private, write, n / 2, Ordinary, n / 2},
		{"page cache", int(file.Fd()), shared, read, n, PageCache, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			mem, err := unix.Mmap(tc.fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, tc.flags)
			require.NoError(t, err)
			defer func() { assert.NoError(t, unix.Munmap(mem)) }()
			_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE) // it would bring more than was touched
			tc.touch(mem, tc.upTo)
			r, err := Borrow(hostSystem(), Memory{Bytes: mem[5:], Backing: tc.kind, Shared: tc.flags&shared != 0})
			require.NoError(t, err)
			assert.InDelta(t, tc.want, r.InUse(), n/samples)
		})
	}
	sys := hostSystem()
	sys.Calls = sys.Calls.Before(func(call string) error { return unix.EPERM })
	r, err := Borrow(sys, Memory{Bytes: make([]byte, n)})
	require.NoError(t, err)
	assert.Zero(t, r.InUse(), "what cannot be found out counts as not in use")
}

// Memory that other code allocated is cleared, all of it and nothing else, and not
// unmapped.
func TestAllocatedMemoryIsCleared(t *testing.T) {
	t.Parallel()
	page := os.Getpagesize()
	const n = 9*mib + 5
	mem, err := unix.Mmap(-1, 0, 10*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	for threads := range 4 {
		for i := range mem {
			mem[i] = 0xa5
		}
		size, align, err := hostSystem().Sizes(n, 0)
		require.NoError(t, err)
		require.Equal(t, []int{9*mib + page, page}, []int{size, align})
		r := Allocated(hostSystem(), unsafe.Pointer(&mem[page]), n, size)
		require.Equal(t, []int{n, size, int(Ordinary)}, []int{r.Len(), r.Mapped(), int(r.Backing())})
		require.NoError(t, r.Clear(t.Context(), threads))
		require.Equal(t, n, bytes.Count(mem, []byte{0}))
		require.Equal(t, []byte{0xa5, 0, 0, 0xa5}, []byte{mem[page-1], mem[page], mem[page+n-1], mem[page+n]})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, r.Clear(ctx, threads), context.Canceled)
		require.NoError(t, r.Unmap())
		require.Nil(t, r.Bytes())
	}
	require.NoError(t, unix.Munmap(mem))
	for _, bad := range [][2]int{{0, 0}, {-1, 0}, {1, 3}, {1 << 62, 1 << 62}} {
		_, _, err := hostSystem().Sizes(bad[0], bad[1])
		require.Error(t, err, "%v", bad)
	}
	_, align, err := hostSystem().Sizes(1, 64*mib)
	require.NoError(t, err)
	require.Equal(t, 64*mib, align)
}

func TestMemlockLimit(t *testing.T) {
	t.Parallel()
	var l unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l))
	n, ok := MemlockLimit()
	require.True(t, ok)
	require.Equal(t, min(l.Cur, math.MaxInt), uint64(n))
}
