package loader

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
)

// freeSlots are the slots that no batch is in. The GPU may still be using their
// memory. One goroutine at a time takes slots. Any goroutine may put one, and does not
// wait for the search of the one that takes.
type freeSlots struct {
	mu    sync.Mutex
	news  []*slot       // since the last look
	added chan struct{} // holds a token if there are any

	list []*slot // in the order of their memory, of the goroutine that takes
}

func (f *freeSlots) put(s *slot) {
	f.mu.Lock()
	f.news = append(f.news, s)
	f.mu.Unlock()
	select {
	case f.added <- struct{}{}:
	default:
	}
}

// sort moves the slots that were put to their places in the list.
func (f *freeSlots) sort() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.news {
		f.list = slices.Insert(f.list, f.place(s), s)
	}
	f.news = f.news[:0]
}

// place returns the place in the list of a slot that is not there.
func (f *freeSlots) place(s *slot) int {
	at, _ := slices.BinarySearchFunc(f.list, s, func(a, b *slot) int { return cmp.Compare(a.off, b.off) })
	return at
}

// take removes the slot that is to be filled next, nil if there is none.
//
// It is the first one in memory that the GPU is done with. So only as many are used as
// the pace needs, which then stay in the processors' caches, and batches that follow
// one another are neighbours. If the GPU is done with none, it is the one whose copy
// was queued first.
func (f *freeSlots) take(ctx context.Context) *slot {
	f.sort()
	if len(f.list) == 0 {
		return nil
	}
	if !f.list[0].knownDone() {
		f.list[f.oldest()].done(ctx) // so that it is known
	}
	at := slices.IndexFunc(f.list, (*slot).knownDone)
	if at < 0 {
		at = f.oldest()
	}
	return f.remove(at)
}

// takeDone is take of a slot whose copy is done; nil if there is none.
func (f *freeSlots) takeDone(ctx context.Context) *slot {
	s := f.take(ctx)
	if s != nil && !s.copying.Known() { // take has looked
		f.put(s)
		return nil
	}
	return s
}

// after removes the slot that follows one that was taken, in memory. It is nil unless the
// GPU is done with it.
func (f *freeSlots) after(ctx context.Context, s *slot) *slot {
	at := f.place(s)
	if at == len(f.list) || f.list[at].off != s.off+len(s.host) || !f.list[at].done(ctx) {
		return nil
	}
	return f.remove(at)
}

func (f *freeSlots) remove(at int) *slot {
	s := f.list[at]
	f.list = slices.Delete(f.list, at, at+1)
	return s
}

// oldest returns which slot the GPU is done with next, of those with which it is not
// known to be done.
func (f *freeSlots) oldest() (at int) {
	turn := math.MaxInt
	for i, s := range f.list {
		if s.turn < turn && !s.knownDone() {
			at, turn = i, s.turn
		}
	}
	return at
}

// wait is take that waits for a slot, and returns nil when ctx ends.
func (f *freeSlots) wait(ctx context.Context) *slot {
	for {
		if s := f.take(ctx); s != nil {
			return s
		}
		select {
		case <-f.added:
		case <-ctx.Done():
			return nil
		}
	}
}
