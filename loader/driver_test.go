package loader

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// driven is a driver of an epoch without workers: its test does what they do.
type driven struct {
	*testing.T
	sim *cudasim.Sim
	l   *Loader
	d   *driver
	e   *epoch
	p   *loop
}

func newDriven(t *testing.T, src Source, o Options, done batchSet) *driven {
	t.Helper()
	return newDrivenOn(t, cudasim.Link{}, src, o, done)
}

func newDrivenOn(t *testing.T, link cudasim.Link, src Source, o Options, done batchSet) *driven {
	t.Helper()
	sim, dev := simulated(t, link)
	l := newLoaderFor(t, dev, src, o)
	e := newEpoch(l, 0, done)
	f := &driven{t, sim, l, &l.driver, e, &loop{e: e}}
	f.p.ctx, f.p.cancel = context.WithCancelCause(t.Context())
	e.loop.Store(f.p)
	l.epoch.Store(e)
	f.d.begin(e)
	t.Cleanup(func() {
		sim.Release()
		f.p.cancel(context.Canceled)
	})
	return f
}

// takeAll takes all slots.
func (f *driven) takeAll() []*slot {
	clear(f.d.free.bits)
	return f.l.slots
}

// worker returns a worker of the epoch.
func (f *driven) worker() *worker {
	w := new(worker)
	w.init(f.l)
	w.e = f.e
	return w
}

// newSending has batches of a field of 300 bytes, which wait for others until the link has
// room.
func newSending(t *testing.T, batches, batch int) *driven {
	t.Helper()
	f := newDriven(t, numbered(batches*batch, 300), Options{BatchSize: batch, Prefetch: batches - 1}, nil)
	require.Len(t, f.takeAll(), batches)
	f.d.maxHold = time.Hour
	return f
}

// fill fills a slot with a batch.
func (f *driven) fill(slot, number int) *slot {
	one := f.l.slots[slot]
	n := f.l.layout.samples
	one.begin(0, number, n)
	for at := range n {
		one.indices[at] = number*n + at
		writeSample(one.host[at*300:(at+1)*300], one.indices[at], 0)
	}
	return one
}

// arrived returns the batches that have arrived.
func (f *driven) arrived() []*slot {
	for len(f.e.arrived) > 0 {
		f.e.ready = append(f.e.ready, <-f.e.arrived...)
	}
	return f.e.ready
}

// next takes the first batch that has arrived.
func (f *driven) next() *slot {
	one := f.arrived()[0]
	f.e.ready = f.e.ready[1:]
	return one
}

// complete hands in batches, and drives.
func (f *driven) complete(slots ...*slot) {
	for _, one := range slots {
		f.e.filled <- one
	}
	if f.d.requests.Add(1) == 1 {
		f.d.drive()
	}
}

// sendTogether hands in batches at once. None waits for others.
func (f *driven) sendTogether(slots ...*slot) {
	f.d.waited = true
	f.complete(slots...)
}

// copies returns how many copies there were.
func (s *driven) copies() int { return s.sim.Calls("cudaMemcpyAsync") }

// requireArrived requires that the batches have arrived, in this order, and that the
// device has what is in them.
func (s *driven) requireArrived(numbers ...int) {
	s.Helper()
	var got []int
	for len(s.arrived()) > 0 {
		one := s.next()
		got = append(got, one.number)
		require.NoError(s, one.copied.Wait(s.Context()))
		mem, err := download(s.l.dev, one.mem, len(one.indices)*300)
		require.NoError(s, err)
		want := make([]byte, 300)
		for at, i := range one.indices {
			writeSample(want, i, 0)
			require.Equal(s, want, mem[at*300:(at+1)*300], "batch %d, sample %d", one.number, i)
		}
	}
	require.Equal(s, numbers, got)
}

// Workers that do not drive go on during a call that does not return.
func TestAGoroutineOfItsOwnDrives(t *testing.T) {
	t.Parallel()
	s := newSending(t, 3, 4)
	s.d.apart.Store(true)
	unblock := s.sim.Block("cudaMemcpyAsync", cudasim.Fault{})
	for i := range 3 {
		s.e.filled <- s.fill(i, i)
		require.True(t, s.p.tryDrive())
	}
	unblock()
	require.Eventually(t, func() bool { return len(s.arrived()) == 3 && s.d.requests.Load() == 0 }, time.Minute, time.Millisecond)
	s.requireArrived(0, 1, 2)
}

