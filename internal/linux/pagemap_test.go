//go:build linux

package linux

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"testing"
	"testing/fstest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestCountPagesThatAreMapped(t *testing.T) {
	t.Parallel()
	page := os.Getpagesize()
	const pages = 9000 // more entries than one read has
	m, err := unix.Mmap(-1, 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(m)) }()
	_ = unix.Madvise(m, unix.MADV_NOHUGEPAGE) // else one touch populates more
	addr := uintptr(unsafe.Pointer(&m[0]))
	mapped, err := CountPages(os.DirFS("/"), PagesMapped, len(m), addr)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		t.Skipf("no pagemap here: %v", err)
	}
	require.NoError(t, err)
	assert.Zero(t, mapped)
	m[0], m[8999*page], m[8500*page] = 1, 1, 1
	mapped, err = CountPages(os.DirFS("/"), PagesMapped, len(m), addr)
	require.NoError(t, err)
	assert.Equal(t, 3, mapped)
	mapped, err = CountPages(os.DirFS("/"), PagesMapped, 2, addr+uintptr(page)-1) // parts of two pages
	require.NoError(t, err)
	assert.Equal(t, 1, mapped)
	at := func(pages ...int) (addrs []uintptr) {
		for _, p := range pages {
			addrs = append(addrs, addr+uintptr(p*page)+1)
		}
		return addrs
	}
	for _, tt := range []struct {
		addrs []uintptr
		want  int
	}{{at(0, 8999, 8500), 3}, {at(0, 1), 1}, {at(1, 0), 1}, {nil, 0}} {
		n, err := CountPages(os.DirFS("/"), PagesMapped, 1, tt.addrs...)
		require.NoError(t, err)
		assert.Equal(t, tt.want, n, "%x", tt.addrs)
	}
	runtime.KeepAlive(m)
}

func TestCountPagesWithoutTheFile(t *testing.T) {
	t.Parallel()
	_, err := CountPages(fstest.MapFS{}, PagesMapped, 1, 4096)
	require.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorContains(t, err, "/proc/self/pagemap")
}
