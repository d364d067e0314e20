package loader

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A sender queues the copies of batches that are filled. The start of each copy
// costs the link as much as some hundred KiB, so that small batches go together: a
// batch waits for others while two copies are on their way. Then the link does not
// wait for it.
//
// One goroutine at a time sends. Workers leave it their batches and go on.
type sender struct {
	e       *epoch
	filled  chan *slot
	calls   atomic.Int32 // of send that are not answered yet
	waiting atomic.Bool  // a goroutine calls send when the batches that are held are due
	due     atomic.Bool
	holdFor time.Duration

	// Of the goroutine that sends.
	held         []*slot      // filled, in the order of their numbers
	before, last cudart.Point // where the last two copies end
}

const (
	// copyBytes is how much of several batches one copy takes at the most.
	copyBytes = 4 << 20
	// holdFor is the longest that a batch waits for others: the device may be
	// waiting for something, too, and that for the loop.
	holdFor = time.Millisecond
)

func newSender(e *epoch) *sender {
	n := len(e.l.slots)
	return &sender{e: e, holdFor: holdFor, filled: make(chan *slot, n), held: make([]*slot, 0, n)}
}

// complete takes a batch whose samples are all there.
func (q *sender) complete(s *slot) {
	s.compact(&q.e.l.layout)
	q.filled <- s // never full
	q.send()
}

// send queues what is to be queued now, or leaves it to the goroutine that is
// sending.
func (q *sender) send() {
	if q.calls.Add(1) > 1 {
		return
	}
	for more := true; more; {
		n := q.calls.Load()
		q.sendHeld()
		more = q.calls.Add(-n) > 0
	}
}

func (q *sender) sendHeld() {
	for len(q.filled) > 0 {
		s := <-q.filled
		at, _ := slices.BinarySearchFunc(q.held, s, func(a, b *slot) int { return cmp.Compare(a.number, b.number) })
		q.held = slices.Insert(q.held, at, s)
	}
	due := q.due.Swap(false)
	for len(q.held) > 0 {
		n := 1
		switch {
		case !q.wanted(q.held[0]):
			q.e.l.free.put(q.held[0])
		case !due && q.hold():
			return
		default:
			n = q.neighbours()
			q.copy(q.held[:n])
		}
		q.held = slices.Delete(q.held, 0, n)
	}
}

// wanted reports whether a batch comes before the end of the epoch. If not its slot
// is free.
func (q *sender) wanted(s *slot) bool {
	return q.e.ctx.Err() == nil && q.e.failedBefore(s.number) == nil
}

// hold reports whether the batches that are held wait for others. If so, send will be
// called when the link has room for another copy.
func (q *sender) hold() bool {
	e := q.e
	switch {
	case (len(q.held)+1)*e.l.layout.bytes > copyBytes, q.before.Known():
		return false
	case q.waiting.Load(): // send will be called
		return true
	case q.before.Done(e.ctx):
		return false
	}
	q.waiting.Store(true)
	room := make(chan struct{}, 1)
	stop := q.before.Notify(room)
	e.workers.Go(func() {
		late := time.NewTimer(q.holdFor)
		select {
		case <-room:
		case <-late.C:
		case <-e.ctx.Done():
		}
		late.Stop()
		stop()
		q.waiting.Store(false)
		q.due.Store(true)
		q.send()
	})
	return true
}

// neighbours returns how many of the batches that are held the next copy takes: those
// that follow the first one in memory too. They do not follow it if the consumer's
// streams still use their memory, because the copy would wait for that.
func (q *sender) neighbours() int {
	e, n := q.e, 1
	for size := e.l.layout.bytes; n < len(q.held) && (n+1)*size <= copyBytes; n++ {
		s := q.held[n]
		if s.off != q.held[n-1].off+size || !q.wanted(s) || !s.using.Done(e.ctx) {
			break
		}
	}
	return n
}

// copy queues one copy of neighbours. After an error, which ends the epoch before
// them, their slots are free again.
func (q *sender) copy(slots []*slot) {
	e, l := q.e, q.e.l
	err := l.upload(e.ctx, slots...)
	q.before, q.last = q.last, slots[0].copied
	if err != nil {
		e.fail(slots[0].number, fmt.Errorf("loader: copy %s of epoch %d: %w", batches(slots), e.start.Epoch, err))
	}
	for _, s := range slots {
		if err != nil {
			l.free.put(s)
			continue
		}
		l.stats.samples.Add(int64(len(s.indices)))
		e.arrived <- s
	}
}

// batches names the batches of a copy.
func batches(slots []*slot) string {
	first, last := slots[0].number, slots[len(slots)-1].number
	if first == last {
		return fmt.Sprintf("batch %d", first)
	}
	return fmt.Sprintf("batches %d to %d", first, last)
}
