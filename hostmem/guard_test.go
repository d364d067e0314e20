//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/testgpu"
)

// The guard does not refuse resident memory: pinning it takes
// nothing of what is available. Page cache is available until it is pinned.
func TestResidentMemoryIsNeverRefusedByTheGuard(t *testing.T) {
	if emulated(t) {
		t.Skip("/proc/self/pagemap is another process's here (user-mode emulation?)")
	}
	g := newSimFixture(t, cudasim.Config{})
	touched := func(mem []byte) []byte {
		for i := 0; i < len(mem); i += os.Getpagesize() {
			mem[i] = 1
		}
		return mem
	}
	onDisk, fd := diskFile(t, mib)
	disk, err := pages.Host().Calls.FileSystem(onDisk)
	require.NoError(t, err)
	inMemory := filepath.Join("/dev/shm", fmt.Sprintf("pinned-test-%d", os.Getpid()))
	shm, err := os.Create(inMemory)
	if err != nil {
		t.Skipf("no shared memory here: %v", err)
	}
	defer shm.Close()
	defer func() { assert.NoError(t, os.Remove(inMemory)) }()
	_, err = shm.Write(filled(mib, 1))
	require.NoError(t, err)
	other, err := os.Create(inMemory + "-removed")
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, other.Truncate(mib))
	removed := touched(mapped(t, int(other.Fd()), mib, readWrite, shared))
	require.NoError(t, os.Remove(inMemory+"-removed"))
	half := mapped(t, -1, mib, readWrite, private)
	touched(half[:mib/2])

	require.NoError(t, SetLimits(Limits{MaxShare: 1e-12}))
	t.Cleanup(func() { assert.NoError(t, SetLimits(Limits{})) })
	_, err = Alloc(t.Context(), g.Dev, 4096, Options{})
	require.ErrorIs(t, err, ErrLimit)
	for _, tc := range []struct {
		name    string
		mem     []byte
		refused bool
	}{
		{"anonymous memory that is not resident", mapped(t, -1, mib, readWrite, private), true},
		{"half of it is", half, true},
		{"anonymous memory", touched(mapped(t, -1, mib, readWrite, private)), false},
		{"anonymous shared memory", touched(mapped(t, -1, mib, readWrite, shared)), false},
		{"a memfd", touched(mapped(t, memfd(t, mib), mib, readWrite, shared)), false},
		{"a file of a tmpfs", mapped(t, int(shm.Fd()), mib, unix.PROT_READ, shared), false},
		{"a file of a tmpfs that was removed", removed, false},
		{"a file on a disk", touched(mapped(t, fd, mib, readWrite, shared)), !disk.Memory},
		{"a private mapping of one", mapped(t, fd, mib, readWrite, private), true},
		{"the same, written to", touched(mapped(t, fd, mib, readWrite, private)), false},
	} {
		r, err := Register(t.Context(), g.Dev, tc.mem, RegisterOptions{})
		if tc.refused {
			require.ErrorIs(t, err, ErrLimit, tc.name)
			continue
		}
		require.NoError(t, err, tc.name)
		require.NoError(t, r.Close())
	}
	f, err := MapFile(t.Context(), g.Dev, inMemory, FileOptions{})
	require.NoError(t, err, "shared memory")
	require.NoError(t, f.Close())
	if _, err = MapFile(t.Context(), g.Dev, onDisk, FileOptions{}); !disk.Memory {
		require.ErrorIs(t, err, ErrLimit, "page cache")
	}
}