// Neighbours that are filled at once are one copy, whichever was filled first.
func TestNeighboursAreOneCopy(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		slots, numbers []int
		copies         int
	}{
		{[]int{0, 1, 2, 3}, []int{0, 1, 2, 3}, 1},
		{[]int{2, 0, 3, 1}, []int{2, 0, 3, 1}, 1},
		{[]int{0, 1, 3, 4}, []int{0, 1, 2, 3}, 2},
		{[]int{5, 0, 1}, []int{0, 1, 2}, 2}, // round the end of the memory
		{[]int{3, 2, 1}, []int{0, 1, 2}, 3}, // the wrong way round
	} {
		s := newSending(t, 6, 4)
		before := s.copies()
		var slots []*slot
		for i, slot := range test.slots {
			slots = append(slots, s.fill(slot, test.numbers[i]))
		}
		s.sendTogether(slots...)
		require.Equal(t, test.copies, s.copies()-before, "%+v", test)
		s.requireArrived(slices.Sorted(slices.Values(test.numbers))...)
		require.Equal(t, len(test.slots)*4, s.l.Stats().Samples)
		s.d.meter.collect()
		require.EqualValues(t, len(test.slots)*4*300, s.d.meter.measured.Load()+s.d.meter.unmeasured.Load())
	}
}

// A batch that is not full is a copy of what it has, alone, and goes with its
// neighbours as it is.
func TestAShortBatchSharesACopy(t *testing.T) {
	t.Parallel()
	s := newSending(t, 4, 4)
	short := func(slot int) *slot {
		one := s.fill(slot, slot)
		one.skip(1)
		one.skip(2)
		one.compact(&s.l.layout)
		return one
	}
	none := s.fill(2, 2)
	for at := range 4 {
		none.skip(at)
	}
	none.compact(&s.l.layout)
	s.sendTogether(s.fill(0, 0), short(1), none, s.fill(3, 3))
	s.requireArrived(0, 1, 2, 3)
	require.Equal(t, 4+2+0+4, s.l.Stats().Samples)
	require.Equal(t, 1, s.copies())
}

// One copy takes so many bytes at the most.
func TestACopyIsNotTooLong(t *testing.T) {
	t.Parallel()
	const batch = maxCopy / 3 / 300 // three of them fit
	s := newSending(t, 7, batch)
	require.Equal(t, 3, maxCopy/s.l.layout.bytes)
	var slots []*slot
	for i := range 7 {
		slots = append(slots, s.fill(i, i))
	}
	s.sendTogether(slots...)
	require.Equal(t, 3, s.copies())
	s.requireArrived(0, 1, 2, 3, 4, 5, 6)
}

// A batch does not go with one whose memory the consumer's stream still uses.
func TestNoCopyWaitsForTheNextOnesMemory(t *testing.T) {
	t.Parallel()
	s := newSending(t, 4, 4)
	user := stream(t, s.l.dev)
	gate := make(chan struct{})
	require.NoError(t, user.LaunchHostFunc(func() { <-gate }))
	s.l.slots[2].using.Add(user)
	s.sendTogether(s.fill(0, 0), s.fill(1, 1), s.fill(2, 2), s.fill(3, 3))
	require.Equal(t, 2, s.copies())
	for range 2 {
		one := s.next()
		require.NoError(t, one.copied.Wait(t.Context()), "the stream is busy, and the batch is there")
	}
	require.False(t, s.l.slots[2].copied.Done(t.Context()))
	close(gate)
	s.requireArrived(2, 3)
}

// While two copies are on their way, batches wait for one another, and go when the
// link has room although no worker comes by.
func TestBatchesWaitWhileTheLinkIsBusy(t *testing.T) {
	t.Parallel()
	s := newSending(t, 7, 4)
	s.sim.Hold()
	for i := range 2 {
		s.complete(s.fill(i, i))
		require.Equal(t, i+1, s.copies(), "the link has room")
		require.Len(t, s.arrived(), i+1)
	}
	for i := range 5 {
		s.complete(s.fill(2+i, 2+i))
	}
	require.Equal(t, 2, s.copies())
	require.Len(t, s.arrived(), 2)
	s.sim.Release()
	require.Eventually(t, func() bool { return len(s.arrived()) == 7 }, time.Minute, time.Millisecond)
	require.Equal(t, 3, s.copies())
	s.requireArrived(0, 1, 2, 3, 4, 5, 6)
}

