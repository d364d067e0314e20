package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// requireIdle requires that no goroutine of a loader is left, and that the consumer has so
// many batches.
func requireIdle(t *testing.T, l *Loader, retained int) {
	t.Helper()
	require.Eventually(t, func() bool {
		stacks := make([]byte, 1<<20)
		s := string(stacks[:runtime.Stack(stacks, true)])
		return !strings.Contains(s, "loader.(*worker).work") && !strings.Contains(s, "loader.(*driver).")
	}, time.Minute, time.Millisecond, "goroutines are left")
	require.Equal(t, retained, lent(l))
}

// loopOptions are loops of all kinds, over 30 samples.
var loopOptions = []Options{
	{BatchSize: 4, Workers: 3, Prefetch: 2},
	{BatchSize: 4, Workers: 30, Prefetch: 2, Unordered: true, Shuffle: true},
	{BatchSize: 4, Workers: 2, Prefetch: 11}, // blocks of 3
	{BatchSize: 4, Workers: 1, Prefetch: 11},
	{BatchSize: 4, Workers: 9, Prefetch: 31, Unordered: true}, // one block
}

// A loop that is left, or whose body panics, leaves the rest of its epoch to the next loop.
// Not parallel, as the other tests here: they look at the process's goroutines.
func TestALoopThatIsLeftKeepsItsEpoch(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, o := range loopOptions {
		for _, turns := range []int{1, 3, 8, 9} { // of one loop
			for _, panics := range []bool{false, true} {
				var reads atomic.Int64
				good := numbered(30, 8)
				l := newLoaderFor(t, dev, Func(30, []int{8}, func(ctx context.Context, i int, sample [][]byte) error {
					reads.Add(1)
					return good.Read(ctx, i, sample)
				}), o)
				for epoch := range 2 {
					var seen, numbers []int
					at := Position{Epoch: epoch, Order: l.order}
					loops := 0
					for ; at.Epoch == epoch; loops++ {
						loop := func() {
							defer func() { _ = recover() }()
							n := 0
							for b, err := range l.Batches(t.Context()) {
								require.NoError(t, err)
								require.Equal(t, epoch, b.Epoch())
								if !o.Unordered && b.Number() < 7 {
									require.Equal(t, Position{Epoch: epoch, Batch: b.Number() + 1, Order: l.order}, b.Position())
								}
								at = b.Position()
								requireBatch(t, b, s, 8)
								seen, numbers = append(seen, b.Indices()...), append(numbers, b.Number())
								if n++; n == turns {
									if panics {
										panic("left")
									}
									return
								}
							}
						}
						loop()
						requireIdle(t, l, 0)
					}
					require.Equal(t, (8+turns-1)/turns, loops, "after the last batch the next epoch follows")
					require.True(t, o.Unordered || slices.IsSorted(numbers))
					slices.Sort(seen)
					require.Equal(t, slices.Collect(count(30)), seen, "%+v", o)
					require.Equal(t, Position{Epoch: epoch + 1, Order: l.order}, at)
				}
				require.EqualValues(t, 60, reads.Load(), "what was filled is retained")
			}
		}
	}
}

// EndEpoch leaves out the rest of an epoch: not that of the next one, nor batches that are
// retained.
func TestEndEpoch(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, o := range loopOptions {
		l := newLoaderFor(t, dev, numbered(30, 8), o)
		require.NoError(t, l.EndEpoch(), "there is none")
		for turns := 1; turns <= 8; turns++ {
			var retained *Batch
			given := 0
			for b, err := range l.Batches(t.Context()) {
				require.NoError(t, err)
				require.Equal(t, turns-1, b.Epoch())
				require.EqualError(t, l.EndEpoch(), "loader: end epoch: a loop over its batches is running")
				require.ErrorIs(t, l.EndEpoch(), errRunning)
				if retained == nil {
					retained = b
					b.Retain()
				}
				if given++; given == turns {
					break
				}
			}
			require.NoError(t, l.EndEpoch())
			require.NoError(t, l.EndEpoch(), "there is none any more")
			requireBatch(t, retained, s, 8)
			require.NoError(t, retained.Release())
		}
		require.Len(t, epochOf(t, l, s, 8), 8, "the next epoch is whole")
		require.NoError(t, l.EndEpoch())
		require.Equal(t, 9, gaveEpoch(t, l))
	}
	// Options.Start is within an epoch, which no loop has begun.
	o := Options{BatchSize: 4, Start: Position{Epoch: 3, Batch: 2, Order: "30 samples in batches of 4"}}
	l, err := New(t.Context(), dev, numbered(30, 8), o)
	require.NoError(t, err)
	require.NoError(t, l.EndEpoch())
	require.NoError(t, l.EndEpoch())
	require.Equal(t, 4, gaveEpoch(t, l))
	require.NoError(t, l.Close())
	require.ErrorIs(t, l.EndEpoch(), cudart.ErrClosed)
}