// However much more than the host has is requested, the limit refuses it, and not mmap.
func TestMoreThanTheHostHasIsRefusedByTheLimit(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	sys := g.watch()
	available, ok := Available()
	require.True(t, ok)
	for _, n := range []int{available, 2 * available, 1 << 45} {
		for _, huge := range []HugePages{0, HugePagesNever, HugeTLB1G} {
			_, err := Alloc(g.Context(), g.Dev, n, Options{HugePages: huge})
			require.ErrorIs(t, err, ErrLimit)
			require.NotErrorIs(t, err, unix.ENOMEM)
			require.ErrorContains(t, err, "available are")
		}
	}
	require.NoError(t, SetLimits(Limits{MaxShare: 2}), "switched off")
	t.Cleanup(func() { assert.NoError(t, SetLimits(Limits{})) })
	_, err := Alloc(g.Context(), g.Dev, 1<<50, Options{})
	require.ErrorIs(t, err, unix.ENOMEM)
	require.ErrorContains(t, err, "memory or address space is short (available are")
	assert.Zero(t, sys.Mapped.Load())
}

// Which pages the mappings of a process consist of.
func TestBacking(t *testing.T) {
	t.Parallel()
	system := &pages.System{Calls: pages.Calls{FileSystem: func(path string) (pages.FileSystem, error) {
		switch path {
		case "/data/weights":
			return pages.FileSystem{}, nil
		case "/run/shared":
			return pages.FileSystem{Memory: true}, nil
		case "/huge/pages":
			return pages.FileSystem{Page: 2 * mib, Memory: true}, nil
		}
		return pages.FileSystem{}, os.ErrNotExist
	}}}
	const (
		anonymous = "rw-p 0 00:00 0"
		weights   = "rw-s 0 fe:00 7 /data/weights"
		huge      = "rw-s 0 00:0f 7 /huge/pages"
	)
	for _, tc := range []struct {
		lines  []string
		want   pages.Backing
		shared bool
	}{
		{[]string{anonymous}, pages.Ordinary, false},
		{[]string{weights}, pages.PageCache, true},
		{[]string{weights + " (deleted)"}, pages.PageCache, true},
		{[]string{"rw-p 0 fe:00 7 /data/weights"}, pages.Ordinary, false},
		{[]string{"r--s 0 fe:00 7 /data/gone (deleted)"}, pages.PageCache, true},
		{[]string{"rw-s 0 00:1a 7 /run/shared"}, pages.Ordinary, true},
		{[]string{"rw-s 0 00:01 7 /memfd:x (deleted)"}, pages.Ordinary, true},
		{[]string{"rw-s 0 00:01 7 /dev/zero (deleted)"}, pages.Ordinary, true},
		{[]string{"rw-s 0 00:01 7 /SYSV00000000 (deleted)"}, pages.Ordinary, true},
		{[]string{huge}, pages.Reserved, true},
		{[]string{huge, huge}, pages.Reserved, true},
		{[]string{huge, anonymous}, pages.Ordinary, false},
		{[]string{anonymous, huge}, pages.Ordinary, false},
		{[]string{anonymous, weights}, pages.PageCache, false},
		{[]string{weights, anonymous}, pages.PageCache, false},
		{[]string{weights, huge}, pages.PageCache, true},
	} {
		var text strings.Builder
		for i, line := range tc.lines {
			fmt.Fprintf(&text, "%x000-%x000 %s\n", i+1, i+2, line)
		}
		maps, err := linux.ParseMaps(text.String())
		require.NoError(t, err)
		got, shared := backing(maps, system)
		assert.Equal(t, tc.want, got, "%q", tc.lines)
		assert.Equal(t, tc.shared, shared, "%q", tc.lines)
	}
}

// childEnv names the control group that the test's child process is to join.
const childEnv = "PINNED_TEST_CGROUP"

// memoryGroup makes a control group with a limit on memory, or says why it cannot.
func memoryGroup(t *testing.T, limit int) (procs string) {
	t.Helper()
	groups, err := linux.ReadCgroups(os.DirFS("/"), "memory")
	if err != nil || len(groups) == 0 {
		t.Skipf("no control group for memory: %v", err)
	}
	var reasons []error
	for _, parent := range groups { // its own first, then those around it
		dir := filepath.Join("/", parent.Dir, fmt.Sprintf("pinned-test-%d", os.Getpid()))
		file := "memory.max"
		if parent.Version == 1 {
			file = "memory.limit_in_bytes"
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			reasons = append(reasons, err)
			continue
		}
		t.Cleanup(func() { assert.NoError(t, os.Remove(dir)) })
		err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.Itoa(limit)), 0o644)
		if err == nil {
			return filepath.Join(dir, "cgroup.procs")
		}
		reasons = append(reasons, err)
	}
	t.Skipf("a control group with a limit on memory cannot be made here: %v", errors.Join(reasons...))
	return ""
}

