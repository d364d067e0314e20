//go:build amd64 || arm64

package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/fstest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// answer makes a lookup whose system call is f.
func answer(f func(q *procmap, name []byte) error) func(uintptr) (Mapping, bool, error) {
	return lookup(func(q *procmap) error {
		return f(q, unsafe.Slice((*byte)(q.name), q.nameSize))
	})
}

func TestProcmapQuery(t *testing.T) {
	t.Parallel()
	assert.EqualValues(t, 104, unsafe.Sizeof(procmap{}), "struct procmap_query")
	assert.EqualValues(t, 0xc0686611, ioctlProcmapQuery, "PROCMAP_QUERY")
	const a, b = 0x7f0000000000, 0x7f0000002000
	for name, tc := range map[string]struct {
		flags, inode uint64
		text         string
		want         Mapping
	}{
		"anonymous":      {flags: 0x01 | 0x02, want: Mapping{Start: a, End: b, Read: true, Write: true}},
		"no access":      {want: Mapping{Start: a, End: b}},
		"named":          {flags: 0x01, text: "[anon: Go: heap]", want: Mapping{Start: a, End: b, Read: true, Name: "[anon: Go: heap]"}},
		"a library":      {flags: 0x01 | 0x04, inode: 7, text: "/lib/libc.so.6", want: Mapping{Start: a, End: b, Read: true, File: true, Name: "/lib/libc.so.6"}},
		"a shared file":  {flags: 0x01 | 0x02 | 0x08, inode: 7, text: "/memfd:x (deleted)", want: Mapping{Start: a, End: b, Read: true, Write: true, Shared: true, File: true, Name: "/memfd:x (deleted)"}},
		"a shorter name": {flags: 0x01, inode: 1, text: "/", want: Mapping{Start: a, End: b, Read: true, File: true, Name: "/"}},
	} {
		find := answer(func(q *procmap, name []byte) error {
			assert.EqualValues(t, 104, q.size)
			assert.EqualValues(t, 0x10, q.queryFlags, "PROCMAP_QUERY_COVERING_OR_NEXT_VMA")
			assert.EqualValues(t, a+1, q.queryAddr)
			assert.Len(t, name, 4096)
			assert.Zero(t, q.buildSize)
			assert.Zero(t, q.buildID)
			q.vmaStart, q.vmaEnd, q.vmaFlags, q.inode, q.pageSize = a, b, tc.flags, tc.inode, 4096
			q.nameSize = 0
			if tc.text != "" {
				q.nameSize = uint32(copy(name, tc.text+"\x00"))
			}
			return nil
		})
		for range 2 {
			got, ok, err := find(a + 1)
			require.NoError(t, err, name)
			assert.True(t, ok, name)
			assert.Equal(t, tc.want, got, name)
		}
	}
	_, ok, err := answer(func(*procmap, []byte) error { return unix.ENOENT })(1)
	require.NoError(t, err)
	assert.False(t, ok, "nothing is mapped there or above")
}

// Where the system call fails, whatever the reason, the file answers.
func TestWithoutProcmapQueryTheFileAnswers(t *testing.T) {
	t.Parallel()
	const text = "1000-2000 rw-p 0 00:00 0\n3000-4000 rw-p 0 00:00 0\n"
	for _, errno := range []unix.Errno{unix.ENOTTY, unix.EPERM, unix.ENAMETOOLONG, unix.EINVAL} {
		calls := 0
		maps, err := OpenMaps(fstest.MapFS{mapsName: {Data: []byte(text)}})
		require.NoError(t, err)
		maps.query = answer(func(q *procmap, _ []byte) error {
			if calls++; calls > 1 {
				return errno
			}
			q.vmaStart, q.vmaEnd, q.nameSize = 0x1000, 0x2000, 0
			return nil
		})
		got, err := maps.Within(0x1000, 0x10000)
		require.NoError(t, err, "%v", errno)
		require.Len(t, got, 2, "%v", errno)
		assert.Equal(t, uintptr(0x3000), got[1].Start)
		assert.Equal(t, 2, calls, "it is not asked again")
		require.NoError(t, maps.Close())
	}
}

// asText hides that files are the kernel's.
type asText struct{ fs.FS }

func (a asText) Open(name string) (fs.File, error) {
	f, err := a.FS.Open(name)
	return struct{ fs.File }{f}, err
}

// requireQuery skips where this kernel has no PROCMAP_QUERY.
func requireQuery(tb testing.TB) {
	tb.Helper()
	f, err := os.Open("/" + mapsName)
	require.NoError(tb, err)
	defer f.Close()
	_, _, err = procmapQuery(f)(0)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		kernel, _ := ReadRelease(os.DirFS("/"))
		tb.Skipf("PROCMAP_QUERY (Linux 6.11) is not to be had here: %v, Linux %d.%d", err, kernel.Major, kernel.Minor)
	}
	require.NoError(tb, err)
}

