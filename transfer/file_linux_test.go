//go:build linux && !android && (amd64 || arm64)

package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A slice of a mapped file whose file is cut short has no bytes past its end:
// an error, where a copy loop would have ended the process.
func TestAMappedFileThatIsTruncated(t *testing.T) {
	t.Parallel()
	hosttest.Emulated(t, "user-mode emulation does not report the address of a bus error")
	r := newFixture(t, Options{Workers: 2})
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
	for _, n := range []int{1, 300 * kib, 3 * mib} { // in one piece, in several, by workers
		require.ErrorContains(t, r.c.Upload(t.Context(), dev, mem[mib:mib+n]), "or its file was truncated")
		require.ErrorContains(t, r.c.Upload(t.Context(), dev, mem[mib+1-min(n, mib):mib+1]), "or its file was truncated")
	}
	require.ErrorContains(t, r.c.Download(t.Context(), mem, dev), "or its file was truncated")
	require.NoError(t, f.Truncate(n))
	require.NoError(t, r.c.Upload(t.Context(), dev, mem))
}

// A file that is not in the page cache, or in part, arrives; so it does where the kernel
// is asked what is there (mincore).
func TestFilesOutsideThePageCache(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n, off = 20*mib + 5, 777
	want := bytesOf(3, off+n)
	mem := r.device(n)
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, want, 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Sync())
	for _, drop := range [][2]int64{{0, 0}, {0, mib}, {5 * mib, 7 * mib}, {off + n - 100, 100}, {0, 1}} { // the whole file first
		for _, mincore := range []bool{false, true} {
			require.NoError(t, unix.Fadvise(int(f.Fd()), drop[0], drop[1], unix.FADV_DONTNEED))
			r.fill(mem, make([]byte, n))
			c, ok := openCached(f, fileSystemOf(f), off, n)
			require.True(t, ok)
			if mincore && c.mapping == nil {
				require.NoError(t, c.mapForMincore(int(f.Fd()), n))
			}
			feed := newFileFeed(func(to []byte, off, n int) (int, int, error) {
				got, err := c.readNow(to[:n], off)
				return 0, got, err
			}, lanesOf(readers, readAt(f, off)), scratchBytes, n)
			done, err := r.c.at(n, mem).stage(t.Context(), stage.Copy{N: n, Host: feed})
			require.NoError(t, err)
			require.Equal(t, n, done)
			c.close()
			require.True(t, bytes.Equal(want[off:], r.onDevice(mem, n)))
		}
	}
	// Now that all is there, no other reads.
	c, ok := openCached(f, fileSystemOf(f), off, n)
	require.True(t, ok)
	defer c.close()
	got, err := c.readNow(make([]byte, n), 0)
	if !errors.Is(err, stage.ErrNotReady) { // the kernel may take pages at any time
		require.NoError(t, err)
		require.Equal(t, n, got)
	}
}

// requireUnmapped requires that no file of memfd is mapped.
func requireUnmapped(t *testing.T) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.NotContains(t, string(maps), "memfd:"+t.Name()+" ")
}

