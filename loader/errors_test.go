package loader

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

var errBad = errors.New("bad sample")

// failing is a numbered source with a function that may fail after Read, and
// one after Transform. Read adds one to every byte, and Transform takes it away:
// doing it twice is wrong.
type failing struct {
	Source
	read, transform func(ctx context.Context, i int) error
}

func newFailing(n int, fields ...int) *failing {
	fine := func(context.Context, int) error { return nil }
	return &failing{Source: numbered(n, fields...), read: fine, transform: fine}
}

func (s *failing) Read(ctx context.Context, i int, sample [][]byte) error {
	if err := s.Source.Read(ctx, i, sample); err != nil {
		return err
	}
	add(sample, 1)
	return s.read(ctx, i)
}

func (s *failing) compute(ctx context.Context, i int, sample [][]byte) error {
	add(sample, 255)
	return s.transform(ctx, i)
}

func add(sample [][]byte, n byte) {
	for _, field := range sample {
		for i := range field {
			field[i] += n
		}
	}
}

// only makes some samples fail.
func only(bad ...int) func(context.Context, int) error {
	return func(_ context.Context, i int) error {
		if slices.Contains(bad, i) {
			return errBad
		}
		return nil
	}
}

// The first sample that fails ends the epoch, after the batches before its own.
func TestErrorsEndTheEpoch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, batch = 30, 4
	for _, stage := range []string{"read", "transform"} {
		for bad := range n {
			src := newFailing(n, 8)
			if stage == "read" {
				src.read = only(bad)
			} else {
				src.transform = only(bad)
			}
			l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: 1 + bad%7, Prefetch: 1 + bad%3})
			var numbers []int
			errs := 0
			for b, err := range l.Batches(t.Context()) {
				if err != nil {
					require.Nil(t, b)
					require.ErrorIs(t, err, errBad)
					require.Contains(t, err.Error(), fmt.Sprintf("loader: sample %d, batch %d of epoch 0: ", bad, bad/batch))
					errs++
					continue
				}
				require.Zero(t, errs)
				requireBatch(t, b, s, 8)
				numbers = append(numbers, b.Number())
			}
			require.Equal(t, 1, errs)
			require.Len(t, numbers, bad/batch, "the batches before")
			require.Zero(t, lent(l))
			require.Zero(t, l.Stats().Skipped)

			src.read, src.transform = only(), only()
			require.Len(t, epochOf(t, l, s, 8), 8, "the next epoch")
		}
	}
}

// Of several samples that fail, the one of the earliest batch counts, whichever
// failed first.
func TestTheEarliestErrorCounts(t *testing.T) {
	t.Parallel()
	src := newFailing(40, 8)
	var l *Loader
	src.read = func(ctx context.Context, i int) error {
		switch i {
		case 9: // of batch 2
			for l.epoch.Load().failedBefore(3) == nil && ctx.Err() == nil {
				runtime.Gosched()
			}
			return errBad
		case 14: // of batch 3
			return errors.New("another one")
		}
		return nil
	}
	l = newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 20})
	n := 0
	for _, err := range l.Batches(t.Context()) {
		if err != nil {
			require.ErrorContains(t, err, "sample 9, batch 2 ")
			continue
		}
		n++
	}
	require.Equal(t, 2, n)
}

// Where order does not matter, an error does not wait for anything.
func TestErrorEndsUnorderedEpoch(t *testing.T) {
	t.Parallel()
	src := newFailing(40, 8)
	src.read = func(ctx context.Context, i int) error {
		if i == 20 {
			return errBad
		}
		if i == 0 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	l := newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 20, Unordered: true})
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, errBad)
	require.ErrorContains(t, last, "sample 20, ")
	require.Zero(t, lent(l))
}

