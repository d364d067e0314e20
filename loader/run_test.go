package loader

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

// A worker that fills many samples under one guard names the one that failed, reads
// each of the others once, and goes on behind it.
func TestErrorsOfABatchSourceNameTheSample(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, batch = 24, 12
	for name, cause := range map[string]func() error{
		"bad sample":     func() error { return errBad },
		"panic: gone":    func() error { panic("gone") },
		"runtime.Goexit": func() error { runtime.Goexit(); return nil },
	} {
		for _, stage := range []string{"read", "transform"} {
			for bad := range n {
				for _, o := range []Options{{}, {SkipErrors: true}, {SkipErrors: true, Retries: 1}} {
					o.BatchSize, o.Workers = batch, 1
					src := newFailing(n, 8)
					var reads, transforms [n]atomic.Int32
					src.read = func(_ context.Context, i int) error {
						reads[i].Add(1)
						if stage == "read" && i == bad {
							return cause()
						}
						return nil
					}
					src.transform = func(_ context.Context, i int) error {
						transforms[i].Add(1)
						if stage == "transform" && i == bad {
							return cause()
						}
						return nil
					}
					l := newLoaderFor(t, dev, src, o)
					require.Equal(t, batch/2, l.layout.claimSize(1, o.Workers))
					if !o.SkipErrors {
						var last error
						for _, last = range l.Batches(t.Context()) {
						}
						require.ErrorContains(t, last, fmt.Sprintf("loader: sample %d, batch %d of epoch 0: ", bad, bad/batch))
						require.ErrorContains(t, last, name)
						continue
					}
					want := slices.DeleteFunc(slices.Collect(count(n)), func(i int) bool { return i == bad })
					require.Equal(t, want, slices.Concat(epochOf(t, l, s, 8)...), "%s in %s of %d", name, stage, bad)
					for i := range n {
						tries := int32(1)
						if i == bad {
							tries += int32(o.Retries)
						}
						require.Equal(t, tries, reads[i].Load(), "reads of %d", i)
						if stage == "read" && i == bad {
							tries = 0
						}
						require.Equal(t, tries, transforms[i].Load(), "transforms of %d", i)
					}
					require.Equal(t, o.Retries, l.Stats().Retried)
					require.Equal(t, 1, l.Stats().Skipped)
				}
			}
		}
	}
}

// A together source is a failing one that reads many samples in a call.
type together struct {
	*failing
	batch      func(ctx context.Context, indices []int, run [][]byte) error // after all are read, if it is set
	calls      atomic.Int32
	some, each atomic.Int32 // samples read in such calls, and one at a time
}

func newTogether(n int, fields ...int) *together { return &together{failing: newFailing(n, fields...)} }

func (s *together) Read(ctx context.Context, i int, sample [][]byte) error {
	s.each.Add(1)
	return s.failing.Read(ctx, i, sample)
}

func (s *together) ReadBatch(ctx context.Context, indices []int, run [][]byte) error {
	s.calls.Add(1)
	s.some.Add(int32(len(indices)))
	sample := make([][]byte, len(run))
	for k, i := range indices {
		for f, size := range s.Fields() {
			if len(run[f]) != len(indices)*size || cap(run[f]) != len(run[f]) {
				return fmt.Errorf("field %d of %d samples has %d bytes", f, len(indices), len(run[f]))
			}
			sample[f] = run[f][k*size : (k+1)*size]
		}
		if err := s.failing.Read(ctx, i, sample); err != nil {
			return err
		}
	}
	if s.batch == nil {
		return nil
	}
	return s.batch(ctx, indices, run)
}

// A BatchSource reads what a worker claims in one call, with Transform or without.
func TestBatchSource(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	fields := []int{3, 64}
	const n = 103
	for _, o := range []Options{
		{BatchSize: 20, Workers: 1},
		{BatchSize: 20, Workers: 2, Shuffle: true},
		{BatchSize: 64, Workers: 3, Shuffle: true, Unordered: true},
		{BatchSize: 10, Workers: 20},
		{BatchSize: 1, Workers: 3, DropLast: true},
	} {
		src := newTogether(n, fields...)
		l := newLoaderFor(t, dev, src, o)
		for range 2 {
			require.Len(t, slices.Concat(epochOf(t, l, s, fields...)...), n)
		}
		require.Zero(t, src.each.Load())
		require.EqualValues(t, 2*n, src.some.Load())
		runs := 0
		for batch := range l.batches() {
			runs += (l.sizeOf(batch) + l.layout.claimSize(1, l.o.Workers) - 1) / l.layout.claimSize(1, l.o.Workers)
		}
		require.EqualValues(t, 2*runs, src.calls.Load())
		require.Zero(t, l.Stats().Retried)
	}
}

