package loader

import (
	"context"
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
	src, err := InMemory(fields, data...)
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

// The GPU gathers from pinned memory, unless something asks for batches in host memory or the GPU
// cannot: the samples are the same.
func TestWhoFillsBatchesOfMemory(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	_, without := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrCanUseHostPointerForRegisteredMem: 0}}}})
	other := without.Devices()[0]
	pinned, _ := pinnedOf(t, dev, 50, 8)
	elsewhere, _ := pinnedOf(t, other, 50, 8)
	nothing := func(context.Context, int, [][]byte) error { return nil }
	for name, c := range map[string]struct {
		dev      *cudart.Device
		src      Source
		o        Options
		gathered int
	}{
		"pinned":                    {dev, pinned, Options{}, 50},
		"pageable":                  {dev, memoryOf(t, 50, 8), Options{}, 0},
		"for the host":              {dev, pinned, Options{HostBatches: true}, 0},
		"transformed":               {dev, pinned, Options{Transform: nothing}, 0},
		"no access by its address":  {other, elsewhere, Options{}, 0},
		"shards":                    {dev, shardsOf(t, 1<<20, []int{30, 20}, 8), Options{}, 50},
		"shards for the host":       {dev, shardsOf(t, 1<<20, []int{30, 20}, 8), Options{HostBatches: true, Shuffle: true}, 0},
		"shards that are changed":   {dev, shardsOf(t, 1<<20, []int{30, 20}, 8), Options{Transform: nothing, Shuffle: true}, 0},
		"pinned within another one": {dev, struct{ Source }{pinned}, Options{}, 0},
	} {
		c.o.BatchSize = 4
		l := newLoaderFor(t, c.dev, c.src, c.o)
		s := stream(t, c.dev)
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err, name)
			require.Equal(t, c.gathered == 0, b.Host(0) != nil, name)
			require.NoError(t, b.Use(s))
			require.NoError(t, s.Synchronize(t.Context()))
			got, err := download(c.dev, b.Field(0), b.Len()*8)
			require.NoError(t, err)
			want := make([]byte, 8)
			for at, i := range b.Indices() {
				writeSample(want, i, 0)
				require.Equal(t, want, got[at*8:][:8], name)
			}
		}
		require.Equal(t, c.gathered, l.Stats().Gathered, name)
		require.Equal(t, 50, l.Stats().Samples, name)
	}
	_, err := New(t.Context(), dev, methodTransform{pinned}, Options{BatchSize: 4})
	require.ErrorContains(t, err, "the source has a method Transform, which no loader calls: give it to Options.Transform")
}

type methodTransform struct{ Source }

func (methodTransform) Transform(context.Context, int, [][]byte) error { return nil }

// Memory that is closed between epochs, and while batches are made, ends the epoch.
func TestPinnedMemoryThatIsClosed(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	o := Options{BatchSize: 4}
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
	mapped, err := hostmem.MapFile(t.Context(), dev, path, hostmem.FileOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, mapped.Close()) }()
	src, err := InMemory([]int{width}, mapped.Bytes())
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
