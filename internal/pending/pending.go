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
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
)

// A Queue holds the released blocks of a pool that a GPU may still use: one FIFO for each
// stream. A stream works in order, so its oldest block is done first. A block that several
// streams use is in the FIFO of one of them. When that stream is done with it, it moves to
// the FIFO of another.
//
// No goroutine watches the FIFOs. A caller that requests memory queries the streams, outside
// of all locks, and queries all of them before it allocates new memory: a busy stream hides
// no other. Blocks stay in their FIFO during a query, so that any caller finds the blocks
// that the result shows to be done.
//
// Methods may be called from any goroutine. Calls into the library are those of
// [cudart.Point], whose documentation covers calls that fail, block or never return.
type Queue[T any] struct {
	idle  func(*T)
	bytes atomic.Int64

	mu      sync.Mutex          // not held during calls into the library
	fifos   map[uint64]*fifo[T] // by the ID of the stream
	order   fifo[T]             // head of a ring: streams that had done work at their last query come first
	unused  *fifo[T]            // linked by next, for other streams
	changes uint64              // of the blocks that are the oldest of a stream
}

// A Block is the Queue's part of a pool's block: embed it.
type Block[T any] struct {
	Outer       *T // the block that embeds this
	Size, Class int
	Fence       fence.Fence // has the work on the block

	at         cudart.Point // the FIFO's stream is done with the block here
	prev, next *Block[T]    // in the FIFO
}

// A fifo has the blocks of one stream, in the order of its work, and at least one.
type fifo[T any] struct {
	stream      fence.Timeline
	first, last *Block[T]
	classes     uint64   // bits of the classes of blocks that are or were in the FIFO
	prev, next  *fifo[T] // in the ring
}

// New makes a Queue. Its methods call idle, without a lock, for each block that the device is
// done with and that they do not return.
func New[T any](idle func(*T)) *Queue[T] {
	q := &Queue[T]{idle: idle, fifos: make(map[uint64]*fifo[T])}
	q.order.prev, q.order.next = &q.order, &q.order
	return q
}

// bit returns the bit of a class in fifo.classes. Classes may share a bit.
func bit(class int) uint64 { return 1 << (uint64(class) * 0x9e3779b97f4a7c15 >> 58) }

// Add adds a block that was released. at is what Fence.Next has returned.
func (q *Queue[T]) Add(b *Block[T], at cudart.Point) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.insert(b, at)
	q.bytes.Add(int64(b.Size))
}

// insert puts a block into the FIFO of a stream, behind blocks of earlier work.
func (q *Queue[T]) insert(b *Block[T], at cudart.Point) {
	stream := fence.TimelineAt(at)
	f := q.fifos[stream.ID()]
	if f == nil {
		if f = q.unused; f == nil {
			f = new(fifo[T])
		} else {
			q.unused = f.next
		}
		*f = fifo[T]{stream: stream}
		q.fifos[stream.ID()] = f
		f.link(&q.order)
	}
	before := f.last
	for before != nil && !at.After(before.at) {
		before = before.prev
	}
	b.at, b.prev = at, before
	if before == nil {
		b.next, f.first = f.first, b
		q.changes++
	} else {
		b.next, before.next = before.next, b
	}
	if b.next == nil {
		f.last = b
	} else {
		b.next.prev = b
	}
	f.classes |= bit(b.Class)
}

// remove takes a block out of its FIFO, and drops a FIFO without blocks.
func (q *Queue[T]) remove(f *fifo[T], b *Block[T]) {
	if b.prev == nil {
		f.first = b.next
		q.changes++
	} else {
		b.prev.next = b.next
	}
	if b.next == nil {
		f.last = b.prev
	} else {
		b.next.prev = b.prev
	}
	b.at, b.prev, b.next = cudart.Point{}, nil, nil // no stream is kept
	if f.first == nil {
		f.unlink()
		delete(q.fifos, f.stream.ID())
		*f = fifo[T]{next: q.unused}
		q.unused = f
	}
}

// link puts a FIFO after another of the ring.
func (f *fifo[T]) link(after *fifo[T]) {
	f.prev, f.next = after, after.next
	f.prev.next, f.next.prev = f, f
}

func (f *fifo[T]) unlink() { f.prev.next, f.next.prev = f.next, f.prev }

// Bytes returns the bytes of all blocks.
func (q *Queue[T]) Bytes() int { return int(q.bytes.Load()) }

// Oldest returns the Point of each stream at which it is done with its oldest block.
func (q *Queue[T]) Oldest() (points []cudart.Point) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for f := q.order.next; f != &q.order; f = f.next {
		points = append(points, f.first.at)
	}
	return points
}

