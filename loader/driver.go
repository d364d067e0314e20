package loader

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A driver makes the loader's calls into CUDA: it queues the copies of batches that are
// filled, queries what the GPU is done with, and opens blocks there. One goroutine drives
// at a time, mostly a worker. Others leave it their requests and go on. So a call that does
// not return occupies one thread, and neither workers nor loops wait for it.
//
//	fields                                  | used by                   | under
//	released, starving; epoch.waiting,      | any goroutine             | mu
//	stopped, opened; slot.lent set to false |                           |
//	requests, holding, awaiting             | any goroutine             | –
//	the others; epoch.last, next            | the goroutine that drives | –
type driver struct {
	l        *Loader
	requests atomic.Int32 // that are not done
	holding  atomic.Bool  // a goroutine waits until the held batches are due
	awaiting atomic.Bool  // a goroutine waits for a copy

	mu       sync.Mutex // not held during calls into CUDA
	released []*slot    // that are not in free yet
	starving bool       // workers wait for a slot: release makes a request

	epoch        *epoch
	free         []*slot       // in the order of their memory, which the GPU may still use
	held         []*slot       // filled, in the order of their numbers
	maxHold      time.Duration // of a batch
	waited       bool          // the held batches are due when holding ends
	before, last cudart.Point  // ends of the last two copies
	copies       int
	meter        meter
}

// tryDrive drives, unless another goroutine does.
func (d *driver) tryDrive() {
	if d.requests.Add(1) == 1 {
		d.drive()
	}
}

// request has a goroutine drive. It makes no call into CUDA.
func (d *driver) request() {
	if d.requests.Add(1) == 1 {
		go d.drive()
	}
}

// drive does what there is to do, until no request is left. The first one is counted.
func (d *driver) drive() {
	if !d.l.life.Begin() {
		return // closed: nobody drives any more
	}
	defer d.l.life.End()
	for more := true; more; {
		n := d.requests.Load()
		if e := d.l.epoch.Load(); e != nil {
			p := e.loop.Load()
			d.begin(e)
			d.send(e, p)
			d.open(e, p)
			d.drain(e, p)
		}
		more = d.requests.Add(-n) > 0
	}
}