// What failed in Read does not come to Transform.
func TestNoTransformAfterAnError(t *testing.T) {
	t.Parallel()
	for _, skip := range []bool{false, true} {
		src := newFailing(20, 8)
		src.read = only(3, 4, 17)
		var wrong atomic.Int64
		src.transform = func(ctx context.Context, i int) error {
			if src.read(ctx, i) != nil {
				wrong.Add(1)
			}
			return nil
		}
		l := newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 10, Workers: 2, SkipErrors: skip})
		for range l.Batches(t.Context()) {
		}
		require.Zero(t, wrong.Load())
	}
}

// Samples that fail are left out, and the others of their batches move up.
func TestSkippedSamples(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	fields := []int{3, 257}
	const n, batch = 30, 8
	for name, bad := range map[string][]int{
		"none":          {},
		"first":         {0},
		"last of batch": {7},
		"last of all":   {29},
		"neighbours":    {10, 11, 12},
		"several":       {0, 3, 4, 7, 9, 15, 16, 23, 24, 29},
		"all of one":    {8, 9, 10, 11, 12, 13, 14, 15},
		"all":           slices.Collect(count(n)),
	} {
		for _, stage := range []string{"read", "transform"} {
			for _, workers := range []int{1, 2, 16} {
				src := newFailing(n, fields...)
				if stage == "read" {
					src.read = only(bad...)
				} else {
					src.transform = only(bad...)
				}
				l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: workers, SkipErrors: true})
				batches := epochOf(t, l, s, fields...)
				require.Len(t, batches, 4, name)
				for i, indices := range batches {
					var want []int
					for at := i * batch; at < min((i+1)*batch, n); at++ {
						if !slices.Contains(bad, at) {
							want = append(want, at)
						}
					}
					require.Equal(t, want, indices, "%s in %s", name, stage)
				}
				require.Equal(t, len(bad), l.Stats().Skipped)
				require.Equal(t, (n-len(bad))*(3+257), l.Stats().Bytes)

				// Their places are there again for the next epoch.
				src.read, src.transform = only(), only()
				require.Len(t, slices.Concat(epochOf(t, l, s, fields...)...), n)
			}
		}
	}
}

func count(n int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for i := range n {
			if !yield(i) {
				return
			}
		}
	}
}

func TestRetries(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, stage := range []string{"read", "transform"} {
		for retries := range 4 {
			var tries [20]atomic.Int32
			flaky := func(_ context.Context, i int) error { // every fifth works the third time
				if i%5 == 0 && tries[i].Add(1) < 3 {
					return errBad
				}
				return nil
			}
			src := newFailing(len(tries), 8, 100)
			if stage == "read" {
				src.read = flaky
			} else {
				src.transform = flaky
			}
			l := newLoaderFor(t, dev, src, Options{BatchSize: 6, Workers: 3, Retries: retries, SkipErrors: true})
			// What came is whole, though a Transform that failed had changed it.
			got := slices.Concat(epochOf(t, l, s, 8, 100)...)
			st := l.Stats()
			if retries >= 2 {
				require.Len(t, got, 20)
				require.Zero(t, st.Skipped)
				require.Equal(t, 2*4, st.Retried)
			} else {
				require.Len(t, got, 16)
				require.Equal(t, 4, st.Skipped)
				require.Equal(t, retries*4, st.Retried)
			}
		}
	}

	// Without skipping, the error comes when the tries are used up.
	src := newFailing(20, 8)
	var tries atomic.Int32
	src.read = func(ctx context.Context, i int) error {
		if i == 7 {
			tries.Add(1)
			return errBad
		}
		return nil
	}
	l := newLoaderFor(t, dev, src, Options{BatchSize: 6, Workers: 2, Retries: 3})
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, errBad)
	require.EqualValues(t, 4, tries.Load())
}

