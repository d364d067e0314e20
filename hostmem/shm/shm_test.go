//go:build linux && !android && (amd64 || arm64)

package shm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

const mib = 1 << 20

// tmpfs returns a directory of /dev/shm that is removed at the end, when it must be empty.
func tmpfs(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp(DefaultDir, "pinned-test-")
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, os.Remove(dir), "nothing is left in it") })
	return dir
}

func newMemory(tb testing.TB, name string, n int, o Options) *Memory {
	tb.Helper()
	m, err := Create(tb.Context(), name, n, o)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, m.Close()) })
	return m
}

func openMemory(tb testing.TB, name string, o Options) *Memory {
	tb.Helper()
	m, err := Open(tb.Context(), name, o)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, m.Close()) })
	return m
}

func TestMemoryIsSharedExactly(t *testing.T) {
	t.Parallel()
	dir := tmpfs(t)
	for _, n := range []int{1, 4096, 4097, 3*mib + 5} {
		a := newMemory(t, "x", n, Options{Dir: dir})
		require.Equal(t, n, len(a.Bytes()))
		require.Equal(t, make([]byte, n), a.Bytes())
		var s unix.Stat_t
		require.NoError(t, unix.Stat(filepath.Join(dir, "x"), &s))
		page := os.Getpagesize()
		assert.Equal(t, int64((n+page-1)/page*page+page), s.Blocks*512, "resident as a whole, and no page more than the header's")
		b := openMemory(t, "x", Options{Dir: dir, ReadOnly: true})
		a.Bytes()[n-1] = 7
		require.Equal(t, byte(7), b.Bytes()[n-1])
		require.NoError(t, a.Close())
		require.NoError(t, a.Close())
		assert.Nil(t, a.Bytes())
		require.Equal(t, byte(7), b.Bytes()[n-1], "it is still there for the other")
		require.NoError(t, b.Close())
		_, err := Open(t.Context(), "x", Options{Dir: dir})
		require.ErrorIs(t, err, fs.ErrNotExist, "the last one has removed it")
	}
}

// BenchmarkCreate makes memory and removes it; 16 GiB with PINNED_BENCH_SHM_MIB=16384.
func BenchmarkCreate(b *testing.B) {
	size := 1024
	if text := os.Getenv("PINNED_BENCH_SHM_MIB"); text != "" {
		var err error
		size, err = strconv.Atoi(text)
		require.NoError(b, err)
	}
	for _, name := range []string{"memory", ""} {
		b.Run(cmp.Or(name, "unnamed"), func(b *testing.B) {
			o := Options{Dir: tmpfs(b)}
			b.SetBytes(int64(size) * mib)
			began := hostos.CPUTime()
			for b.Loop() {
				m, err := Create(b.Context(), name, size*mib, o)
				require.NoError(b, err)
				b.StopTimer()
				require.NoError(b, m.Close())
				b.StartTimer()
			}
			b.ReportMetric((hostos.CPUTime()-began).Seconds()*1e3/float64(size*b.N)/1.048576, "cpu-s/GB")
		})
	}
}

func TestMemoryThatIsKept(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t), Keep: true}
	m := newMemory(t, "model", 10_000, o)
	require.NoError(t, m.Begin())
	copy(m.Bytes(), "weights")
	require.NoError(t, m.Complete("model, revision 5"))
	require.NoError(t, m.Close())

	_, err := Create(t.Context(), "model", 10_000, o)
	require.ErrorIs(t, err, fs.ErrExist)
	removed, err := Sweep(o.Dir)
	require.NoError(t, err)
	require.Empty(t, removed)
	m = openMemory(t, "model", Options{Dir: o.Dir})
	c, err := m.Content()
	require.NoError(t, err)
	assert.True(t, c.Complete)
	assert.Equal(t, "model, revision 5", c.Label)
	assert.Equal(t, os.Getpid(), c.Writer)
	assert.Equal(t, "weights", string(m.Bytes()[:7]))

	all, err := List(o.Dir)
	require.NoError(t, err)
	require.Len(t, all, 1)
	info := all[0]
	assert.Equal(t, []int{os.Getpid()}, info.Users)
	assert.Equal(t, []any{filepath.Join(o.Dir, "model"), 10_000, os.Getpid(), true, c}, []any{info.Path, info.Len, info.Maker, info.Keep, info.Content})
	assert.WithinRange(t, info.Used, info.Created, time.Now())

	require.NoError(t, Remove("model", Options{Dir: o.Dir}))
	require.ErrorIs(t, Remove("model", Options{Dir: o.Dir}), fs.ErrNotExist)
	assert.Equal(t, "weights", string(m.Bytes()[:7]))
}

