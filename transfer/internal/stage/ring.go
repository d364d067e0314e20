package stage

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/fence"
)

// A ring is pinned memory that copies of one device pass through. It is cut into
// extents of whole units, the first that are free, so that what is reused first
// is what is in the caches still. An extent is free when it was released and the
// GPU is done with it: whoever needs one asks, the oldest first.
type ring struct {
	dev  *cudart.Device
	buf  *hostmem.Buffer
	unit int // bytes
	most int // units of an extent

	mu      sync.Mutex
	free    []uint64 // a bit for each unit
	flying  []*extent
	asking  bool // a goroutine asks whether the oldest of flying is done
	waiters []*waiter
}

// An extent is memory that one chunk passes through.
type extent struct {
	ring  *ring
	first int // unit
	units int
	mem   []byte
	fence fence.Fence // of the GPU's use
}

// A waiter is a job that found no extent.
type waiter struct{ wake chan<- struct{} }

func newRing(ctx context.Context, dev *cudart.Device, units, unit, most int, label string) (*ring, error) {
	buf, err := hostmem.Alloc(ctx, dev, units*unit, hostmem.Options{Label: label})
	if err != nil {
		return nil, err
	}
	if spans := len(buf.Spans()); spans > 1 {
		// Copies of a chunk must not cross from one registration to the next.
		return nil, errors.Join(fmt.Errorf("%v is registered in %d pieces", buf, spans), buf.Close())
	}
	r := &ring{dev: dev, buf: buf, unit: unit, most: most, free: make([]uint64, (units+63)/64)}
	for i := range units {
		r.free[i/64] |= 1 << (i % 64)
	}
	return r, nil
}

// bytes is the most that an extent holds.
func (r *ring) bytes() int { return r.most * r.unit }

// try takes an extent of n bytes, nil if there is none. Those that wait come
// first, in the order in which they began to; w is the caller's place among them,
// nil if it has none.
func (r *ring) try(ctx context.Context, n int, w *waiter) *extent {
	units := (n + r.unit - 1) / r.unit
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiters) > 0 && r.waiters[0] != w {
		return nil
	}
	for {
		if x := r.take(units, n); x != nil {
			return x
		}
		if !r.reclaim(ctx) {
			return nil
		}
	}
}

// take takes the first free units in a row.
func (r *ring) take(units, n int) *extent {
	run := 0
	for i := 0; i < len(r.free)*64; i++ {
		word := r.free[i/64] >> (i % 64)
		if word&1 == 0 {
			run = 0
			if word == 0 {
				i |= 63
			} else {
				i += bits.TrailingZeros64(word) - 1
			}
			continue
		}
		if run++; run < units {
			continue
		}
		first := i + 1 - units
		r.set(first, units, false)
		off := first * r.unit
		return &extent{ring: r, first: first, units: units, mem: r.buf.Bytes()[off : off+n : off+n]}
	}
	return nil
}

func (r *ring) set(first, units int, free bool) {
	for i := first; i < first+units; i++ {
		if free {
			r.free[i/64] |= 1 << (i % 64)
		} else {
			r.free[i/64] &^= 1 << (i % 64)
		}
	}
}

// reclaim asks whether the oldest extents that were released are done, and
// returns whether one was.
func (r *ring) reclaim(ctx context.Context) (some bool) {
	for len(r.flying) > 0 && !r.asking {
		x := r.flying[0]
		r.asking = true
		r.mu.Unlock()
		done := x.fence.Done(ctx)
		r.mu.Lock()
		r.asking = false
		if !done {
			return some
		}
		r.flying = append(r.flying[:0], r.flying[1:]...)
		r.set(x.first, x.units, true)
		some = true
	}
	return some
}

// release returns the extent to its ring, which reuses it when the GPU is done
// with what the fence knows.
func (x *extent) release() {
	r := x.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if x.fence.Empty() {
		r.set(x.first, x.units, true)
	} else {
		r.flying = append(r.flying, x)
	}
	r.wakeFirst()
}

// wakeFirst wakes the one that has waited longest.
func (r *ring) wakeFirst() {
	if len(r.waiters) > 0 {
		select {
		case r.waiters[0].wake <- struct{}{}:
		default:
		}
	}
}

// wait begins to wait for an extent: wake is sent to when it is the caller's turn
// and memory was released. leave ends that.
func (r *ring) wait(wake chan<- struct{}) *waiter {
	w := &waiter{wake: wake}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters = append(r.waiters, w)
	return w
}

func (r *ring) leave(w *waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiters, w); i >= 0 {
		r.waiters = slices.Delete(r.waiters, i, i+1)
		r.wakeFirst()
	}
}

// ready reports whether a waiter whose turn it is may find memory now.
func (r *ring) ready(ctx context.Context, w *waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiters) > 0 && r.waiters[0] == w && r.reclaim(ctx)
}

// notify wakes a waiter whose turn it is when the GPU is done with the oldest
// extent. stop ends that.
func (r *ring) notify(w *waiter) (stop func()) {
	r.mu.Lock()
	var points []cudart.Point
	if len(r.flying) > 0 && len(r.waiters) > 0 && r.waiters[0] == w {
		points = r.flying[0].fence.Points(nil)
	}
	r.mu.Unlock()
	stops := make([]func(), len(points))
	for i, p := range points {
		stops[i] = p.Notify(w.wake)
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// close waits until the GPU is done with all extents, and unmaps the memory. No
// job uses the ring any more. It may be tried again.
func (r *ring) close(ctx context.Context) error {
	r.mu.Lock()
	flying := r.flying
	r.mu.Unlock()
	for _, x := range flying {
		if err := x.fence.Wait(ctx); err != nil {
			return fmt.Errorf("%v may be in use: %w", r.buf, err)
		}
	}
	return r.buf.CloseContext(ctx)
}