func TestPanicsAreErrors(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for name, cause := range map[string]func(){
		"went wrong":         func() { panic("went wrong") },
		"bad sample":         func() { panic(errBad) },
		"index out of range": func() { _ = []int(nil)[len(dev.Name())] },
		"nil pointer":        func() { _ = *(*int)(nil) },
	} {
		for _, stage := range []string{"read", "transform"} {
			for _, skip := range []bool{false, true} {
				src := newFailing(20, 8)
				panics := func(_ context.Context, i int) error {
					if i == 13 {
						cause()
					}
					return nil
				}
				if stage == "read" {
					src.read = panics
				} else {
					src.transform = panics
				}
				l := newLoaderFor(t, dev, src, Options{BatchSize: 6, Workers: 2, SkipErrors: skip})
				if skip {
					require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 19)
					continue
				}
				var last error
				for _, last = range l.Batches(t.Context()) {
				}
				require.ErrorContains(t, last, "loader: sample 13, batch 2 of epoch 0: panic: ")
				require.ErrorContains(t, last, name)
				require.ErrorContains(t, last, "errors_test.go", "the stack")
			}
		}
	}
}

// A source that ends its goroutine, as t.FailNow does, fails like one that returns
// an error: the batch's other samples come, later epochs do, and Close works.
func TestASourceThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, stage := range []string{"read", "transform"} {
		for _, o := range []Options{
			{BatchSize: 6, Workers: 1},
			{BatchSize: 6, Workers: 2, SkipErrors: true},
			{BatchSize: 6, Workers: 1, SkipErrors: true, MaxTransforms: 1},
			{BatchSize: 6, Workers: 3, SkipErrors: true, Retries: 2},
		} {
			src := newFailing(20, 8)
			var exits atomic.Int32
			exit := func(_ context.Context, i int) error {
				if i%5 == 3 {
					exits.Add(1)
					runtime.Goexit()
				}
				return nil
			}
			if stage == "read" {
				src.read = exit
			} else {
				src.transform = exit
			}
			l := newLoaderFor(t, dev, src, o)
			if o.SkipErrors {
				require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 16)
				require.Equal(t, 4, l.Stats().Skipped)
				require.Equal(t, 4*o.Retries, l.Stats().Retried)
				require.EqualValues(t, 4*(1+o.Retries), exits.Load())
			} else {
				var last error
				for _, last = range l.Batches(t.Context()) {
				}
				require.EqualError(t, last, "loader: sample 3, batch 0 of epoch 0: a callback ended its goroutine (runtime.Goexit, as testing.T.FailNow does)")
			}
			src.read, src.transform = only(), only()
			require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 20)
			require.Zero(t, lent(l))
			require.EqualValues(t, l.o.MaxTransforms, l.transforms.free.Load())
		}
	}
}

// A loop waits for workers that went on on another goroutine.
func TestTheLoopWaitsAfterAnEndedGoroutine(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var returned atomic.Bool
	var l *Loader
	src := Func(4, []int{8}, func(_ context.Context, i int, _ [][]byte) error {
		if i == 0 {
			runtime.Goexit()
		}
		cancel()
		for !l.epoch.Load().loop.Load().workers.Sealed() {
			runtime.Gosched()
		}
		for range 1000 { // in which a loop that does not wait ends
			runtime.Gosched()
		}
		returned.Store(true)
		return nil
	})
	l = newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 1, SkipErrors: true})
	for _, err := range l.Batches(ctx) {
		require.ErrorIs(t, err, context.Canceled)
	}
	require.True(t, returned.Load())
}

// A retry may be what ends the goroutine, or what works.
func TestRetryAfterAnEndedGoroutine(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	var tries [20]atomic.Int32
	src := newFailing(len(tries), 8)
	src.transform = func(_ context.Context, i int) error {
		switch tries[i].Add(1) {
		case 1:
			return errBad
		case 2:
			runtime.Goexit()
		case 3:
			panic("once more")
		}
		return nil
	}
	l := newLoaderFor(t, dev, src, Options{BatchSize: 6, Workers: 2, Retries: 3})
	require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 20)
	require.Equal(t, 3*20, l.Stats().Retried)
}

