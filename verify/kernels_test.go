package verify

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/pattern"
)

// counted counts when it is closed.
type counted struct {
	gpu
	dev    *cudart.Device
	closed *atomic.Int32
}

func (g counted) CloseContext(ctx context.Context) error {
	g.closed.Add(1)
	return g.gpu.CloseContext(ctx)
}

// kernelRun runs the paths with kernels on a simulated device.
func kernelRun(t *testing.T, plan Plan, change func(r *runner, sim *cudasim.Sim)) *Report {
	t.Helper()
	sim, dev := simulated(t, cudasim.Config{})
	plan.Paths, plan.NoStale = []Path{pathKernel, pathDeviceMemory}, true
	r, err := newRunner(t.Context(), dev, plan)
	require.NoError(t, err)
	var loaded, closed atomic.Int32
	r.load = func(ctx context.Context, dev *cudart.Device) (gpu, error) {
		loaded.Add(1)
		g, err := loadKernels(ctx, dev)
		return counted{g, dev, &closed}, err
	}
	if change != nil {
		change(r, sim)
	}
	require.NoError(t, r.run(t.Context()))
	assert.Equal(t, loaded.Load(), closed.Load(), "kernels that were loaded are closed")
	return r.report
}

func TestKernelPaths(t *testing.T) {
	t.Parallel()
	plan := small()
	plan.Variants = 100
	r := kernelRun(t, plan, nil)
	requireClean(t, r)
	assert.Empty(t, r.Skipped)
	for _, p := range r.Paths {
		assert.Positive(t, p.Cases)
		assert.Equal(t, 65537, p.LargestBytes)
	}
}

// Only random bytes, and their poison, are others at the speed of memory.
func TestContentsAtMemorySpeed(t *testing.T) {
	t.Parallel()
	for _, p := range patterns() {
		for _, c := range []content{p.content(12345), p.content(12345).poisonAt(atHop)} {
			want := c
			if p == patternRandom {
				want.Kind = pattern.Hash
			}
			assert.Equal(t, want, c.atMemorySpeed())
		}
	}
}

// An upload that does not arrive is found without the way back, and described by it.
func TestKernelPathFindsWhatDidNotArrive(t *testing.T) {
	t.Parallel()
	const n = 10_000
	r := kernelRun(t, Plan{Sizes: []int{n}, Patterns: []Pattern{patternCounter}, Offsets: []Offset{{3, 5, 7}}, Streams: []int{1}}, func(r *runner, sim *cudasim.Sim) {
		load := r.load
		r.load = func(ctx context.Context, dev *cudart.Device) (gpu, error) {
			g, err := load(ctx, dev)
			return spoiling{g.(counted)}, err
		}
	})
	require.ErrorIs(t, r.Err(), ErrMismatch)
	require.Len(t, r.Mismatches, 2)
	up, device := r.Mismatches[0], r.Mismatches[1]
	assert.Equal(t, pathKernel, up.Path)
	assert.Equal(t, []int{77, 1, 1}, []int{up.FirstBadOffsetBytes, up.BadBytes, up.BadBits})
	assert.Equal(t, pathDeviceMemory, device.Path)
	assert.Equal(t, []int{77, 1}, []int{device.FirstBadOffsetBytes, device.BadBytes})
	assert.Equal(t, atDevice, device.At)
	assert.NotEqual(t, device.FoundHex[:2], device.ExpectedHex[:2])
	assert.Equal(t, device.FoundHex[2:], device.ExpectedHex[2:])
	assert.Contains(t, device.String(), "1 of 10000 bytes wrong, the first at offset 77")
}

// spoiling changes a byte before it compares.
type spoiling struct{ counted }

func (g spoiling) Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c pattern.Content, at uint64) (gpukernels.Found, error) {
	if err := s.Synchronize(ctx); err != nil {
		return gpukernels.Found{}, err
	}
	var b byte
	err := g.dev.CopyToHost(unsafe.Pointer(&b), p+77, 1)
	b ^= 4
	err = errors.Join(err, g.dev.CopyToDevice(p+77, unsafe.Pointer(&b), 1), g.dev.Synchronize(ctx))
	found, compared := g.counted.Compare(ctx, s, p, n, c, at)
	return found, errors.Join(err, compared)
}

// What only the kernel reads wrong is reported as such: of the device's memory, and of the
// host's.
func TestKernelPathFindsWrongReads(t *testing.T) {
	t.Parallel()
	for _, at := range []string{atDevice, atSource} {
		r := kernelRun(t, Plan{Sizes: []int{100}, Patterns: []Pattern{patternRandom}, Offsets: []Offset{{}}, Streams: []int{1}}, func(r *runner, _ *cudasim.Sim) {
			r.found = func(c Case, where string, f gpukernels.Found) gpukernels.Found {
				if where == at {
					return gpukernels.Found{Mismatches: 3, First: 90}
				}
				return f
			}
		})
		require.NotEmpty(t, r.Mismatches)
		m := r.Mismatches[0]
		assert.Equal(t, pathKernel, m.Path)
		assert.Equal(t, causeRead, m.Cause)
		assert.Equal(t, at, m.At)
		assert.Len(t, m.ExpectedHex, 20)
		assert.Contains(t, m.String(), "3 of 100 bytes wrong, the first at offset 90, as a kernel reads the "+at+": expected ")
	}
}

// A byte written beside the target is found.
func TestKernelPathsFindOverruns(t *testing.T) {
	t.Parallel()
	r := kernelRun(t, Plan{Sizes: []int{100}, Patterns: []Pattern{patternRandom}, Offsets: []Offset{{}}, Streams: []int{1}}, func(r *runner, _ *cudasim.Sim) {
		load := r.load
		r.load = func(ctx context.Context, dev *cudart.Device) (gpu, error) {
			g, err := load(ctx, dev)
			return overrunning{g.(counted)}, err
		}
	})
	require.Len(t, r.Mismatches, 2)
	for _, m := range r.Mismatches {
		assert.Equal(t, causeOverrun, m.Cause)
		assert.Equal(t, 100, m.FirstBadOffsetBytes)
	}
}

type overrunning struct{ counted }

func (g overrunning) Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c pattern.Content, at uint64) (gpukernels.Found, error) {
	found, err := g.counted.Compare(ctx, s, p, n, c, at)
	var b byte
	return found, errors.Join(err, g.dev.CopyToDevice(p+cudart.DevPtr(n), unsafe.Pointer(&b), 1), g.dev.Synchronize(ctx))
}

// Where no kernels can be loaded their paths are skipped, with the reason.
func TestPathsOfKernelsThatCannotLoadAreSkipped(t *testing.T) {
	t.Parallel()
	r := kernelRun(t, small(), func(r *runner, _ *cudasim.Sim) {
		r.load = func(context.Context, *cudart.Device) (gpu, error) {
			return nil, fmt.Errorf("no kernels here: %w", errors.ErrUnsupported)
		}
	})
	assert.ErrorContains(t, r.Err(), "no case was run")
	require.Len(t, r.Skipped, 2)
	for _, s := range r.Skipped {
		assert.Contains(t, s.Reason, "no kernels here")
	}
}

// Kernels that do not compile are a failure, and leave nothing behind.
func TestKernelsThatDoNotLoad(t *testing.T) {
	t.Parallel()
	r := kernelRun(t, small(), func(r *runner, _ *cudasim.Sim) {
		r.load = func(context.Context, *cudart.Device) (gpu, error) { return nil, errors.New("does not compile") }
	})
	assert.Equal(t, 2, r.FailureCount)
	assert.ErrorContains(t, r.Err(), "does not compile")
}