func TestFilesInMemory(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
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
	requireUnmapped(t)

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

// A file in memory arrives by pread and from its mapping; one with holes is not mapped, and keeps them; one that is
// truncated has no bytes past its end.
func TestReadsOfFilesInMemory(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const n, off = minMapped + 5, 777
	f := memfd(t, 0)
	want := bytesOf(4, off+n+10)
	_, err := f.Write(want)
	require.NoError(t, err)
	got := make([]byte, n)
	for _, faster := range []string{"pread", "mapping", "either"} {
		c, ok := openCached(f, unix.TMPFS_MAGIC, off, n)
		require.True(t, ok)
		require.NotNil(t, c.memory)
		clear(got)
		for at := 0; at < n; at += 512 * kib {
			if faster != "either" {
				c.memory.pread.Store(int64(map[string]int{"pread": 1, "mapping": 1e9}[faster]))
				c.memory.copying.Store(1e6)
			}
			to := got[at:min(at+512*kib, n)]
			had, err := c.readNow(to, at)
			require.NoError(t, err)
			require.Len(t, to, had)
		}
		require.True(t, bytes.Equal(want[off:off+n], got), faster)
		c.close()
	}
	mem := r.device(n)
	done, err := r.c.UploadFrom(t.Context(), mem, f, off, n)
	require.NoError(t, err)
	require.Equal(t, n, done)
	require.True(t, bytes.Equal(want[off:off+n], r.onDevice(mem, n)))

	require.NoError(t, f.Truncate(off+n-1))
	require.NoError(t, f.Truncate(off+2*n))
	holes, ok := openCached(f, unix.TMPFS_MAGIC, off, n)
	require.True(t, ok)
	require.Nil(t, holes.memory)
	require.NoError(t, f.Truncate(off+n-1))
	hosttest.Emulated(t, "user-mode emulation does not report the address of a bus error")
	c, ok := openCached(f, unix.TMPFS_MAGIC, off, n-1)
	require.True(t, ok)
	defer c.close()
	c.memory.pread.Store(1e9)
	c.memory.copying.Store(1)
	require.NoError(t, f.Truncate(off+5*mib))
	had, err := c.readNow(got[:512*kib], 5*mib-256*kib)
	require.NoError(t, err)
	require.Equal(t, 256*kib, had)
}

// A large new file in memory, for which pages are made ahead of the copies, arrives wherever it begins, also if it has
// its size already; a download that fails leaves what has arrived.
func TestLargeNewFilesInMemory(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	const n = minFresh + hostos.HugePage + 5
	want := bytesOf(7, n)
	mem := r.device(n)
	r.fill(mem, want)
	for i, off := range []int{0, 777, hostos.HugePage - 1} {
		for _, size := range []int{0, off + n + 3}[i%2:][:1] {
			what := fmt.Sprintf("at %d of %d bytes", off, size)
			f := memfd(t, 0)
			require.NoError(t, f.Truncate(int64(size)), what)
			_, err := f.WriteAt([]byte{9, 9}, int64(max(off-1, 0))) // which a page has already
			require.NoError(t, err, what)
			sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 6, Code: cudart.ErrInvalidResourceHandle})
			done, err := r.c.DownloadTo(t.Context(), f, int64(off), mem, n)
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle, what)
			require.Less(t, done, n, what)
			got := make([]byte, n)
			_, err = f.ReadAt(got[:done], int64(off))
			require.NoError(t, err, what)
			require.True(t, bytes.Equal(want[:done], got[:done]), what)
			done, err = r.c.DownloadTo(t.Context(), f, int64(off), mem, n)
			require.NoError(t, err, what)
			require.Equal(t, n, done, what)
			_, err = f.ReadAt(got, int64(off))
			require.NoError(t, err, what)
			require.True(t, bytes.Equal(want, got), what)
			info, err := f.Stat()
			require.NoError(t, err, what)
			require.EqualValues(t, max(size, off+n), info.Size(), what)
		}
	}
	requireUnmapped(t)
}

