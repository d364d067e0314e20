package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/testgpu"
)

// simulatedDevices returns the devices of a simulated library.
func simulatedDevices(t *testing.T, cfg cudasim.Config) (*cudasim.Sim, []*cudart.Device) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cfg)
	return sim, rt.Devices()
}

func find(t *testing.T, b *result.Bench, name, method string, n int) *result.Series {
	t.Helper()
	s := b.Find(name, result.Label{Key: result.Method, Value: method}, result.Label{Key: result.Size, Value: strconv.Itoa(n)})
	require.NotNil(t, s, "%s by %s of %d bytes", name, method, n)
	return s
}

func TestMemoryKept(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	_, devices := simulatedDevices(t, cudasim.Config{})
	const large = 64<<20 + 1
	env := measure.Env{Devices: devices, Options: measure.Options{Quick: true, Sizes: []int{1 << 20, large}}}
	b, err := measure.Run(t.Context(), memory, env, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	assert.Len(t, b.Series, 8)
	within := 0.05
	if testgpu.Race {
		within = 0.3 // the detector's own memory
	}
	for _, n := range env.Sizes {
		for method, want := range map[string]float64{ours: 1, pooled: 1, cudas: 1, powerOfTwo: float64(roundedUp(n)) / float64(n)} {
			s := find(t, b, retainedName, method, n)
			assert.InDelta(t, want, s.Median, within, "%s of %d", method, n)
			assert.Equal(t, result.Ratio, s.Unit)
			assert.True(t, s.Verified, method)
		}
	}
	text := strings.Join(b.Answers, "\n")
	assert.Contains(t, text, "rounds up to powers of two, as PyTorch does by default, wastes ")
	assert.Contains(t, text, "pinned_max_round_threshold_mb")
	notes := strings.Join(b.Notes, "\n")
	assert.Contains(t, notes, "smaps_rollup")
	assert.Contains(t, notes, "power_of_two: the simulated cudaHostAlloc")
	assert.NotContains(t, notes, "hostmem: ")
}

func TestMemoryInterrupted(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	_, devices := simulatedDevices(t, cudasim.Config{})
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	env := measure.Env{Devices: devices, Options: measure.Options{Quick: true, Sizes: []int{1 << 20}}}
	b, err := measure.Run(ctx, memory, env, func(p measure.Progress) {
		if p.Done == 1 {
			cancel(stop)
		}
	})
	require.ErrorIs(t, err, stop)
	assert.Len(t, b.Series, 1)
	assert.Empty(t, b.Errors)
	assert.Len(t, b.Answers, 1)
}

func TestMemoryPlans(t *testing.T) {
	t.Parallel()
	_, err := memory.Plan(measure.Env{})
	require.EqualError(t, err, "no device")
	_, devices := simulatedDevices(t, cudasim.Config{})
	_, footprint, err := measure.Estimate(memory, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1<<29 + 1}}})
	require.NoError(t, err)
	assert.Equal(t, 1<<30, footprint.Pinned, "what the allocator that rounds takes")
	for n, want := range map[int]int{1: 16384, 4 << 10: 16384, 64 << 10: 1024, 1 << 20: 64, 64 << 20: 1, 1 << 30: 1} {
		assert.Equal(t, want, blocksOf(n), n)
	}
	for n, want := range map[int]int{1: 1, 2: 2, 3: 4, 1 << 30: 1 << 30, 1<<30 + 1: 1 << 31} {
		assert.Equal(t, want, roundedUp(n), n)
	}
}

