package stage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
)

// A ring is pinned memory that copies of one device pass through. An extent of it is the
// first free units in a row, so that memory which is still in the caches is reused first.
//
//	extent       entered by                   | counts as used | next
//	free                                      | –              | try, or a waiter
//	used         try, serve                   | yes            | release
//	in flight    release                      | yes            | polled, the oldest of each
//	             with a fence                 |                | stream first: free
//	quarantined  quarantine, for a stream     | lost           | its fence is known to have
//	             that does not respond        |                | completed: free
//
// All changes of state need mu. Jobs that need memory poll; nobody polls for them.
type ring struct {
	dev       *cudart.Device
	buf       *hostmem.Buffer
	unit      int // bytes
	units     int // of buf
	maxChunk  int // units
	extension extension

	mu       sync.Mutex
	free     []bool          // by unit, the extension's included
	used     [directions]int // units
	usedSlow int             // units of slow copies
	inFlight []*extent       // in the order of release
	quarantineState
	polling bool      // a goroutine polls extents in flight
	waiters []*waiter // in the order in which they began to wait
}

// A quarantineState has the extents of a ring whose streams do not respond.
type quarantineState struct {
	quarantined []*extent
	lost        int   // units of them
	lostWhy     error // of the one that came last
}

// A ringSize is the size of a ring's parts, in bytes.
type ringSize struct{ unit, ring, extension, maxChunk int }

// A request is for memory of a ring.
type request struct {
	n    int // bytes
	dir  direction
	slow bool // the copy may wait for a disk while it holds the memory
}

// An extent is the part of a ring that one chunk passes through.
type extent struct {
	request
	ring   *ring
	first  int // unit
	units  int
	mem    []byte
	fence  fence.Fence    // the GPU's use
	stream fence.Timeline // the one that uses it, in flight; nil for several
}

// A waiter is a job that found no extent. It is served as soon as there is memory
// for it, and not only when it has woken: waking takes longer than a copy.
type waiter struct {
	request
	ring *ring
	wake chan<- struct{}
	x    *extent // nil until it is served
}

func newRing(ctx context.Context, dev *cudart.Device, size ringSize) (*ring, error) {
	buf, err := allocPiece(ctx, dev, size.ring)
	if err != nil {
		return nil, err
	}
	units, extended := size.ring/size.unit, size.extension/size.unit
	r := &ring{
		dev: dev, buf: buf, unit: size.unit, units: units, maxChunk: size.maxChunk / size.unit,
		extension: extension{units: extended, pinned: new(atomic.Int64)},
		free:      make([]bool, units+1+extended),
	}
	r.setFree(0, units, true)
	return r, nil
}

// allocPiece allocates memory that is one registration, because no copy may cross from one
// registration to the next.
func allocPiece(ctx context.Context, dev *cudart.Device, n int) (*hostmem.Buffer, error) {
	buf, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{Label: ringLabel})
	if err == nil && len(slices.Collect(buf.Spans(0, n))) > 1 {
		err = errors.Join(fmt.Errorf("%v: registered in several pieces, which copies cannot cross", buf), buf.Close())
		buf = nil
	}
	return buf, err
}

// try takes an extent. It returns nil if there is none, or if waiters go first.
func (r *ring) try(q request) *extent {
	r.mu.Lock()
	defer r.mu.Unlock()
	for !r.precedes(q) {
		if x := r.fit(q); x != nil {
			return x
		}
		if !r.poll() {
			break
		}
	}
	return nil
}

// precedes reports whether a waiter goes before a request. A slow request goes behind all
// waiters of its direction, a fast one behind the fast waiters.
func (r *ring) precedes(q request) bool {
	return slices.ContainsFunc(r.waiters, func(w *waiter) bool { return w.dir == q.dir && (q.slow || !w.slow) })
}

// fit takes an extent if its direction may have that much, and that much is free. Slow copies
// together have half of the ring at most.
func (r *ring) fit(q request) *extent {
	units := (q.n + r.unit - 1) / r.unit
	if r.used[q.dir]+units > r.share(q.dir) || q.slow && r.usedSlow+units > r.units/2 {
		return nil
	}
	return r.take(units, q)
}