// What a download that fails has extended a file in memory by is cut off again,
// but for the bytes that arrived.
func TestFilesInMemoryAfterAFailure(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	const n = 8 * mib
	want := bytesOf(2, n)
	mem := r.device(n)
	r.fill(mem, want)
	for _, before := range []int{0, 700, 3 * mib, 2 * n} {
		for _, chunks := range []int{0, 1, 5} {
			for _, off := range []int{0, 777} {
				what := fmt.Sprintf("%d bytes before, %d chunks, at %d", before, chunks, off)
				f := memfd(t, 0)
				old := bytesOf(3, before)
				_, err := f.Write(old)
				require.NoError(t, err)
				sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: chunks + 1, Code: cudart.ErrInvalidResourceHandle})
				done, err := r.c.DownloadTo(t.Context(), f, int64(off), mem, n)
				require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle, what)
				require.Less(t, done, n, what)
				got, err := io.ReadAll(io.NewSectionReader(f, 0, math.MaxInt64))
				require.NoError(t, err)
				end := off + done
				if done == 0 {
					end = 0
				}
				require.Len(t, got, max(before, end), what)
				require.True(t, bytes.Equal(want[:done], got[min(off, len(got)):][:done]), what)
			}
		}
	}
	// One that another process has changed meanwhile is left as it is.
	f := memfd(t, 0)
	_, err = r.c.With(Call{Progress: func(int, int) {
		assert.NoError(t, f.Truncate(2*n))
		panic(assert.AnError)
	}}).DownloadTo(t.Context(), f, 0, mem, n)
	require.Error(t, err)
	info, err := f.Stat()
	require.NoError(t, err)
	require.EqualValues(t, 2*n, info.Size())

	// And a callback that ends its goroutine.
	f = memfd(t, 0)
	done, err := r.c.With(Call{Progress: func(int, int) { runtime.Goexit() }}).DownloadTo(t.Context(), f, 0, mem, n)
	require.ErrorIs(t, err, bounded.ErrExited)
	info, err = f.Stat()
	require.NoError(t, err)
	require.EqualValues(t, done, info.Size())
	requireUnmapped(t)
}

// A file in memory that another process truncates during the copy is written,
// where its mapping has no pages any more.
func TestAFileInMemoryThatIsTruncated(t *testing.T) {
	t.Parallel()
	hosttest.Emulated(t, "user-mode emulation maps pages past the end of a file")
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 1})
	const n = 3 * mib
	want := bytesOf(2, n)
	mem := r.device(n)
	r.fill(mem, want)
	f := memfd(t, 0)
	sim.Hold()
	var done int
	var group sync.WaitGroup
	group.Go(func() { done, err = r.c.DownloadTo(t.Context(), f, 0, mem, n) })
	for size := int64(0); size < n; { // until it is extended, and mapped
		info, err := f.Stat()
		require.NoError(t, err)
		size = info.Size()
		runtime.Gosched()
	}
	for sim.Calls("cudaMemcpyAsync") == 0 {
		runtime.Gosched()
	}
	assert.NoError(t, f.Truncate(mib+1))
	sim.Release()
	group.Wait()
	require.NoError(t, err)
	require.Equal(t, n, done)
	got, err := io.ReadAll(io.NewSectionReader(f, 0, math.MaxInt64))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

// A full tmpfs is ENOSPC, with what it had room for in the file. The test runs
// itself in a mount namespace, with a tmpfs of its own.
func TestAFullFileSystemInMemory(t *testing.T) {
	const dir, capacity = "PINNED_TEST_TMPFS", 5 * mib
	if at := os.Getenv(dir); at != "" {
		require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, fmt.Sprintf("size=%d", capacity)))
		r := newFixture(t, Options{Workers: 2})
		const n = 2 * capacity
		want := bytesOf(2, n)
		mem := r.device(n)
		r.fill(mem, want)
		f, err := os.Create(filepath.Join(at, "file"))
		require.NoError(t, err)
		defer f.Close()
		done, err := r.c.DownloadTo(t.Context(), f, 0, mem, n)
		require.ErrorIs(t, err, unix.ENOSPC)
		require.LessOrEqual(t, done, capacity)
		got, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		require.Len(t, got, done)
		require.True(t, bytes.Equal(want[:done], got))
		t.Logf("%d of %d bytes", done, n)
		return
	}
	hosttest.Emulated(t, "user-mode emulation has no namespaces")
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), dir+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EINVAL) {
		t.Skipf("no user namespaces here: %v", err)
	}
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS", "%s", out)
	t.Logf("%s", out)
}

// Device nodes are not files in memory, though their file system is.
func TestADeviceNodeIsWritten(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	for _, direct := range []bool{false, true} {
		c := r.c.With(Call{DirectIO: direct})
		done, err := c.DownloadTo(t.Context(), f, 0, r.device(2*mib), 2*mib)
		require.NoError(t, err)
		require.Equal(t, 2*mib, done)
	}
}