// While batches are held, a worker that has filled another one leaves it: the goroutine that waits for the link
// drives, or the worker with which a quarter of a copy is filled.
func TestWorkersDoNotDriveForHeldBatches(t *testing.T) {
	t.Parallel()
	const batch = maxCopy / 16 / 300 // 16 of them fit
	s := newSending(t, 10, batch)
	require.Equal(t, 16, maxCopy/s.l.layout.bytes)
	s.sim.Hold()
	finish := func(i int) (due bool) {
		one := s.fill(i, i)
		w := &worker{l: s.l, e: s.e, claim: claim{one, 0, batch}}
		return w.finishClaim()
	}
	for i := range 3 {
		require.True(t, finish(i), "none is held")
		s.complete()
	}
	require.True(t, s.d.holding.Load())
	require.Equal(t, 2, s.copies())
	for i := 3; i < 6; i++ {
		require.False(t, finish(i), "three and the one that is held are no copy")
	}
	require.True(t, finish(6))
	s.complete()
	require.False(t, finish(7), "the driver has the others")
	require.Equal(t, 2, s.copies())
	s.sim.Release()
	require.Eventually(t, func() bool { return len(s.arrived()) == 8 }, time.Minute, time.Millisecond)
	s.requireArrived(0, 1, 2, 3, 4, 5, 6, 7)
}

// Batches that are enough for a copy do not wait.
func TestBatchesThatFillACopyDoNotWait(t *testing.T) {
	t.Parallel()
	const batch = maxCopy / 3 / 300
	s := newSending(t, 6, batch)
	s.sim.Hold()
	for i := range 5 {
		s.complete(s.fill(i, i))
		require.Equal(t, []int{1, 2, 2, 2, 3}[i], s.copies(), "batch %d", i)
	}
	large := newSending(t, 4, maxCopy/2/300+1) // two do not fit
	large.sim.Hold()
	for i := range 4 {
		large.complete(large.fill(i, i))
		require.Equal(t, i+1, large.copies())
	}
}

// A device that waits for what the loop does next holds up no batch.
func TestBatchesDoNotWaitForADeviceThatWaits(t *testing.T) {
	t.Parallel()
	const n = 20
	_, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(n*4, 8), Options{BatchSize: 4, Prefetch: n})
	gate := make(chan struct{})
	require.NoError(t, l.stream.LaunchHostFunc(func() { <-gate }))
	got := 0
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if got++; got == n {
			close(gate)
		}
	}
	require.Equal(t, n, got)
}

// Batches that wait for others are copied when the loop is left, as the next one gets them;
// not if the epoch has ended, or an error comes before them.
func TestBatchesThatWaitWhenTheLoopEnds(t *testing.T) {
	t.Parallel()
	for _, ending := range []string{"left", "over", "failed"} {
		s := newSending(t, 6, 4)
		s.sim.Hold()
		for i := range 5 {
			s.complete(s.fill(i, i))
		}
		require.Equal(t, 2, s.copies())
		arrives := 5
		switch ending {
		case "over":
			arrives = 2
			s.l.epoch.Store(nil)
		case "failed":
			arrives = 3
			s.e.fail(3, errBad)
		}
		s.p.cancel(nil)
		require.Eventually(t, func() bool { return len(s.arrived()) == arrives && !s.d.holding.Load() && s.d.requests.Load() == 0 }, time.Minute, time.Millisecond)
		s.sim.Release()
		s.requireArrived([]int{0, 1, 2, 3, 4}[:arrives]...)
	}
}

// A copy of several batches that fails ends the epoch before the first of them, and
// their memory stays until the device is done with what was queued.
func TestACopyOfSeveralBatchesThatFails(t *testing.T) {
	t.Parallel()
	s := newSending(t, 6, 4)
	s.sendTogether(s.fill(0, 0))
	s.sim.Hold()
	require.NoError(t, s.l.stream.CopyOnDevice(s.l.slots[5].mem, s.l.slots[4].mem, 8)) // what was queued of it
	s.sim.Fail("cudaMemcpyAsync", cudasim.Fault{Code: cudart.ErrInvalidValue})
	s.sendTogether(s.fill(1, 1), s.fill(2, 2), s.fill(3, 3))
	err := s.e.failedBefore(1)
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorContains(t, err, "loader: copy batches 1 to 3 of epoch 0: ")
	require.NoError(t, s.e.failedBefore(0))
	for _, one := range s.l.slots[1:4] {
		require.False(t, one.copied.Done(t.Context()), "batch %d", one.number)
	}
	require.Equal(t, 4, s.l.Stats().Samples)
	s.sim.Release()
	for _, one := range s.l.slots {
		require.NoError(t, one.wait(t.Context()))
	}
}

