package loader

import (
	"context"
	"fmt"
	"sync/atomic"
)

// An opening is a block of batches whose samples are being claimed: one batch, or
// several small ones, which take less time to fill than a worker takes to wake up. It is
// made anew for each block, since a worker may come late, when its slots are already
// others'.
type opening struct {
	slots   []*slot // neighbours in memory
	run     int     // samples of a run
	each    int     // runs of a full batch
	runs    int     // of all batches
	claimed atomic.Int64
	next    atomic.Pointer[opening]
}

// A run is samples of one batch that a worker has claimed.
type run struct {
	s        *slot
	from, to int // positions in the batch
}

// newOpening opens slots that are ready for their batches, all of them full but the last.
func newOpening(l *Loader, slots ...*slot) *opening {
	o := &opening{slots: slots}
	if last := len(slots) - 1; last >= 0 {
		o.run = l.layout.run(len(slots), l.o.Workers)
		o.each = pieces(l.layout.samples, o.run)
		o.runs = last*o.each + pieces(len(slots[last].indices), o.run)
	}
	return o
}

// pieces returns how many pieces of a size, or less, make up n.
func pieces(n, size int) int { return (n + size - 1) / size }

// claim takes the next run; there is none left if it is false.
func (o *opening) claim() (run, bool) {
	n := int(o.claimed.Add(1)) - 1
	if n >= o.runs {
		return run{}, false
	}
	s, from := o.slots[n/o.each], n%o.each*o.run
	return run{s, from, min(from+o.run, len(s.indices))}, true
}

// left returns the slots of which runs are left.
func (o *opening) left() []*slot {
	n := int(o.claimed.Load())
	if n >= o.runs {
		return nil
	}
	return o.slots[n/o.each:]
}

// openAhead opens the block after o, if that is the last one and a slot is free for it:
// workers that have to wait for it take long to wake. The caller has samples in hand,
// and must not wait for other workers.
func (e *epoch) openAhead(o *opening) {
	e.claims.Lock()
	defer e.claims.Unlock()
	if e.last == o && !e.opening {
		e.open(e.l.free.takeDone)
	}
}

// openNext returns the block after o, of which nothing is left. It opens it, or waits
// until another worker has. It waits for a free slot. It is nil if there are no more
// batches, or the epoch ends.
func (e *epoch) openNext(o *opening) *opening {
	e.claims.Lock()
	defer e.claims.Unlock()
	for e.last == o && e.opening {
		if e.ctx.Err() != nil {
			return nil
		}
		e.opened.Wait()
	}
	if e.last != o || e.open(e.l.free.wait) {
		return o.next.Load()
	}
	if e.unopened != nil && e.ctx.Err() == nil {
		e.fail(e.next, fmt.Errorf("loader: batch %d of epoch %d: %w", e.next, e.start.Epoch, e.unopened))
	}
	e.last = nil
	e.opened.Broadcast()
	return nil
}

// open opens the next block, on a slot that take returns, and reports whether there is
// one. It wakes as many of the workers that wait for it as there are runs, all at once:
// with a lock for which they queue, each would have to wake before the next one does.
func (e *epoch) open(take func(context.Context) *slot) bool {
	e.opening = true
	e.claims.Unlock()
	next := e.block(take)
	e.claims.Lock()
	e.opening = false
	if next == nil {
		e.opened.Signal() // one may wait longer than the caller
		return false
	}
	e.last.next.Store(next)
	e.last = next
	for range next.runs {
		e.opened.Signal()
	}
	return true
}

// block readies the next batches on a slot that take returns, and on those after it that
// the GPU is done with. An error is for the worker that needs the batch: as long as there
// are samples left before it, they come first.
func (e *epoch) block(take func(context.Context) *slot) *opening {
	if e.unopened != nil || !e.more() {
		return nil
	}
	l := e.l
	var slots []*slot
	for s := take(e.ctx); s != nil; s = l.free.after(e.ctx, s) {
		if e.unopened = e.reclaim(s); e.unopened != nil {
			l.free.put(s)
			break
		}
		s.begin(e.start.Epoch, e.next, l.sizeOf(e.next))
		slots = append(slots, s)
		e.next++
		if len(slots) == l.layout.block || !e.more() {
			break
		}
	}
	if slots == nil {
		return nil
	}
	return newOpening(l, slots...)
}

// more reports whether there is a batch to be opened, and sets next to it.
func (e *epoch) more() bool {
	for e.start.has(e.next) {
		e.next++
	}
	return e.next < e.l.batches()
}
