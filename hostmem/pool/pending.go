package pool

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// pending are the blocks that were released while work was queued on them. No
// goroutine watches them: a Get that needs memory asks, outside of all locks, with
// the block that it asks about taken out. A stream works in order, so the oldest
// block of a stream answers for the others, and every stream is asked before new
// memory is pinned: a busy stream hides no other.
type pending struct {
	bytes  atomic.Int64 // of blocks that are not known to be done, listed or taken out
	mu     sync.Mutex
	lines  map[*cudart.Timeline]*line
	order  line   // of a ring: those that had done work when asked last come first
	unused *line  // linked by next, for the next stream
	heads  uint64 // changes when a line has another oldest block than before, not by its end

	drained map[*cudart.Timeline]bool // streams for which a goroutine waits, after Close
}

// A line is the pending blocks of one stream, in the order of release. Blocks
// on which several streams have worked have a line of their own.
type line struct {
	of         *cudart.Timeline // nil for blocks of several streams
	blocks     blockList
	classes    classSet // of blocks that are or were here
	prev, next *line    // in the ring
}

// A classSet is a set of classes.
type classSet [(classes + 63) / 64]uint64

func (s *classSet) add(class int)      { s[class/64] |= 1 << (class % 64) }
func (s *classSet) has(class int) bool { return s[class/64]&(1<<(class%64)) != 0 }

func (q *pending) init() {
	q.lines = make(map[*cudart.Timeline]*line)
	q.order.prev, q.order.next = &q.order, &q.order
	q.drained = make(map[*cudart.Timeline]bool)
}

// push adds a block that was released.
func (q *pending) push(b *block) {
	of := b.fence.Only()
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(of)
	l.classes.add(b.class)
	l.blocks.pushBack(b)
	q.bytes.Add(int64(b.size))
}

// unpop puts a block back that is not done.
func (q *pending) unpop(of *cudart.Timeline, b *block) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(of)
	l.classes.add(b.class)
	l.blocks.pushFront(b)
	q.heads++
}

// line returns the line of a stream, a new one if need be.
func (q *pending) line(of *cudart.Timeline) *line {
	l := q.lines[of]
	if l == nil {
		if l = q.unused; l == nil {
			l = new(line)
		} else {
			q.unused = l.next
		}
		*l = line{of: of}
		q.lines[of] = l
		l.link(&q.order)
		q.heads++
	}
	return l
}

func (q *pending) headsNow() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.heads
}

// done counts a block that was taken out and is done.
func (q *pending) done(b *block) { q.bytes.Add(-int64(b.size)) }

// any reports whether there are blocks, listed or taken out.
func (q *pending) any() bool { return q.bytes.Load() > 0 }

// count returns how many blocks a stream has.
func (q *pending) count(of *cudart.Timeline) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[of]; l != nil {
		for b := l.blocks.first; b != nil; b = b.next {
			n++
		}
	}
	return n
}

// front returns the stream to ask first for blocks of a class.
func (q *pending) front(class int) (of *cudart.Timeline, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.order.next
	return l.of, l != &q.order && l.classes.has(class)
}

// link puts l after another of the ring.
func (l *line) link(after *line) {
	l.prev, l.next = after, after.next
	l.prev.next, l.next.prev = l, l
}

func (l *line) unlink() { l.prev.next, l.next.prev = l.next, l.prev }

// pop takes the oldest block of a line. A line without blocks is dropped.
func (q *pending) pop(l *line) *block {
	b := l.blocks.pop()
	if l.blocks.first == nil {
		l.unlink()
		delete(q.lines, l.of)
		*l = line{next: q.unused}
		q.unused = l
	}
	return b
}

// all returns the streams to ask: those that have blocks of a class, or all if class
// is negative.
func (q *pending) all(class int, room []*cudart.Timeline) []*cudart.Timeline {
	q.mu.Lock()
	defer q.mu.Unlock()
	for l := q.order.next; l != &q.order; l = l.next {
		if class < 0 || l.classes.has(class) {
			room = append(room, l.of)
		}
	}
	return room
}

// take takes the oldest block of a stream.
func (q *pending) take(of *cudart.Timeline) *block {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[of]; l != nil {
		return q.pop(l)
	}
	return nil
}

