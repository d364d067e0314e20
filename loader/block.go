package loader

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
)

// A block is one or more batches whose samples workers claim: several if they are small,
// because one would be claimed before a worker has woken up. Each block is a new object: a
// late worker may still hold a pointer to an old one.
type block struct {
	slots   []*slot // neighbours in memory
	size    int     // samples of a claim
	each    int     // claims of a full batch
	claims  int     // of all batches
	before  int     // claims of all earlier blocks
	claimed atomic.Int64
	next    atomic.Pointer[block]
}

// A claim is samples of one batch that a worker has to fill.
type claim struct {
	s        *slot
	from, to int // positions in the batch
}

// divide divides the batches into claims. All of them are full but the last.
func (b *block) divide(l *Loader) {
	pieces := func(n, size int) int { return (n + size - 1) / size }
	last := len(b.slots) - 1
	b.size = l.layout.claimSize(len(b.slots), l.o.Workers)
	b.each = pieces(l.layout.samples, b.size)
	b.claims = last*b.each + pieces(len(b.slots[last].indices), b.size)
}

// at returns claim n.
func (b *block) at(n int) claim {
	s, from := b.slots[n/b.each], n%b.each*b.size
	return claim{s, from, min(from+b.size, len(s.indices))}
}

// open opens blocks until as many claims as there are workers are open beside the block
// that they claim from, so that no worker has to wait for the next one. If workers wait and
// there is no slot, it has a request made when there is.
func (d *driver) open(e *epoch, p *loop) {
	for !e.opened && e.ahead() < d.l.o.Workers {
		d.sort()
		if b := d.newBlock(e); b != nil || e.ends() {
			d.publish(e, b)
			continue
		}
		d.mu.Lock()
		released := len(d.released) > 0
		starving := e.waiting > 0 && !released
		d.starving = starving
		d.mu.Unlock()
		if released {
			continue
		}
		if starving && len(d.free) > 0 {
			d.afterCopy(p, d.free[d.oldest()].copied, e.next)
		}
		return
	}
}

// newBlock readies the next batches, on a free slot and those that follow it in memory. It
// returns nil if there is none. If a slot's last copy has failed, the epoch ends before the
// batch.
func (d *driver) newBlock(e *epoch) *block {
	b := &block{before: e.last.before + e.last.claims}
	for len(b.slots) < d.l.layout.block && !e.ends() {
		s := d.take(b.slots)
		if s == nil {
			break
		}
		if err := s.failed(e); err != nil {
			e.fail(e.next, fmt.Errorf("loader: batch %d of epoch %d: %w", e.next, e.number, err))
			break
		}
		s.begin(e.number, e.next, d.l.sizeOf(e.next))
		b.slots = append(b.slots, s)
		e.next++
	}
	if b.slots == nil {
		return nil
	}
	b.divide(d.l)
	return b
}

// publish lets workers claim from a block, if it is not nil. Those that wait get their
// claims with it: they need no lock when they wake up. The others learn of the end.
func (d *driver) publish(e *epoch, b *block) {
	d.mu.Lock()
	handed := 0
	if b != nil {
		handed = min(e.waiting, b.claims)
		b.claimed.Store(int64(handed))
		e.last.next.Store(b)
		e.last = b
		if handed > 0 { // nothing is left of the blocks before
			e.blocks.Store(b)
		}
	}
	woken := handed
	if e.opened = e.ends(); e.opened {
		woken = e.waiting
	}
	e.waiting -= woken
	d.mu.Unlock()
	for i := range woken {
		var c claim
		if i < handed {
			c = b.at(i)
		}
		e.handed <- c
	}
}

// wait waits for a block after b, of which nothing is left, and returns a claim from it;
// none if the epoch has no other block, or the loop ends. If the block is there, again is
// true.
func (d *driver) wait(e *epoch, b *block) (c claim, again bool) {
	d.mu.Lock()
	if again = b.next.Load() != nil; again || e.stopped || e.opened {
		d.mu.Unlock()
		return c, again
	}
	e.waiting++
	first := e.waiting == 1
	d.mu.Unlock()
	if first {
		d.request()
	}
	return <-e.handed, false
}

// setStopped sets whether workers may wait for a block, and wakes those that do.
func (d *driver) setStopped(e *epoch, stopped bool) {
	d.mu.Lock()
	woken := e.waiting
	e.waiting, e.stopped = 0, stopped
	d.mu.Unlock()
	for range woken {
		e.handed <- claim{}
	}
}

// sort moves the slots that were released to their places among those that are free.
func (d *driver) sort() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.released {
		d.free = slices.Insert(d.free, d.place(s.off), s)
	}
	d.released = d.released[:0]
}

// place returns where among the free slots the first one at or after an offset is.
func (d *driver) place(off int) int {
	at, _ := slices.BinarySearchFunc(d.free, off, func(s *slot, off int) int { return cmp.Compare(s.off, off) })
	return at
}

// take removes the slot that is to be filled next: after the slots of a block the one that
// follows them, if the GPU is done with it; for a new block the first one in memory with
// which it is. So only as many slots are used as the pace needs, which stay in the
// processors' caches, and batches that follow one another are neighbours. If the GPU is done
// with none, it is the one whose copy was queued first. It returns nil if there is none, or
// its copy is not done.
func (d *driver) take(block []*slot) *slot {
	if len(d.free) == 0 {
		return nil
	}
	var at int
	if n := len(block); n > 0 {
		off := block[n-1].off + d.l.layout.bytes
		if at = d.place(off); at == len(d.free) || d.free[at].off != off || !d.free[at].done() {
			return nil
		}
	} else {
		if !d.free[0].knownDone() {
			d.free[d.oldest()].done() // so that it is known
		}
		if at = slices.IndexFunc(d.free, (*slot).knownDone); at < 0 {
			at = d.oldest()
		}
	}
	s := d.free[at]
	if !s.copied.Known() {
		return nil
	}
	d.free = slices.Delete(d.free, at, at+1)
	return s
}

// oldest returns which free slot the GPU is done with next, of those with which it is not
// known to be done.
func (d *driver) oldest() (at int) {
	first := math.MaxInt
	for i, s := range d.free {
		if s.copyNumber < first && !s.knownDone() {
			at, first = i, s.copyNumber
		}
	}
	return at
}