// Content is complete only between Complete and Begin, and one writes at a time.
func TestContent(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t)}
	a := newMemory(t, "x", 100, o)
	b := openMemory(t, "x", o)
	reader := openMemory(t, "x", Options{Dir: o.Dir, ReadOnly: true})
	state := func() Content {
		c, err := reader.Content()
		require.NoError(t, err)
		return c
	}
	assert.Equal(t, Content{}, state())
	require.ErrorContains(t, a.Complete(""), "Begin was not called")
	require.ErrorIs(t, reader.Begin(), hostmem.ErrReadOnly)
	require.NoError(t, a.Begin())
	require.ErrorIs(t, a.Begin(), ErrWriting)
	require.ErrorIs(t, b.Begin(), ErrWriting)
	assert.False(t, state().Complete)
	assert.Equal(t, uint64(1), state().Generation)
	require.ErrorContains(t, a.Complete(strings.Repeat("x", 201)), "201 bytes")
	require.NoError(t, a.Complete("one"))
	assert.Equal(t, "one", state().Label)
	assert.Equal(t, uint64(2), state().Generation)
	require.NoError(t, b.Begin())
	assert.Empty(t, state().Label)
	// A writer that ends leaves incomplete content, and another can begin.
	require.NoError(t, b.Close())
	assert.False(t, state().Complete)
	require.NoError(t, a.Begin())
	require.NoError(t, a.Complete("two"))
	assert.Equal(t, "two", state().Label)
	assert.Equal(t, uint64(4), state().Generation)
	require.NoError(t, a.Close())
	_, err := a.Content()
	require.ErrorIs(t, err, cudart.ErrClosed)
}

func TestMemoryWithoutAName(t *testing.T) {
	t.Parallel()
	a := newMemory(t, "", 5000, Options{})
	f, err := a.File()
	require.NoError(t, err)
	require.Error(t, f.Truncate(0), "its size is sealed")
	require.NoError(t, a.Close())
	b, err := OpenFile(t.Context(), f, Options{}) // the descriptor has kept it
	require.NoError(t, err)
	require.NoError(t, f.Close())
	assert.Equal(t, make([]byte, 5000), b.Bytes())
	require.NoError(t, b.Close())
	_, err = Create(t.Context(), "", 5000, Options{Keep: true})
	require.ErrorContains(t, err, "Options.Keep needs a name")
}

// A descriptor of memory with a name counts as the name: the last one removes it.
func TestADescriptorOfMemoryWithAName(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t)}
	a := newMemory(t, "x", 5000, o)
	f, err := a.File()
	require.NoError(t, err)
	b, err := OpenFile(t.Context(), f, Options{ReadOnly: true})
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, a.Close())
	require.FileExists(t, filepath.Join(o.Dir, "x"))
	require.NoError(t, b.Close())
	require.NoFileExists(t, filepath.Join(o.Dir, "x"))
}

func TestCreateRefuses(t *testing.T) {
	t.Parallel()
	dir, ended := tmpfs(t), func() context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		return ctx
	}()
	for _, tc := range []struct {
		name string
		n    int
		o    Options
		ctx  context.Context
		want string
		is   error
	}{
		{name: "a/b", n: 1, want: "without a slash"},
		{name: "..", n: 1, want: "neither . nor .."},
		{name: "a\x00b", n: 1, want: "without a slash"},
		{name: strings.Repeat("n", 201), n: 1, want: "up to 200 bytes"},
		{name: "x", n: 0, want: "must be positive"},
		{name: "x", n: -1, want: "must be positive"},
		{name: "x", n: 1 << 62, want: "address space"},
		{name: "x", n: 1 << 50, is: hostmem.ErrLimit},
		{name: "x", n: 1, o: Options{Mode: fs.ModeDir}, want: "Options.Mode"},
		{name: "x", n: 1, o: Options{Dir: filepath.Join(dir, "none")}, is: fs.ErrNotExist},
		{name: "x", n: 1, o: Options{Dir: "/proc/self"}, want: "/proc/self"},
		{name: "x", n: 1, ctx: ended, is: context.Canceled},
	} {
		if tc.o.Dir == "" {
			tc.o.Dir = dir
		}
		if tc.ctx == nil {
			tc.ctx = t.Context()
		}
		_, err := Create(tc.ctx, tc.name, tc.n, tc.o)
		require.Error(t, err, "%.20q of %d", tc.name, tc.n)
		require.ErrorContains(t, err, tc.want)
		if tc.is != nil {
			require.ErrorIs(t, err, tc.is)
		}
	}
	none := context.Context(nil)
	_, err := Create(none, "x", 1, Options{})
	require.ErrorContains(t, err, "context is nil")
	disk := t.TempDir()
	if _, err = Create(t.Context(), "x", 1, Options{Dir: disk}); err == nil {
		t.Log("the temporary directory is in memory")
		require.NoError(t, os.Remove(filepath.Join(disk, "x")))
	} else {
		require.ErrorIs(t, err, errors.ErrUnsupported)
	}
}

