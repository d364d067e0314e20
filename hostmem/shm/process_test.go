//go:build linux && !android && (amd64 || arm64)

package shm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

// asUser makes this program a user of the memory in a directory, instead of the tests.
const asUser = "PINNED_TEST_SHM_USER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asUser); dir != "" {
		if err := user(dir); err != nil {
			fmt.Fprintln(os.Stderr, "wrong:", err)
			os.Exit(3)
		}
		return
	}
	os.Exit(m.Run())
}

// userBytes returns the size of the memory of a world: in a soak it has a huge page.
func userBytes() int {
	if os.Getenv("PINNED_SOAK") != "" {
		return 4 << 20
	}
	return 256 << 10
}

// user opens, fills, reads and closes memory at random, for ever or a number of times. It returns what is wrong.
func user(dir string) error {
	ctx := context.Background()
	rt, err := cudasim.Open(ctx, cudasim.Config{})
	if err != nil {
		return err
	}
	dev, err := rt.Device(0)
	if err != nil {
		return err
	}
	times, _ := strconv.Atoi(os.Getenv(asUser + "_TIMES"))
	random := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	fmt.Println("ready")
	for i := 0; times == 0 || i < times; i++ {
		o := Options{Dir: dir, Keep: random.IntN(8) == 0}
		m, err := Open(ctx, "x", o)
		if errors.Is(err, fs.ErrNotExist) {
			if m, err = Create(ctx, "x", userBytes(), o); errors.Is(err, fs.ErrExist) {
				continue
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // its maker was killed, and another has removed it
			continue
		}
		if err != nil {
			return err
		}
		if random.IntN(2) == 0 {
			if _, err := m.Register(ctx, dev, hostmem.RegisterOptions{Background: true}); err != nil {
				return err
			}
		}
		if random.IntN(2) == 0 {
			err = fillContent(m, random.Uint32())
		} else {
			err = checkContent(m)
		}
		if err = errors.Join(err, m.Close()); err != nil {
			return err
		}
		if random.IntN(8) == 0 {
			if _, err := Sweep(dir); err != nil {
				return err
			}
		}
		if m.keep && random.IntN(4) == 0 {
			if err := Remove("x", o); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return rt.Close()
}

func fillContent(m *Memory, seed uint32) error {
	if err := m.Begin(); err != nil {
		if errors.Is(err, ErrWriting) {
			return nil
		}
		return err
	}
	mem := m.Bytes()
	for at := 0; at < len(mem); at += 4 {
		binary.LittleEndian.PutUint32(mem[at:], seed+uint32(at))
	}
	return m.Complete(strconv.FormatUint(uint64(seed), 10))
}

// checkContent requires that content which is complete before and after it was read is that of its label.
func checkContent(m *Memory) error {
	before, err := m.Content()
	if err != nil || !before.Complete {
		return err
	}
	mem := bytes.Clone(m.Bytes())
	if after, err := m.Content(); err != nil || after.Generation != before.Generation {
		return err
	}
	seed, err := strconv.ParseUint(before.Label, 10, 32)
	if err != nil {
		return fmt.Errorf("label %q: %w", before.Label, err)
	}
	for at := 0; at < len(mem); at += 4 {
		if got := binary.LittleEndian.Uint32(mem[at:]); got != uint32(seed)+uint32(at) {
			return fmt.Errorf("generation %d, label %s, byte %d: %d", before.Generation, before.Label, at, got)
		}
	}
	return nil
}

// A process is a user that runs.
type process struct {
	cmd *exec.Cmd
	out *bytes.Buffer // its standard error, once it was waited for
}

func startUser(t *testing.T, dir string, times int) *process {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	p := &process{exec.Command(exe), &bytes.Buffer{}}
	p.cmd.Env = append(os.Environ(), asUser+"="+dir, fmt.Sprintf("%s_TIMES=%d", asUser, times), "GOMAXPROCS=2")
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.cmd.Stderr = p.out
	err = p.cmd.Start()
	require.NoError(t, err)
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, ready); err != nil {
		_ = p.cmd.Wait()
		require.FailNow(t, "it did not begin", "%v: %s", err, p.out)
	}
	return p
}

// kill kills the process at any moment; it must not have ended by itself.
func (p *process) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait()
	status := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	require.True(t, status.Signaled(), "%s", p.out)
}

// afterSweep returns what Sweep leaves, which must be kept memory. The kernel may close the files of a process that was killed
// a moment after its end.
func afterSweep(t *testing.T, dir string) []Info {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		_, err := Sweep(dir)
		require.NoError(t, err)
		all, err := List(dir)
		require.NoError(t, err)
		lost := slices.IndexFunc(all, func(i Info) bool { return !i.Keep })
		if lost < 0 {
			return all
		}
		require.True(t, time.Now().Before(until), "%+v", all[lost])
	}
}