// begin begins an epoch: all slots that the consumer has not got are free.
func (d *driver) begin(e *epoch) {
	if d.epoch == e {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.epoch, d.held, d.released = e, nil, nil
	d.free = slices.DeleteFunc(slices.Clone(d.l.slots), func(s *slot) bool { return s.lent.Load() })
}

// release takes back a slot from the consumer.
func (d *driver) release(s *slot) {
	d.mu.Lock()
	s.lent.Store(false)
	d.released = append(d.released, s)
	starving := d.starving
	d.starving = false
	d.mu.Unlock()
	if starving {
		d.request()
	}
}

// after drives when wait has returned, which ends with the loop. flag is true meanwhile.
func (d *driver) after(flag *atomic.Bool, wait func()) {
	if flag.Swap(true) {
		return
	}
	go func() {
		wait()
		flag.Store(false)
		d.tryDrive()
	}()
}

// afterCopy drives when a copy is done. The epoch fails before a batch if CUDA cannot report
// that it is.
func (d *driver) afterCopy(p *loop, copied cudart.Point, batch int) {
	d.after(&d.awaiting, func() {
		if err := copied.Wait(p.ctx); err != nil && p.ctx.Err() == nil {
			p.e.fail(batch, fmt.Errorf("loader: epoch %d: the GPU may be using the memory: %w", p.e.number, err))
		}
	})
}

// drain ends an epoch of which the loop has got all batches, when the last copy is done.
// The epoch fails if a copy has failed.
func (d *driver) drain(e *epoch, p *loop) {
	switch {
	case !e.draining.Load():
		return
	case !d.last.Done(context.Background()):
		d.afterCopy(p, d.last, d.l.batches())
		return
	}
	d.meter.collect()
	for _, s := range d.l.slots {
		if err := s.failed(e); err != nil {
			e.fail(d.l.batches(), fmt.Errorf("loader: end of epoch %d: %w", e.number, err))
		}
	}
	e.fail(d.l.batches(), errDrained)
}

// The start of each copy costs the link as much as some hundred KiB, so that small batches
// go together: a batch waits for others while two copies are under way. Then the link does
// not wait for it.
const (
	// maxCopy is the most bytes of several batches that one copy takes.
	maxCopy = 4 << 20
	// maxHold is the longest that a batch waits for others: the device may be waiting for
	// something, too, and that for the loop.
	maxHold = time.Millisecond
)

// send queues the copies of batches that are filled and do not wait for others.
func (d *driver) send(e *epoch, p *loop) {
	for len(e.filled) > 0 {
		s := <-e.filled
		at, _ := slices.BinarySearchFunc(d.held, s, func(a, b *slot) int { return cmp.Compare(a.number, b.number) })
		d.held = slices.Insert(d.held, at, s)
	}
	due := d.waited && !d.holding.Load()
	for len(d.held) > 0 && e.failedBefore(d.held[0].number) == nil && (due || !d.hold(p)) {
		n := d.neighbours()
		if !d.copy(p, d.held[:n]) {
			return
		}
		d.held = slices.Delete(d.held, 0, n)
	}
	d.waited = d.waited && !due
}

// hold reports whether the batches that are held wait for others: until the link has room
// for another copy.
func (d *driver) hold(p *loop) bool {
	switch {
	case (len(d.held)+1)*d.l.layout.bytes > maxCopy, d.before.Known():
		return false
	case !d.holding.Load():
		if d.before.Done(context.Background()) {
			return false
		}
		d.waited = true
		before := d.before
		d.after(&d.holding, func() {
			room := make(chan struct{}, 1)
			defer before.Notify(room)()
			select {
			case <-room:
			case <-time.After(d.maxHold):
			case <-p.ctx.Done():
			}
		})
	}
	return true
}

// neighbours returns how many of the batches that are held the next copy takes: those that
// follow the first one in memory too. They do not follow it if the consumer's streams still
// use their memory, because the copy would wait for that.
func (d *driver) neighbours() int {
	n, size := 1, d.l.layout.bytes
	for ; n < len(d.held) && (n+1)*size <= maxCopy; n++ {
		s := d.held[n]
		if s.off != d.held[n-1].off+size || d.epoch.failedBefore(s.number) != nil || !s.using.Done(context.Background()) {
			break
		}
	}
	return n
}

// copy queues one copy of neighbours. After an error the epoch ends before them. It returns
// false if it did not because the loop has ended.
func (d *driver) copy(p *loop, slots []*slot) bool {
	e, l := p.e, d.l
	first, samples := slots[0].number, 0
	for _, s := range slots {
		samples += len(s.indices)
	}
	t := d.meter.begin(l.stream, first)
	err := d.order(p.ctx, slots)
	if err != nil && p.ctx.Err() != nil {
		return false
	}
	t = t.record(l.stream, began)
	if err == nil {
		err = d.queue(slots)
	}
	t = t.record(l.stream, ended)
	copied := l.stream.Point()
	d.before, d.last = d.last, copied
	d.copies++
	for _, s := range slots {
		s.copied, s.copyNumber = copied, d.copies
	}
	if err != nil {
		what := fmt.Sprintf("batch %d", first)
		if len(slots) > 1 {
			what = fmt.Sprintf("batches %d to %d", first, slots[len(slots)-1].number)
		}
		e.fail(first, fmt.Errorf("loader: copy %s of epoch %d: %w", what, e.number, err))
		return true
	}
	d.meter.end(t, samples*l.layout.sample(), copied)
	l.counters.samples.Add(int64(samples))
	for _, s := range slots {
		e.arrived <- s // never full
	}
	return true
}

// order puts the copy of slots after the consumer's work on what they held before. The
// device waits for that work, or the host if the device cannot be made to.
func (d *driver) order(ctx context.Context, slots []*slot) error {
	for _, s := range slots {
		if s.using.Done(context.Background()) { // to wait for what is done costs the stream time
			continue
		}
		if s.using.Before(d.l.stream) != nil {
			if err := s.using.Wait(ctx); err != nil {
				return fmt.Errorf("the GPU may be using the memory: %w", err)
			}
		}
	}
	return nil
}

// queue queues the copy of slots (cudaMemcpyAsync). One slot that is not full takes a copy
// for each field; of several all bytes are copied.
func (d *driver) queue(slots []*slot) error {
	s, l := slots[0], d.l
	n := len(s.indices)
	if len(slots) > 1 || n == l.layout.samples {
		return l.buf.CopyToDevice(l.stream, s.mem, s.off, len(slots)*l.layout.bytes)
	}
	for f, size := range l.layout.sizes {
		at := l.layout.offsets[f]
		if n == 0 { // all were skipped
			break
		}
		if err := l.buf.CopyToDevice(l.stream, s.mem+cudart.DevPtr(at), s.off+at, n*size); err != nil {
			return err
		}
	}
	return nil
}