// The functions of the child, in this process: whatever fails, all is released.
func TestKeepFails(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("no CUDA on " + runtime.GOOS)
	}
	_, err := keep(t.Context(), keepRequest{Simulated: true, Allocator: "malloc", Size: 1, Count: 1})
	require.ErrorContains(t, err, `there is no allocator "malloc"`)
	_, err = keep(t.Context(), keepRequest{Library: "/nowhere/libcudart.so.13", Allocator: ours, Size: 1, Count: 1})
	require.ErrorContains(t, err, "/nowhere/libcudart.so.13")
	for _, allocator := range allocators {
		_, err := keep(t.Context(), keepRequest{Simulated: true, Allocator: allocator, Size: 1 << 60, Count: 2})
		require.Error(t, err, allocator)
		assert.NotContains(t, err.Error(), "outstanding")
	}
}

const running = `7e0000000000-7e0000400000 r-xp 00000000 00:01 9 /site-packages/torch/lib/libtorch_cuda.so
Rss:                1024 kB
7e1000000000-7e1000400000 r-xp 00000000 00:01 9 /usr/lib/libcuda.so.580.159.04
Rss:                1024 kB
7f0000000000-7f0080000000 rw-s 00000000 00:01 1063 /dev/zero (deleted)
Rss:             2097152 kB
7f1000000000-7f1010000000 rw-p 00000000 00:00 0
Rss:              262144 kB
`

func TestReadMemory(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{
		"proc/7/status":  {Data: []byte("Name:\tpython3\nState:\tS (sleeping)\n")},
		"proc/7/smaps":   {Data: []byte(running)},
		"proc/7/environ": {Data: []byte("PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:4096\x00")},
	}
	b, err := ReadMemory(fsys, 7)
	require.NoError(t, err)
	assert.True(t, b.Complete)
	assert.Equal(t, "memory", b.Name)
	assert.InDelta(t, 2<<30, b.Find(processName, result.Label{Key: kindLabel, Value: "like_cuda_host_alloc"}).Median, 0)
	assert.InDelta(t, 2<<30+256<<20, b.Find(processName, result.Label{Key: kindLabel, Value: "pinned_at_most"}).Median, 0)
	assert.InDelta(t, 2<<30, b.Find(blockName, result.Label{Key: blockLabel, Value: "1"}).Median, 0)
	assert.Nil(t, b.Find(processName, result.Label{Key: kindLabel, Value: "mlock"}), "there is none")
	require.Len(t, b.Answers, 3)
	assert.Equal(t, "Process 7 (python3), which has libraries of PyTorch, seems to pin between 2 GiB and 2.25 GiB of its 2.25 GiB of resident memory.", b.Answers[0])
	assert.Contains(t, b.Answers[1], "rounded up to powers of two (a guess): 1 of 1 blocks above 2 MiB, 2 GiB in total. Up to nearly half of it, 1 GiB, may be unused.")
	assert.Contains(t, b.Answers[2], "If PyTorch pins this memory, it was started with the setting that avoids rounding already")
	for _, v := range b.Views {
		assert.NotEmpty(t, b.Select(v), v.Title)
	}

	fsys["proc/7/environ"].Data = []byte("HOME=/\x00")
	b, err = ReadMemory(fsys, 7)
	require.NoError(t, err)
	assert.Contains(t, b.Answers[2], "If PyTorch pins this memory, to avoid rounding: PYTORCH_ALLOC_CONF=")

	fsys["proc/7/smaps"].Data = []byte(strings.ReplaceAll(running, "libtorch_cuda", "libother"))
	b, err = ReadMemory(fsys, 7)
	require.NoError(t, err)
	assert.Contains(t, b.Answers[1], "The sizes do not look rounded up to powers of two (a guess): 1 of 1 blocks", "one block proves nothing")

	delete(fsys, "proc/7/environ")
	fsys["proc/7/smaps"].Data = []byte("7f0000000000-7f0080000000 rw-p 00000000 00:00 0\nRss: 4 kB\n")
	b, err = ReadMemory(fsys, 7)
	require.NoError(t, err)
	assert.Equal(t, []string{"Process 7 (python3) pins no memory that shows: it has no CUDA driver mapped and no locked memory."}, b.Answers)
	assert.Contains(t, strings.Join(b.Notes, "\n"), "the environment of the process could not be read")

	_, err = ReadMemory(fsys, 8)
	require.ErrorContains(t, err, "memory of process 8: ")
}