// Of several makers of a name one succeeds, and the others leave nothing.
// Each call of the system fails once: Create returns memory as it should be, or an error, after which nothing is left.
func TestCreateWhereACallFails(t *testing.T) {
	t.Parallel()
	const n = 5*mib + 1
	o := Options{Dir: tmpfs(t), Workers: 1}
	for _, name := range []string{"x", ""} {
		failed, calls := 0, 1
		for at := range 1000 {
			if at > calls {
				break
			}
			for _, errno := range []unix.Errno{unix.EINVAL, unix.ENOMEM, unix.EFAULT} {
				sys := hostmemtest.NewSystem()
				seen, what := 0, ""
				sys.Calls = sys.Calls.Before(func(call string) error {
					if seen++; seen != at || call == "Unmap" {
						return nil
					}
					what = call
					return errno
				})
				m, err := Create(sys.Context(t), name, n, o)
				calls = max(calls, seen)
				if err == nil {
					assert.Equal(t, n, len(m.Bytes()), what)
					assert.Equal(t, n, bytes.Count(m.Bytes(), []byte{0}), what)
					require.NoError(t, m.Close(), what)
				} else {
					failed++
					require.ErrorIs(t, err, errno, what)
					assert.ErrorContains(t, err, "shm: create ", what)
				}
				left, err := os.ReadDir(o.Dir)
				require.NoError(t, err)
				assert.Empty(t, left, what)
				assert.Zero(t, sys.Mapped.Load(), what)
			}
		}
		assert.Greater(t, calls, 8)
		assert.Greater(t, failed, 6)
	}
}

// A file system without space for all of the memory is an error, also if it has some for huge pages.
func TestCreateOnAFullFileSystem(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t), Workers: 2}
	for space := range 4 {
		sys := hostmemtest.NewSystem()
		var pages atomic.Int32
		sys.Calls = sys.Calls.Before(func(call string) error {
			if (call == "Advise collapse" || call == "Advise populate") && int(pages.Add(1)) > space {
				return unix.EFAULT // as where a write would be a SIGBUS
			}
			return nil
		})
		_, err := Create(sys.Context(t), "x", 9*mib, o)
		require.ErrorIs(t, err, unix.ENOSPC)
		require.ErrorContains(t, err, "no space left (df;")
		left, err := os.ReadDir(o.Dir)
		require.NoError(t, err)
		assert.Empty(t, left)
		assert.Zero(t, sys.Mapped.Load())
	}
}

