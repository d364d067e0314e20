// Package fence reports whether GPUs are done with memory, for every package of this module
// that has memory which a GPU uses.
package fence

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A Fence stands between memory and its reuse. It remembers the streams that
// use the memory, and where their work on it ends. No memory is reused,
// unregistered or unmapped unless Done has returned true, or Wait nil. The zero
// Fence is of memory that no stream uses.
//
// Each of its streams is in one of these states:
//
//	state     entered by              | Done, Wait
//	open      Add                     | as after Record
//	recorded  Record, Done or Wait    | query the device: cudart.Point describes
//	                                  | calls that fail, block or never return,
//	                                  | streams that are closed or lost, and
//	                                  | devices that are lost
//	removed   the point was reached   | true, nil
//
// A stream that is added again is open again. A query that fails leaves the stream in its
// state, and the next call queries again: a Fence forgets nothing. Before makes calls into
// the library that may block on the caller's goroutine, and so do Done and Wait with a
// context that cannot end.
//
// Methods may be called from any goroutine.
type Fence struct {
	last  atomic.Uint64 // the timeline that was added last, and is open; 0 for none
	count atomic.Int32  // len(uses)

	mu      sync.Mutex // not held during calls into the library
	uses    []use
	err     error
	pruneAt int // len(uses)
}

// A use is a stream and the end of its work on the memory.
type use struct {
	timeline Timeline
	point    cudart.Point // unless open
	open     bool
}

// Add remembers that s uses the memory. It is to be called after work was
// queued there, even if that failed, because some of it may have been queued.
func (f *Fence) Add(s *cudart.Stream) {
	timeline := TimelineOf(s)
	if timeline == nil || f.last.Load() == timeline.ID() {
		return
	}
	f.mu.Lock()
	i := f.use(timeline)
	if i < 0 {
		i = len(f.uses)
		f.uses = append(f.uses, use{timeline: timeline})
		f.count.Add(1)
	}
	f.uses[i].open = true
	f.last.Store(timeline.ID())
	prune := len(f.uses) > max(f.pruneAt, minPrune)
	f.mu.Unlock()
	if prune {
		f.prune()
	}
}

// use returns the index of a stream, -1 if it is not there.
func (f *Fence) use(timeline Timeline) int {
	return slices.IndexFunc(f.uses, func(u use) bool { return u.timeline == timeline })
}

// Empty reports whether the memory is known to be unused. It makes no calls.
func (f *Fence) Empty() bool { return f.count.Load() == 0 }

// Record fixes the end of the work on the memory: work that is queued on the streams
// later is not waited for. It records an event on each stream that has queued
// work since its last one (cudaEventRecord), and does not block: see the function Record.
func (f *Fence) Record() {
	if f.Empty() {
		return
	}
	var buf [inlineStreams]cudart.Point
	for _, p := range f.points(buf[:0]) {
		Record(p)
	}
}

// inlineStreams is the number of streams handled without an allocation.
const inlineStreams = 4

// points fixes all streams and returns their points.
func (f *Fence) points(list []cudart.Point) []cudart.Point {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fix()
	for _, u := range f.uses {
		list = append(list, u.point)
	}
	return list
}

// fix ends the open state of all streams.
func (f *Fence) fix() {
	f.last.Store(0)
	for i := range f.uses {
		if u := &f.uses[i]; u.open {
			u.point, u.open = u.timeline.End(), false
		}
	}
}

