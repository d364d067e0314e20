package loader

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// The claims of a block are all of its samples, in order, each of one batch.
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
					l := &Loader{spec: spec{o: Options{Workers: workers}, layout: layout{samples: batch}}}
					o := &block{slots: slots}
					o.divide(l)
					what := fmt.Sprintf("%d batches of %d, the last %d short, %d workers", batches, batch, short, workers)
					require.GreaterOrEqual(t, o.claims, min(len(want), 2*workers, batches), what)
					for n := range o.claims {
						r := o.at(n)
						require.Less(t, r.from, r.to, what)
						require.LessOrEqual(t, r.to-r.from, l.layout.claimSize(batches, workers), what)
						for at := r.from; at < r.to; at++ {
							got = append(got, [2]int{r.s.number, at})
						}
					}
					require.Equal(t, want, got, what)
				}
			}
		}
	}
}

// A worker claims a share of a block, of one batch at the most.
func TestClaimSize(t *testing.T) {
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
		require.Equal(t, test.want, layout{samples: test.samples}.claimSize(test.batches, test.workers), "%+v", test)
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
		_, l, err := Options{BatchSize: test.batch, Workers: 8, Prefetch: test.prefetch}.resolve(numbered(1<<20, test.bytes), 0)
		require.NoError(t, err)
		require.Equal(t, test.want, l.block, "%+v", test)
	}
	o := Options{BatchSize: 16, Workers: 8, MaxBytes: 16 * 64 * kib}
	_, l, err := o.resolve(numbered(1<<20, 4*kib), 0)
	require.NoError(t, err)
	require.Equal(t, 4, l.block, "of 16 batches")
}

// A quick source's batches are claimed as a whole, if there is memory for a batch of each worker.
func TestWholeBatchesOfQuickSources(t *testing.T) {
	t.Parallel()
	inMemory, err := InMemory([]int{4096}, make([]byte, 1024*4096))
	require.NoError(t, err)
	small, err := InMemory([]int{1024}, make([]byte, 1024*1024))
	require.NoError(t, err)
	for name, test := range map[string]struct {
		src                Source
		reading            time.Duration // of 1,000 samples
		prefetch, retained int
		transform          bool
		want               int // samples of a claim of 256
	}{
		"quick":                        {src: numbered(1024, 4096), reading: 3 * time.Millisecond, want: 256},
		"slow":                         {src: numbered(1024, 4096), reading: 4 * time.Millisecond, want: 32},
		"not known":                    {src: numbered(1024, 4096), want: 32},
		"little memory":                {src: numbered(1024, 4096), reading: time.Millisecond, prefetch: 8, want: 32},
		"little memory left":           {src: numbered(1024, 4096), reading: time.Millisecond, retained: 6, want: 32},
		"memory":                       {src: inMemory, reading: time.Millisecond, want: 256},
		"memory, non-temporal":         {src: small, reading: time.Millisecond, want: 96},
		"memory, transformed":          {src: inMemory, reading: time.Millisecond, transform: true, want: 256},
		"a source of batches":          {src: batches{numbered(1024, 4096)}, reading: time.Millisecond, want: 32},
		"memory, transformed and slow": {src: inMemory, reading: 10 * time.Millisecond, transform: true, want: 32},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := Options{BatchSize: 256, Workers: 4, Prefetch: cmp.Or(test.prefetch, 14)}
			if test.transform {
				o.Transform = func(context.Context, int, [][]byte) error { return nil }
			}
			f := newDriven(t, test.src, o, nil)
			f.l.counters.samples.Store(1000)
			f.l.counters.retained.Store(int64(test.retained))
			f.l.workers[1].times.reading.Store(int64(test.reading))
			f.d.publishAhead(f.e, f.p)
			f.l.counters.retained.Store(0)
			require.Equal(t, test.want, f.e.last.size)
			require.Equal(t, len(f.e.last.slots)*((255+test.want)/test.want), f.e.last.claims)
			require.Equal(t, test.want == 256 && runtime.GOMAXPROCS(0) >= 8, f.d.apart.Load())
			if test.transform {
				require.Len(t, f.l.workers[0].list, 256)
			}
		})
	}
}

