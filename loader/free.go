package loader

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// freeSlots are the slots that no batch is in. The GPU may still be using their
// memory.
type freeSlots struct {
	mu    sync.Mutex    // not held during calls into the library
	list  []*slot       // in the order of their memory
	added chan struct{} // holds a token if a slot was put since the last look
}

func (f *freeSlots) put(s *slot) {
	f.mu.Lock()
	at, _ := slices.BinarySearchFunc(f.list, s, func(a, b *slot) int { return cmp.Compare(a.off, b.off) })
	f.list = slices.Insert(f.list, at, s)
	f.mu.Unlock()
	select {
	case f.added <- struct{}{}:
	default:
	}
}

// take removes the slot that is to be filled next, nil if there is none. One
// goroutine at a time takes.
//
// It is the first one in memory that the GPU is done with. So only as many are used as
// the pace needs, which then stay in the processors' caches, and batches that follow
// one another are neighbours. If the GPU is done with none, it is the one whose copy
// was queued first.
func (f *freeSlots) take(ctx context.Context) *slot {
	first := f.first()
	switch {
	case first == nil:
		return nil
	case first.done(ctx): // which shows of others that they are done
		return f.remove(first)
	}
	f.mu.Lock()
	at := slices.IndexFunc(f.list, (*slot).knownDone)
	if at < 0 {
		first = slices.MinFunc(f.list, func(a, b *slot) int { return cmp.Compare(a.turn, b.turn) })
	} else {
		first = f.list[at]
	}
	f.mu.Unlock()
	return f.remove(first)
}

func (f *freeSlots) first() *slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) == 0 {
		return nil
	}
	return f.list[0]
}

func (f *freeSlots) remove(s *slot) *slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := slices.Index(f.list, s)
	f.list = slices.Delete(f.list, at, at+1)
	return s
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