// isOpenDirect reports whether this process has a file open past the page cache.
func isOpenDirect(t *testing.T, path string) bool {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	for _, fd := range all {
		if name, err := os.Readlink(fd); err != nil || name != path {
			continue
		}
		n, err := strconv.Atoi(filepath.Base(fd))
		require.NoError(t, err)
		if flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFL, 0); err == nil && flags&unix.O_DIRECT != 0 {
			return true
		}
	}
	return false
}

// DirectIO is honoured for readers and writers that are files, whose offset
// moves as by Read and Write.
func TestDirectIO(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "file")
	probe, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_DIRECT, 0o600)
	if err != nil {
		t.Skipf("no O_DIRECT in %s: %v", t.TempDir(), err)
	}
	require.NoError(t, probe.Close())
	r := newFixture(t, Options{Workers: 2})
	const n = 3*mib + 5
	want := bytesOf(7, n)
	mem := r.device(n)
	for _, off := range []int64{0, 4096, 777} {
		for how, copies := range map[string]func(v *Copier, f *os.File) (int, error){
			"UploadFrom":     func(v *Copier, f *os.File) (int, error) { return v.UploadFrom(t.Context(), mem, f, off, n) },
			"UploadReader":   func(v *Copier, f *os.File) (int, error) { return v.UploadReader(t.Context(), mem, f, n) },
			"DownloadTo":     func(v *Copier, f *os.File) (int, error) { return v.DownloadTo(t.Context(), f, off, mem, n) },
			"DownloadWriter": func(v *Copier, f *os.File) (int, error) { return v.DownloadWriter(t.Context(), f, mem, n) },
		} {
			what := fmt.Sprintf("%s at %d", how, off)
			upload := strings.HasPrefix(how, "Upload")
			f, err := os.OpenFile(path, os.O_RDWR|os.O_TRUNC, 0)
			require.NoError(t, err)
			if upload {
				_, err = f.WriteAt(want, off)
				require.NoError(t, err)
				r.fill(mem, make([]byte, n))
			} else {
				r.fill(mem, want)
			}
			_, err = f.Seek(off, io.SeekStart)
			require.NoError(t, err)
			var direct atomic.Bool
			done, err := copies(r.c.With(Call{DirectIO: true, Progress: func(int, int) {
				if isOpenDirect(t, path) {
					direct.Store(true)
				}
			}}), f)
			require.NoError(t, err, what)
			require.Equal(t, n, done, what)
			require.True(t, direct.Load(), what)
			require.False(t, isOpenDirect(t, path), what)
			at, err := f.Seek(0, io.SeekCurrent)
			require.NoError(t, err)
			if strings.HasSuffix(how, "er") {
				require.Equal(t, off+n, at, what)
			} else {
				require.Equal(t, off, at, what)
			}
			got := r.onDevice(mem, n)
			if !upload {
				_, err = f.ReadAt(got, off)
				require.NoError(t, err)
				info, err := f.Stat()
				require.NoError(t, err)
				require.Equal(t, off+n, info.Size(), what)
			}
			require.True(t, bytes.Equal(want, got), what)

			// An early end, and a failure: the offset is the count's.
			if how == "UploadReader" {
				require.NoError(t, f.Truncate(off+mib+1))
				_, err = f.Seek(off, io.SeekStart)
				require.NoError(t, err)
				done, err = copies(r.c.With(Call{DirectIO: true}), f)
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				require.Equal(t, mib+1, done)
				at, err = f.Seek(0, io.SeekCurrent)
				require.NoError(t, err)
				require.Equal(t, off+mib+1, at)
			}
			require.NoError(t, f.Close())
		}
	}
}