// A worker that fills a whole batch requests the next block when all are taken.
func TestNextBlockOfWholeBatches(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		f := newBlocks(t, 400, nil)
		f.d.publish(f.e, f.d.newBlock(f.e, f.d.usable(f.l.layout.block)))
		f.e.last.whole = whole
		w := f.worker()
		_, first := w.next(t.Context())
		require.True(t, first, "no block is left")
		f.d.publish(f.e, f.d.newBlock(f.e, f.d.usable(f.l.layout.block)))
		f.e.last.whole = whole
		f.d.publish(f.e, f.d.newBlock(f.e, f.d.usable(f.l.layout.block)))
		for claims := 1; claims < f.e.current.Load().claims; claims++ {
			_, first = w.next(t.Context())
			require.False(t, first)
		}
		_, first = w.next(t.Context())
		require.Equal(t, !whole, first, "there is one")
	}
}

// A worker also requests a block with one of the last claims for which there is no other.
func TestTheLastClaimsRequestABlock(t *testing.T) {
	t.Parallel()
	f := newBlocks(t, 400, nil)
	f.d.publish(f.e, f.d.newBlock(f.e, f.l.slots[:4]))
	w := f.worker()
	for claimed, want := range []bool{true, false, true, false} {
		ok, first := w.next(t.Context())
		require.True(t, ok)
		require.Equal(t, want, first, "claim %d of 4, of 2 workers", claimed)
	}
}

// batches is a source of many samples in one call.
type batches struct{ Source }

func (b batches) ReadBatch(context.Context, []int, [][]byte) error { return nil }

// ahead claims all of the last block, opens another one after it, and returns the slots and batches of that
// one.
func (f *driven) ahead() (slots, numbers []int) {
	f.Helper()
	before := f.e.last
	before.claimed.Store(int64(before.claims))
	f.e.current.Store(before)
	f.d.publishAhead(f.e, f.p)
	next := before.next.Load()
	if next == nil {
		require.Same(f, before, f.e.last)
		return nil, nil
	}
	require.Same(f, next, f.e.last, "one block")
	for _, s := range next.slots {
		slots = append(slots, slices.Index(f.l.slots, s))
		numbers = append(numbers, s.number)
		require.Len(f, s.indices, f.l.sizeOf(s.number))
		require.EqualValues(f, f.l.sizeOf(s.number), s.missing.Load())
	}
	return slots, numbers
}

// newBlocks has 16 slots and blocks of 4 batches, of 4 samples each.
func newBlocks(t *testing.T, samples int, done batchSet) *driven {
	t.Helper()
	f := newDriven(t, numbered(samples, 8), Options{BatchSize: 4, Workers: 2, Prefetch: 15}, done)
	require.Equal(t, 4, f.l.layout.block)
	return f
}

// A block is the next batches, without those of which the position says that they were
// got, on slots that are neighbours.
func TestBlocks(t *testing.T) {
	t.Parallel()
	f := newBlocks(t, 47, batchSet{{0, 1}, {2, 3}, {4, 6}})
	for i, want := range []struct{ slots, numbers []int }{
		{[]int{0, 1, 2, 3}, []int{1, 3, 6, 7}},
		{[]int{4, 5, 6, 7}, []int{8, 9, 10, 11}}, // the last one is short
		{nil, nil},
	} {
		slots, numbers := f.ahead()
		require.Equal(t, want.slots, slots)
		require.Equal(t, want.numbers, numbers)
		require.Equal(t, i > 0, f.e.allPublished)
	}
	require.Len(t, slices.Collect(f.d.free.all), 8)
	require.NoError(t, f.e.failedBefore(f.l.batches()))
	c, again := f.d.wait(f.e, f.e.last)
	require.False(t, again)
	require.Zero(t, c, "no worker waits")
}

