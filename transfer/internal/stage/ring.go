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
	dev   *cudart.Device
	buf   *hostmem.Buffer
	unit  int // bytes
	units int // in all
	most  int // of an extent

	mu      sync.Mutex
	free    []uint64 // a bit for each unit
	used    [2]int   // units, by direction
	flying  []*extent
	asking  bool // a goroutine asks whether the oldest of flying is done
	waiters []*waiter
}

// A direction is up or down, as an index.
func direction(down bool) int {
	if down {
		return 1
	}
	return 0
}

// An extent is memory that one chunk passes through.
type extent struct {
	ring  *ring
	first int // unit
	units int
	way   int
	mem   []byte
	fence fence.Fence // of the GPU's use
}

// A waiter is a job that found no extent. It is served as soon as there is memory
// for it, and not only when it has woken: waking takes longer than a copy.
type waiter struct {
	n, way int
	wake   chan<- struct{}
	x      *extent // that it was given
}

func newRing(ctx context.Context, dev *cudart.Device, units, unit, most int, label string) (*ring, error) {
	buf, err := hostmem.Alloc(ctx, dev, units*unit, hostmem.Options{Label: label})
	if err != nil {
		return nil, err
	}
	if spans := len(buf.Spans()); spans > 1 {
		// Copies of a chunk must not cross from one registration to the next.
		return nil, errors.Join(fmt.Errorf("%v is registered in %d pieces", buf, spans), buf.Close())
	}
	r := &ring{dev: dev, buf: buf, unit: unit, units: units, most: most, free: make([]uint64, (units+63)/64)}
	for i := range units {
		r.free[i/64] |= 1 << (i % 64)
	}
	return r, nil
}

// bytes is the most that an extent holds.
func (r *ring) bytes() int { return r.most * r.unit }

// try takes an extent of n bytes, nil if there is none, or others wait for one.
// Neither direction has more than half while the other one wants some.
func (r *ring) try(ctx context.Context, n int, down bool) *extent {
	way := direction(down)
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.first(way) == nil {
		if x := r.fit(n, way); x != nil {
			return x
		}
		if !r.reclaim(ctx) {
			break
		}
	}
	return nil
}

// fit takes an extent if there is room for it.
func (r *ring) fit(n, way int) *extent {
	units := (n + r.unit - 1) / r.unit
	if r.used[way]+units > r.share(way) {
		return nil
	}
	return r.take(units, n, way)
}

// share is how many units a direction may have: all that the other one leaves,
// half if that one wants some.
func (r *ring) share(way int) int {
	if r.used[1-way] > 0 || r.first(1-way) != nil {
		return r.units / 2
	}
	return r.units
}

// chunk is the size of the largest chunks: a quarter of a direction's share, up
// to most.
func (r *ring) chunk(down bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return min(r.most, max(r.share(direction(down))/4, 1)) * r.unit
}

// serve gives waiters what there is, in the order in which they began to wait.
func (r *ring) serve() {
	for way := range r.used {
		for w := r.first(way); w != nil; w = r.first(way) {
			x := r.fit(w.n, way)
			if x == nil {
				break
			}
			w.x = x
			r.drop(w)
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}
}

func (r *ring) drop(w *waiter) {
	if i := slices.Index(r.waiters, w); i >= 0 {
		r.waiters = slices.Delete(r.waiters, i, i+1)
	}
}

// first is the one that has waited longest in a direction.
func (r *ring) first(way int) *waiter {
	for _, w := range r.waiters {
		if w.way == way {
			return w
		}
	}
	return nil
}

// take takes the first free units in a row.
func (r *ring) take(units, n, way int) *extent {
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
		r.used[way] += units
		off := first * r.unit
		return &extent{ring: r, first: first, units: units, way: way, mem: r.buf.Bytes()[off : off+n : off+n]}
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
		r.put(x)
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
		r.put(x)
		r.serve()
	} else {
		r.flying = append(r.flying, x)
	}
}

// put makes an extent's memory available.
func (r *ring) put(x *extent) {
	r.set(x.first, x.units, true)
	r.used[x.way] -= x.units
}

// wait begins to wait for an extent of n bytes: wake is sent to when there is
// one, which leave returns. The caller asks now and then whether the GPU is done
// with memory: see poll and notify.
func (r *ring) wait(wake chan<- struct{}, n int, down bool) *waiter {
	w := &waiter{n: n, wake: wake, way: direction(down)}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters = append(r.waiters, w)
	r.serve()
	return w
}

// leave ends a wait, and returns the extent that came of it.
func (r *ring) leave(w *waiter) *extent {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(w)
	return w.x
}

// poll asks what the GPU is done with, and reports whether a waiter has got
// memory.
func (r *ring) poll(ctx context.Context, w *waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.x == nil && r.reclaim(ctx) {
		r.serve()
	}
	return w.x != nil
}

// notify sends to a waiter when the GPU is done with the oldest extent. stop ends
// that.
func (r *ring) notify(w *waiter) (stop func()) {
	r.mu.Lock()
	var points []cudart.Point
	if len(r.flying) > 0 {
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