func TestMakersOfOneName(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t)}
	for range 20 {
		var all sync.WaitGroup
		made := make([]*Memory, 4)
		for i := range made {
			all.Go(func() {
				var err error
				if made[i], err = Create(t.Context(), "x", 8192, o); err != nil {
					assert.ErrorIs(t, err, fs.ErrExist)
				}
			})
		}
		all.Wait()
		made = slices.DeleteFunc(made, func(m *Memory) bool { return m == nil })
		require.Len(t, made, 1)
		require.NoError(t, made[0].Close())
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	dir := tmpfs(t)
	put := func(name string, content []byte) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	good := newMemory(t, "good", 5000, Options{Dir: dir})
	whole, err := os.ReadFile(filepath.Join(dir, "good"))
	require.NoError(t, err)
	put("empty", nil)
	put("short", whole[:100])
	put("cut", whole[:len(whole)-1])
	put("longer", append(slices.Clone(whole), 0))
	put("text", bytes.Repeat([]byte("text "), 3000))
	require.NoError(t, os.Symlink("good", filepath.Join(dir, "link")))
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "directory"), 0o700))
	for _, name := range []string{"link", "pipe", "directory"} {
		t.Cleanup(func() { _ = os.Remove(filepath.Join(dir, name)) })
	}
	for name, want := range map[string]error{
		"none": fs.ErrNotExist, "link": unix.ELOOP, "pipe": ErrDamaged, "directory": nil, "a/b": nil, "": nil,
		"empty": ErrDamaged, "short": ErrDamaged, "cut": ErrDamaged, "longer": ErrDamaged, "text": ErrDamaged,
	} {
		for _, readOnly := range []bool{false, true} {
			_, err := Open(t.Context(), name, Options{Dir: dir, ReadOnly: readOnly})
			require.Error(t, err, name)
			if want != nil {
				require.ErrorIs(t, err, want, name)
			}
		}
		if want == ErrDamaged || name == "link" {
			require.Error(t, Remove(name, Options{Dir: dir}), "%s stays", name)
			_, err := Create(t.Context(), name, 1, Options{Dir: dir})
			require.ErrorIs(t, err, fs.ErrExist, name)
		}
	}
	all, err := List(dir)
	require.NoError(t, err)
	require.Len(t, all, 1)
	assert.Equal(t, filepath.Join(dir, "good"), all[0].Path)
	require.NoError(t, good.Close())
}

// No header, whatever its bytes, makes a call panic, or map what the file does not have.
func TestHostileHeaders(t *testing.T) {
	t.Parallel()
	dir := tmpfs(t)
	m := newMemory(t, "x", 5000, Options{Dir: dir, Keep: true})
	path := filepath.Join(dir, "x")
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	t.Cleanup(func() { _ = os.Remove(path) })
	random := rand.New(rand.NewPCG(5, 6))
	damaged := 0
	for i := range 400 {
		bad := slices.Clone(whole)
		at := i
		if i >= headerSize {
			at = random.IntN(headerSize)
		}
		for range 1 + random.IntN(3) {
			bad[at] ^= byte(1 << random.IntN(8))
			at = random.IntN(headerSize)
		}
		if random.IntN(3) == 0 { // an attacker knows the checksum
			order.PutUint64(bad[atSize:], random.Uint64()>>random.IntN(64))
			order.PutUint64(bad[atOffset:], random.Uint64()>>random.IntN(64))
			order.PutUint32(bad[atSum:], checksum(bad))
		}
		require.NoError(t, os.WriteFile(path, bad, 0o600))
		o, err := Open(t.Context(), "x", Options{Dir: dir})
		if err != nil {
			require.ErrorIs(t, err, ErrDamaged)
			damaged++
			continue
		}
		require.Len(t, o.Bytes(), 5000)
		c, err := o.Content()
		require.NoError(t, err)
		assert.LessOrEqual(t, len(c.Label), 3*maxLabel)
		_ = o.Begin()
		_ = o.Close()
		_, _ = List(dir)
	}
	assert.Greater(t, damaged, 50)
}

// A file that loses its header while it is open is an error, and not the end of the process.
func TestAFileThatShrinks(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("the memory is not for the GPU")
	}
	o := Options{Dir: tmpfs(t)}
	m := newMemory(t, "x", 5000, o)
	require.NoError(t, os.Truncate(filepath.Join(o.Dir, "x"), 0))
	_, err := m.Content()
	require.ErrorContains(t, err, "SIGBUS")
	require.Error(t, m.Begin())
	require.NoError(t, m.Close())
}

func TestMemoryOfOthers(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root makes files of other users")
	}
	o := Options{Dir: tmpfs(t)}
	m := newMemory(t, "x", 5000, o)
	require.NoError(t, os.Chown(filepath.Join(o.Dir, "x"), 12345, -1))
	_, err := Open(t.Context(), "x", o)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "user 12345")
	o.AnyOwner = true
	require.NoError(t, openMemory(t, "x", o).Close())
	require.NoError(t, m.Close())
}

