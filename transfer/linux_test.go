//go:build linux && !android && (amd64 || arm64)

package transfer

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

// A slice of a mapped file whose file is cut short has no bytes behind its end:
// an error, where a copy loop would have ended the process.
func TestAMappedFileThatIsCutShort(t *testing.T) {
	t.Parallel()
	if os.Getenv("PINNED_TEST_EXEC") != "" {
		t.Skip("user-mode emulation does not tell the address of a bus error")
	}
	r := newRig(t, Options{Workers: 2, Chunk: mib})
	const n = 4 * mib
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(n))
	mem, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	dev := r.device(n)
	require.NoError(t, r.c.Upload(t.Context(), dev, mem))
	require.NoError(t, f.Truncate(mib))
	require.ErrorContains(t, r.c.Upload(t.Context(), dev, mem), "or the file behind it cut short")
	require.ErrorContains(t, r.c.Download(t.Context(), mem, dev), "or the file behind it cut short")
	require.NoError(t, f.Truncate(n))
	require.NoError(t, r.c.Upload(t.Context(), dev, mem))
}

// memfd gives a file in memory.
func memfd(t *testing.T, flags int) *os.File {
	fd, err := unix.MemfdCreate("pinned-test", flags)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "memfd")
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestFilesInMemory(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Workers: 2, Chunk: mib})
	const n = 3*mib + 5
	want := bytesOf(6, n)
	mem := r.device(n)
	r.fill(mem, want)

	f := memfd(t, 0)
	done, err := r.c.DownloadTo(t.Context(), f, 100, mem, n)
	require.NoError(t, err)
	require.Equal(t, n, done)
	got := make([]byte, 100+n)
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	require.True(t, bytes.Equal(append(make([]byte, 100), want...), got))

	// What is there around the bytes stays.
	_, err = r.c.DownloadTo(t.Context(), f, 0, mem, 10)
	require.NoError(t, err)
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, want[:10], got[:10])
	require.True(t, bytes.Equal(want, got[100:]))

	// One that must not grow says so, and nothing is mapped afterwards.
	sealed := memfd(t, unix.MFD_ALLOW_SEALING)
	require.NoError(t, sealed.Truncate(mib))
	_, err = unix.FcntlInt(sealed.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW)
	require.NoError(t, err)
	_, err = r.c.DownloadTo(t.Context(), sealed, 0, mem, n)
	require.ErrorIs(t, err, unix.EPERM)
	done, err = r.c.DownloadTo(t.Context(), sealed, 0, mem, mib)
	require.NoError(t, err)
	require.Equal(t, mib, done)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.NotContains(t, string(maps), "memfd:pinned-test")

	// One that is open for writing only cannot be mapped, and is written.
	only, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer only.Close()
	_, err = r.c.DownloadTo(t.Context(), only, 7, mem, n)
	require.NoError(t, err)
	_, err = f.ReadAt(got[:n], 7)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got[:n]))
}

func TestNearCores(t *testing.T) {
	t.Parallel()
	var allowed unix.CPUSet
	for _, cpu := range []int{0, 1, 2, 3, 16, 17} {
		allowed.Set(cpu)
	}
	for text, want := range map[string]int{"0-1": 2, "0-7,16-23": 6, "3": 1, "4-15": 0, "": 0, "2,17": 2, "1000-5000": 0, "17,65535": 1} {
		list, err := linux.ParseCPUList(text)
		require.NoError(t, err)
		set := near(list, allowed)
		if want == 0 {
			assert.Nil(t, set, "%q", text)
			continue
		}
		if assert.NotNil(t, set, "%q", text) {
			assert.Equal(t, want, set.Count(), "%q", text)
		}
	}
}

// Cores that were chosen are left again.
func TestCoresAreLeft(t *testing.T) {
	t.Parallel()
	var before, during, after unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &before))
	first := -1
	for cpu := range 1024 {
		if before.IsSet(cpu) {
			first = cpu
			break
		}
	}
	var one unix.CPUSet
	one.Set(first)
	done := make(chan struct{})
	go func() {
		defer close(done)
		leave := cores{set: &one}.enter()
		assert.NoError(t, unix.SchedGetaffinity(0, &during))
		leave()
		assert.NoError(t, unix.SchedGetaffinity(0, &after))
	}()
	<-done
	assert.Equal(t, 1, during.Count())
	assert.Equal(t, before, after)
}