// Next returns a Point that the work on the memory has yet to reach; ok is false if the
// device is known to be done with it. It fixes the end of the work as Record does, and
// makes no calls.
func (f *Fence) Next() (p cudart.Point, ok bool) {
	if f.Empty() {
		return p, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fix()
	f.drop(func(u use) bool { return u.point.Completed() })
	if len(f.uses) == 0 {
		return p, false
	}
	return f.uses[len(f.uses)-1].point, true
}

func (f *Fence) drop(reached func(use) bool) {
	f.uses = slices.DeleteFunc(f.uses, func(u use) bool {
		if !reached(u) {
			return false
		}
		if f.err == nil {
			f.err = u.point.Err()
		}
		return true
	})
	f.count.Store(int32(len(f.uses)))
}

// Done reports whether the device is done with the memory. It queries each stream
// once at most (cudaEventQuery). A call that blocks or fails counts as false; ctx bounds
// the call, not the work.
func (f *Fence) Done(ctx context.Context) bool {
	for {
		if p, ok := f.Next(); !ok || !p.Done(ctx) {
			return !ok
		}
	}
}

// Wait waits until the device is done with the memory, and with the work of streams that
// are added meanwhile. After an error the memory may be in use: the error is ctx's, when
// that ends first, or the reason why CUDA cannot report.
func (f *Fence) Wait(ctx context.Context) error {
	for p, ok := f.Next(); ok; p, ok = f.Next() {
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Before makes work that is queued on s later wait for the work on the memory
// (cudaStreamWaitEvent). The caller does not wait, and the Fence stays as it is.
// After an error some of the work may not be waited for.
func (f *Fence) Before(s *cudart.Stream) error {
	var buf [inlineStreams]cudart.Point
	for _, p := range f.points(buf[:0]) {
		Record(p)
		if err := s.WaitPoint(p); err != nil {
			return err
		}
	}
	return nil
}

// Err returns the first error that CUDA reported for the work on the memory
// since the last call, once the device is done with it. What was copied may be
// wrong then.
func (f *Fence) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.err
	f.err = nil
	return err
}

const (
	minPrune     = 8
	pruneTimeout = 10 * time.Millisecond
)

// prune forgets streams that were closed or are idle, so that memory which many
// short-lived streams have used does not remember them all.
func (f *Fence) prune() {
	f.mu.Lock()
	var idle []cudart.Point
	for _, u := range f.uses {
		if p, ok := u.timeline.Idle(); ok {
			idle = append(idle, p)
		}
	}
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), pruneTimeout)
	defer cancel()
	for _, p := range idle {
		p.Done(ctx)
	}
	f.forget(func(u use) bool {
		// Nothing was queued since its last point: that is the end, open or not.
		p, ok := u.timeline.Idle()
		return ok && p.Completed()
	})
}

// forget drops streams, also open ones, if idle reports that they have no work on the
// memory. An Add during idle may be of work that idle has not seen: so last is cleared
// before, for Add to wait for the lock and add the stream again.
func (f *Fence) forget(idle func(use) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last.Store(0)
	f.drop(idle)
	f.pruneAt = 2 * len(f.uses)
}

// Completed reports whether the device is known to be done with the memory, without
// a call into the library.
func (f *Fence) Completed() bool {
	if f.Empty() {
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(func(u use) bool { return !u.open && u.point.Completed() })
	return len(f.uses) == 0
}

// Only returns the one stream that uses the memory, nil if there are several,
// or none.
func (f *Fence) Only() Timeline {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.uses) != 1 {
		return nil
	}
	return f.uses[0].timeline
}

// Points appends the recorded ends of the work on the memory to list.
func (f *Fence) Points(list []cudart.Point) []cudart.Point {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, u := range f.uses {
		if !u.open {
			list = append(list, u.point)
		}
	}
	return list
}

// AddPoint adds a recorded end of work on the memory.
func (f *Fence) AddPoint(p cudart.Point) {
	timeline := TimelineAt(p)
	if timeline == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.use(timeline)
	if i < 0 {
		f.uses = append(f.uses, use{timeline: timeline, point: p})
		f.count.Add(1)
	} else if u := &f.uses[i]; !u.open && p.After(u.point) {
		// The later Point also reports errors of the earlier one that are found later.
		if f.err == nil {
			f.err = u.point.Err()
		}
		u.point = p
	}
}