// Epochs has each epoch once, and one that was left within until all of it was got.
func TestEpochs(t *testing.T) {
	dev := testgpu.Device(t)
	for _, o := range loopOptions {
		for _, turns := range []int{1, 3, 4, 8, 9} { // of one loop
			l := newLoaderFor(t, dev, numbered(30, 8), o)
			var epochs, want []int
			for epoch := range l.Epochs(3) {
				epochs = append(epochs, epoch)
				n := 0
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					require.Equal(t, epoch, b.Epoch())
					if n++; n == turns {
						break
					}
				}
				require.Positive(t, n)
			}
			for epoch := range 3 {
				want = append(want, slices.Repeat([]int{epoch}, (8+turns-1)/turns)...)
			}
			require.Equal(t, want, epochs, "%+v, %d", o, turns)
			require.Equal(t, 3, gaveEpoch(t, l), "the next one follows")
		}
	}
	o := Options{BatchSize: 4, Start: Position{Epoch: 1, Batch: 7, Order: "30 samples in batches of 4"}}
	l := newLoaderFor(t, dev, numbered(30, 8), o)
	var got []Position
	for range l.Epochs(3) {
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			got = append(got, b.Position())
		}
	}
	require.Len(t, got, 1+8)
	require.Equal(t, Position{Epoch: 2, Order: o.Start.Order}, got[0])
	for range l.Epochs(1 << 40) {
		require.NoError(t, l.Close(), "after which there are none")
	}
	empty := newLoaderFor(t, dev, numbered(3, 8), Options{BatchSize: 4, DropLast: true})
	require.Equal(t, []int{0, 1}, slices.Collect(func(yield func(int) bool) {
		for epoch := range empty.Epochs(2) {
			for range empty.Batches(t.Context()) {
				require.Fail(t, "there is no batch")
			}
			yield(epoch)
		}
	}))
}

// A copy that fails after the loop was left at the last batch ends the next loop.
func TestACopyThatFailsAfterTheLastBatch(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(30, 8), Options{BatchSize: 4, Workers: 3, Prefetch: 11})
	sim.Hold()
	n := 0
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if n++; n == 8 {
			break
		}
	}
	sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
	sim.Release()
	for b, err := range l.Batches(t.Context()) {
		require.Nil(t, b)
		require.ErrorIs(t, err, cudart.ErrUnknown)
		require.ErrorContains(t, err, "end of epoch 0")
	}
	sim.ResetFaults()
	require.Equal(t, 1, gaveEpoch(t, l))
}

// A canceled loop ends its epoch, at whichever batch.
func TestACanceledLoopEndsItsEpoch(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	gone := errors.New("gone")
	for _, o := range loopOptions {
		l := newLoaderFor(t, dev, numbered(30, 8), o)
		for at := range 8 {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			n := 0
			var last error
			for b, err := range l.Batches(ctx) {
				if last = err; err != nil {
					require.Nil(t, b)
					continue
				}
				require.Equal(t, at, b.Epoch())
				requireBatch(t, b, s, 8)
				if n++; n == at+1 {
					cancel(gone)
				}
			}
			require.Equal(t, at+1, n)
			require.ErrorIs(t, last, gone)
			require.ErrorIs(t, last, context.Canceled)
			requireIdle(t, l, 0)
		}
		require.Len(t, epochOf(t, l, s, 8), 8, "the next epoch is whole")
	}
}

