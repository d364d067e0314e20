package loader

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// The runs of a block are all of its samples, in order, each of one batch. The slots that
// are left are those of which a run is.
func TestClaims(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 2, 5, 16, 100} {
		for _, short := range []int{0, 1, batch / 2} { // the last batch lacks so many
			for _, batches := range []int{1, 2, 3, 7} {
				for _, workers := range []int{1, 2, 3, 8, 500} {
					if short == batch {
						continue
					}
					var slots []*slot
					var want, got [][2]int // number of the batch, and place in it
					for number := range batches {
						size := batch
						if number == batches-1 {
							size -= short
						}
						s := &slot{indices: make([]int, batch), skipped: make([]bool, batch)}
						s.begin(0, number, size)
						slots = append(slots, s)
						for at := range size {
							want = append(want, [2]int{number, at})
						}
					}
					l := &Loader{o: Options{Workers: workers}, layout: layout{samples: batch}}
					o := newOpening(l, slots...)
					what := fmt.Sprintf("%d batches of %d, the last %d short, %d workers", batches, batch, short, workers)
					require.GreaterOrEqual(t, o.runs, min(len(want), 2*workers, batches), what)
					for claimed := 0; ; claimed++ {
						left := o.left()
						r, ok := o.claim()
						if !ok {
							require.Empty(t, left, what)
							require.Equal(t, o.runs, claimed, what)
							break
						}
						require.Same(t, r.s, left[0], what)
						require.Same(t, slots[batches-1], left[len(left)-1], what)
						require.Less(t, r.from, r.to, what)
						require.LessOrEqual(t, r.to-r.from, l.layout.run(batches, workers), what)
						for at := r.from; at < r.to; at++ {
							got = append(got, [2]int{r.s.number, at})
						}
					}
					require.Equal(t, want, got, what)
					_, ok := o.claim()
					require.False(t, ok, "again")
					require.Empty(t, o.left())
				}
			}
		}
	}
}

// What a worker claims is a share of what is open, of one batch at the most.
func TestTheSamplesOfARun(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ samples, batches, workers, want int }{
		{256, 1, 24, 5},
		{16, 16, 24, 5},
		{16, 16, 8, 16},
		{16, 16, 1, 16},
		{16, 1, 24, 1},
		{16, 3, 4, 6},
		{1, 64, 4, 1},
		{256, 1, 2048, 1},
		{4096, 1, 1, 2048},
	} {
		require.Equal(t, test.want, layout{samples: test.samples}.run(test.batches, test.workers), "%+v", test)
	}
}

// A block is 1 MiB of batches, a quarter of the memory at the most, and one batch at least.
func TestTheBatchesOfABlock(t *testing.T) {
	t.Parallel()
	const kib = 1 << 10
	for _, test := range []struct{ bytes, batch, prefetch, want int }{
		{4 * kib, 16, 0, 16},
		{4 * kib, 256, 0, 1},
		{4 * kib, 128, 0, 2},
		{4 * kib, 4096, 0, 1},
		{4 * kib, 96, 0, 2},
		{4, 256, 0, 64},
		{4 * kib, 16, 1, 1},
		{4 * kib, 16, 6, 1},
		{4 * kib, 16, 7, 2},
		{4 * kib, 16, 1000, 16},
	} {
		_, l, err := Options{BatchSize: test.batch, Workers: 8, Prefetch: test.prefetch}.resolve(numbered(1<<20, test.bytes))
		require.NoError(t, err)
		require.Equal(t, test.want, l.block, "%+v", test)
	}
	o := Options{BatchSize: 16, Workers: 8, MaxBytes: 16 * 64 * kib}
	_, l, err := o.resolve(numbered(1<<20, 4*kib))
	require.NoError(t, err)
	require.Equal(t, 4, l.block, "of 16 batches")
}

// opened is an epoch without workers: its test opens the blocks.
type opened struct {
	*testing.T
	sim *cudasim.Sim
	l   *Loader
	e   *epoch
}

// newOpened has 16 slots and blocks of 4 batches, of 4 samples each.
func newOpened(t *testing.T, samples int, start Position) *opened {
	t.Helper()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(samples, 8), Options{BatchSize: 4, Workers: 2, Prefetch: 15})
	require.Equal(t, 4, l.layout.block)
	e := &epoch{l: l, start: start, next: start.Batch, badly: math.MaxInt, failed: make(chan struct{}, 1)}
	e.ctx, e.cancel = context.WithCancelCause(t.Context())
	t.Cleanup(func() { e.cancel(nil) })
	e.opened.L = &e.claims
	e.last = newOpening(l)
	e.current.Store(e.last)
	return &opened{t, sim, l, e}
}