// An epoch in which all goes together is as any other, also where the loop keeps
// batches and samples are skipped.
func TestEpochsOfBatchesThatShareCopies(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{
		{BatchSize: 4, Workers: 3, Prefetch: 9, Shuffle: true},
		{BatchSize: 4, Workers: 9, Prefetch: 9, Unordered: true},
		{BatchSize: 1, Workers: 4, Prefetch: 30},
		{BatchSize: 4, Workers: 3, Prefetch: 9, SkipErrors: true},
	} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			sim, dev := simulated(t, cudasim.Link{HostToDevice: late(200 * time.Microsecond)})
			s := stream(t, dev)
			src := newFailing(201, 5, 300)
			if o.SkipErrors {
				src.read = only(7, 8, 9, 10, 11, 100, 200)
			}
			l := newLoaderFor(t, dev, src, o)
			var retained []*Batch
			for range 3 {
				seen := 0
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					seen += b.Len()
					if len(retained) > 2 {
						requireBatch(t, retained[0], s, 5, 300)
						require.NoError(t, retained[0].Release())
						retained = retained[1:]
					}
					b.Retain()
					retained = append(retained, b)
				}
				if o.SkipErrors {
					seen += 7
				}
				require.Equal(t, 201, seen)
			}
			for _, b := range retained {
				requireBatch(t, b, s, 5, 300)
				require.NoError(t, b.Release())
			}
			t.Logf("%d copies of %d batches", sim.Calls("cudaMemcpyAsync"), l.Stats().Batches)
		})
	}
}

// What batches of one copy cost the consumer: its stream waits once for all of them, and
// records an event where it has queued work since the last one, for all batches but the
// last, which the next Use is to do.
func TestBatchesOfOneCopyShareCalls(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		slots          []int
		works          bool
		waits, records int
	}{
		{[]int{0, 1, 2, 3, 4, 5}, false, 1, 1},
		{[]int{0, 1, 2, 3, 4, 5}, true, 1, 5},
		{[]int{3, 4, 5, 0, 1, 2}, false, 2, 2}, // two copies
		{[]int{3, 4, 5, 0, 1, 2}, true, 2, 5},
	} {
		s := newSending(t, 6, 4)
		s.sim.Hold()
		var slots []*slot
		for number, slot := range test.slots {
			slots = append(slots, s.fill(slot, number))
		}
		s.sendTogether(slots...)
		require.Equal(t, test.waits, s.copies())
		user := stream(t, s.l.dev)
		calls := func() []int {
			var n []int
			for _, fn := range []string{"cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery", "cudaMemsetAsync"} {
				n = append(n, s.sim.Calls(fn))
			}
			return n
		}
		before, work := calls(), 0
		for len(s.arrived()) > 0 {
			s.p.deliver(s.next(), func(b *Batch, _ error) bool {
				require.NoError(t, b.Use(user))
				require.NoError(t, b.Use(user), "again")
				if test.works {
					work++
					require.NoError(t, user.Memset(b.Field(0), 0, 300))
				}
				return true
			})
		}
		after := calls()
		for i := range after {
			after[i] -= before[i]
		}
		require.Equal(t, []int{test.waits, test.records, 0, work}, after, "%+v", test)
		require.Zero(t, lent(s.l))

		// The stream's last event stands for all of its work on the batches.
		s.sim.Release()
		require.NoError(t, slots[5].wait(t.Context()))
		looks := s.sim.Calls("cudaEventQuery")
		for _, one := range slots {
			require.True(t, one.completed(), "batch %d", one.number)
		}
		require.Equal(t, looks, s.sim.Calls("cudaEventQuery"))
	}
}

// A stream that need not wait for a batch again is not done with it before it was copied.
func TestBatchesOfOneCopyAreWaitedFor(t *testing.T) {
	t.Parallel()
	s := newSending(t, 3, 4)
	user := stream(t, s.l.dev)
	all := newLog(t, user, 3, 4*300)
	s.sim.Hold()
	s.sendTogether(s.fill(0, 0), s.fill(1, 1), s.fill(2, 2))
	require.Equal(t, 1, s.copies())
	for len(s.arrived()) > 0 {
		s.p.deliver(s.next(), func(b *Batch, _ error) bool {
			all.add(b)
			return true
		})
	}
	for _, one := range s.l.slots {
		require.False(t, one.using.Done(t.Context()))
	}
	s.sim.Release()
	all.requireAll()
}