// Before a worker has to wait, there is a claim for each in a block after the one that is
// claimed from, or there is no slot.
func TestBlocksArePublishedAhead(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		workers, prefetch int
		blocks            []int // claims of those that are open at first, and after a claim from the first
	}{
		{2, 15, []int{4, 4}},
		{16, 15, []int{16, 16}},
		{40, 15, []int{16, 16, 16, 16}},
		{40, 31, []int{32, 32, 32}},
		{5, 1, []int{4, 4}},
		{1, 1, []int{2, 2}},
	} {
		f := newDriven(t, numbered(4000, 8), Options{BatchSize: 4, Workers: test.workers, Prefetch: test.prefetch}, nil)
		f.d.publishAhead(f.e, f.p)
		w := f.worker()
		ok, first := w.next(t.Context())
		require.True(t, ok)
		require.True(t, first, "so the worker has the driver look")
		f.d.publishAhead(f.e, f.p)
		var blocks []int
		for b := f.e.current.Load(); b != nil; b = b.next.Load() {
			blocks = append(blocks, b.claims)
		}
		require.Equal(t, test.blocks, blocks, "%+v", test)
		for claims := 1; claims < blocks[0]; claims++ {
			w.begin(claim{})
			ok, first = w.next(t.Context())
			require.True(t, ok)
			require.False(t, first, "another block follows")
		}
	}
}

// While there is a claim for each worker, a block waits until it can have all its batches.
func TestShortBlocksAreForIdleWorkers(t *testing.T) {
	t.Parallel()
	f := newBlocks(t, 47, nil)
	all := f.takeAll()
	f.release(0, 1)
	f.d.publishAhead(f.e, f.p)
	require.Equal(t, all[:2], f.e.last.slots, "nothing else is left to be claimed")
	f.e.current.Store(f.e.last)
	require.GreaterOrEqual(t, f.e.unclaimed(), f.l.o.Workers)
	f.release(4, 5, 6)
	f.d.publishAhead(f.e, f.p)
	require.Equal(t, all[:2], f.e.last.slots, "it would have three batches")
	f.release(7)
	f.d.publishAhead(f.e, f.p)
	require.Equal(t, all[4:8], f.e.last.slots)

	// The last block of an epoch has fewer.
	f.e.next = f.l.batches() - 1
	f.release(9)
	f.e.current.Store(f.e.last)
	f.d.publishAhead(f.e, f.p)
	require.Equal(t, all[9:10], f.e.last.slots)
	require.True(t, f.e.allPublished)

	// Idle workers do not wait for the consumer's stream, either: all slots that can be filled are one block.
	f = newBlocks(t, 400, nil)
	f.sim.Hold()
	user := stream(t, f.l.dev)
	for _, s := range f.takeAll()[:3] {
		require.NoError(t, user.Memset(s.mem, 0, 1))
		s.using.Add(user)
		f.release(s.at)
	}
	f.d.publishAhead(f.e, f.p)
	require.Equal(t, f.l.slots[:3], f.e.last.slots)
	f.sim.Release()
}

// A block has fewer batches if the slots after the first one are not free, or the GPU is
// not done with them, and waits for none.
func TestABlockEndsAtMemoryInUse(t *testing.T) {
	t.Parallel()
	f := newBlocks(t, 400, nil)
	all := f.takeAll()
	slots, _ := f.ahead()
	require.Nil(t, slots, "none is free")

	f.sim.Hold()
	copied := f.l.slots[3]
	copied.begin(0, 0, 4)
	require.True(t, f.d.copy(f.p, []*slot{copied}))
	user := stream(t, f.l.dev)
	used := f.l.slots[10]
	require.NoError(t, user.Memset(used.mem, 0, 1))
	used.using.Add(user)
	used.using.Record()
	for _, at := range []int{1, 2, 3, 4, 5, 7, 8, 9, 10, 15} {
		f.d.release(all[at])
	}
	for _, want := range [][]int{{1, 2}, {4, 5}, {7, 8, 9}, {15}} {
		slots, _ = f.ahead()
		require.Equal(t, want, slots)
	}
	slots, _ = f.ahead()
	require.Equal(t, []int{10}, slots, "the copy waits for the stream, no worker does")
	slots, _ = f.ahead()
	require.Nil(t, slots)
	require.Len(t, slices.Collect(f.d.free.all), 1)
	f.sim.Release()
	require.NoError(t, copied.wait(t.Context()))
	slots, _ = f.ahead()
	require.Equal(t, []int{3}, slots)
}

