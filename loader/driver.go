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
	"github.com/gopinned/pinned/internal/bounded"
)

// A driver makes the loader's calls into CUDA: it queues the copies of filled batches, queries
// which copies and streams have completed, and publishes blocks on the slots. One goroutine
// drives at a time, mostly a worker. The others count a request, which that goroutine serves, and
// go on. So a call that does not return occupies one thread, and neither workers nor loops wait
// for it. Workers that fill whole batches quickly would lose a quarter of their time to these calls, and leave them to
// a goroutine of its own if there are processors for it.
//
//	fields                                  | used by                   | under
//	epoch.waiting, stopped, allPublished    | any goroutine             | mu
//	requests, holding, awaiting, apart,     | any goroutine             | atomic
//	released, starving                      |                           |
//	the others; epoch.last, next            | the goroutine that drives | –
type driver struct {
	l        *Loader
	requests atomic.Int32 // requests that are not served
	holding  atomic.Bool  // a goroutine waits until the held batches are due
	awaiting atomic.Bool  // a goroutine waits for a copy
	apart    atomic.Bool  // workers do not drive

	released []atomic.Uint64 // a bit for each slot that the consumer has released
	starving atomic.Bool     // workers wait for a slot: release makes a request

	mu sync.Mutex // not held during calls into CUDA

	epoch   *epoch
	free    slotSet       // the GPU may still use them
	held    []*slot       // filled, in the order of their batches' numbers
	maxHold time.Duration // the longest that a batch is held
	waited  bool          // the held batches are due when holding is false
	copied
}

// The copies that the driver has queued.
type copied struct {
	before, last cudart.Point // ends of the last two
	copies       int
	meter        meter
}

// tryDrive drives, unless another goroutine drives.
func (d *driver) tryDrive() {
	if d.requests.Add(1) == 1 {
		d.drive()
	}
}

// request lets another goroutine drive. It makes no call into CUDA.
func (d *driver) request() {
	if d.requests.Add(1) == 1 {
		go d.drive()
	}
}

// drive serves requests until there are none. The caller has counted the first one.
func (d *driver) drive() {
	if !d.l.life.Begin() {
		return // closed: no goroutine drives any more
	}
	defer d.l.life.End()
	for more := true; more; {
		n := d.requests.Load()
		if e := d.l.epoch.Load(); e != nil {
			p := e.loop.Load()
			d.begin(e)
			d.l.windows.update(e)
			d.send(e, p)
			d.l.windows.update(e)
			d.publishAhead(e, p)
			d.drain(e, p)
		}
		more = d.requests.Add(-n) > 0
	}
}

// begin begins an epoch: all slots that are not lent to the consumer are free.
func (d *driver) begin(e *epoch) {
	if d.epoch == e {
		return
	}
	d.collect()
	d.epoch, d.held = e, nil
	d.free = newSlotSet(d.l.slots)
	for _, s := range d.l.slots {
		if !s.lent.Load() {
			d.free.add(s)
		}
	}
}

// release takes back a slot from the consumer.
func (d *driver) release(s *slot) {
	d.released[s.at/64].Or(1 << (s.at % 64))
	if d.starving.Load() && d.starving.Swap(false) {
		d.request()
	}
}

// after drives when wait has returned. wait must return when the loop ends, or count in the
// loader's life. flag is true until then.
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

// afterCopy drives when a copy has completed. If CUDA cannot report that, the epoch fails before
// a batch.
func (d *driver) afterCopy(p *loop, copied cudart.Point, batch int) {
	d.after(&d.awaiting, func() {
		if err := copied.Wait(p.ctx); err != nil && p.ctx.Err() == nil {
			p.e.fail(batch, fmt.Errorf("loader: epoch %d: the GPU may be using the memory: %w", p.e.number, err))
		}
	})
}

// drain ends an epoch whose batches are all delivered when the last copy has completed. The epoch
// fails if a copy failed.
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
		if err := s.copyErr(e); err != nil {
			e.fail(d.l.batches(), fmt.Errorf("loader: end of epoch %d: %w", e.number, err))
		}
	}
	e.fail(d.l.batches(), errDrained)
}

// The start of a copy costs the link as much time as some hundred KiB. So small batches share a
// copy: a batch is held while two copies are in flight, because the link is busy then.
const (
	// maxCopy is the maximum size of a copy of several batches, in bytes.
	maxCopy = 4 << 20
	// maxGathered is the same of a copy by a kernel, whose start costs the link as much time as 0.7 MB (H200, 2026-11-29).
	maxGathered = 16 << 20
	// maxHold is the maximum time that a batch is held. The copies in flight may wait for work
	// of the device that waits for the loop.
	maxHold = time.Millisecond
)

// maxCopy returns the maximum size of a copy of several batches, in bytes.
func (l *Loader) maxCopy() int {
	if l.gather != nil {
		return maxGathered
	}
	return maxCopy
}