// Events for the ends of a batch's work may be recorded when its memory is another batch's.
// Work on that is waited for all the same.
func TestTheNextUseRecordsTheEndsOfABatch(t *testing.T) {
	t.Parallel()
	s := newSending(t, 2, 4)
	users := []*cudart.Stream{stream(t, s.l.dev), stream(t, s.l.dev)}
	use := func(number int, then func()) {
		s.sendTogether(s.fill(0, number))
		s.p.deliver(s.next(), func(b *Batch, _ error) bool {
			for _, user := range users {
				require.NoError(t, b.Use(user))
				require.NoError(t, user.Memset(b.Field(0), 0, 8))
			}
			then()
			return true
		})
	}
	use(0, func() {})
	last := s.l.unrecorded.Swap(nil)
	require.Len(t, last.ends, 2, "of both streams")
	use(1, func() {
		last.recordEnds()
		require.NoError(t, s.l.dev.Synchronize(t.Context()))
		s.sim.Hold()
		require.NoError(t, users[1].Memset(s.l.slots[0].mem, 0, 8))
	})
	require.False(t, s.l.slots[0].using.Done(t.Context()))
	s.sim.Release()
	require.NoError(t, s.l.slots[0].wait(t.Context()))
}

// take takes slots while there is one to be filled, and returns which they are.
func (f *driven) take() (order []int) {
	f.d.collect()
	for slots := f.d.usable(1); slots != nil; slots = f.d.usable(1) {
		f.d.free.remove(slots[0])
		order = append(order, slots[0].at)
	}
	return order
}

func (f *driven) release(slots ...int) {
	for _, at := range slots {
		f.d.release(f.l.slots[at])
	}
}

// The slot that is filled next is the first one that the GPU is done with, whichever
// was released first; or else the one whose copy was queued first, if that is done.
func TestTheFirstCompletedSlotIsUsed(t *testing.T) {
	t.Parallel()
	f := newDriven(t, numbered(100, 8), Options{BatchSize: 4, Prefetch: 4}, nil)
	require.Equal(t, []int{0, 1, 2, 3, 4}, f.take())
	f.release(3, 1, 4, 0, 2)
	require.Equal(t, []int{0, 1, 2, 3, 4}, f.take())

	// Copies of 3, 0 and 1 are under way, and a stream uses 2.
	for _, s := range f.l.slots {
		s.begin(0, 0, 4)
	}
	f.sim.Hold()
	for _, at := range []int{3, 0, 1} {
		require.True(t, f.d.copy(f.p, f.l.slots[at:at+1]))
	}
	user, dev := stream(t, f.l.dev), f.l.dev
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	use := func(s *slot) {
		require.NoError(t, user.CopyOnDevice(mem, s.mem, 8))
		s.using.Add(user)
	}
	use(f.l.slots[2])
	use(f.l.slots[3])
	f.release(0, 1, 2, 3, 4)
	require.Equal(t, []int{4, 2}, f.take(), "2 was never copied")
	first, oldest := f.d.free.completed()
	require.Nil(t, first)
	require.Equal(t, f.l.slots[3], oldest)
	f.release(2, 4)
	f.sim.Release()
	for _, s := range f.l.slots {
		require.NoError(t, s.wait(t.Context()))
	}
	require.Equal(t, []int{0, 1, 2, 3, 4}, f.take())

	// The GPU is done with 2, which is not known yet.
	use(f.l.slots[2])
	f.l.slots[2].using.Record()
	done := make(chan struct{})
	require.NoError(t, user.LaunchHostFunc(func() { close(done) }))
	<-done
	require.False(t, f.l.slots[2].completed())
	f.release(4, 2)
	require.Equal(t, []int{2, 4}, f.take())
	require.NoError(t, dev.Free(mem))
}

// The slots after the first one in memory are used as far as they are free and the GPU is done with them.
func TestUsableNeighbours(t *testing.T) {
	t.Parallel()
	f := newDriven(t, numbered(100, 8), Options{BatchSize: 4, Prefetch: 4}, nil)
	slots := f.l.slots
	require.Equal(t, slots[:2], f.d.usable(2))
	require.Equal(t, slots, f.d.usable(5))
	require.Equal(t, slots, f.d.usable(9), "there are no more")
	f.d.free.remove(slots[3])
	require.Equal(t, slots[:3], f.d.usable(5), "3 is not free")
	f.d.free.remove(slots[0])
	f.d.free.add(slots[3])
	f.sim.Hold()
	slots[3].begin(0, 0, 4)
	require.True(t, f.d.copy(f.p, slots[3:4]))
	require.Equal(t, slots[1:3], f.d.usable(5), "3 is being copied")
	f.sim.Release()
	require.NoError(t, slots[3].wait(t.Context()))
	require.Equal(t, slots[1:], f.d.usable(5))
}
