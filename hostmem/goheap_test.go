//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
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

func TestGoHeapIsFound(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 15, 1000, 32 << 10, 32<<10 + 1, mib + 1, 65 * mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			mem := make([]byte, n)
			all, err := readMappings()
			require.NoError(t, err)
			for _, part := range [][]byte{mem, mem[n/2:], mem[n-1:], mem[:1]} {
				assert.True(t, goMemory(all, part))
				// Each rule by itself: a Go release that breaks one must not go unnoticed.
				p := unsafe.Pointer(unsafe.SliceData(part))
				assert.True(t, pinnable(p), "by runtime.Pinner")
				low, high := heapRow(all)
				assert.True(t, low <= uintptr(p) && uintptr(p) < high, "%p by the row of mappings %#x-%#x", p, low, high)
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
	all, err := readMappings()
	require.NoError(t, err)
	for name, mem := range map[string][]byte{
		"anonymous": anonymous, "in the middle": anonymous[mib+1 : 2*mib], "memfd, private": memfd, "a global": global[:],
		"shared": mapped(t, -1, mib, readWrite, shared),
	} {
		assert.False(t, goMemory(all, mem), name)
		assert.False(t, pinnable(unsafe.Pointer(&mem[0])), name)
	}
}

func TestGoHeapIsFoundByName(t *testing.T) {
	t.Parallel()
	mem := mapped(t, -1, 4*kib, readWrite, private)
	start := uintptr(unsafe.Pointer(&mem[0]))
	m := mapping{start: start, end: start + uintptr(len(mem)), read: true, write: true, name: "[anon: Go: heap]"}
	assert.True(t, goMemory([]mapping{m}, mem))
	m.name = "[anon:pinned]"
	assert.False(t, goMemory([]mapping{m}, mem))
}

func TestRowAround(t *testing.T) {
	t.Parallel()
	all := []mapping{
		{start: 0x1000, end: 0x2000, file: true},
		{start: 0x2000, end: 0x3000},
		{start: 0x3000, end: 0x5000, write: true},
		{start: 0x5000, end: 0x6000, shared: true},
		{start: 0x7000, end: 0x8000},
		{start: 0x9000, end: 0xa000},
	}
	for _, tc := range []struct{ at, low, high uintptr }{
		{0x2000, 0x2000, 0x5000},
		{0x4fff, 0x2000, 0x5000},
		{0x5000, 0x5000, 0x6000},
		{0x7800, 0x7000, 0x8000},
		{0x9fff, 0x9000, 0xa000},
		{0x8000, 0, 0},
		{0xa000, 0, 0},
		{0, 0, 0},
	} {
		low, high := rowAround(all, tc.at)
		assert.Equal(t, []uintptr{tc.low, tc.high}, []uintptr{low, high}, "%#x", tc.at)
	}
}
