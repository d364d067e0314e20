package loader

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// The slot that is filled next is the first one that the GPU is done with, whichever
// was released first; or else the one whose copy was queued first.
func TestTheSlotThatIsFilledNext(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 4})
	require.Len(t, l.slots, 5)
	takeAll := func() (order []int) {
		for s := l.free.take(t.Context()); s != nil; s = l.free.take(t.Context()) {
			order = append(order, slices.Index(l.slots, s))
		}
		return order
	}
	put := func(slots ...int) {
		for _, at := range slots {
			l.free.put(l.slots[at])
		}
	}
	require.Equal(t, []int{0, 1, 2, 3, 4}, takeAll())
	put(3, 1, 4, 0, 2)
	require.Equal(t, []int{0, 1, 2, 3, 4}, takeAll())

	// Copies of 3, 0 and 1 are on their way, and a stream uses 2.
	for _, s := range l.slots {
		s.begin(0, 0, 4)
	}
	sim.Hold()
	for _, at := range []int{3, 0, 1} {
		require.NoError(t, l.upload(t.Context(), l.slots[at]))
	}
	user := stream(t, dev)
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	require.NoError(t, user.CopyOnDevice(mem, l.slots[2].mem, 8))
	l.slots[2].using.Add(user)
	put(0, 1, 2, 3, 4)
	require.Equal(t, []int{4, 2, 3, 0, 1}, takeAll(), "2 was never copied")
	put(0, 1, 2, 3, 4)
	sim.Release()
	for _, s := range l.slots {
		require.NoError(t, s.wait(t.Context()))
	}
	require.Equal(t, []int{0, 1, 2, 3, 4}, takeAll())

	// The GPU is done with 2, which is not known yet.
	require.NoError(t, user.CopyOnDevice(mem, l.slots[2].mem, 8))
	l.slots[2].using.Add(user)
	l.slots[2].using.Record()
	done := make(chan struct{})
	require.NoError(t, user.LaunchHostFunc(func() { close(done) }))
	<-done
	require.False(t, l.slots[2].knownDone())
	put(4, 2)
	require.Equal(t, []int{2, 4}, takeAll())
	put(0, 1, 2, 3, 4)
	require.NoError(t, dev.Free(mem))
}

// A worker waits for a slot, until its context ends.
func TestWaitingForASlot(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 3})
	var all []*slot
	for range l.slots {
		all = append(all, l.free.wait(t.Context()))
	}
	var putting sync.WaitGroup
	for _, s := range all {
		putting.Go(func() { l.free.put(s) })
	}
	for range all {
		require.NotNil(t, l.free.wait(t.Context()))
	}
	putting.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Nil(t, l.free.wait(ctx))
	for _, s := range all {
		l.free.put(s)
	}
}

// The slot after another one in memory is taken if it is free and the GPU is done with it.
func TestTheSlotAfterAnother(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 4})
	after := func(at int) *slot { return l.free.after(t.Context(), l.slots[at]) }
	first := l.free.take(t.Context())
	require.Same(t, l.slots[0], first)
	require.Same(t, l.slots[1], after(0))
	require.Nil(t, after(0), "1 is not free")
	require.Same(t, l.slots[2], after(1))
	require.Same(t, l.slots[3], after(2))
	require.Same(t, l.slots[4], after(3))
	require.Nil(t, after(4), "it is the last one")
	sim.Hold()
	l.slots[1].begin(0, 0, 4)
	require.NoError(t, l.upload(t.Context(), l.slots[1]))
	l.free.put(l.slots[3])
	l.free.put(l.slots[1])
	l.free.sort()
	require.Nil(t, after(0), "it is being copied")
	require.Same(t, l.slots[3], after(2))
	sim.Release()
	require.NoError(t, l.slots[1].wait(t.Context()))
	require.Same(t, l.slots[1], after(0))
	require.Zero(t, l.free.count())
}

// Where few batches suffice, few are used: those of the block that is being filled and of the
// one that is open after it, and two that are on their way.
func TestMemoryThatIsNotNeededIsNotUsed(t *testing.T) {
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