// Changes returns a number that changes when the result of Oldest does.
func (q *Queue[T]) Changes() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changes
}

// Streams returns the streams that have blocks.
func (q *Queue[T]) Streams() []fence.Timeline {
	list, _ := q.streams(nil, ^uint64(0))
	return list
}

// streams appends the streams that may have blocks of some classes. recent is 1 if the first
// of them is the stream that had done work at its last query, else 0.
func (q *Queue[T]) streams(list []fence.Timeline, classes uint64) (all []fence.Timeline, recent int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for f := q.order.next; f != &q.order; f = f.next {
		if f.classes&classes != 0 {
			list = append(list, f.stream)
			if f == q.order.next {
				recent = 1
			}
		}
	}
	return list, recent
}

// take takes the oldest block of a stream if the device is known to be done with it. Else
// it returns the Point to query: of the oldest block, or, on another stream, of a block
// that has just moved there. ok is false if there is no block.
func (q *Queue[T]) take(of fence.Timeline) (b *Block[T], at cudart.Point, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var f *fifo[T]
	if of != nil {
		f = q.fifos[of.ID()]
	}
	if f == nil {
		return nil, at, false
	}
	b = f.first
	if !b.at.Completed() {
		return nil, b.at, true
	}
	f.unlink()
	f.link(&q.order)
	q.remove(f, b)
	if at, ok = b.Fence.Next(); ok {
		q.insert(b, at)
		return nil, at, true
	}
	q.bytes.Add(-int64(b.Size))
	return b, at, true
}

// inlineStreams is the number of streams that are queried without an allocation.
const inlineStreams = 16

// Find takes a block of a class, of size bytes or more, that the device is done with; nil if
// there is none. It queries the stream that had done work at its last query, then calls
// other, for a block that is idle already, and then queries the other streams. Other blocks
// that it finds done become idle. ctx bounds the calls, not the work.
func (q *Queue[T]) Find(ctx context.Context, class, size int, other func() *T) *T {
	var buf [inlineStreams]fence.Timeline
	streams, recent := q.streams(buf[:0], bit(class))
	if b, _ := q.search(ctx, streams[:recent:recent], class, size); b != nil {
		return b
	}
	if b := other(); b != nil {
		return b
	}
	b, _ := q.search(ctx, streams[recent:], class, size)
	return b
}

// Reclaim makes all blocks idle that the device is done with, and returns their number.
func (q *Queue[T]) Reclaim(ctx context.Context) int {
	_, idle := q.search(ctx, q.Streams(), 0, 0)
	return idle
}

// search takes blocks that the device is done with from the FIFOs of streams, and of streams
// to which blocks move, until one fits; with a size of 0 none does. It ends after
// bounded.SearchTimeout, if each call returns soon.
func (q *Queue[T]) search(ctx context.Context, streams []fence.Timeline, class, size int) (found *T, idle int) {
	var start time.Time
	for i := 0; i < len(streams); i++ {
		switch {
		case i == 1: // with one stream, reading the clock would double the time
			start = time.Now()
		case i > 1 && time.Since(start) > bounded.SearchTimeout:
			return nil, idle
		}
		of, more := streams[i], true
		for more {
			b, at, ok := q.take(of)
			switch {
			case b != nil && size > 0 && b.Class == class && b.Size >= size:
				return b.Outer, idle
			case b != nil:
				q.idle(b.Outer)
				idle++
			case !ok:
				more = false
			case fence.TimelineAt(at) == of:
				more = at.Done(ctx)
			case at.Done(ctx):
				streams = append(streams, fence.TimelineAt(at))
			}
		}
	}
	return nil, idle
}

// Wait waits until the device is done with all blocks of a stream's FIFO, and with blocks
// that move to other streams, and makes them idle. After an error blocks stay: the device
// cannot report whether it is done with them, or ctx has ended.
func (q *Queue[T]) Wait(ctx context.Context, of fence.Timeline) (err error) {
	streams := []fence.Timeline{of}
	for len(streams) > 0 {
		b, at, ok := q.take(streams[0])
		switch {
		case b != nil:
			q.idle(b.Outer)
		case !ok:
			streams = streams[1:]
		case fence.TimelineAt(at) != streams[0]:
			streams = append(streams, fence.TimelineAt(at))
		default:
			if failed := at.Wait(ctx); failed != nil {
				err = cmp.Or(err, failed)
				streams = streams[1:]
			}
		}
	}
	return err
}

// Drain waits for all streams that have blocks. It calls then once for every stream that
// completed, possibly concurrently. It reports whether there was anything to wait for.
func (q *Queue[T]) Drain(ctx context.Context, then func() error) (waited bool, err error) {
	streams := q.Streams()
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
