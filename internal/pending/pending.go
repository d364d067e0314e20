// Package pending keeps blocks of memory that were released while a device may use them,
// until it is done with them. Pools of memory stand on it.
package pending

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// Lines are the pending blocks of a pool, in lines, one a stream. A stream works in order,
// so the oldest block of its line answers for the others. A block that several streams use
// is in the line of one of them, and moves to another's when that one is done with it.
//
// No goroutine watches the lines: who needs memory asks, outside of all locks, and asks
// every stream before new memory is allocated: a busy stream hides no other. Blocks stay in
// their line meanwhile, so that what an answer shows to be done is found by anyone.
//
// Methods may be called from any goroutine. Calls into the library are those of
// [cudart.Point], which says what happens when they fail, block or never return.
type Lines[T any] struct {
	idle  func(*T)
	bytes atomic.Int64

	mu     sync.Mutex // not held during calls into the library
	lines  map[*cudart.Timeline]*line[T]
	order  line[T]  // of a ring: those that had done work when asked last come first
	unused *line[T] // linked by next, for the next stream
	heads  uint64
}

// A Block is what a block of a pool has to be to be pending: embed it.
type Block[T any] struct {
	Of          *T // the block that embeds this
	Size, Class int
	Fence       fence.Fence // of the work on the block

	at         cudart.Point // the stream of the line is done with the block from there on
	prev, next *Block[T]    // in the line
}

// A line is the blocks of one stream, in the order of its work, never none.
type line[T any] struct {
	of          *cudart.Timeline
	first, last *Block[T]
	classes     uint64   // bits of those of blocks that are or were here
	prev, next  *line[T] // in the ring
}

// New makes lines. idle takes each block that is found done, and that the caller did not
// look for. No lock is held then.
func New[T any](idle func(*T)) *Lines[T] {
	q := &Lines[T]{idle: idle, lines: make(map[*cudart.Timeline]*line[T])}
	q.order.prev, q.order.next = &q.order, &q.order
	return q
}

// bit is that of a class in line.classes. Classes may share one.
func bit(class int) uint64 { return 1 << (uint64(class) * 0x9e3779b97f4a7c15 >> 58) }

// Add adds a block that was released. at is what Fence.Next has returned.
func (q *Lines[T]) Add(b *Block[T], at cudart.Point) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.insert(b, at)
	q.bytes.Add(int64(b.Size))
}

// insert puts a block into the line of a stream, behind those of earlier work.
func (q *Lines[T]) insert(b *Block[T], at cudart.Point) {
	l := q.lines[at.Line()]
	if l == nil {
		if l = q.unused; l == nil {
			l = new(line[T])
		} else {
			q.unused = l.next
		}
		*l = line[T]{of: at.Line()}
		q.lines[l.of] = l
		l.link(&q.order)
	}
	before := l.last
	for before != nil && !at.After(before.at) {
		before = before.prev
	}
	b.at, b.prev = at, before
	if before == nil {
		b.next, l.first = l.first, b
		q.heads++
	} else {
		b.next, before.next = before.next, b
	}
	if b.next == nil {
		l.last = b
	} else {
		b.next.prev = b
	}
	l.classes |= bit(b.Class)
}

// remove takes a block out of its line. A line without blocks is dropped.
func (q *Lines[T]) remove(l *line[T], b *Block[T]) {
	if b.prev == nil {
		l.first = b.next
		q.heads++
	} else {
		b.prev.next = b.next
	}
	if b.next == nil {
		l.last = b.prev
	} else {
		b.next.prev = b.prev
	}
	b.at, b.prev, b.next = cudart.Point{}, nil, nil // no stream is kept
	if l.first == nil {
		l.unlink()
		delete(q.lines, l.of)
		*l = line[T]{next: q.unused}
		q.unused = l
	}
}

// link puts a line after another of the ring.
func (l *line[T]) link(after *line[T]) {
	l.prev, l.next = after, after.next
	l.prev.next, l.next.prev = l, l
}

func (l *line[T]) unlink() { l.prev.next, l.next.prev = l.next, l.prev }

// Bytes are those of all blocks here.
func (q *Lines[T]) Bytes() int { return int(q.bytes.Load()) }

// Oldest appends a Point for each stream, where it is done with its oldest block.
func (q *Lines[T]) Oldest(list []cudart.Point) []cudart.Point {
	q.mu.Lock()
	defer q.mu.Unlock()
	for l := q.order.next; l != &q.order; l = l.next {
		list = append(list, l.first.at)
	}
	return list
}

// Heads returns a number that changes with what Oldest returns.
func (q *Lines[T]) Heads() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.heads
}

// Streams appends the streams that have blocks.
func (q *Lines[T]) Streams(list []*cudart.Timeline) []*cudart.Timeline {
	return q.streams(list, ^uint64(0), nil)
}

func (q *Lines[T]) streams(list []*cudart.Timeline, classes uint64, but *cudart.Timeline) []*cudart.Timeline {
	q.mu.Lock()
	defer q.mu.Unlock()
	for l := q.order.next; l != &q.order; l = l.next {
		if l.classes&classes != 0 && l.of != but {
			list = append(list, l.of)
		}
	}
	return list
}