// The system call, the file read in part and the whole file agree.
func TestAllWaysAgree(t *testing.T) {
	t.Parallel()
	page := os.Getpagesize()
	mmap := func(fd, prot, flags int) uintptr {
		if fd < 0 {
			flags |= unix.MAP_ANONYMOUS
		}
		mem, err := unix.Mmap(fd, 0, 3*page, prot, flags)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, unix.Munmap(mem)) })
		return uintptr(unsafe.Pointer(&mem[0]))
	}
	open := func(name string) int {
		name = filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(name, make([]byte, 3*page), 0o600))
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return int(f.Fd())
	}
	gone := filepath.Join(t.TempDir(), "gone")
	removed, err := os.Create(gone)
	require.NoError(t, err)
	defer removed.Close()
	require.NoError(t, removed.Truncate(int64(3*page)))
	require.NoError(t, os.Remove(gone))
	memfd, err := unix.MemfdCreate("a b", 0)
	require.NoError(t, err)
	defer unix.Close(memfd)
	require.NoError(t, unix.Ftruncate(memfd, int64(3*page)))

	addresses := []uintptr{
		mmap(-1, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED),
		mmap(memfd, unix.PROT_READ, unix.MAP_SHARED),
		mmap(memfd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE),
		mmap(open("a file"), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED),
		mmap(open("two\nlines"), unix.PROT_READ, unix.MAP_PRIVATE),
		mmap(open(`a\134`), unix.PROT_WRITE, unix.MAP_PRIVATE),
		mmap(int(removed.Fd()), unix.PROT_READ, unix.MAP_SHARED),
	}
	all, err := ReadMaps(os.DirFS("/"))
	require.NoError(t, err)
	for name, root := range map[string]fs.FS{"query": os.DirFS("/"), "text": asText{os.DirFS("/")}} {
		t.Run(name, func(t *testing.T) {
			if name == "query" {
				requireQuery(t)
			}
			maps, err := OpenMaps(root)
			require.NoError(t, err)
			defer maps.Close()
			for _, addr := range addresses {
				i := slices.IndexFunc(all, func(m Mapping) bool { return m.Start <= addr && addr < m.End })
				require.GreaterOrEqual(t, i, 0)
				for _, at := range []uintptr{all[i].Start, addr, all[i].End - 1} {
					got, ok, err := maps.Find(at)
					require.NoError(t, err)
					assert.True(t, ok)
					assert.Equal(t, all[i], got)
				}
			}
			assert.Equal(t, name == "query", maps.query != nil, "whether the system call answered")
		})
	}
}

// manyMappings makes n mappings, of a page each, and returns the address of the
// first.
func manyMappings(tb testing.TB, n int) uintptr {
	tb.Helper()
	page := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, n*page, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, unix.Munmap(mem)) })
	for i := 0; i < n; i += 2 {
		if err := unix.Mprotect(mem[i*page:(i+1)*page], unix.PROT_NONE); err != nil {
			tb.Skipf("%d mappings are more than this host allows (vm.max_map_count): %v", n, err)
		}
	}
	return uintptr(unsafe.Pointer(&mem[0]))
}

// A lookup among 40,000 mappings, of the lowest, of one in the middle and of the
// highest; "all" is what each of them costs where the whole file is parsed.
func BenchmarkMaps(b *testing.B) {
	const n = 40_000
	base := manyMappings(b, n)
	page := uintptr(os.Getpagesize())
	for _, way := range []struct {
		name string
		root fs.FS
	}{{"query", os.DirFS("/")}, {"text", asText{os.DirFS("/")}}} {
		for _, at := range []int{0, n / 2, n - 1} {
			b.Run(fmt.Sprintf("%s/%d", way.name, at), func(b *testing.B) {
				if way.name == "query" {
					requireQuery(b)
				}
				b.ReportAllocs()
				for b.Loop() {
					maps, err := OpenMaps(way.root)
					require.NoError(b, err)
					m, ok, err := maps.Find(base + uintptr(at)*page)
					require.NoError(b, err)
					require.True(b, ok && m.Start <= base+uintptr(at)*page)
					require.NoError(b, maps.Close())
				}
			})
		}
	}
	b.Run("all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			all, err := ReadMaps(os.DirFS("/"))
			require.NoError(b, err)
			require.Greater(b, len(all), n)
		}
	})
}
