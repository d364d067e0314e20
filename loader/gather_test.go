package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// pinnedOf returns a source of samples in pinned memory, and that memory. Fields begin at odd addresses
// but for the first.
func pinnedOf(t testing.TB, dev *cudart.Device, n int, fields ...int) (BatchSource, *hostmem.Buffer) {
	t.Helper()
	size := 0
	for _, width := range fields {
		size += n*width + 1
	}
	buf, err := hostmem.Alloc(t.Context(), dev, size, hostmem.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, buf.Close()) })
	rest := buf.Bytes()
	var data [][]byte
	for f, width := range fields {
		data, rest = append(data, rest[:n*width]), rest[n*width+1:]
		for i := range n {
			writeSample(data[f][i*width:][:width], i, f)
		}
	}
	src, err := Pinned(fields, data...)
	require.NoError(t, err)
	return src, buf
}

// Batches that the GPU gathers are those that workers fill, in their order, with their positions, and
// a position of one resumes the other.
func TestGatheredBatchesAreThoseOfWorkers(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, epochs = 103, 2
	for _, fields := range [][]int{{64}, {256}, {100, 1, 257}, {16, 4096}} {
		src, _ := pinnedOf(t, dev, n, fields...)
		for _, o := range []Options{
			{BatchSize: 16},
			{BatchSize: 16, DropLast: true, Workers: 20},
			{BatchSize: 4, Shuffle: true, Seed: 3, Prefetch: 40},
			{BatchSize: 1, Shuffle: true, Workers: 3, Unordered: true},
			{BatchSize: 1000, Shuffle: true},
			{BatchSize: 7, Workers: 1, Prefetch: 1},
		} {
			t.Run(fmt.Sprintf("%v/%+v", fields, o), func(t *testing.T) {
				workers := newLoaderFor(t, dev, memoryOf(t, n, fields...), o)
				var want []delivered
				for range epochs {
					for b, err := range workers.Batches(t.Context()) {
						require.NoError(t, err)
						want = append(want, delivered{slices.Clone(b.Indices()), b.Position()})
					}
				}
				for _, from := range []int{0, len(want) / 3} {
					if from > 0 {
						o.Start = want[from-1].position
					}
					l := newLoaderFor(t, dev, src, o)
					samples := map[int]int{}
					got := from
					for range l.Epochs(epochs) {
						for b, err := range l.Batches(t.Context()) {
							require.NoError(t, err)
							if !o.Unordered {
								require.Equal(t, want[got], delivered{slices.Clone(b.Indices()), b.Position()})
							}
							got++
							require.Nil(t, b.Host(0), "there are no host bytes")
							require.Equal(t, -1, b.Offset(0))
							require.NoError(t, b.Use(s))
							require.NoError(t, s.Synchronize(t.Context()))
							for f, width := range fields {
								bytes, err := download(dev, b.Field(f), b.Len()*width)
								require.NoError(t, err)
								sample := make([]byte, width)
								for at, i := range b.Indices() {
									writeSample(sample, i, f)
									require.Equal(t, sample, bytes[at*width:][:width], "%v: sample %d, place %d, field %d", b, i, at, f)
									samples[i]++
								}
							}
						}
					}
					require.Len(t, want, got)
					if from == 0 && !o.DropLast {
						require.Len(t, samples, n)
					}
				}
			})
		}
	}
}

// Small batches that are neighbours in memory are one launch.
func TestSmallBatchesAreGatheredTogether(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	const n, batch, width = 4096, 16, 256
	src, buf := pinnedOf(t, dev, n, width)
	l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Shuffle: true})
	s := stream(t, dev)
	before := sim.Calls("cuLaunchKernel")
	batches := 0
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.NoError(t, b.Use(s))
		batches++
	}
	launches := sim.Calls("cuLaunchKernel") - before
	require.Equal(t, n/batch, batches)
	require.Positive(t, launches)
	require.Less(t, launches, batches/2)
	require.Equal(t, l.o.slots()*batch*4, l.Stats().PinnedBytes, "lists of indices alone")
	require.Equal(t, n*width, l.Stats().Bytes)
	require.NoError(t, buf.Close(), "it waits for the kernels")
}