func TestNewRefusesInvalidOptions(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	huge := math.MaxInt / 4
	const by2 = "10 samples in batches of 2"
	for _, test := range []struct {
		want string
		src  Source
		o    Options
	}{
		{"Options.BatchSize is 0: must be positive", numbered(10, 8), Options{}},
		{"Options.BatchSize is -1: must be positive", numbered(10, 8), Options{BatchSize: -1}},
		{"Options.Workers is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, Workers: -1}},
		{"Options.MaxTransforms is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, MaxTransforms: -1}},
		{"Options.Prefetch is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, Prefetch: -1}},
		{"Options.MaxBytes is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, MaxBytes: -1}},
		{"Options.Retries is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, Retries: -1}},
		{"Options.Start.Epoch is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, Start: Position{Epoch: -1}}},
		{"Options.Start.Epoch is 9223372036854775807: no epoch can follow it", numbered(10, 8), Options{BatchSize: 2, Start: Position{Epoch: 1<<63 - 1}}},
		{"Options.Start.Batch is -1: must not be negative", numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: -1}}},
		{"Options.Start is after batch 5: an epoch has 5", numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 6, Order: by2}}},
		{"Options.Start is after batch 5: an epoch has 5", numbered(11, 8), Options{BatchSize: 2, DropLast: true,
			Start: Position{Batch: 6, Order: "11 samples in batches of 2, full ones only"}}},
		{"Options.Start is after batch 7: an epoch has 5", numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 2, Done: "3,7", Order: by2}}},
		{`Options.Start.Done is "7,3": "3": must be a number, or a range of numbers, greater than those before`, numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 2, Done: "7,3", Order: by2}}},
		{`Options.Start.Done is "2": "2": must be`, numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 2, Done: "2", Order: by2}}},
		{`Options.Start.Done is "4-3": "4-3": must be`, numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 2, Done: "4-3", Order: by2}}},
		{`Options.Start.Done is "4,": "": must be`, numbered(10, 8), Options{BatchSize: 2, Start: Position{Batch: 2, Done: "4,", Order: by2}}},
		{"the source has no samples", numbered(0, 8), Options{BatchSize: 2}},
		{"the source has no samples", numbered(-5, 8), Options{BatchSize: 2}},
		{"the source has no fields", numbered(10), Options{BatchSize: 2}},
		{"field 1 of the source has 0 bytes: must be positive", numbered(10, 8, 0), Options{BatchSize: 2}},
		{"field 0 of the source has -8 bytes: must be positive", numbered(10, -8), Options{BatchSize: 2}},
		{fmt.Sprintf("field 0 of the source has %d bytes: too many for a batch of 10 samples", huge), numbered(10, huge), Options{BatchSize: 100}},
		{fmt.Sprintf("field 4 of the source has %d bytes: too many for a batch of 1 samples", huge), numbered(10, huge, huge, huge, huge-2000, huge), Options{BatchSize: 1}},
		{fmt.Sprintf("Options.Prefetch is %d: too many batches of 256 bytes", huge), numbered(10, 8), Options{BatchSize: 2, Prefetch: huge}},
		{"Options.MaxBytes is 511: two batches of 256 bytes do not fit", numbered(10, 8), Options{BatchSize: 2, MaxBytes: 511}},
		{"Options.MaxBytes is 1: two batches of 512 bytes do not fit", numbered(10, 8, 1), Options{BatchSize: 2, MaxBytes: 1}},
	} {
		l, err := New(t.Context(), dev, test.src, test.o)
		if assert.ErrorContains(t, err, "loader: new: "+test.want) {
			assert.Nil(t, l)
		} else if l != nil {
			require.NoError(t, l.Close())
		}
	}

	// At the end of an epoch the next one follows.
	l := newLoaderFor(t, dev, numbered(10, 8), Options{BatchSize: 2, Start: Position{Epoch: 3, Batch: 5, Order: by2}})
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.Equal(t, 4, b.Epoch())
		break
	}
}

// Batches that the device has no room for.
func TestDeviceTooSmall(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 1 << 20}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	_, err = New(t.Context(), dev, numbered(1000, 1024), Options{BatchSize: 256, Prefetch: 4})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	require.ErrorContains(t, err, "loader: new: 5 batches of 262144 bytes: ")
	// The simulator says at the end that nothing is left.
}