// An error of a slot's copy ends the blocks before it. The batches before it come.
func TestAnErrorOfPublishingAhead(t *testing.T) {
	t.Parallel()
	for bad := range 4 {
		f := newBlocks(t, 400, batchSet{{1, 2}})
		s := f.l.slots[bad]
		s.begin(0, 7, 4)
		f.sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
		require.True(t, f.d.copy(f.p, []*slot{s}))
		require.NoError(t, s.wait(t.Context()))

		_, numbers := f.ahead()
		require.Equal(t, []int{0, 2, 3}[:bad], append([]int{}, numbers...))
		require.True(t, f.e.allPublished)
		next := []int{0, 2, 3, 4}[bad]
		require.NoError(t, f.e.failedBefore(next-1))
		err := f.e.failedBefore(next)
		require.ErrorIs(t, err, cudart.ErrUnknown)
		require.ErrorContains(t, err, fmt.Sprintf("loader: batch %d of epoch 0: copy of batch 7: ", next))
	}
}

// Workers that wait get the claims of the next block, as many as it has; the others wait on.
// They are woken when there is no other block, or the loop ends.
func TestWaitingForABlock(t *testing.T) {
	t.Parallel()
	const workers = 7
	for _, ending := range []string{"all opened", "failed", "stopped"} {
		f := newBlocks(t, 32, nil) // two blocks
		all := f.takeAll()
		f.d.requests.Store(1) // drive in the test
		got := make(chan claim, workers)
		for range workers {
			go func() {
				c, again := f.d.wait(f.e, f.e.last)
				if again {
					c = claim{}
				}
				got <- c
			}()
		}
		require.Eventually(t, func() bool {
			f.d.mu.Lock()
			defer f.d.mu.Unlock()
			return f.e.waiting == workers
		}, time.Minute, time.Millisecond)
		f.d.publishAhead(f.e, f.p)
		require.True(t, f.d.starving.Load())
		for _, s := range all {
			f.d.release(s)
		}
		require.False(t, f.d.starving.Load())
		require.EqualValues(t, 3, f.d.requests.Load(), "the first that waits, and the first slot")
		f.d.collect()
		f.d.publish(f.e, f.d.newBlock(f.e, f.d.usable(f.l.layout.block)))
		seen := make(map[claim]bool)
		for range 4 {
			c := <-got
			require.NotNil(t, c.s)
			seen[c] = true
		}
		require.Len(t, seen, 4, "each has its own")
		require.Empty(t, got)
		require.Equal(t, workers-4, f.e.waiting)
		require.Zero(t, f.e.ahead(), "no other worker finds them")
		switch ending {
		case "all opened":
			f.d.publish(f.e, f.d.newBlock(f.e, f.d.usable(f.l.layout.block)))
			require.True(t, f.e.allPublished)
			for range workers - 4 {
				require.NotNil(t, (<-got).s)
			}
		case "failed":
			f.e.fail(1, errBad)
			f.d.publishAhead(f.e, f.p)
			for range workers - 4 {
				require.Zero(t, <-got)
			}
		case "stopped":
			f.d.setStopped(f.e, true)
			for range workers - 4 {
				require.Zero(t, <-got)
			}
			c, again := f.d.wait(f.e, f.e.last)
			require.Zero(t, c)
			require.False(t, again)
		}
		require.Zero(t, f.e.waiting)
		f.d.requests.Store(0)
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

// Where few batches suffice, few are used: those of the block that is being filled and of the
// one that is open after it, and two that are on their way.
func TestTheLoaderUsesOnlyTheSlotsThatItNeeds(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	const batch = 4
	for _, width := range []int{8, 1 << 18} { // blocks of 8 batches, and of one
		next := make(chan struct{}, 1) // lets the next batch be read
		good := numbered(200, width)
		l := newLoaderFor(t, dev, Func(200, []int{width}, func(ctx context.Context, i int, sample [][]byte) error {
			if i%batch == 0 {
				<-next
			}
			return good.Read(ctx, i, sample)
		}), Options{BatchSize: batch, Workers: 1, Prefetch: 32})
		next <- struct{}{}
		used := make(map[cudart.DevPtr]bool)
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			require.NoError(t, b.Wait(t.Context()))
			used[b.Field(0)] = true
			if b.Number() < 49 {
				next <- struct{}{}
			}
		}
		require.LessOrEqual(t, len(used), 2*l.layout.block+2, "of %d", len(l.slots))
	}
}