func TestReadMemoryOfThisProcess(t *testing.T) {
	t.Parallel()
	if _, err := linux.ReadSMapsRollup(os.DirFS("/")); err != nil {
		t.Skip("the kernel does not report what a process has: ", err)
	}
	b, err := ReadMemory(os.DirFS("/"), os.Getpid())
	require.NoError(t, err)
	assert.NotEmpty(t, b.Answers)
}

// A process that pins anew for every batch, looked at while it does.
func TestWatchMemory(t *testing.T) {
	t.Parallel()
	maps := func(inode int) *fstest.MapFile {
		return &fstest.MapFile{Data: fmt.Appendf(nil, "7e1000000000-7e1000400000 r-xp 00000000 00:01 9 /usr/lib/libcuda.so.580\n"+
			"7f0000000000-7f0000400000 rw-s 00000000 00:01 %d /dev/zero (deleted)\n", inode)}
	}
	process := func() fstest.MapFS {
		return fstest.MapFS{"proc/7/status": {Data: []byte("Name:\tpython3\nState:\tS (sleeping)\n")}, "proc/7/smaps": {Data: []byte(running)}, "proc/7/maps": maps(1), "proc/self": {Mode: fs.ModeDir}}
	}
	value := func(b *result.Bench, name, change string) float64 {
		return b.Find(name, result.Label{Key: changeLabel, Value: change}).Median
	}
	synctest.Test(t, func(t *testing.T) {
		root := process()
		looks := 0
		began := time.Now()
		b, err := WatchMemory(t.Context(), root, 7, 2*time.Second, func(d time.Duration) <-chan time.Time {
			looks++
			root["proc/7/maps"] = maps(1 + looks/4) // each is there at four looks
			return time.After(d)
		})
		require.NoError(t, err)
		assert.Equal(t, 2*time.Second, time.Since(began))
		assert.True(t, b.Complete)
		assert.Equal(t, 20, looks)
		for _, change := range []string{"appeared", "vanished"} {
			assert.InDelta(t, 5, value(b, changesName, change), 0)
			assert.InDelta(t, 20<<20, value(b, changedName, change), 0)
		}
		assert.Contains(t, b.Answers, "In 2.0 s (21 looks) the process pinned 5 blocks (20 MiB) and unpinned 5 blocks (20 MiB), 5.0 a second.")
		assert.Contains(t, strings.Join(b.Notes, "\n"), "mappings are compared every 100ms")
		for _, v := range b.Views {
			assert.NotEmpty(t, b.Select(v), v.Title)
		}
	})
	synctest.Test(t, func(t *testing.T) { // nothing changes, and then it is interrupted
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("stop")
		time.AfterFunc(550*time.Millisecond, func() { cancel(stop) })
		b, err := WatchMemory(ctx, process(), 7, time.Hour, time.After)
		require.ErrorIs(t, err, stop)
		assert.False(t, b.Complete)
		assert.Contains(t, b.Answers, "In 0.6 s (6 looks) the process pinned and unpinned nothing that shows: it reuses pinned memory, or registers memory of its own.")
	})
	synctest.Test(t, func(t *testing.T) { // it ends
		root := process()
		b, err := WatchMemory(t.Context(), root, 7, time.Hour, func(d time.Duration) <-chan time.Time {
			delete(root, "proc/7/maps")
			delete(root, "proc/7/status")
			return time.After(d)
		})
		require.NoError(t, err)
		assert.True(t, b.Complete)
		assert.Contains(t, b.Notes, "the process ended after 100ms")
	})
	_, err := WatchMemory(t.Context(), process(), 8, time.Hour, time.After)
	require.ErrorContains(t, err, "memory of process 8: ")
}