// An interrupted source spoils a sample and waits until its context ends, in one of its
// methods, for all but the first samples, as long as it is blocked.
type interrupted struct {
	Source
	in      string
	first   int
	blocked atomic.Bool
	entered chan struct{}
}

func (s *interrupted) wait(ctx context.Context, in string, i int, sample [][]byte) error {
	if s.in != in || i < s.first || !s.blocked.Load() {
		return nil
	}
	add(sample, 77)
	select {
	case s.entered <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return ctx.Err()
}

func (s *interrupted) Read(ctx context.Context, i int, sample [][]byte) error {
	if err := s.Source.Read(ctx, i, sample); err != nil {
		return err
	}
	add(sample, 1)
	return s.wait(ctx, "Read", i, sample)
}

func (s *interrupted) compute(ctx context.Context, i int, sample [][]byte) error {
	add(sample, 255)
	return s.wait(ctx, "Transform", i, sample)
}

// A togetherInterrupted source is one that reads many samples in a call.
type togetherInterrupted struct{ *interrupted }

func (s togetherInterrupted) ReadBatch(ctx context.Context, indices []int, all [][]byte) error {
	for k, i := range indices {
		if err := s.Read(ctx, i, [][]byte{all[0][8*k : 8*k+8]}); err != nil {
			return err
		}
	}
	return s.wait(ctx, "ReadBatch", indices[0], all)
}

// What a source was at when the loop was left is done again by the next loop, and is no
// failure.
func TestSamplesThatWereInterrupted(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, batch = 100, 10
	for _, in := range []string{"Read", "Transform", "ReadBatch"} {
		for _, workers := range []int{1, 3, 40} {
			one := &interrupted{Source: numbered(n, 8), in: in, first: batch, entered: make(chan struct{}, 1)}
			one.blocked.Store(true)
			var src Source = one
			if in == "ReadBatch" {
				src = togetherInterrupted{one}
			}
			l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: workers, MaxTransforms: workers, Prefetch: 9})
			for b, err := range l.Batches(t.Context()) {
				require.NoError(t, err)
				require.Zero(t, b.Number())
				requireBatch(t, b, s, 8)
				<-one.entered
				break
			}
			requireIdle(t, l, 0)
			one.blocked.Store(false)
			require.Equal(t, slices.Collect(count(n))[batch:], slices.Concat(epochOf(t, l, s, 8)...))
			require.Zero(t, l.Stats().Retried)
			require.Zero(t, l.Stats().Skipped)
		}
	}
}

// A blocking source waits in Read, or in Transform, until its context ends.
type blocking struct {
	Source
	inTransform bool
	entered     atomic.Int64
}

func (s *blocking) block(ctx context.Context) error {
	s.entered.Add(1)
	<-ctx.Done()
	return ctx.Err()
}

func (s *blocking) Read(ctx context.Context, i int, sample [][]byte) error {
	if !s.inTransform {
		return s.block(ctx)
	}
	return s.Source.Read(ctx, i, sample)
}

func (s *blocking) compute(ctx context.Context, _ int, _ [][]byte) error { return s.block(ctx) }