// send queues the copies of filled batches, unless they are held.
func (d *driver) send(e *epoch, p *loop) {
	for len(e.filled) > 0 {
		s := <-e.filled
		at, _ := slices.BinarySearchFunc(d.held, s, func(a, b *slot) int { return cmp.Compare(a.number, b.number) })
		d.held = slices.Insert(d.held, at, s)
	}
	due := d.waited && !d.holding.Load()
	for len(d.held) > 0 && e.failedBefore(d.held[0].number) == nil && d.l.windows.ready(e, d.held[0]) && (due || !d.hold(p)) {
		n := d.neighbours()
		if !d.copy(p, d.held[:n]) {
			return
		}
		d.held = slices.Delete(d.held, 0, n)
	}
	d.waited = d.waited && !due
}

// hold reports whether the held batches wait for others: until fewer than two copies are in
// flight.
func (d *driver) hold(p *loop) bool {
	switch {
	case (len(d.held)+1)*d.l.layout.bytes > d.l.maxCopy(), d.before.Completed():
		return false
	case !d.holding.Load():
		if d.before.Done(context.Background()) {
			return false
		}
		d.waited = true
		before := d.before
		d.after(&d.holding, func() {
			completed := make(chan struct{}, 1)
			defer before.Notify(completed)()
			select {
			case <-completed:
			case <-time.After(d.maxHold):
			case <-p.ctx.Done():
			}
		})
	}
	return true
}

// due reports whether filled batches need the driver. While batches are held, it is enough that it finds a quarter
// of a copy of them: the end of that time drives.
func (d *driver) due(e *epoch) bool {
	return !d.holding.Load() || 4*len(e.filled)*d.l.layout.bytes >= d.l.maxCopy()
}

// neighbours returns the number of held batches in the next copy: the first one and those that
// follow it in memory. It stops at a batch whose memory the consumer's streams still use, because
// the copy would wait for them.
func (d *driver) neighbours() int {
	n, size := 1, d.l.layout.bytes
	for ; n < len(d.held) && (n+1)*size <= d.l.maxCopy(); n++ {
		s := d.held[n]
		if s.off != d.held[n-1].off+size || d.epoch.failedBefore(s.number) != nil || !d.l.windows.ready(d.epoch, s) || !s.using.Done(context.Background()) {
			break
		}
	}
	return n
}

// copy queues one copy of neighbours, if there is a device. After an error the epoch ends before
// them. It returns false if the loop has ended before the copy was queued.
func (d *driver) copy(p *loop, slots []*slot) bool {
	e, l := p.e, d.l
	first := slots[0].number
	if l.dev == nil {
		d.arrive(e, slots)
		return true
	}
	t := d.meter.begin(l.stream, first)
	err := d.orderAfterConsumer(p.ctx, slots)
	if err != nil && p.ctx.Err() != nil {
		return false
	}
	t = t.record(l.stream, began)
	if err == nil {
		err = d.queue(slots)
	}
	t = t.record(l.stream, ended)
	done := slots
	if err == nil && l.o.OnDevice != nil {
		done = d.onDevice(e, slots)
	}
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
	d.meter.end(t, samples(slots)*l.layout.sample(), copied)
	l.windows.passed(slots, copied)
	d.arrive(e, done)
	return true
}

func samples(slots []*slot) (n int) {
	for _, s := range slots {
		n += len(s.indices)
	}
	return n
}

// onDevice calls Options.OnDevice for batches whose copies are queued, on a goroutine of its own,
// which it may end. If it fails, the epoch ends before that batch, and onDevice returns the slots
// of the batches before.
func (d *driver) onDevice(e *epoch, slots []*slot) []*slot {
	done := 0
	_, err := bounded.Callback(context.Background(), func() (none struct{}, err error) {
		for ; done < len(slots); done++ {
			s := slots[done]
			b := &Batch{l: d.l, s: s, indices: s.indices, epoch: e.number, number: s.number}
			b.released.Store(true)
			if err := d.l.o.OnDevice(d.l.stream, b); err != nil {
				return none, err
			}
		}
		return none, nil
	})
	if err != nil {
		e.fail(slots[done].number, fmt.Errorf("loader: Options.OnDevice of batch %d of epoch %d: %w", slots[done].number, e.number, err))
	}
	return slots[:done]
}

// arrive sends the slots of a copy to the loop.
func (d *driver) arrive(e *epoch, slots []*slot) {
	if len(slots) > 0 {
		d.l.counters.samples.Add(int64(samples(slots)))
		e.arrived <- slices.Clone(slots) // never full
	}
}

// orderAfterConsumer orders the copy of slots after the consumer's work on the batches that they
// had before. The device waits for that work (cudaStreamWaitEvent), or the host after an error.
func (d *driver) orderAfterConsumer(ctx context.Context, slots []*slot) error {
	for _, s := range slots {
		if s.using.Done(context.Background()) { // a wait for completed work costs the stream time
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

// queue queues the copy of slots (cudaMemcpyAsync, or a gatherer's kernels). One slot that is not full takes a copy
// for each field. Of several slots all bytes are copied.
func (d *driver) queue(slots []*slot) error {
	s, l := slots[0], d.l
	if l.gather != nil {
		return l.gather.queue(l, slots)
	}
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