// Whatever a ReadBatch does that fails, its samples are read one at a time, and what
// comes is what Read has written.
func TestABatchSourceThatFails(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, batch = 40, 20 // in runs of 10
	spoil := func(run [][]byte) {
		for _, field := range run {
			for i := range field {
				field[i] = 0xee
			}
		}
	}
	for name, fails := range map[string]func(ctx context.Context, indices []int, run [][]byte) error{
		"an error":  func(context.Context, []int, [][]byte) error { return errBad },
		"a panic":   func(context.Context, []int, [][]byte) error { panic("gone") },
		"Goexit":    func(context.Context, []int, [][]byte) error { runtime.Goexit(); return nil },
		"no memory": func(context.Context, []int, [][]byte) error { return fmt.Errorf("%d", *(*int)(nil)) },
		"an index too high": func(_ context.Context, indices []int, _ [][]byte) error {
			return fmt.Errorf("%d", indices[len(indices)])
		},
		"bytes past the run":         func(_ context.Context, _ []int, run [][]byte) error { run[0][len(run[0])] = 1; return nil },
		"a field too many":           func(_ context.Context, _ []int, run [][]byte) error { run[2][0] = 1; return nil },
		"an error, with all cleared": func(_ context.Context, indices []int, run [][]byte) error { clear(indices); clear(run); return errBad },
	} {
		for _, workers := range []int{1, 3} {
			src := newTogether(n, 8, 300)
			src.batch = func(ctx context.Context, indices []int, run [][]byte) error {
				if slices.Contains(indices, 13) {
					spoil(run)
					return fails(ctx, indices, run)
				}
				return nil
			}
			l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: workers})
			require.Equal(t, slices.Collect(count(n)), slices.Concat(epochOf(t, l, s, 8, 300)...), name)
			run := l.layout.claimSize(1, workers)
			want := min(run, batch-13/run*run)
			require.Equal(t, want, l.Stats().Retried, name)
			require.EqualValues(t, want, src.each.Load(), name)
			require.Zero(t, l.Stats().Skipped)
			require.Zero(t, lent(l))
		}
	}
}

// If a sample fails in Read as well, it is the one that is named, or skipped.
func TestABatchSourceWithOneFailingSample(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for name, cause := range map[string]func() error{
		"bad sample":     func() error { return errBad },
		"panic: gone":    func() error { panic("gone") },
		"runtime.Goexit": func() error { runtime.Goexit(); return nil },
	} {
		for bad := range 40 {
			src := newTogether(40, 8)
			src.read = func(_ context.Context, i int) error {
				if i == bad {
					return cause()
				}
				return nil
			}
			skipping := newLoaderFor(t, dev, src, Options{BatchSize: 20, Workers: 1, SkipErrors: true, Retries: 2})
			want := slices.DeleteFunc(slices.Collect(count(40)), func(i int) bool { return i == bad })
			require.Equal(t, want, slices.Concat(epochOf(t, skipping, s, 8)...))
			require.Equal(t, 1, skipping.Stats().Skipped)
			require.Equal(t, 10+2, skipping.Stats().Retried)

			l := newLoaderFor(t, dev, src, Options{BatchSize: 20, Workers: 1})
			var last error
			for _, last = range l.Batches(t.Context()) {
			}
			require.ErrorContains(t, last, fmt.Sprintf("loader: sample %d, batch %d of epoch 0: ", bad, bad/20))
			require.ErrorContains(t, last, name)
		}
	}
}

// What a ReadBatch does to its arguments changes nothing.
func TestABatchSourceThatChangesItsArguments(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	src := newTogether(200, 8, 3)
	src.batch = func(_ context.Context, indices []int, run [][]byte) error {
		slices.Sort(indices)
		_ = append(indices[:1], indices...)
		for f := range run {
			_ = append(run[f], 1, 2, 3)
			run[f] = run[f][:1]
		}
		run[1] = nil
		return nil
	}
	l := newLoaderFor(t, dev, src, Options{BatchSize: 50, Workers: 2, Shuffle: true})
	for range 3 {
		require.Len(t, slices.Concat(epochOf(t, l, s, 8, 3)...), 200)
	}
	require.Zero(t, src.each.Load())
}

// A ReadBatch that blocks ends with its context, and its samples have not failed.
func TestABatchSourceThatBlocks(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	for _, then := range []func(ctx context.Context) error{
		func(ctx context.Context) error { return ctx.Err() },
		func(ctx context.Context) error { return nil },
		func(ctx context.Context) error { panic(ctx.Err()) },
		func(ctx context.Context) error { runtime.Goexit(); return nil },
	} {
		entered := make(chan struct{}, 100)
		src := newTogether(100, 8)
		src.batch = func(ctx context.Context, indices []int, _ [][]byte) error {
			entered <- struct{}{}
			<-ctx.Done()
			return then(ctx)
		}
		l := newLoaderFor(t, dev, src, Options{BatchSize: 20, Workers: 3, SkipErrors: true, Retries: 3})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-entered
			cancel()
		}()
		errs := 0
		for b, err := range l.Batches(ctx) {
			require.Nil(t, b)
			require.ErrorIs(t, err, context.Canceled)
			errs++
		}
		require.Equal(t, 1, errs)
		require.Zero(t, l.Stats().Retried)
		require.Zero(t, l.Stats().Skipped)
		require.Zero(t, src.each.Load())
		require.Zero(t, lent(l))
	}
}