func TestCancellationReachesTheSource(t *testing.T) {
	dev := testgpu.Device(t)
	for _, inTransform := range []bool{false, true} {
		for _, skip := range []bool{false, true} {
			src := &blocking{Source: numbered(100, 8), inTransform: inTransform}
			l := newLoaderFor(t, dev, src, Options{BatchSize: 4, Workers: 9, MaxTransforms: 2, SkipErrors: skip, Retries: 3})
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				for src.entered.Load() < 2 {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
			errs := 0
			for b, err := range l.Batches(ctx) {
				require.Nil(t, b)
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorContains(t, err, "loader: epoch 0")
				errs++
			}
			require.Equal(t, 1, errs)
			requireIdle(t, l, 0)
			require.Zero(t, l.Stats().Skipped, "samples that are not wanted have not failed")
			require.Zero(t, l.Stats().Retried)
		}
	}
}

func TestCancelledBefore(t *testing.T) {
	dev := testgpu.Device(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := New(ctx, dev, numbered(10, 8), Options{BatchSize: 4})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "loader: ")

	l := newLoaderFor(t, dev, numbered(10, 8), Options{BatchSize: 4})
	errs := 0
	for b, err := range l.Batches(ctx) {
		require.Nil(t, b)
		require.ErrorIs(t, err, context.Canceled)
		errs++
	}
	require.Equal(t, 1, errs)
	requireIdle(t, l, 0)
}

// A worker that has many samples to read leaves those that are not wanted.
func TestCancelledWithinAClaim(t *testing.T) {
	dev := testgpu.Device(t)
	for _, inTransform := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		calls := 0 // of one worker
		src := staged{Source: Func(1000, []int{8}, func(context.Context, int, [][]byte) error { return nil })}
		src.each = func(transforms bool) {
			if transforms != inTransform {
				return
			}
			if calls++; calls == 3 {
				cancel()
			}
		}
		o := Options{BatchSize: 1000, Workers: 1}
		l := newLoaderFor(t, dev, src, o)
		require.Greater(t, l.layout.claimSize(1, o.Workers), 100)
		for _, err := range l.Batches(ctx) {
			require.ErrorIs(t, err, context.Canceled)
		}
		require.Equal(t, 3, calls)
		requireIdle(t, l, 0)
	}
}

// Workers that wait for memory end too.
func TestCancelledWhileWorkersWaitForMemory(t *testing.T) {
	var reads atomic.Int64
	src := Func(100, []int{8}, func(context.Context, int, [][]byte) error {
		reads.Add(1)
		return nil
	})
	l := newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 20, Prefetch: 2})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last error
	for _, err := range l.Batches(ctx) {
		if last = err; err == nil {
			require.Eventually(t, func() bool { return reads.Load() == 3*4 }, time.Minute, time.Millisecond)
			cancel()
		}
	}
	require.ErrorIs(t, last, context.Canceled)
	requireIdle(t, l, 0)
}

// A loop that is left does not wait for copies: Close does, and its memory stays
// until they are done.
func TestCloseWaitsForCopies(t *testing.T) {
	sim, dev := simulated(t, cudasim.Link{})
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, err)
	sim.Hold()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.NotNil(t, b)
		break
	}
	requireIdle(t, l, 0)
	before := sim.Outstanding()
	require.Positive(t, before.PendingOps)

	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err = l.CloseContext(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "loader: close: all memory stays allocated, the GPU may be using it: ")
	after := sim.Outstanding()
	require.Equal(t, before.Registrations, after.Registrations)
	require.Equal(t, before.DeviceAllocs, after.DeviceAllocs)
	for _, err := range l.Batches(t.Context()) {
		require.ErrorIs(t, err, cudart.ErrClosed)
	}

	sim.Release()
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	require.Zero(t, sim.Outstanding().Registrations)
	require.Zero(t, sim.Outstanding().DeviceAllocs)
}

// A call into CUDA that does not return keeps Close no longer than its context. When it
// returns, all is released.
func TestCloseWithACallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	l, err := New(t.Context(), dev, numbered(8, 8), Options{BatchSize: 4})
	require.NoError(t, err)
	unblock := sim.Block("cudaFree", cudasim.Fault{})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- l.CloseContext(ctx) }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaFree", 1))
	cancel()
	require.ErrorIs(t, <-closed, context.Canceled)
	require.EqualError(t, l.CloseContext(ctx), "loader: close: another Close is in progress: context canceled")
	require.Equal(t, 1, sim.Outstanding().DeviceAllocs)
	unblock()
	require.NoError(t, l.Close())
	require.Zero(t, sim.Outstanding().DeviceAllocs)
	require.Zero(t, sim.Outstanding().Registrations)
}