// DirectIO does with a file what can be done with it as it is open.
func TestDirectIOKeepsToTheFlags(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	c := r.c.With(Call{DirectIO: true})
	const n = 64 * kib
	want := bytesOf(7, n)
	mem := r.device(n)
	r.fill(mem, want)
	for where, dir := range directories(t) {
		path := filepath.Join(dir, "file")
		old := bytesOf(8, n)
		require.NoError(t, os.WriteFile(path, old, 0o600))

		appending, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = c.DownloadTo(t.Context(), appending, 0, mem, n)
		require.ErrorContains(t, err, "O_APPEND", where)
		done, err := c.DownloadWriter(t.Context(), appending, mem, n)
		require.NoError(t, err, where)
		require.Equal(t, n, done, where)
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, bytes.Equal(slices.Concat(old, want), got), where)

		for how, upload := range map[string]func() (int, error){
			"UploadFrom":   func() (int, error) { return c.UploadFrom(t.Context(), mem, appending, 0, n) },
			"UploadReader": func() (int, error) { return c.UploadReader(t.Context(), mem, appending, n) },
		} {
			_, err = upload()
			require.ErrorIs(t, err, unix.EBADF, "%s: %s of one that is open for writing only", where, how)
		}
		require.NoError(t, appending.Close())

		reading, err := os.Open(path)
		require.NoError(t, err)
		_, err = c.DownloadTo(t.Context(), reading, 0, mem, n)
		require.ErrorIs(t, err, unix.EBADF, where)
		_, err = c.DownloadWriter(t.Context(), reading, mem, n)
		require.ErrorIs(t, err, unix.EBADF, where)
		require.NoError(t, reading.Close())
	}
}

// To open a FIFO once more would wait for its other end.
func TestDirectIOOfAPipe(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	c := r.c.With(Call{DirectIO: true})
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	const n = 32 * kib
	want := bytesOf(7, n)
	mem := r.device(n)
	from, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer from.Close()
	_, err = c.UploadFrom(t.Context(), mem, from, 0, n)
	require.ErrorIs(t, err, unix.ESPIPE)
	to, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer to.Close()
	r.fill(mem, want)
	done, err := c.DownloadWriter(t.Context(), to, mem, n)
	require.NoError(t, err)
	require.Equal(t, n, done)
	r.fill(mem, make([]byte, n))
	done, err = c.UploadReader(t.Context(), mem, from, n)
	require.NoError(t, err)
	require.Equal(t, n, done)
	require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
}

// What O_DIRECT has written is counted, although the rest could not be.
func TestDirectIOCountsWhatItWrote(t *testing.T) {
	t.Parallel()
	d, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer d.Close()
	f, err := os.Open(d.Name()) // refuses to write
	require.NoError(t, err)
	defer f.Close()
	took, err := writeDirect(f, d, 4096)(make([]byte, 3*block+5), block)
	require.ErrorIs(t, err, unix.EBADF)
	require.Equal(t, 3*block, took)
	info, err := f.Stat()
	require.NoError(t, err)
	require.EqualValues(t, 5*block, info.Size())
}

// A read past the page cache may return less than there is. The cache has the
// rest, and reports where the file ends.
func TestShortReadsPastThePageCache(t *testing.T) {
	t.Parallel()
	const size = 10*block + 100
	data := bytesOf(1, size)
	for name, maxN := range map[string]int{"nothing": 0, "one byte": 1, "half a block": block / 2, "a block": block, "two blocks and a bit": 2*block + 7, "all": size} {
		for _, base := range []int{0, block, 777} {
			for _, n := range []int{1, block, 3*block + 9, size - base, size - base + 1} {
				what := fmt.Sprintf("%s, %d from %d", name, n, base)
				first := true
				read := readBlocks(func(p []byte, off int64) (int, error) {
					require.Zero(t, off%block, what)
					require.Zero(t, len(p)%block, what)
					if !first && maxN < block {
						return 0, unix.EINVAL
					}
					first = false
					return copy(p[:min(len(p), maxN)], data[min(int(off), size):]), nil
				}, int64(base), readAt(bytes.NewReader(data), int64(base)))
				to := make([]byte, size+3*block)
				skip, got, err := read(to, 0, n)
				if n > size-base {
					require.ErrorIs(t, err, io.ErrUnexpectedEOF, what)
					require.Equal(t, size-base, got, what)
				} else {
					require.NoError(t, err, what)
					require.Equal(t, n, got, what)
				}
				require.True(t, bytes.Equal(data[base:base+got], to[skip:skip+got]), what)
			}
		}
	}
}