func memoryOf(t testing.TB, n int, fields ...int) BatchSource {
	t.Helper()
	data := make([][]byte, len(fields))
	for f, size := range fields {
		data[f] = make([]byte, n*size)
		for i := range n {
			writeSample(data[f][i*size:(i+1)*size], i, f)
		}
	}
	src, err := InMemory(fields, data...)
	require.NoError(t, err)
	return src
}

func TestMemory(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	fields := []int{1, 100, 4096}
	for _, o := range []Options{
		{BatchSize: 100, Workers: 1},                // a run is a batch
		{BatchSize: 100, Workers: 1, Shuffle: true}, //
		{BatchSize: 64, Workers: 4, Shuffle: true},
		{BatchSize: 7, Workers: 3},
	} {
		l := newLoaderFor(t, dev, memoryOf(t, 203, fields...), o)
		require.Len(t, slices.Concat(epochOf(t, l, s, fields...)...), 203)
	}
	// The caller's slices may change.
	sizes, data := []int{4}, [][]byte{make([]byte, 8)}
	retained, err := InMemory(sizes, data...)
	require.NoError(t, err)
	sizes[0], data[0] = 0, nil
	require.Equal(t, 2, retained.Len())
	require.Equal(t, []int{4}, retained.Fields())
	// Samples one at a time.
	src := memoryOf(t, 5, 3, 8)
	sample, want := [][]byte{make([]byte, 3), make([]byte, 8)}, make([]byte, 8)
	for i := range 5 {
		require.NoError(t, src.Read(t.Context(), i, sample))
		for f := range sample {
			writeSample(want[:len(sample[f])], i, f)
			require.Equal(t, want[:len(sample[f])], sample[f])
		}
	}
}

// transformed has samples that the host reads after they are in pinned memory.
type transformed struct{ BatchSource }

func (transformed) compute(context.Context, int, [][]byte) error { return nil }

// Samples are written past the caches if nothing reads them there, and the batches are
// small.
func TestMemoryWithNonTemporalStores(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const size = maxGPUOnly / 256
	small := memoryOf(t, 600, size)
	for _, c := range []struct {
		src   Source
		batch int
		past  bool
	}{
		{small, 256, true},
		{small, 257, false},
		{transformed{small}, 16, false},
		{numbered(600, size), 16, false},
	} {
		l := newLoaderFor(t, dev, c.src, Options{BatchSize: c.batch, Shuffle: true})
		m, ok := l.batch.(memory)
		require.Equal(t, c.past, ok && m.gpuOnly, "%T in batches of %d", c.src, c.batch)
		require.Len(t, slices.Concat(epochOf(t, l, stream(t, dev), size)...), 600)
	}
}

func TestMemoryRefusesPartialSamples(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]struct {
		fields []int
		data   [][]byte
	}{
		"there are no fields":                                           {nil, nil},
		"fields has 2 sizes, and data 1 fields":                         {[]int{1, 2}, [][]byte{{1}}},
		"fields has 1 sizes, and data 2 fields":                         {[]int{1}, [][]byte{{1}, {2}}},
		"field 1 has 0 bytes: must be positive":                         {[]int{1, 0}, [][]byte{{1}, {1}}},
		"field 0 has -1 bytes: must be positive":                        {[]int{-1}, [][]byte{{1}}},
		"field 0: 5 bytes are not a whole number of samples of 2 bytes": {[]int{2}, [][]byte{make([]byte, 5)}},
		"field 1 has 2 samples, and field 0 has 3":                      {[]int{2, 3}, [][]byte{make([]byte, 6), make([]byte, 6)}},
	} {
		src, err := InMemory(c.fields, c.data...)
		require.EqualError(t, err, "loader: in memory: "+want)
		require.Nil(t, src)
	}
	src, err := InMemory([]int{4}, nil)
	require.NoError(t, err)
	_, err = New(t.Context(), testgpu.Device(t), src, Options{BatchSize: 2})
	require.ErrorContains(t, err, "the source has no samples")
}

// Samples are gathered in any order, with neighbours and repetitions.
func TestGather(t *testing.T) {
	t.Parallel()
	const size, n = 5, 100
	from := make([]byte, n*size)
	for i := range n {
		writeSample(from[i*size:(i+1)*size], i, 0)
	}
	p := newPermutation(n, 1, 1)
	var shuffled []int
	for i := range n {
		shuffled = append(shuffled, p.at(i))
	}
	for _, indices := range [][]int{
		nil, {0}, {99}, {98, 99}, {3, 4, 5, 7, 8, 2, 1, 0, 0, 0, 1, 2, 2, 99},
		slices.Collect(count(n)), shuffled, shuffled[:16], shuffled[:17],
	} {
		to := make([]byte, len(indices)*size+1)
		gather(to[:len(indices)*size], from, size, indices, func(to, from []byte) int { return copy(to, from) })
		for at, i := range indices {
			require.Equal(t, from[i*size:(i+1)*size], to[at*size:(at+1)*size], "%v at %d", indices, at)
		}
		require.Zero(t, to[len(indices)*size], "nothing past the end")
	}
}