// A process that is being started has a copy of each descriptor. It must not count as one that has the memory open.
func TestACopyOfADescriptorIsNoUser(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("the memory is not for the GPU")
	}
	dir := tmpfs(t)
	f, err := openTemporary(dir, 0o600)
	require.NoError(t, err)
	another, err := reopen(f, false)
	require.NoError(t, err)
	defer another.Close()
	ok, err := tryLock(f, false)
	require.True(t, ok && err == nil, "%v", err)
	forked, err := unix.Dup(int(f.Fd()))
	require.NoError(t, err)
	defer unix.Close(forked)
	ok, err = tryLock(another, true)
	require.False(t, ok || err != nil, "%v", err)
	require.NoError(t, closeLocked(f))
	ok, err = tryLock(another, true)
	require.True(t, ok && err == nil, "%v", err)
}

// What a killed process leaves is removed by Sweep, and by the next Create of the name.
func TestUnusedMemoryIsRemoved(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t)}
	leave := func(name string) {
		m, err := Create(t.Context(), name, 5000, o)
		require.NoError(t, err)
		require.NoError(t, m.unmap())
		require.NoError(t, closeLocked(m.file)) // as the kernel does for a process that was killed
	}
	leave("a")
	leave("b")
	held := newMemory(t, "c", 5000, o)
	again := newMemory(t, "a", 100, o)
	removed, err := Sweep(o.Dir)
	require.NoError(t, err)
	assert.Equal(t, []string{filepath.Join(o.Dir, "b")}, removed)
	require.NoError(t, held.Close())
	require.NoError(t, again.Close())
}

// A process that has the file exclusively makes Open wait for no longer than its context.
func TestOpenWaitsForItsContextOnly(t *testing.T) {
	t.Parallel()
	o := Options{Dir: tmpfs(t), Keep: true}
	require.NoError(t, newMemory(t, "x", 5000, o).Close())
	f, err := openNamed(filepath.Join(o.Dir, "x"), true)
	require.NoError(t, err)
	ok, err := tryLock(f, true)
	require.NoError(t, err)
	require.True(t, ok)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = Open(ctx, "x", o)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, closeLocked(f))
	require.NoError(t, openMemory(t, "x", o).Close())
	require.NoError(t, Remove("x", o))
}

func TestRegisterSharedMemory(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	o := Options{Dir: tmpfs(t)}
	for _, name := range []string{"x", ""} {
		for _, readOnly := range []bool{false, true} {
			m := newMemory(t, name, 3*mib+7, o)
			f, err := m.File()
			require.NoError(t, err)
			second, err := OpenFile(t.Context(), f, Options{ReadOnly: readOnly})
			require.NoError(t, err)
			require.NoError(t, f.Close())
			a, err := m.Register(t.Context(), dev, hostmem.RegisterOptions{})
			require.NoError(t, err)
			b, err := second.Register(t.Context(), dev, hostmem.RegisterOptions{Background: true, Chunk: 2 * mib})
			require.NoError(t, err)
			require.NoError(t, b.Registered(t.Context()))
			assert.False(t, a.Info().ReadOnly)
			assert.Equal(t, readOnly, b.Info().ReadOnly)
			_, _, ok := hostmem.Find(m.Bytes())
			assert.True(t, ok)
			require.NoError(t, m.Close())
			require.NoError(t, a.Close(), "it is closed already")
			require.NoError(t, second.Close())
		}
	}
}

// Memory that is registered by other means stays mapped until that is closed.
func TestMemoryStaysMappedWhileItIsRegistered(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	m := newMemory(t, "", 5000, Options{})
	b, err := hostmem.Register(t.Context(), dev, m.Bytes(), hostmem.RegisterOptions{})
	require.NoError(t, err)
	require.ErrorContains(t, m.Close(), "still registered")
	require.NoError(t, b.Close())
	require.NoError(t, m.Close())
}

func TestZeroMemory(t *testing.T) {
	t.Parallel()
	var m Memory
	assert.Nil(t, m.Bytes())
	assert.Zero(t, m.Len())
	_, err := m.Content()
	for _, err := range []error{err, m.Begin(), m.Complete(""), m.Close(), m.CloseContext(context.Context(nil))} {
		assert.Error(t, err)
	}
	_, err = m.File()
	assert.Error(t, err)
	_, err = m.Register(t.Context(), nil, hostmem.RegisterOptions{})
	assert.Error(t, err)
	_, err = OpenFile(t.Context(), nil, Options{})
	assert.Error(t, err)
}
