package loader

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// late makes one way of a simulated link take its time.
func late(d time.Duration) cudasim.Speed { return cudasim.Speed{Rate: 100, Latency: d} }

func simulated(t *testing.T, link cudasim.Link) (*cudasim.Sim, *cudart.Device) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: link}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return sim, dev
}

// A log is where a consumer's stream puts the batches that it was given, in its
// own time.
type log struct {
	*testing.T
	s    *cudart.Stream
	size int // of a batch
	mem  cudart.DevPtr
	seen [][]int
}

func newLog(t *testing.T, s *cudart.Stream, batches, size int) *log {
	t.Helper()
	mem, err := s.Device().Malloc(batches * size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Device().Free(mem)) })
	return &log{T: t, s: s, size: size, mem: mem}
}

// add queues work that uses the batch, and does not wait for it.
func (l *log) add(b *Batch) {
	require.NoError(l, b.Use(l.s))
	at := l.mem + cudart.DevPtr(len(l.seen)*l.size)
	require.NoError(l, l.s.CopyOnDevice(at, b.Field(0), l.size))
	l.seen = append(l.seen, slices.Clone(b.Indices()))
}

// requireAll requires that the stream found in each batch what belongs there.
func (l *log) requireAll() {
	l.Helper()
	require.NoError(l, l.s.Synchronize(l.Context()))
	got, err := download(l.s.Device(), l.mem, len(l.seen)*l.size)
	require.NoError(l, err)
	for _, indices := range l.seen {
		one := l.size / len(indices)
		want := make([]byte, one)
		for _, i := range indices {
			writeSample(want, i, 0)
			require.Equal(l, want, got[:one])
			got = got[one:]
		}
	}
}

// The loop is far ahead of the stream that uses its batches: they are not
// overwritten before it has.
func TestDeviceMemoryWaitsForTheConsumersStreams(t *testing.T) {
	t.Parallel()
	for _, retained := range []bool{false, true} {
		_, dev := simulated(t, cudasim.Link{OnDevice: late(2 * time.Millisecond)})
		const batch, width = 4, 64
		l := newLoaderFor(t, dev, numbered(12*batch, width), Options{BatchSize: batch, Workers: 2, Prefetch: 2, Shuffle: true})
		all := newLog(t, stream(t, dev), 24, batch*width)
		var before *Batch
		for range 2 {
			for b, err := range l.Batches(t.Context()) {
				require.NoError(t, err)
				all.add(b)
				if retained {
					b.Retain()
					if before != nil {
						require.NoError(t, before.Release())
					}
					before = b
				}
			}
		}
		if before != nil {
			require.NoError(t, before.Release())
		}
		require.Len(t, all.seen, 24)
		all.requireAll()
	}
}

// Several streams use a batch, and the slowest of them counts.
func TestDeviceMemoryWaitsForEachStream(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{OnDevice: late(time.Millisecond)})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(12*batch, width), Options{BatchSize: batch, Prefetch: 1})
	var logs []*log
	for range 3 {
		logs = append(logs, newLog(t, stream(t, dev), 12, batch*width))
	}
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		for i := range logs {
			logs[(i+b.Number())%len(logs)].add(b)
		}
	}
	for _, one := range logs {
		one.requireAll()
	}
}

// Batches are released before their copies have begun: what is to be copied
// is not overwritten.
func TestPinnedMemoryWaitsForItsCopy(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{HostToDevice: late(2 * time.Millisecond)})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(12*batch, width), Options{BatchSize: batch, Workers: 2, Prefetch: 2, Shuffle: true})
	all := newLog(t, stream(t, dev), 12, batch*width)
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		all.add(b)
	}
	all.requireAll()
}

// Nothing of a batch is there before the stream has waited for it.
func TestUseWaitsForTheCopy(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(3*batch, width), Options{BatchSize: batch})
	all := newLog(t, stream(t, dev), 3, batch*width)
	sim.Hold()
	n := 0
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		all.add(b)
		require.False(t, b.s.copied.Done(t.Context()), "the batch was given before its copy")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, b.Wait(ctx), context.Canceled)
		if n++; n == 3 {
			sim.Release()
			require.NoError(t, b.Wait(t.Context()))
			require.True(t, b.s.copied.Completed())
		}
	}
	all.requireAll()
}