// ahead opens a block after the last one, and returns its slots and its batches.
func (o *opened) ahead() (slots, numbers []int) {
	o.Helper()
	before := o.e.last
	o.e.openAhead(before)
	next := before.next.Load()
	if next == nil {
		return nil, nil
	}
	require.Same(o, next, o.e.last)
	for _, s := range next.slots {
		slots = append(slots, slices.Index(o.l.slots, s))
		numbers = append(numbers, s.number)
		require.Len(o, s.indices, o.l.sizeOf(s.number))
		require.EqualValues(o, o.l.sizeOf(s.number), s.left.Load())
	}
	return slots, numbers
}

// A block is the next batches, without those of which the position says that they were
// got, on slots that are neighbours.
func TestBlocks(t *testing.T) {
	t.Parallel()
	o := newOpened(t, 47, Position{Batch: 1, Done: []int{2, 4, 5}})
	for _, want := range []struct{ slots, numbers []int }{
		{[]int{0, 1, 2, 3}, []int{1, 3, 6, 7}},
		{[]int{4, 5, 6, 7}, []int{8, 9, 10, 11}}, // the last one is short
		{nil, nil},
	} {
		slots, numbers := o.ahead()
		require.Equal(t, want.slots, slots)
		require.Equal(t, want.numbers, numbers)
	}
	require.Equal(t, 8, o.l.free.count())
	require.NoError(t, o.e.err)
	last := o.e.last
	require.Nil(t, o.e.openNext(last), "there is no other")
	require.Nil(t, o.e.last)
	require.Nil(t, o.e.openNext(last))
	o.e.openAhead(last)
	require.Equal(t, 8, o.l.free.count())
	require.NoError(t, o.e.err)
}

// The worker that claims the first samples of a batch opens the next block.
func TestAWorkerOpensAhead(t *testing.T) {
	t.Parallel()
	o := newOpened(t, 400, Position{})
	w := &worker{e: o.e, c: &o.l.workers[0]}
	require.True(t, w.claim())
	first := o.e.current.Load()
	require.Equal(t, first.slots[0], w.s)
	require.NotNil(t, first.next.Load())
	require.Equal(t, 8, o.l.free.count())
}

// A block has fewer batches if the slots after the first one are not free, or the GPU is
// not done with them, and waits for none.
func TestABlockEndsAtMemoryInUse(t *testing.T) {
	t.Parallel()
	o := newOpened(t, 400, Position{})
	all := slices.Clone(o.l.slots)
	for range all {
		o.l.free.take(t.Context())
	}
	slots, _ := o.ahead()
	require.Nil(t, slots, "none is free")

	o.sim.Hold()
	copied := all[3]
	copied.begin(0, 0, 4)
	require.NoError(t, o.l.upload(t.Context(), copied))
	user := stream(t, o.l.dev)
	used := all[10]
	require.NoError(t, user.Memset(used.mem, 0, 1))
	used.using.Add(user)
	used.using.Record()
	for _, at := range []int{1, 2, 3, 4, 5, 7, 8, 9, 10, 15} {
		o.l.free.put(all[at])
	}
	for _, want := range [][]int{{1, 2}, {4, 5}, {7, 8, 9}, {15}} {
		slots, _ = o.ahead()
		require.Equal(t, want, slots)
	}
	slots, _ = o.ahead()
	require.Equal(t, []int{10}, slots, "the copy waits for the stream, no worker does")
	slots, _ = o.ahead()
	require.Nil(t, slots)
	require.Equal(t, 1, o.l.free.count())
	o.sim.Release()
	next := o.e.openNext(o.e.last) // waits
	require.Equal(t, []*slot{copied}, next.slots)
}

// An error of a slot ends the block before it. It is for the worker that needs the batch,
// when none of the samples before it are left, and is not lost.
func TestAnErrorOfOpeningAhead(t *testing.T) {
	t.Parallel()
	for bad := range 4 {
		o := newOpened(t, 400, Position{Done: []int{1}})
		slot := o.l.slots[bad]
		slot.begin(0, 7, 4)
		o.sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
		require.NoError(t, o.l.upload(t.Context(), slot))
		require.NoError(t, slot.copying.Wait(t.Context()))

		var want []int
		if bad > 0 {
			want = []int{0, 2, 3}[:bad]
		}
		_, numbers := o.ahead()
		require.Equal(t, want, numbers)
		for range 3 { // whoever tries it
			_, numbers = o.ahead()
			require.Nil(t, numbers)
		}
		require.NoError(t, o.e.err, "there may be samples before the batch")
		require.Equal(t, 16-bad, o.l.free.count())

		last := o.e.last
		require.Nil(t, o.e.openNext(last))
		require.ErrorIs(t, o.e.err, cudart.ErrUnknown)
		next := []int{0, 2, 3, 4}[bad]
		require.ErrorContains(t, o.e.err, fmt.Sprintf("loader: batch %d of epoch 0: copy of batch 7: ", next))
		require.Equal(t, next, o.e.badly)
		require.Nil(t, o.e.openNext(last))
		require.Equal(t, 16-bad, o.l.free.count())
	}
}

