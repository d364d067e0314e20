//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// residentPages is how many pages of mem, which begins a page, are there.
func residentPages(t *testing.T, mem []byte) (n int) {
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
		r, err := Borrow(hostSystem(), part, false)
		require.NoError(t, err)
		assert.Equal(t, unsafe.Pointer(&part[0]), r.Pointer())
		assert.Equal(t, []int{len(part), len(part)}, []int{r.Len(), r.Mapped()})
		require.NoError(t, r.Populate(t.Context(), 0, r.Mapped(), Populate{Threads: 2}))
		assert.Empty(t, r.Notes())
		if !emulated(t) {
			want := (bounds[1]+page-1)/page - bounds[0]/page
			assert.Equal(t, want, residentPages(t, mem), "%v: its pages and no others", bounds)
		}
		require.NoError(t, r.Unmap())
		require.NoError(t, r.Unmap())
		assert.Nil(t, r.Bytes())
		mem[0] = 1 // still mapped
		require.NoError(t, unix.Munmap(mem))
	}
}

// Memory of others may be a device's: it is never touched.
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
		r, err := Borrow(sys, mem, readOnly)
		require.NoError(t, err)
		require.NoError(t, r.Populate(t.Context(), 0, r.Mapped(), Populate{}))
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
	r, err := Borrow(hostSystem(), part, false)
	require.NoError(t, err)
	covered := 0
	require.NoError(t, r.Populate(t.Context(), 0, r.Mapped(), Populate{Threads: 1, Item: 2 * mib, Done: func(off, n int) error {
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
		sys.Calls.MapFile = func(f *os.File, off int64, n int) (unsafe.Pointer, error) {
			mapped += n
			return real.MapFile(f, off, n)
		}
		sys.Calls.Unmap = func(p unsafe.Pointer, n int) error {
			mapped -= n
			return real.Unmap(p, n)
		}
		r, err := MapFile(sys, f, int64(bounds[0]), bounds[1]-bounds[0])
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, r.Populate(t.Context(), 0, r.Mapped(), Populate{}))
		assert.Empty(t, r.Notes())
		require.Equal(t, want[bounds[0]:bounds[1]], r.Bytes())
		assert.Positive(t, mapped)
		require.NoError(t, r.Unmap())
		assert.Zero(t, mapped)
	}
}

// A page behind a file's end is an error, not a signal.
func TestAFilesMissingPage(t *testing.T) {
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1*mib))
	r, err := MapFile(hostSystem(), f, 0, mib)
	require.NoError(t, err)
	defer func() { assert.NoError(t, r.Unmap()) }()
	require.NoError(t, f.Truncate(1))
	err = r.Populate(t.Context(), 0, r.Mapped(), Populate{})
	if emulated(t) {
		return // advice does nothing there
	}
	require.ErrorIs(t, err, errFault)
}