// Streams of two devices use the same batches.
func TestStreamsOfTwoDevices(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	var streams []*cudart.Stream
	for i := range 2 {
		dev, err := rt.Device(i)
		require.NoError(t, err)
		streams = append(streams, stream(t, dev))
	}
	l := newLoaderFor(t, streams[0].Device(), numbered(50, 8), Options{BatchSize: 4, Prefetch: 2})
	for range 2 {
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			first := streams[b.Number()%2]
			require.NoError(t, b.Use(first))
			if b.Number()%3 == 0 {
				require.NoError(t, b.Use(streams[1-b.Number()%2]))
				require.NoError(t, b.Use(first), "again")
			}
			require.NoError(t, b.Wait(t.Context()))
			requireBatch(t, b, streams[0], 8)
		}
	}
	for _, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
	}
	require.Empty(t, sim.Misuses())
}

// A stream that its owner closed before the batch was released has to be waited
// for by other means.
func TestStreamClosedBeforeRelease(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{OnDevice: late(time.Millisecond)})
	const batch, width = 4, 64
	l := newLoaderFor(t, dev, numbered(8*batch, width), Options{BatchSize: batch, Prefetch: 1})
	all := newLog(t, stream(t, dev), 8, batch*width)
	last := all.s
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		all.s = s
		all.add(b)
		require.NoError(t, s.Close())
	}
	all.s = last
	require.NoError(t, dev.Synchronize(t.Context()))
	all.requireAll()
}

// All is allocated at the begin: later epochs pin, allocate and make nothing.
func TestNoCUDAMemoryIsAllocatedAfterNew(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 3})
	counts := func() map[string]int {
		m := make(map[string]int)
		for _, fn := range []string{"cudaHostRegister", "cudaHostAlloc", "cudaMalloc", "cudaMallocAsync", "cudaStreamCreateWithPriority"} {
			m[fn] = sim.Calls(fn)
		}
		return m
	}
	before := counts()
	for range 3 {
		epochOf(t, l, s, 8)
	}
	require.Equal(t, before, counts())
	require.Positive(t, before["cudaHostRegister"])
}

// What is read ahead is bounded by the batches that there is room for.
func TestReadingAheadIsBounded(t *testing.T) {
	t.Parallel()
	const batch = 5
	var reads atomic.Int64
	src := Func(100, []int{256}, func(context.Context, int, [][]byte) error {
		reads.Add(1)
		return nil
	})
	for _, o := range []Options{
		{BatchSize: batch, Workers: 50, Prefetch: 3},
		{BatchSize: batch, Workers: 3, Prefetch: 3},
		{BatchSize: batch, Workers: 50, MaxBytes: 4*batch*256 + 100},
	} {
		reads.Store(0)
		l := newLoaderFor(t, testgpu.Device(t), src, o)
		require.Equal(t, 4*batch*256, l.Stats().PinnedBytes)
		var first *Batch // whose memory may be filled when it is released, before the loop has ended
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			require.Eventually(t, func() bool { return reads.Load() == 4*batch }, time.Minute, time.Millisecond)
			first = b
			first.Retain()
			break
		}
		require.EqualValues(t, 4*batch, reads.Load(), "%+v", o)
		require.NoError(t, first.Release())
	}
}

// A staged source takes its time in Read and in Transform.
type staged struct {
	Source
	reading, computing time.Duration
	each               func(transforms bool) // if it is set
}

func (s staged) Read(ctx context.Context, i int, sample [][]byte) error {
	time.Sleep(s.reading)
	if s.each != nil {
		s.each(false)
	}
	return s.Source.Read(ctx, i, sample)
}

func (s staged) compute(context.Context, int, [][]byte) error {
	time.Sleep(s.computing)
	if s.each != nil {
		s.each(true)
	}
	return nil
}
