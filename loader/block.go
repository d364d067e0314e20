package loader

import (
	"fmt"
	"math/bits"
	"runtime"
	"sync/atomic"
	"time"
)

// A block is one or more batches whose samples workers claim: several if they are small,
// because one would be claimed before a worker has woken up. Each block is a new object: a
// late worker may still hold a pointer to an old one.
type block struct {
	slots   []*slot      // one for each batch, neighbours in memory
	size    int          // samples in a claim
	whole   bool         // each claim is a batch, which a worker fills quickly
	each    int          // claims in a full batch
	claims  int          // claims in all batches
	before  int          // claims in all earlier blocks
	claimed atomic.Int64 // claims that workers have taken, or more
	next    atomic.Pointer[block]
}

// A claim is a range of samples of one batch, which one worker fills.
type claim struct {
	s        *slot
	from, to int // positions in the batch
}

// divide divides the batches into claims. All batches but the last are full.
func (b *block) divide(l *Loader) {
	pieces := func(n, size int) int { return (n + size - 1) / size }
	last := len(b.slots) - 1
	b.size = l.layout.claimSize(len(b.slots), l.o.Workers)
	if b.whole = !l.sharesBatches(); b.whole {
		b.size = l.layout.samples
	}
	b.each = pieces(l.layout.samples, b.size)
	b.claims = last*b.each + pieces(len(b.slots[last].indices), b.size)
}

// quickBatch is the time in which a worker must fill a batch, on average, for it to be one claim.
const quickBatch = time.Millisecond

// sharesBatches reports whether several workers fill each batch at the same time. What a core has just stored
// is in its own caches, from where the GPU reads slowly: a batch that several cores have filled is there as a whole when
// it is copied, and most of one that one core has filled is not. But a source that waits needs all workers
// for one batch.
func (l *Loader) sharesBatches() bool {
	read := l.counters.samples.Load()
	if !l.plain || read == 0 || len(l.slots)-int(l.counters.retained.Load()) < minSlots(l.o.Workers) {
		return true
	}
	var spent int64
	for i := range l.workers {
		w := &l.workers[i].times
		spent += w.reading.Load() + w.transforming.Load()
	}
	return spent == 0 || time.Duration(spent/read)*time.Duration(l.layout.samples) > quickBatch
}

// minSlots returns the number of batches in memory with which each worker fills one of its own, while others
// are copied and consumed.
func minSlots(workers int) int { return 2*workers + 2 }

// at returns claim n.
func (b *block) at(n int) claim {
	s, from := b.slots[n/b.each], n%b.each*b.size
	return claim{s, from, min(from+b.size, len(s.indices))}
}

// publishAhead publishes blocks until those after the current one have a claim for each worker,
// so that no worker waits for the next block. If workers wait and there is no slot, the release
// of a slot makes a request.
func (d *driver) publishAhead(e *epoch, p *loop) {
	for !e.allPublished && e.ahead() < d.l.o.Workers {
		d.collect()
		slots := d.usable(d.l.layout.block)
		if e.unclaimed() >= d.l.o.Workers && len(slots) < min(d.l.layout.block, d.l.batches()-e.next) {
			return // soon there are more, for the same calls
		}
		if b := d.newBlock(e, slots); b != nil || e.ends() {
			d.publish(e, b)
			continue
		}
		d.mu.Lock()
		starving := e.waiting > 0
		d.mu.Unlock()
		if d.starving.Store(starving); d.collect() { // perhaps before it was set
			d.starving.Store(false)
			continue
		}
		if starving {
			first, oldest := d.free.completed()
			if first != nil { // since then
				continue
			}
			if oldest != nil {
				d.afterCopy(p, oldest.copied, e.next)
			}
		}
		return
	}
}

// newBlock prepares the next batches on slots. It returns nil if there is no slot or no batch. If a
// slot's last copy failed, the epoch ends before the batch.
func (d *driver) newBlock(e *epoch, slots []*slot) *block {
	b := &block{before: e.last.before + e.last.claims}
	for n, s := range slots {
		if e.ends() {
			break
		}
		if err := s.copyErr(e); err != nil {
			e.fail(e.next, fmt.Errorf("loader: batch %d of epoch %d: %w", e.next, e.number, err))
			break
		}
		d.free.remove(s)
		s.begin(e.number, e.next, d.l.sizeOf(e.next))
		e.next++
		b.slots = slots[:n+1]
	}
	if b.slots == nil {
		return nil
	}
	b.divide(d.l)
	d.apart.Store(b.whole && 2*d.l.o.Workers <= runtime.GOMAXPROCS(0))
	return b
}

// publish lets workers claim from a block, if it is not nil. It sends a claim to each worker
// that waits, which then needs no lock. After the last block it sends the others an empty claim.
func (d *driver) publish(e *epoch, b *block) {
	d.mu.Lock()
	handed := 0
	if b != nil {
		handed = min(e.waiting, b.claims)
		b.claimed.Store(int64(handed))
		e.last.next.Store(b)
		e.last = b
		if handed > 0 { // all earlier claims are taken
			e.current.Store(b)
		}
	}
	woken := handed
	if e.allPublished = e.ends(); e.allPublished {
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

// wait waits for the block after b, whose claims are all taken, and returns a claim of the new
// block. The claim is empty if the epoch has no other block, or the loop ends. If the block is
// published already, again is true.
func (d *driver) wait(e *epoch, b *block) (c claim, again bool) {
	d.mu.Lock()
	if again = b.next.Load() != nil; again || e.stopped || e.allPublished {
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

// setStopped sets whether workers must not wait for a block, and wakes the workers that do.
func (d *driver) setStopped(e *epoch, stopped bool) {
	d.mu.Lock()
	woken := e.waiting
	e.waiting, e.stopped = 0, stopped
	d.mu.Unlock()
	for range woken {
		e.handed <- claim{}
	}
}

// collect adds the released slots to the free ones. It reports whether there were any.
func (d *driver) collect() (some bool) {
	for i := range d.released {
		if d.released[i].Load() == 0 {
			continue
		}
		for word := d.released[i].Swap(0); word != 0; word &= word - 1 {
			s := d.l.slots[64*i+bits.TrailingZeros64(word)]
			s.lent.Store(false)
			d.free.add(s)
		}
		some = true
	}
	return some
}

// usable returns free slots to be filled: n neighbours in memory at most, with which the GPU is
// done. They begin at the first such slot. So the loader uses only as many slots as its rate needs,
// which stay in the CPU's caches. If the GPU is done with no slot, they begin at the slot whose copy
// was queued first, and the copies of all have completed: the next copy waits for the consumer.
func (d *driver) usable(n int) []*slot {
	first, oldest := d.free.completed()
	if oldest != nil {
		oldest.done() // queries
		first, oldest = d.free.completed()
	}
	usable := (*slot).done
	if first == nil {
		first, usable = oldest, (*slot).fillable
	}
	if first == nil || !first.fillable() {
		return nil
	}
	end := first.at + 1
	for end < min(first.at+n, len(d.l.slots)) && d.free.has(d.l.slots[end]) && usable(d.l.slots[end]) {
		end++
	}
	return d.l.slots[first.at:end]
}