// first moves a stream to the front.
func (q *pending) first(of *cudart.Timeline) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[of]; l != nil && q.order.next != l {
		l.unlink()
		l.link(&q.order)
	}
}

// undrained returns the streams for which no goroutine waits, each of which the
// caller then starts.
func (q *pending) undrained() (streams []*cudart.Timeline) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for of := range q.lines {
		if !q.drained[of] {
			q.drained[of] = true
			streams = append(streams, of)
		}
	}
	return streams
}

// takeOrStop is take for that goroutine, which ends when there is no block.
func (q *pending) takeOrStop(of *cudart.Timeline) *block {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[of]; l != nil {
		return q.pop(l)
	}
	delete(q.drained, of)
	return nil
}

// stopDrain is unpop for that goroutine, which ends.
func (q *pending) stopDrain(of *cudart.Timeline, b *block) {
	q.unpop(of, b)
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.drained, of)
}

const (
	// usualLines is how many streams are asked without allocating.
	usualLines = 16
	// lookPatience is how long one look at all streams goes on asking: it is longer only
	// if calls into CUDA block.
	lookPatience = 500 * time.Millisecond
)

// reclaim looks for a pending block of a class that holds n bytes and whose
// work is done. Other blocks that it finds done become idle.
func (p *core) reclaim(ctx context.Context, class, n int) *block {
	var room [usualLines]*cudart.Timeline
	lines := p.pending.all(class, room[:0])
	if len(lines) == 0 {
		return nil
	}
	start := time.Now()
	for _, of := range lines {
		b, _ := p.reclaimLine(ctx, of, class, n)
		if b != nil {
			p.pending.first(of)
			return b
		}
		if time.Since(start) > lookPatience {
			break
		}
	}
	return nil
}

// reclaimLine takes what is done from the front of a stream's line, until it
// finds a block that fits, or all that is done if class is negative. It returns how
// many blocks became idle.
func (p *core) reclaimLine(ctx context.Context, of *cudart.Timeline, class, n int) (found *block, idle int) {
	var later blockList // of several streams: they are in no order
	for {
		b := p.pending.take(of)
		if b == nil {
			break
		}
		if b.done(ctx) {
			p.pending.done(b)
			if b.class == class && b.size >= n {
				found = b
				break
			}
			p.putIdle(b)
			idle++
			continue
		}
		if of != nil {
			p.putBack(of, b)
			break
		}
		later.pushFront(b)
	}
	for b := later.pop(); b != nil; b = later.pop() {
		p.putBack(of, b)
	}
	return found, idle
}

// reclaimAll makes all pending blocks idle whose work is done, and returns how many.
func (p *core) reclaimAll(ctx context.Context) (idle int) {
	start := time.Now()
	for _, of := range p.pending.all(-1, nil) {
		_, n := p.reclaimLine(ctx, of, -1, 0)
		if idle += n; time.Since(start) > lookPatience {
			break
		}
	}
	return idle
}

// hopeless returns an error if nothing is leased, and of no pending block it can be
// known whether the GPU is done with it: no memory returns to the pool then. It asks
// only streams that have returned errors.
func (p *core) hopeless(ctx context.Context) error {
	if p.stats().Leases > 0 {
		return nil
	}
	var last error
	for _, of := range p.pending.all(-1, nil) {
		b := p.pending.take(of)
		if b == nil {
			return nil
		}
		err := b.unknown(ctx)
		p.pending.unpop(of, b)
		if err == nil {
			return nil
		}
		last = err
	}
	return last
}

// notify sends to c when the oldest block of any stream is done, as far as that
// is known. stop ends that.
func (p *core) notify(c chan<- struct{}) (stop func()) {
	var points []cudart.Point
	p.pending.mu.Lock()
	for l := p.pending.order.next; l != &p.pending.order; l = l.next {
		for b := l.blocks.first; b != nil; b = b.next {
			points = b.fence.Points(points)
			if l.of != nil {
				break
			}
		}
	}
	p.pending.mu.Unlock()
	stops := make([]func(), len(points))
	for i, point := range points {
		stops[i] = point.Notify(c)
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}
