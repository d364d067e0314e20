package bench

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// smallFile is the options of files of an odd size.
var smallFile = measure.Options{Sizes: []int{1<<20 + 7}, Quick: true}

func fileSeries(b *result.Bench, cache, method string) *result.Series {
	return b.Find(fileRate, result.Label{Key: cacheLabel, Value: cache}, result.Label{Key: result.Method, Value: method})
}

// nothingLeft fails a test that leaves a file behind in a directory.
func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, entries)
}

func TestFilesArrive(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	_, devices := simulatedDevices(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{}, {}}})
	b, err := measure.Run(t.Context(), files, measure.Env{Devices: devices, Options: smallFile}, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	nothingLeft(t, dir)
	notes := strings.Join(b.Notes, "\n")
	for _, cache := range []string{inCache, outOfCache} {
		for _, method := range []string{fileMapped, fileRead, fileStaged, fileRegistered, fileFanout, fileDirect, filePinned} {
			s := fileSeries(b, cache, method)
			switch {
			case cache == outOfCache && method == filePinned, cache == inCache && method == fileDirect:
				assert.Nil(t, s, "%s %s", cache, method)
			case s == nil && cache == outOfCache: // as this file system has it
				assert.Contains(t, notes, method+" cold")
			default:
				require.NotNil(t, s, "%s %s", cache, method)
				assert.True(t, s.Verified, "%s %s", cache, method)
				assert.Equal(t, map[bool]string{true: allDevices, false: "0"}[method == fileFanout], s.Labels.Get(result.Device))
				assert.GreaterOrEqual(t, len(s.Samples), 3)
			}
		}
	}
	require.NotEmpty(t, b.Answers)
	assert.Contains(t, b.Answers[0], "A cached file uploads ")
	assert.Contains(t, b.Answers[1], " of the rate of pinned memory.")
	assert.Contains(t, b.Answers[2], "All GPUs together receive one cached file at ")
	assert.Equal(t, []string{"at 1 MiB + 7 B"}, titles(b))
}

// The rate from pinned memory is the link's, by the device.
func TestFilesKnowTheLink(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	_, devices := simulatedDevices(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{HostToDevice: cudasim.Speed{Rate: 25, Latency: 8 * time.Microsecond}}}}})
	b, err := measure.Run(t.Context(), files, measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{16 << 20}, Quick: true}}, nil)
	require.NoError(t, err)
	s := fileSeries(b, inCache, filePinned)
	require.NotNil(t, s)
	assert.InDelta(t, 25, s.Median, 0.5)
}

// A copy that does not arrive is found.
func TestFilesThatDoNotArrive(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	_, devices := simulatedDevices(t, cudasim.Config{})
	f := &fileFixture{devices: devices, n: 1 << 20, dir: os.TempDir()}
	require.NoError(t, f.open(t.Context()))
	defer func() { require.NoError(t, f.close()) }()
	_, err := f.sample(t.Context(), inCache, fileStaged, "0", clocked(func(context.Context) error { return nil }), new(time.Duration))
	require.NoError(t, err)
	require.ErrorContains(t, f.verify(t.Context(), "0"), "has other bytes than the file, between 0 and 1048576")
	_, err = f.sample(t.Context(), inCache, fileStaged, "0", clocked(f.byStaging), new(time.Duration))
	require.NoError(t, err)
	require.NoError(t, f.verify(t.Context(), "0"))
}

func TestFilesInMemory(t *testing.T) {
	if _, inMemory, err := onDisk("/dev/shm"); err != nil || !inMemory {
		t.Skip("no tmpfs at /dev/shm")
	}
	t.Setenv("TMPDIR", "/dev/shm")
	_, devices := simulatedDevices(t, cudasim.Config{})
	b, err := measure.Run(t.Context(), files, measure.Env{Devices: devices, Options: smallFile}, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	assert.NotNil(t, fileSeries(b, inCache, fileStaged))
	assert.Nil(t, fileSeries(b, outOfCache, fileStaged))
	assert.Contains(t, strings.Join(b.Notes, "\n"), "the files of /dev/shm are in memory (name a directory on a disk by TMPDIR)")
	assert.Len(t, b.Answers, 2)
}

func TestFilesInterrupted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	for _, what := range []string{"", inCache, outOfCache} {
		_, devices := simulatedDevices(t, cudasim.Config{})
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("stop")
		b, err := measure.Run(ctx, files, measure.Env{Devices: devices, Options: smallFile}, func(p measure.Progress) {
			if strings.Contains(p.What, what) {
				cancel(stop)
			}
		})
		require.ErrorIs(t, err, stop)
		assert.False(t, b.Complete)
		assert.Empty(t, b.Errors)
		nothingLeft(t, dir)
	}
}

// A call that does not return does not keep the run once ctx has ended.
func TestFilesInterruptedInACall(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for _, fn := range []string{"cudaMemcpy", "cudaHostRegister", "cudaMemset"} {
		sim, devices := simulatedDevices(t, cudasim.Config{})
		unblock := sim.Block(fn, cudasim.Fault{Nth: 2})
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("stop")
		go func() {
			if sim.AwaitBlocked(ctx, fn, 1) == nil {
				cancel(stop)
			}
		}()
		b, err := measure.Run(ctx, files, measure.Env{Devices: devices, Options: smallFile}, nil)
		unblock()
		require.ErrorIs(t, err, stop, fn)
		assert.False(t, b.Complete)
	}
}

func TestFilesFail(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	for _, fn := range []string{"cudaMalloc", "cudaMemcpy", "cudaMemset", "cudaStreamCreateWithPriority", "cudaMemcpyAsync"} {
		sim, devices := simulatedDevices(t, cudasim.Config{})
		sim.Fail(fn, cudasim.Fault{Code: 999})
		b, err := measure.Run(t.Context(), files, measure.Env{Devices: devices, Options: smallFile}, nil)
		require.NoError(t, err)
		assert.Contains(t, strings.Join(b.Errors, "\n"), fn)
		nothingLeft(t, dir)
	}
}

func TestFilesPlans(t *testing.T) {
	_, err := files.Plan(measure.Env{})
	require.EqualError(t, err, "no device")
	_, devices := simulatedDevices(t, cudasim.Config{})
	_, err = planFiles(measure.Env{Devices: devices, Options: measure.Options{Sizes: []int{1 << 50}}})
	if runtime.GOOS == "linux" {
		require.ErrorContains(t, err, "it takes a file of 1 PiB, and ")
		require.ErrorContains(t, err, "name smaller sizes, or another directory by TMPDIR")
	}
	t.Setenv("TMPDIR", t.TempDir()+"/none")
	_, err = planFiles(measure.Env{Devices: devices})
	require.ErrorIs(t, err, os.ErrNotExist)
}