// First returns the stream that had done work when it was asked last, if it may have
// blocks of a class, else nil.
func (q *Lines[T]) First(class int) *cudart.Timeline {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.order.next; l.classes&bit(class) != 0 {
		return l.of
	}
	return nil
}

// take takes the oldest block of a stream if the device is known to be done with it. Else
// it returns the Point to ask about: of the oldest block, or, on another stream, of a block
// that has just moved there. ok is false if there is no block.
func (q *Lines[T]) take(of *cudart.Timeline) (b *Block[T], at cudart.Point, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[of]
	if l == nil {
		return nil, at, false
	}
	b = l.first
	if !b.at.Known() {
		return nil, b.at, true
	}
	l.unlink()
	l.link(&q.order)
	q.remove(l, b)
	if at, ok = b.Fence.Next(); ok {
		q.insert(b, at)
		return nil, at, true
	}
	q.bytes.Add(-int64(b.Size))
	return b, at, true
}

const (
	// usual is how many streams are asked without allocating.
	usual = 16
	// Patience is how long one look at all streams goes on asking: it is longer only if
	// calls into CUDA block.
	Patience = 500 * time.Millisecond
)

// Find takes a block of a class, of size bytes or more, that the device is done with; nil if
// there is none. It asks all streams but one, those first that had done work when asked last.
// Other blocks that it finds done become idle. ctx bounds the calls, not the work.
func (q *Lines[T]) Find(ctx context.Context, class, size int, but *cudart.Timeline) *T {
	var room [usual]*cudart.Timeline
	b, _ := q.look(ctx, q.streams(room[:0], bit(class), but), class, size)
	return b
}

// FindOn is Find that asks one stream; a nil one has no blocks.
func (q *Lines[T]) FindOn(ctx context.Context, of *cudart.Timeline, class, size int) *T {
	room := [...]*cudart.Timeline{of}
	b, _ := q.look(ctx, room[:], class, size)
	return b
}

// Reclaim makes all blocks idle that the device is done with, and returns how many.
func (q *Lines[T]) Reclaim(ctx context.Context) int {
	_, idle := q.look(ctx, q.Streams(nil), 0, 0)
	return idle
}

// look takes what is done from the front of streams' lines, and of those that blocks move
// to, until it finds a block that fits; none does if size is 0.
func (q *Lines[T]) look(ctx context.Context, streams []*cudart.Timeline, class, size int) (found *T, idle int) {
	var start time.Time
	for i := 0; i < len(streams); i++ {
		switch {
		case i == 1: // with one stream, reading the clock would take as long as the rest
			start = time.Now()
		case i > 1 && time.Since(start) > Patience:
			return nil, idle
		}
		of, more := streams[i], true
		for more {
			b, at, ok := q.take(of)
			switch {
			case b != nil && size > 0 && b.Class == class && b.Size >= size:
				return b.Of, idle
			case b != nil:
				q.idle(b.Of)
				idle++
			case !ok:
				more = false
			case at.Line() == of:
				more = at.Done(ctx)
			case at.Done(ctx):
				streams = append(streams, at.Line())
			}
		}
	}
	return nil, idle
}

// TakeOn takes a block of a class that one stream uses and no other, done or not: for work
// of the same stream. It takes the one that was released last, and makes no calls.
func (q *Lines[T]) TakeOn(of *cudart.Timeline, class int) *T {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[of]
	if l == nil || l.classes&bit(class) == 0 {
		return nil
	}
	for b := l.last; b != nil; b = b.prev {
		if b.Class == class && b.Fence.Only() == of {
			q.remove(l, b)
			q.bytes.Add(-int64(b.Size))
			return b.Of
		}
	}
	return nil
}

// Wait waits until the device is done with all blocks of a stream's line, and of lines that
// they move to, and makes them idle. An error says that it cannot be known whether it is, or
// that ctx ended; the blocks stay then.
func (q *Lines[T]) Wait(ctx context.Context, of *cudart.Timeline) (err error) {
	streams := []*cudart.Timeline{of}
	for len(streams) > 0 {
		b, at, ok := q.take(streams[0])
		switch {
		case b != nil:
			q.idle(b.Of)
		case !ok:
			streams = streams[1:]
		case at.Line() != streams[0]:
			streams = append(streams, at.Line())
		default:
			if failed := at.Wait(ctx); failed != nil {
				err = cmp.Or(err, failed)
				streams = streams[1:]
			}
		}
	}
	return err
}

// Drain is Wait for all streams that have blocks now; waited is false if there are none.
// When a stream's blocks are idle it calls then, from any goroutine: other streams may take
// long, or fail.
func (q *Lines[T]) Drain(ctx context.Context, then func() error) (waited bool, err error) {
	streams := q.Streams(nil)
	errs := make([]error, len(streams))
	var group sync.WaitGroup
	for i, of := range streams {
		group.Go(func() {
			if errs[i] = q.Wait(ctx, of); errs[i] == nil {
				errs[i] = then()
			}
		})
	}
	group.Wait()
	return len(streams) > 0, errors.Join(errs...)
}