// share returns the number of units that a direction may have: all without the extension, or
// half of all while the other direction uses or wants some.
func (r *ring) share(d direction) int {
	units, other := r.units-r.lost, d.opposite()
	if r.used[other] == 0 && !slices.ContainsFunc(r.waiters, func(w *waiter) bool { return w.dir == other }) {
		return units
	}
	if r.extension.open {
		units += r.extension.units
	}
	return units / 2
}

// chunk returns the size of the largest chunks: a quarter of a direction's share, up
// to maxChunk.
func (r *ring) chunk(d direction) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.chunkUnits(d) * r.unit
}

func (r *ring) chunkUnits(d direction) int { return min(r.maxChunk, max(r.share(d)/4, 1)) }

// serve gives memory to waiters, in the order in which they began to wait.
func (r *ring) serve() {
	var full struct{ fast, slow [directions]bool }
	waiting := r.waiters[:0]
	for _, w := range r.waiters {
		if !full.fast[w.dir] && !(w.slow && full.slow[w.dir]) {
			if w.x = r.fit(w.request); w.x != nil {
				wake(w.wake)
				continue
			}
			// A slow copy may wait for its own limit, others wait for memory.
			full.slow[w.dir] = true
			full.fast[w.dir] = !w.slow
		}
		waiting = append(waiting, w)
	}
	clear(r.waiters[len(waiting):])
	r.waiters = waiting
}

// take takes the first free units in a row.
func (r *ring) take(units int, q request) *extent {
	run := 0
	for i, free := range r.free {
		if run++; !free {
			run = 0
		}
		if run < units {
			continue
		}
		x := &extent{request: q, ring: r, first: i + 1 - units, units: units}
		r.setFree(x.first, units, false)
		r.count(x, 1)
		buf, off := r.buf, x.first*r.unit
		if x.first > r.units {
			buf, off = r.extension.buf, (x.first-r.extensionAt())*r.unit
		}
		x.mem = buf.Bytes()[off : off+q.n : off+q.n]
		return x
	}
	return nil
}

// count adds an extent's units to the used ones, or subtracts them with sign -1.
func (r *ring) count(x *extent, sign int) {
	r.used[x.dir] += sign * x.units
	if x.slow {
		r.usedSlow += sign * x.units
	}
}

// put makes a used extent free.
func (r *ring) put(x *extent) {
	r.setFree(x.first, x.units, true)
	r.count(x, -1)
}

func (r *ring) setFree(first, units int, free bool) {
	for i := range units {
		r.free[first+i] = free
	}
}

// poll queries the GPU for the oldest extents in flight of each stream. It serves waiters,
// and reports whether an extent became free. It releases mu during queries.
func (r *ring) poll() (some bool) {
	if r.polling {
		return false
	}
	r.polling = true
	some = r.restore()
	var buf [4]fence.Timeline
	busy := buf[:0]
	for i := 0; i < len(r.inFlight); {
		x := r.inFlight[i]
		if !slices.Contains(busy, x.stream) {
			r.mu.Unlock()
			done := x.fence.Done(background)
			r.mu.Lock()
			at := slices.Index(r.inFlight, x)
			if at >= 0 && done {
				r.inFlight = slices.Delete(r.inFlight, at, at+1)
				r.put(x)
				some = true
			}
			if i = max(at, 0); at < 0 || done { // it was quarantined, or is free
				continue
			}
			busy = append(busy, x.stream)
		}
		i++
	}
	r.polling = false
	if some {
		r.serve()
	}
	return some
}

// oldestPoints appends the Points of the oldest extent of each stream.
func (r *ring) oldestPoints(points []cudart.Point) []cudart.Point {
	r.mu.Lock()
	defer r.mu.Unlock()
	var streams []fence.Timeline
	for _, x := range r.inFlight {
		if !slices.Contains(streams, x.stream) {
			streams = append(streams, x.stream)
			points = x.fence.Points(points)
		}
	}
	return points
}

// release returns the extent to its ring, which reuses it when the GPU is done
// with what the fence has.
func (x *extent) release() {
	r := x.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if x.fence.Empty() {
		r.put(x)
		r.serve()
		return
	}
	x.stream = x.fence.Only()
	oldest := !slices.ContainsFunc(r.inFlight, func(y *extent) bool { return y.stream == x.stream })
	r.inFlight = append(r.inFlight, x)
	if oldest {
		r.notifyAll()
	}
}