// Close waits for the consumer's streams too, which were given batches.
func TestCloseWaitsForTheConsumersStreams(t *testing.T) {
	sim, dev := simulated(t, cudasim.Link{})
	l, err := New(t.Context(), dev, numbered(8, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, err)
	all := newLog(t, stream(t, dev), 1, 32)
	var retained *Batch
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		b.Retain()
		if retained == nil {
			retained = b
		} else {
			require.NoError(t, b.Release())
		}
	}
	sim.Hold() // all copies are done
	all.add(retained)
	require.NoError(t, retained.Release())
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, l.CloseContext(ctx), context.DeadlineExceeded)
	require.Equal(t, 2, sim.Outstanding().DeviceAllocs, "the loader's and the log's")
	sim.Release()
	require.NoError(t, l.Close())
	all.requireAll()
	require.Empty(t, sim.Misuses())
}

// A loop that has given all batches ends when they are on the device.
func TestTheEndOfAnEpochWaitsForCopies(t *testing.T) {
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(12, 8), Options{BatchSize: 4, Prefetch: 3})
	sim.Hold()
	n := 0
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if n++; n == 3 { // the next turn waits
			require.Positive(t, sim.Outstanding().PendingOps)
			sim.Release()
		}
	}
	require.Zero(t, sim.PendingCopies())

	// It ends with its context.
	sim.Hold()
	defer sim.Release()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n = 0
	var last error
	for _, err := range l.Batches(ctx) {
		if last = err; err != nil {
			break
		}
		if n++; n == 3 {
			cancel()
		}
	}
	require.ErrorIs(t, last, context.Canceled)
	requireIdle(t, l, 0)
}

func TestRetainedBatches(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	l, err := New(t.Context(), dev, numbered(40, 8), Options{BatchSize: 4, Prefetch: 3, Shuffle: true})
	require.NoError(t, err)
	var retained []*Batch
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.NoError(t, b.Use(s))
		if b.Number()%3 == 0 && len(retained) < 2 {
			b.Retain()
			retained = append(retained, b)
		}
	}
	require.Len(t, retained, 2)
	requireIdle(t, l, 2)
	require.Len(t, epochOf(t, l, s, 8), 10, "an epoch with the memory that is left")
	for _, b := range retained {
		require.Zero(t, b.Epoch())
		requireBatch(t, b, s, 8) // as they were
	}

	require.Equal(t, 2, l.Stats().Retained)
	require.ErrorContains(t, l.Close(), "loader: close: 2 batches are retained: Close again when they are released")
	for _, b := range retained {
		require.NoError(t, b.Release())
		require.ErrorIs(t, b.Release(), errReleased)
		require.ErrorIs(t, b.Release(), os.ErrClosed)
		b.Retain() // too late
		require.ErrorIs(t, b.Use(s), errReleased)
		require.ErrorIs(t, b.Wait(t.Context()), errReleased)
		require.Nil(t, b.Host(0))
		require.Equal(t, 4, b.Len())
	}
	require.Zero(t, l.Stats().Retained)
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
}

// A loop that keeps all batches and asks for another waits, and says why when its
// context ends, or when another goroutine closes the loader.
func TestErrorsContainThatAllBatchesAreRetained(t *testing.T) {
	for _, closes := range []bool{false, true} {
		l, err := New(t.Context(), testgpu.Device(t), numbered(40, 8), Options{BatchSize: 4, Prefetch: 2})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var all []*Batch
		var last error
		for b, err := range l.Batches(ctx) {
			if last = err; err != nil {
				require.Nil(t, b)
				continue
			}
			b.Retain()
			if all = append(all, b); len(all) == 3 {
				require.Equal(t, 3, l.Stats().Retained)
				if closes {
					require.ErrorIs(t, l.Close(), errRunning)
				} else {
					cancel()
				}
			}
		}
		require.Len(t, all, 3)
		require.ErrorContains(t, last, "loader: epoch 0: all 3 batches are retained, and none was released: ")
		if closes {
			require.ErrorIs(t, last, cudart.ErrClosed)
		} else {
			require.ErrorIs(t, last, context.Canceled)
		}
		for _, b := range all {
			require.NoError(t, b.Release())
		}
		requireIdle(t, l, 0)
		require.NoError(t, l.Close())
	}
}

