package loader

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// sending is an epoch without workers: its test completes the batches, of a field of
// 300 bytes.
type sending struct {
	*testing.T
	sim *cudasim.Sim
	l   *Loader
	e   *epoch
	q   *sender
}

// newSending has batches that wait for others until the link has room.
func newSending(t *testing.T, batches, batch int) *sending {
	t.Helper()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(batches*batch, 300), Options{BatchSize: batch, Prefetch: batches - 1})
	require.Len(t, l.slots, batches)
	e := &epoch{l: l, badly: math.MaxInt, failed: make(chan struct{}, 1), arrived: make(chan *slot, batches)}
	e.ctx, e.cancel = context.WithCancelCause(t.Context())
	e.sender = newSender(e)
	e.sender.holdFor = time.Hour
	for range batches {
		l.free.take(t.Context())
	}
	s := &sending{T: t, sim: sim, l: l, e: e, q: e.sender}
	t.Cleanup(func() {
		sim.Release()
		e.cancel(context.Canceled)
		e.workers.Wait()
	})
	return s
}

// fill fills a slot with a batch.
func (s *sending) fill(slot, number int) *slot {
	one := s.l.slots[slot]
	n := s.l.layout.samples
	one.begin(0, number, n)
	for at := range n {
		one.indices[at] = number*n + at
		writeSample(one.host[at*300:(at+1)*300], one.indices[at], 0)
	}
	return one
}

// sendTogether completes the batches of slots at once. None waits for others.
func (s *sending) sendTogether(slots ...*slot) {
	for _, one := range slots {
		s.q.filled <- one
	}
	s.q.due.Store(true)
	s.q.send()
}

// copies returns how many copies there were.
func (s *sending) copies() int { return s.sim.Calls("cudaMemcpyAsync") }

// requireArrived requires that the batches have arrived, in this order, and that the
// device has what is in them.
func (s *sending) requireArrived(numbers ...int) {
	s.Helper()
	var got []int
	for len(s.e.arrived) > 0 {
		one := <-s.e.arrived
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
		for _, one := range slots {
			s.l.meter.read(one)
		}
		require.EqualValues(t, len(test.slots)*4*300, s.l.meter.measured.Load()+s.l.meter.unmeasured.Load())
	}
}

// A batch that is not full is a copy of what it has, alone, and goes with its
// neighbours as it is.
func TestShortNeighbours(t *testing.T) {
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
	const batch = copyBytes / 3 / 300 // three of them fit
	s := newSending(t, 7, batch)
	require.Equal(t, 3, copyBytes/s.l.layout.bytes)
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
		one := <-s.e.arrived
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
		s.q.complete(s.fill(i, i))
		require.Equal(t, i+1, s.copies(), "the link has room")
		require.Len(t, s.e.arrived, i+1)
	}
	for i := range 5 {
		s.q.complete(s.fill(2+i, 2+i))
	}
	require.Equal(t, 2, s.copies())
	require.Len(t, s.e.arrived, 2)
	s.sim.Release()
	require.Eventually(t, func() bool { return len(s.e.arrived) == 7 }, time.Minute, time.Millisecond)
	require.Equal(t, 3, s.copies())
	s.requireArrived(0, 1, 2, 3, 4, 5, 6)
	s.e.workers.Wait() // no goroutine is left
}

// Batches that are enough for a copy do not wait.
func TestEnoughForACopyDoesNotWait(t *testing.T) {
	t.Parallel()
	const batch = copyBytes / 3 / 300
	s := newSending(t, 6, batch)
	s.sim.Hold()
	for i := range 5 {
		s.q.complete(s.fill(i, i))
		require.Equal(t, []int{1, 2, 2, 2, 3}[i], s.copies(), "batch %d", i)
	}
	large := newSending(t, 4, copyBytes/2/300+1) // two do not fit
	large.sim.Hold()
	for i := range 4 {
		large.q.complete(large.fill(i, i))
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

// Batches that wait for others are free again when the epoch ends or an error comes
// before them.
func TestBatchesThatWaitAndAreNotWanted(t *testing.T) {
	t.Parallel()
	for _, canceled := range []bool{false, true} {
		s := newSending(t, 6, 4)
		s.sim.Hold()
		for i := range 5 {
			s.q.complete(s.fill(i, i))
		}
		require.Equal(t, 2, s.copies())
		if canceled {
			s.e.cancel(context.Canceled)
		} else {
			s.e.fail(3, errBad)
			s.sim.Release()
		}
		s.e.workers.Wait()
		if canceled {
			require.Equal(t, 3, s.l.free.count())
			require.Equal(t, 2, s.copies())
		} else {
			require.Equal(t, 2, s.l.free.count())
			s.requireArrived(0, 1, 2)
		}
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
	require.Equal(t, 3, s.l.free.count())
	for _, one := range s.l.slots[1:4] {
		require.False(t, one.copying.Done(t.Context()), "batch %d", one.number)
	}
	require.Equal(t, 4, s.l.Stats().Samples)
	s.sim.Release()
	for _, one := range s.l.slots {
		require.NoError(t, one.wait(t.Context()))
	}
}

// An epoch in which all goes together is as any other, also where the loop keeps
// batches and samples are skipped.
func TestEpochsOfBatchesThatGoTogether(t *testing.T) {
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
			var kept []*Batch
			for range 3 {
				seen := 0
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					seen += b.Len()
					if len(kept) > 2 {
						requireBatch(t, kept[0], s, 5, 300)
						require.NoError(t, kept[0].Release())
						kept = kept[1:]
					}
					b.Keep()
					kept = append(kept, b)
				}
				if o.SkipErrors {
					seen += 7
				}
				require.Equal(t, 201, seen)
			}
			for _, b := range kept {
				requireBatch(t, b, s, 5, 300)
				require.NoError(t, b.Release())
			}
			t.Logf("%d copies of %d batches", sim.Calls("cudaMemcpyAsync"), l.Stats().Batches)
		})
	}
}

// What batches of one copy cost the consumer: its stream waits once for all of them, and
// records an event where it has queued work since the last one.
func TestBatchesOfOneCopyShareCalls(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		slots          []int
		works          bool
		waits, records int
	}{
		{[]int{0, 1, 2, 3, 4, 5}, false, 1, 1},
		{[]int{0, 1, 2, 3, 4, 5}, true, 1, 6},
		{[]int{3, 4, 5, 0, 1, 2}, false, 2, 2}, // two copies
		{[]int{3, 4, 5, 0, 1, 2}, true, 2, 6},
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
		for len(s.e.arrived) > 0 {
			s.e.give(<-s.e.arrived, func(b *Batch, _ error) bool {
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
		require.Equal(t, 6, s.l.free.count())

		// The stream's last event stands for all of its work on the batches.
		s.sim.Release()
		require.NoError(t, slots[5].wait(t.Context()))
		looks := s.sim.Calls("cudaEventQuery")
		for _, one := range slots {
			require.True(t, one.knownDone(), "batch %d", one.number)
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
	for len(s.e.arrived) > 0 {
		s.e.give(<-s.e.arrived, func(b *Batch, _ error) bool {
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