// notifyAll wakes the waiting jobs, which then poll.
func (r *ring) notifyAll() {
	for _, w := range r.waiters {
		wake(w.wake)
	}
}

// wait begins to wait for an extent. The waiter sends to wake when it has one. The caller
// polls; before it sleeps, it requests a notification at the oldest Points.
func (r *ring) wait(wake chan<- struct{}, q request) *waiter {
	w := &waiter{ring: r, request: q, wake: wake}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters = append(r.waiters, w)
	if r.serve(); w.x == nil {
		r.wantExtension(q.dir)
	}
	return w
}

// stop ends a wait, and returns the waiter's extent, if any.
func (w *waiter) stop() *extent {
	r := w.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiters, w); i >= 0 {
		r.waiters = slices.Delete(r.waiters, i, i+1)
		r.serve() // its request may have blocked others
	}
	return w.x
}

// poll polls the ring, and reports whether the waiter has memory.
func (w *waiter) poll() bool {
	r := w.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.x == nil {
		r.poll()
	}
	if w.x == nil {
		r.wantExtension(w.dir)
	}
	return w.x != nil
}

// quarantine takes the extents of a stream that does not respond out of circulation, so that
// they do not block extents of other streams. The shares become smaller, and so do the
// requests of waiters.
func (r *ring) quarantine(stream fence.Timeline, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lostWhy = why
	var buf [4]cudart.Point
	r.inFlight = slices.DeleteFunc(r.inFlight, func(x *extent) bool {
		points := x.fence.Points(buf[:0])
		if !slices.ContainsFunc(points, func(p cudart.Point) bool { return fence.TimelineAt(p) == stream }) {
			return false
		}
		r.quarantined = append(r.quarantined, x)
		r.count(x, -1)
		r.lost += x.units
		for _, p := range points {
			p.Notify(make(chan struct{}, 1)) // so that restore finds it known
		}
		return true
	})
	for _, w := range r.waiters {
		w.n = min(w.n, r.chunkUnits(w.dir)*r.unit)
	}
	r.notifyAll()
}

// restore makes quarantined extents free whose fences are known to have completed. It makes
// no calls.
func (r *ring) restore() (some bool) {
	r.quarantined = slices.DeleteFunc(r.quarantined, func(x *extent) bool {
		if !x.fence.Completed() {
			return false
		}
		r.count(x, 1)
		r.lost -= x.units
		r.put(x)
		some = true
		return true
	})
	return some
}

// check returns an error if too much memory is quarantined for any copy. It queries the GPU
// for the quarantined extents first.
func (r *ring) check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.isLost() {
		return nil
	}
	list := slices.Clone(r.quarantined)
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(background, bounded.QueryTimeout)
	for _, x := range list {
		_ = x.fence.Wait(ctx)
	}
	cancel()
	r.mu.Lock()
	if r.restore(); !r.isLost() {
		r.serve()
		return nil
	}
	return fmt.Errorf("%v: %w: %w", r.buf, errLost, r.lostWhy)
}

// isLost reports whether one of the directions has no unit: both need one.
func (r *ring) isLost() bool { return r.lost >= r.units-1 }

// close waits until the GPU is done with all extents, and unmaps the memory. It fails while
// an abandoned copy is inside a call into the library, and may be called again.
func (r *ring) close(ctx context.Context) error {
	r.mu.Lock()
	list := slices.Concat(r.inFlight, r.quarantined)
	r.mu.Unlock()
	for _, x := range list {
		if err := x.fence.Wait(ctx); err != nil {
			return fmt.Errorf("%v may be in use: %w", r.buf, err)
		}
	}
	r.mu.Lock()
	r.poll()
	held := r.lost + r.used[toDevice] + r.used[toHost]
	r.mu.Unlock()
	if held > 0 {
		return fmt.Errorf("%v: %w", r.buf, ErrHeld)
	}
	if err := r.closeExtension(ctx); err != nil {
		return err
	}
	return r.buf.CloseContext(ctx)
}

var errLost = errors.New("all of it may be in use")
