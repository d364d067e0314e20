package pool

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// pending are the blocks that were released while work was queued on them. No
// goroutine watches them: whoever needs memory asks, outside of all locks, with
// the block that it asks about taken out. A stream works in order, so the oldest
// block of a stream answers for the others, and every stream is asked before new
// memory is pinned: a busy stream hides no other.
type pending struct {
	mu    sync.Mutex
	lines map[*cudart.Timeline]*line
	order line // of a ring: those that had done work when asked last come first
	bytes int
	heads uint64 // changes when a line has another oldest block than before, not by its end
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
}

// push adds a block that was released.
func (q *pending) push(b *block) {
	of := b.fence.Only()
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(of)
	l.classes.add(b.class)
	l.blocks.pushBack(b)
	q.bytes += b.size
}

// unpop puts a block back that is not done.
func (q *pending) unpop(of *cudart.Timeline, b *block) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(of)
	l.classes.add(b.class)
	l.blocks.pushFront(b)
	q.bytes += b.size
	q.heads++
}

// line returns the line of a stream, a new one if need be.
func (q *pending) line(of *cudart.Timeline) *line {
	l := q.lines[of]
	if l == nil {
		l = &line{of: of}
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

// size returns the bytes of all blocks, and any whether there are some.
func (q *pending) size() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes
}

func (q *pending) any() bool { return q.size() > 0 }

// front returns the stream to ask first for blocks of a class.
func (q *pending) front(class int) (of *cudart.Timeline, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.order.next
	return l.of, l != &q.order && l.classes.has(class)
}

// link puts l behind another of the ring.
func (l *line) link(after *line) {
	l.prev, l.next = after, after.next
	l.prev.next, l.next.prev = l, l
}

func (l *line) unlink() { l.prev.next, l.next.prev = l.next, l.prev }

// pop takes the oldest block of a line. A line without blocks is forgotten.
func (q *pending) pop(l *line) *block {
	b := l.blocks.pop()
	if b != nil {
		q.bytes -= b.size
	}
	if l.blocks.first == nil {
		l.unlink()
		delete(q.lines, l.of)
	}
	return b
}

// all are the streams to ask: those that have blocks of a class, or all if class
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

// usualLines is how many streams are asked without allocating.
const usualLines = 16

// reclaim looks for a pending block of a class that holds n bytes and whose
// work is done. Other blocks that it finds done become idle.
func (p *core) reclaim(ctx context.Context, class, n int) *block {
	var room [usualLines]*cudart.Timeline
	for _, of := range p.pending.all(class, room[:0]) {
		if b := p.reclaimLine(ctx, of, class, n); b != nil {
			p.pending.first(of)
			return b
		}
	}
	return nil
}

// reclaimLine takes what is done from the front of a stream's line, until it
// finds a block that fits, or all that is done if class is negative.
func (p *core) reclaimLine(ctx context.Context, of *cudart.Timeline, class, n int) *block {
	var later blockList // of several streams: they are in no order
	defer func() {
		for b := later.pop(); b != nil; b = later.pop() {
			p.putBack(of, b)
		}
	}()
	for {
		b := p.pending.take(of)
		switch {
		case b == nil:
			return nil
		case b.done(ctx):
			if b.class == class && b.size >= n {
				return b
			}
			p.putIdle(b)
		case of == nil:
			later.pushFront(b)
		default:
			p.putBack(of, b)
			return nil
		}
	}
}

// reclaimAll makes all pending blocks idle whose work is done.
func (p *core) reclaimAll(ctx context.Context) {
	for _, of := range p.pending.all(-1, nil) {
		p.reclaimLine(ctx, of, -1, 0)
	}
}

// drain waits until no block is pending. An error says that it cannot be known
// whether the work is done, or that ctx ended: blocks stay pending then.
func (p *core) drain(ctx context.Context) error {
	for {
		lines := p.pending.all(-1, nil)
		if len(lines) == 0 {
			return nil
		}
		b := p.pending.take(lines[0])
		if b == nil {
			continue
		}
		if err := b.fence.Wait(ctx); err != nil {
			p.putBack(lines[0], b)
			return err
		}
		p.putIdle(b)
	}
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