// MaxBytes is kept where lists of indices are larger than the samples.
func TestGatheringKeepsToMaxBytes(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	src, _ := pinnedOf(t, dev, 100_000, 1)
	o := Options{BatchSize: 1000, MaxBytes: 10_000}
	l := newLoaderFor(t, dev, src, o)
	require.Positive(t, l.Stats().PinnedBytes)
	require.LessOrEqual(t, l.Stats().PinnedBytes, o.MaxBytes)
	o.MaxBytes = 7_000
	_, err := New(t.Context(), dev, src, o)
	require.ErrorContains(t, err, "Options.MaxBytes is 7000: two batches of 4000 bytes do not fit")
}

// Batches are on the device, whatever becomes of the memory that they are from.
func TestGatheredBatchesOutliveTheirSource(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	src, buf := pinnedOf(t, dev, 1000, 16, 3)
	l := newLoaderFor(t, dev, src, Options{BatchSize: 10, Shuffle: true, Prefetch: 5})
	var retained []*Batch
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		b.Retain()
		if retained = append(retained, b); len(retained) == l.o.slots() {
			break
		}
	}
	require.NoError(t, buf.Close())
	sample := make([]byte, 3)
	for _, b := range retained {
		require.NoError(t, b.Use(s))
		require.NoError(t, s.Synchronize(t.Context()))
		got, err := download(dev, b.Field(1), b.Len()*len(sample))
		require.NoError(t, err)
		for at, i := range b.Indices() {
			writeSample(sample, i, 1)
			require.Equal(t, sample, got[at*len(sample):][:len(sample)])
		}
	}
	require.ErrorContains(t, l.Close(), "6 batches are retained")
	for _, b := range retained {
		require.NoError(t, b.Release())
	}
	require.NoError(t, l.Close())
}

func TestPinnedMemoryThatIsRefused(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	o := Options{BatchSize: 4}
	src, err := Pinned([]int{8}, make([]byte, 80))
	require.NoError(t, err)
	_, err = New(t.Context(), dev, src, o)
	require.ErrorContains(t, err, "loader: new: field 0 of the source: its 80 bytes are not pinned, or not by package hostmem")
	_, err = Pinned([]int{8}, make([]byte, 81))
	require.ErrorContains(t, err, "loader: memory: field 0: 81 bytes are not a whole number of samples of 8 bytes")

	// Closed between epochs, and while batches are made.
	src, buf := pinnedOf(t, dev, 100, 8)
	l := newLoaderFor(t, dev, src, o)
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
	}
	require.NoError(t, buf.Close())
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, os.ErrClosed)
	require.ErrorContains(t, last, "loader: copy batch")
	require.NotContains(t, last.Error(), `buffer "loader"`, "which is not what was closed")

	sim, without := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrCanUseHostPointerForRegisteredMem: 0}}}})
	src, _ = pinnedOf(t, without.Devices()[0], 10, 8)
	held := sim.Outstanding()
	_, err = New(t.Context(), without.Devices()[0], src, o)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "gather by the GPU")
	require.Equal(t, held, sim.Outstanding())
}

// The pages of a file are gathered without a copy by the CPU; without a device they are read as memory.
func TestGatherFromAFile(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n, width = 1000, 512
	all := make([]byte, n*width)
	for i := range n {
		writeSample(all[i*width:][:width], i, 0)
	}
	path := filepath.Join(t.TempDir(), "samples")
	require.NoError(t, os.WriteFile(path, all, 0o600))
	mapped, err := hostmem.MapFile(t.Context(), dev, path, hostmem.MapFileOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, mapped.Close()) }()
	src, err := Pinned([]int{width}, mapped.Bytes())
	require.NoError(t, err)
	l, err := New(t.Context(), dev, src, Options{BatchSize: 64, Shuffle: true})
	require.NoError(t, err)
	s := stream(t, dev)
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.NoError(t, b.Use(s))
		require.NoError(t, s.Synchronize(t.Context()))
		got, err := download(dev, b.Field(0), b.Len()*width)
		require.NoError(t, err)
		for at, i := range b.Indices() {
			require.Equal(t, all[i*width:][:width], got[at*width:][:width])
		}
	}
	require.NoError(t, l.Close())
	host, memory := newHostLoader(t, src, Options{BatchSize: 64, Shuffle: true})
	for b, err := range host.Batches(t.Context()) {
		require.NoError(t, err)
		requireHostBatch(t, b, memory, width)
	}
}