// An epoch whose batches are all retained ends all the same.
func TestAllBatchesRetainedAtTheEnd(t *testing.T) {
	l := newLoaderFor(t, testgpu.Device(t), numbered(12, 8), Options{BatchSize: 4, Prefetch: 2, Workers: 5})
	var all []*Batch
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		b.Retain()
		all = append(all, b)
	}
	require.Len(t, all, 3)
	requireIdle(t, l, 3)
	for _, b := range all {
		require.NoError(t, b.Release())
	}
}

// A loop that has retained all the memory goes on when some comes back.
func TestAllBatchesRetained(t *testing.T) {
	l := newLoaderFor(t, testgpu.Device(t), numbered(40, 8), Options{BatchSize: 4, Prefetch: 2})
	given := make(chan *Batch, 10)
	released := make(chan error)
	go func() {
		var all []*Batch
		for b := range given {
			if all = append(all, b); len(all) == len(l.slots) {
				for _, b := range all {
					released <- b.Release()
				}
				all = nil
			}
		}
		for _, b := range all {
			released <- b.Release()
		}
		close(released)
	}()
	errs := make(chan error, 1)
	go func() {
		n := 0
		for err := range released {
			if err != nil {
				errs <- err
				return
			}
			n++
		}
		if n != 10 {
			errs <- fmt.Errorf("%d batches released, not 10", n)
			return
		}
		errs <- nil
	}()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		b.Retain()
		given <- b
	}
	close(given)
	require.NoError(t, <-errs)
	requireIdle(t, l, 0)
}

// Who has done with a batch before the turn ends may say so.
func TestReleaseWithinTheLoop(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(40, 8), Options{BatchSize: 4, Prefetch: 1})
	n := 0
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		requireBatch(t, b, s, 8)
		require.NoError(t, b.Release())
		require.ErrorIs(t, b.Release(), errReleased)
		n++
	}
	require.Equal(t, 10, n)
	requireIdle(t, l, 0)
}

func TestALoopWithinALoopIsErrRunning(t *testing.T) {
	l := newLoaderFor(t, testgpu.Device(t), numbered(12, 8), Options{BatchSize: 4})
	outer := 0
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.Zero(t, b.Epoch())
		outer++
		inner := 0
		for b, err := range l.Batches(t.Context()) {
			require.Nil(t, b)
			require.ErrorIs(t, err, errRunning)
			inner++
		}
		require.Equal(t, 1, inner)
	}
	require.Equal(t, 3, outer)
	require.Equal(t, 1, gaveEpoch(t, l), "a loop that could not begin took no epoch")
}

func gaveEpoch(t *testing.T, l *Loader) int {
	t.Helper()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		return b.Epoch()
	}
	t.Fatal("no batch")
	return 0
}

func TestCloseEndsTheLoop(t *testing.T) {
	dev := testgpu.Device(t)
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, err)
	n := 0
	var last error
	for _, last = range l.Batches(t.Context()) {
		if n++; n == 2 {
			require.ErrorIs(t, l.Close(), errRunning)
		}
	}
	require.Equal(t, 3, n)
	require.ErrorIs(t, last, cudart.ErrClosed)
	require.NotErrorIs(t, last, context.Canceled, "nobody has canceled the caller's context")
	requireIdle(t, l, 0)
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	for b, err := range l.Batches(t.Context()) {
		require.Nil(t, b)
		require.ErrorIs(t, err, cudart.ErrClosed)
		require.ErrorIs(t, err, os.ErrClosed)
		require.EqualError(t, err, "loader: batches: already closed")
	}
}

// Close by another goroutine ends a loop whose source would wait forever.
func TestCloseEndsABlockedLoop(t *testing.T) {
	src := &blocking{Source: numbered(100, 8)}
	l, err := New(t.Context(), testgpu.Device(t), src, Options{BatchSize: 4, Workers: 5})
	require.NoError(t, err)
	closing := make(chan error)
	go func() {
		for src.entered.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		closing <- l.Close()
	}()
	var last error
	for _, last = range l.Batches(t.Context()) {
	}
	require.ErrorIs(t, last, cudart.ErrClosed)
	require.ErrorIs(t, <-closing, errRunning)
	requireIdle(t, l, 0)
	require.NoError(t, l.Close())
}