// A process in a control group of 1 GiB lives, however much it tries to pin, and
// however many goroutines try at once.
func TestTheGuardKeepsAProcessAlive(t *testing.T) {
	const limit = gib
	if procs := os.Getenv(childEnv); procs != "" {
		require.NoError(t, os.WriteFile(procs, []byte("0"), 0o644))
		t.Run("at once", pinAtOnce)
		t.Run("small", pinUntilRefused)
		return
	}
	if testgpu.Race || emulated(t) {
		t.Skip("the memory that the race detector or an emulator needs is not limited")
	}
	if n, ok := Available(); !ok || n < 2*limit {
		t.Skipf("the host has %d bytes available, which are too few for this", n)
	}
	procs := memoryGroup(t, limit)
	for _, run := range []string{"at_once", "small"} {
		child := exec.Command(os.Args[0], "-test.run", "^TestTheGuardKeepsAProcessAlive$/^"+run+"$", "-test.v")
		child.Env = append(os.Environ(), childEnv+"="+procs, "GOMEMLIMIT=off", "GOGC=100")
		out, err := child.CombinedOutput()
		require.NoError(t, err, "a process that is killed has got too much:\n%s", out)
		require.True(t, bytes.Contains(out, []byte("--- PASS: TestTheGuardKeepsAProcessAlive/"+run)), "%s", out)
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, "MiB pinned") {
				t.Log(strings.TrimSpace(line))
			}
		}
	}
}

// pinAtOnce requests 4 x 500 MiB from four goroutines: one after the other three would
// be refused.
func pinAtOnce(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	var group sync.WaitGroup
	results := make(chan error, 4)
	others := make(chan struct{}, 4) // those that were refused
	for range 4 {
		group.Go(func() {
			b, err := Alloc(t.Context(), g.Dev, 500*mib, Options{})
			results <- err
			if err != nil {
				others <- struct{}{}
				return
			}
			for range 3 { // holds it until all have requested theirs
				select {
				case <-others:
				case <-time.After(20 * time.Second):
				}
			}
			assert.NoError(t, b.Close())
		})
	}
	refused := 0
	for range 4 {
		if err := <-results; err != nil {
			require.ErrorIs(t, err, ErrLimit)
			require.ErrorContains(t, err, "of 1 GiB (")
			refused++
		}
	}
	group.Wait()
	assert.Equal(t, 3, refused)
	t.Logf("%d MiB pinned", (4-refused)*500)
}

// pinUntilRefused fills the group with small buffers, and then needs memory for itself.
func pinUntilRefused(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	random := rand.New(rand.NewPCG(5, 6))
	pinned := 0
	var all []*Buffer
	for refused := 0; refused < 20; {
		n := 64*kib + random.IntN(16*mib)
		b, err := Alloc(t.Context(), g.Dev, n, Options{})
		if err != nil {
			require.ErrorIs(t, err, ErrLimit)
			refused++ // smaller ones may still fit
			continue
		}
		all = append(all, b)
		pinned += b.Info().Reserved
	}
	heap := make([][]byte, 40)
	for i := range heap {
		heap[i] = make([]byte, mib)
		for j := 0; j < mib; j += 4096 {
			heap[i][j] = 1
		}
	}
	runtime.KeepAlive(heap)
	t.Logf("%d MiB pinned", pinned>>20)
	assert.Greater(t, pinned, 700*mib, "the guard leaves too much")
	for _, b := range all {
		require.NoError(t, b.Close())
	}
}
