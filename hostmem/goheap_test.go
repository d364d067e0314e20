//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"fmt"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

var global [8192]byte

// mapped is memory that the test maps itself.
func mapped(tb testing.TB, fd, n, prot, flags int) []byte {
	tb.Helper()
	if fd < 0 {
		flags |= unix.MAP_ANONYMOUS
	}
	mem, err := unix.Mmap(fd, 0, n, prot, flags)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, unix.Munmap(mem)) })
	return mem
}

const (
	readWrite = unix.PROT_READ | unix.PROT_WRITE
	private   = unix.MAP_PRIVATE
	shared    = unix.MAP_SHARED
)

// isGoMemory queries the kernel and goMemory.
func isGoMemory(tb testing.TB, mem []byte) bool {
	tb.Helper()
	maps, err := linux.OpenMaps(os.DirFS("/"))
	require.NoError(tb, err)
	defer maps.Close()
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	covered, err := maps.Within(start, start+uintptr(len(mem)))
	require.NoError(tb, err)
	heap, err := goMemory(maps, covered, mem)
	require.NoError(tb, err)
	return heap
}

func TestGoHeapIsFound(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 15, 1000, 32 << 10, 32<<10 + 1, mib + 1, 65 * mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			mem := make([]byte, n)
			for _, part := range [][]byte{mem, mem[n/2:], mem[n-1:], mem[:1]} {
				assert.True(t, isGoMemory(t, part))
				// Each rule by itself: a Go release that breaks one must not go unnoticed.
				p := unsafe.Pointer(unsafe.SliceData(part))
				assert.True(t, pinnable(p), "by runtime.Pinner")
				maps, err := linux.OpenMaps(os.DirFS("/"))
				require.NoError(t, err)
				object := new([64]byte)
				row, err := sameRow(maps, uintptr(p), uintptr(unsafe.Pointer(object)))
				require.NoError(t, err)
				assert.True(t, row, "%p by the row of mappings of %p", p, object)
				require.NoError(t, maps.Close())
			}
		})
	}
}

func TestOtherMemoryIsNotTakenForGoHeap(t *testing.T) {
	t.Parallel()
	anonymous := mapped(t, -1, 3*mib, readWrite, private)
	fd, err := unix.MemfdCreate("pinned-test", 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, mib))
	memfd := mapped(t, fd, mib, readWrite, private)
	for name, mem := range map[string][]byte{
		"anonymous": anonymous, "in the middle": anonymous[mib+1 : 2*mib], "memfd, private": memfd, "a global": global[:],
		"shared": mapped(t, -1, mib, readWrite, shared),
	} {
		assert.False(t, isGoMemory(t, mem), name)
		assert.False(t, pinnable(unsafe.Pointer(&mem[0])), name)
	}
}

func TestGoHeapIsFoundByName(t *testing.T) {
	t.Parallel()
	mem := mapped(t, -1, 4*kib, readWrite, private)
	start := uintptr(unsafe.Pointer(&mem[0]))
	m := linux.Mapping{Start: start, End: start + uintptr(len(mem)), Read: true, Write: true, Name: "[anon: Go: heap]"}
	heap, err := goMemory(mapsOf(t, ""), []linux.Mapping{m}, mem)
	require.NoError(t, err)
	assert.True(t, heap)
	m.Name = "[anon:pinned]"
	heap, err = goMemory(mapsOf(t, ""), []linux.Mapping{m}, mem)
	require.NoError(t, err)
	assert.False(t, heap)
}

func TestSameRow(t *testing.T) {
	t.Parallel()
	maps := mapsOf(t, `1000-2000 r--p 00000000 fe:00 7 /file
2000-3000 ---p 00000000 00:00 0
3000-5000 rw-p 00000000 00:00 0
5000-6000 rw-s 00000000 00:00 0
6000-7000 rw-p 00000000 00:00 0
8000-9000 rw-p 00000000 00:00 0
`)
	for _, tc := range []struct {
		a, b uintptr
		want bool
	}{
		{0x2000, 0x2000, true},
		{0x2000, 0x2fff, true},
		{0x2000, 0x3000, true},
		{0x2800, 0x4fff, true},
		{0x1fff, 0x2000, false}, // a file's
		{0x4fff, 0x5000, false}, // shared
		{0x5000, 0x5001, false},
		{0x4fff, 0x6000, false}, // shared memory in between
		{0x6fff, 0x7000, false}, // nothing there
		{0x6000, 0x8000, false}, // a gap in between
		{0x7000, 0x8000, false},
		{0x8000, 0x9000, false},
		{0x9000, 0x9000, false},
	} {
		for _, pair := range [][2]uintptr{{tc.a, tc.b}, {tc.b, tc.a}} {
			got, err := sameRow(maps, pair[0], pair[1])
			require.NoError(t, err)
			assert.Equal(t, tc.want, got, "%#x", pair)
		}
	}
	_, err := sameRow(mapsOf(t, "what\n"), 0, 1)
	require.Error(t, err)
}

// Memory from which private anonymous mappings lead to the heap without a gap is
// taken for the heap's, whichever of its mappings they start at.
func TestMemoryInTheHeapsRow(t *testing.T) {
	t.Parallel()
	const n = 16 * kib
	// Far below every heap, and not where programs lie.
	base, err := unix.MmapPtr(-1, 0, unsafe.Add(nil, 0x7000_0000), n, readWrite, private|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		t.Skipf("the address is not free: %v", err)
	}
	defer func() { assert.NoError(t, unix.MunmapPtr(base, n)) }()
	mem := unsafe.Slice((*byte)(base), n)
	start := uintptr(base)
	object := new([64]byte)
	low := uintptr(unsafe.Pointer(object))&^(gib-1) - 4*gib // of all stacks and arenas, or most
	high := low + 8*gib
	line := func(start, end uintptr, flags string) string {
		return fmt.Sprintf("%x-%x %s 0 00:00 0\n", start, end, flags)
	}
	heap := line(low, high, "rw-p")
	for name, tc := range map[string]struct {
		text string
		want bool
	}{
		"apart":              {line(start, start+n, "rw-p") + heap, false},
		"apart, in two":      {line(start, start+4*kib, "rw-p") + line(start+4*kib, start+n, "r--p") + heap, false},
		"beside":             {line(start, low, "rw-p") + heap, true},
		"beside, in two":     {line(start, start+4*kib, "---p") + line(start+4*kib, low, "rw-p") + heap, true},
		"beside a reserve":   {line(start, start+n, "rw-p") + line(start+n, low, "---p") + heap, true},
		"a page away":        {line(start, low-4*kib, "rw-p") + heap, false},
		"beside, at its end": {line(start, start+4*kib, "rw-p") + line(start+4*kib, start+8*kib, "rw-s") + line(start+8*kib, low, "rw-p") + heap, true},
		"beside, but shared": {line(start, start+4*kib, "rw-p") + line(start+4*kib, low, "rw-s") + heap, false},
	} {
		maps := mapsOf(t, tc.text)
		covered, err := maps.Within(start, start+n)
		require.NoError(t, err)
		got, err := goMemory(maps, covered, mem)
		require.NoError(t, err)
		assert.Equal(t, tc.want, got, name)
	}
	covered, err := linux.ParseMaps(line(start, start+n, "rw-p"))
	require.NoError(t, err)
	_, err = goMemory(mapsOf(t, "what\n"), covered, mem)
	require.ErrorContains(t, err, "/proc/thread-self/maps:1: ")
}
