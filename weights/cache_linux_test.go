package weights_test

import (
	"os"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/weights"
)

// cachedPages returns how many pages of a file are in the page cache.
func cachedPages(t testing.TB, path string) (n int) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	page := os.Getpagesize()
	pages := make([]byte, (len(mem)+page-1)/page)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		t.Skipf("mincore: %v", errno)
	}
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

func TestDropCacheRemovesWhatWasRead(t *testing.T) {
	b := benchOf(t, t.TempDir(), map[string][]byte{"a": makeSafetensors(t, nil, u8("x", 3*mib), u8("y", 5*mib))})
	path := b.paths[0]
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, f.Sync()) // pages that are not on the disk stay
	all := cachedPages(t, path)
	require.NotZero(t, all)
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	require.NoError(t, f.Close())
	if cachedPages(t, path) == all {
		t.Skip("the file system of the test's directory keeps pages, as tmpfs and emulators do")
	}
	devs := devicesOf(t, 1)
	for _, drop := range []bool{false, true} {
		for _, tensors := range [][]*weights.Tensor{b.tensors[:1], b.tensors} {
			_, err := os.ReadFile(path)
			require.NoError(t, err)
			plan, err := weights.NewPlan(slices.Values(tensors), nil, weights.PlanOptions{})
			require.NoError(t, err)
			p := b.planned(t, devs, plan)
			require.NoError(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{DropCache: drop}))
			p.requireLoaded(t, "")
			left := cachedPages(t, path)
			switch {
			case !drop:
				require.Greater(t, left, all/2)
			case len(tensors) == 1:
				require.LessOrEqual(t, left, 5*mib/os.Getpagesize()+3)
				require.Greater(t, left, all/4, "the other tensor's pages stay")
			default:
				require.LessOrEqual(t, left, 1, "the header's page stays")
			}
		}
	}
}

// What a load that fails has not copied stays in the page cache, for the next one.
func TestDropCacheKeepsWhatWasNotCopied(t *testing.T) {
	b := benchOf(t, t.TempDir(), map[string][]byte{"a": makeSafetensors(t, nil, u8("x", 3*mib), u8("y", 5*mib))})
	f, err := os.OpenFile(b.paths[0], os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	require.NoError(t, f.Close())
	p, sim := planOnto(t, b)
	all := cachedPages(t, b.paths[0])
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Times: -1, Code: cudart.ErrInvalidValue})
	require.ErrorIs(t, p.plan.Load(t.Context(), p.memory, weights.LoadOptions{DropCache: true}), cudart.ErrInvalidValue)
	require.Equal(t, all, cachedPages(t, b.paths[0]))
}