// Worlds of processes that open, fill, read and close one memory, and are killed at random moments: no process reads wrong
// bytes, waits for one that was killed, or fails; and nothing is left that nobody keeps.
func TestProcessesThatAreKilled(t *testing.T) {
	hosttest.StartsPrograms(t)
	t.Parallel()
	worlds, killsOfEach := []int{1, 3, 8}, 6
	until := time.Now()
	if soak, err := time.ParseDuration(os.Getenv("PINNED_SOAK")); err == nil {
		worlds, killsOfEach, until = []int{1, 2, 3, 4, 5, 6, 7, 8}, 40, until.Add(soak)
	}
	random, kills := rand.New(rand.NewPCG(7, uint64(os.Getpid()))), 0
	for round := 0; round == 0 || time.Now().Before(until); round++ {
		for _, n := range worlds {
			dir := tmpfs(t)
			world := make([]*process, n)
			for i := range world {
				world[i] = startUser(t, dir, 0)
			}
			for range killsOfEach {
				time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond)
				i := random.IntN(n)
				world[i].kill(t)
				kills++
				world[i] = startUser(t, dir, 0)
			}
			for _, p := range world {
				p.kill(t)
				kills++
			}
			// The next process finds what is there, and uses it or replaces it.
			last := startUser(t, dir, 50)
			require.NoError(t, last.cmd.Wait(), last.out)
			for _, info := range afterSweep(t, dir) {
				require.Empty(t, info.Users)
				require.NoError(t, Remove(filepath.Base(info.Path), Options{Dir: dir}))
			}
			require.NoError(t, os.Remove(dir), "nothing else is left")
			require.NoError(t, os.Mkdir(dir, 0o700))
		}
	}
	t.Logf("%d processes were killed", kills)
}

// Eight mappings of one memory have its pages once: by the kernel's account of shares (Pss).
func TestMemoryIsKeptOnce(t *testing.T) {
	t.Parallel()
	const n = 2 * mib
	o := Options{Dir: tmpfs(t)}
	m := newMemory(t, "x", n, o)
	_ = bytes.Count(m.Bytes(), []byte{0}) // Create maps no page where the kernel has no MADV_POPULATE_WRITE
	for range 7 {
		b := openMemory(t, "x", o)
		_ = bytes.Count(b.Bytes(), []byte{0})
	}
	total := 0
	err := linux.ReadProcessSMaps(os.DirFS("/"), os.Getpid(), func(mapping linux.Mapping, s linux.SMaps) {
		if strings.HasPrefix(mapping.Name, filepath.Dir(m.path)) {
			total += s.Rss
		}
	})
	require.NoError(t, err)
	if total == 0 {
		t.Skip("an emulator does not account for memory")
	}
	// Rss counts the pages of each mapping: all of them are resident, and the file has them once.
	assert.GreaterOrEqual(t, total, 8*n)
	info, err := os.Stat(m.path)
	require.NoError(t, err)
	assert.Equal(t, int64(n+os.Getpagesize()), info.Sys().(*syscall.Stat_t).Blocks*512)
}