// requireWaiting requires that so many goroutines come to wait in openNext, and no more.
func requireWaiting(t *testing.T, n int) {
	t.Helper()
	stacks := make([]byte, 4<<20)
	require.Eventually(t, func() bool {
		found := 0
		for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(g, "[sync.Cond.Wait") && strings.Contains(g, "loader.(*epoch).openNext") {
				found++
			}
		}
		return found == n
	}, time.Minute, time.Millisecond, "%d goroutines that wait for a block", n)
}

// Of the workers that wait for another one's block, as many are woken as there are runs.
// If that one has found no slot, one of them waits for a slot in its place. When the epoch
// ends all are woken. Not parallel: it looks at the process's goroutines.
func TestWaitingForABlock(t *testing.T) {
	const workers, runs = 7, 4
	for asleep, ending := range map[int]string{workers - runs: "opened", workers - 1 - runs: "no slot", workers: "canceled"} {
		o := newOpened(t, 400, Position{})
		e, none := o.e, o.e.last
		trying, goOn := make(chan struct{}), make(chan struct{})
		e.workers.Go(func() { // as openAhead does
			e.claims.Lock()
			defer e.claims.Unlock()
			e.open(func(ctx context.Context) *slot {
				close(trying)
				<-goOn
				if ending == "no slot" {
					return nil
				}
				return o.l.free.takeDone(ctx)
			})
		})
		<-trying
		got := make(chan *opening, workers)
		for range workers {
			e.workers.Go(func() { got <- e.openNext(none) })
		}
		requireWaiting(t, workers)
		e.openAhead(none) // does not wait
		if ending != "canceled" {
			close(goOn)
			requireWaiting(t, asleep)
			require.Equal(t, runs, none.next.Load().runs)
		}
		var end sync.WaitGroup
		end.Go(e.end)
		require.Eventually(t, func() bool { return len(got) == workers }, time.Minute, time.Millisecond)
		if ending == "canceled" {
			close(goOn)
		}
		end.Wait()
		for range workers {
			next := <-got
			require.Equal(t, ending == "canceled", next == nil)
			require.True(t, next == nil || next == none.next.Load())
		}
		require.Equal(t, len(o.l.slots), o.l.free.count())
	}
}

// Each batch of a block arrives as soon as it is filled, with one worker too: here each is
// read when the one before has arrived.
func TestABatchDoesNotWaitForItsBlock(t *testing.T) {
	t.Parallel()
	const batches, batch = 40, 4
	for _, workers := range []int{1, 2, 5} {
		arrived := make([]chan struct{}, batches+1)
		for i := range arrived {
			arrived[i] = make(chan struct{})
		}
		close(arrived[0])
		src := numbered(batches*batch, 8)
		l := newLoaderFor(t, testgpu.Device(t), Func(src.Len(), src.Fields(), func(ctx context.Context, i int, sample [][]byte) error {
			select {
			case <-arrived[i/batch]:
				return src.Read(ctx, i, sample)
			case <-ctx.Done():
				return ctx.Err()
			}
		}), Options{BatchSize: batch, Workers: workers, Prefetch: 31})
		require.Equal(t, 8, l.layout.block)
		n := 0
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			require.Equal(t, n, b.Number())
			n++
			close(arrived[n])
		}
		require.Equal(t, batches, n)
	}
}

// A call of ReadBatch has samples of one batch.
func TestReadBatchWithinABatch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n, batch = 203, 4
	for _, workers := range []int{1, 2, 7} {
		src := newTogether(n, 8)
		src.batch = func(_ context.Context, indices []int, _ [][]byte) error {
			if first, last := indices[0]/batch, indices[len(indices)-1]/batch; first != last {
				return fmt.Errorf("samples of batches %d to %d", first, last)
			}
			return nil
		}
		l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: workers, Prefetch: 31})
		require.Equal(t, 8, l.layout.block)
		require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), n)
		require.EqualValues(t, n, src.some.Load())
		require.Zero(t, src.each.Load())
	}
}

// Workers that nothing is left for leave the ones that have work alone: with a slot for
// one batch at a time, each batch is filled, however many workers there are.
func TestManyWorkersAndFewSlots(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, workers := range []int{3, 40, 400} {
		for _, batch := range []int{1, 4} {
			l := newLoaderFor(t, dev, numbered(500, 8), Options{BatchSize: batch, Workers: workers, Prefetch: 1})
			for range 2 {
				require.Equal(t, slices.Collect(count(500)), slices.Concat(epochOf(t, l, s, 8)...))
			}
		}
	}
}
