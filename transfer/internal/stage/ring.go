package stage

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/fence"
)

// A ring is pinned memory that copies of one device pass through. It is cut into
// extents of whole units, the first that are free, so that what is reused first
// is what is in the caches still. An extent is free when it was released and the
// GPU is done with it: jobs that need one ask, the oldest extent first.
type ring struct {
	dev   *cudart.Device
	buf   *hostmem.Buffer
	unit  int // bytes
	units int // of buf
	most  int // of an extent
	annex annex

	mu      sync.Mutex
	free    []uint64     // a bit for each unit
	used    [classes]int // units
	flying  []*extent    // released, in order
	aside   []*extent    // released, and a GPU does not say whether it is done
	lost    int          // units of them
	why     error        // of the last one
	asking  bool         // a goroutine asks whether the oldest of flying is done
	waiters []*waiter    // in order
}

// A class is the direction of a copy, and whether it may wait for a disk while it
// has memory of the ring.
type class int

const (
	classUp class = iota
	classDown
	classSlowUp
	classSlowDown
	classes
)

func classOf(down, slow bool) class {
	c := classUp
	if down {
		c = classDown
	}
	if slow {
		c += classSlowUp - classUp
	}
	return c
}

func (c class) slow() bool { return c >= classSlowUp }

// way is the class without the slowness, back that of the other direction.
func (c class) way() class  { return c % classSlowUp }
func (c class) back() class { return 1 - c.way() }

// usedBy is how many units copies of a direction have.
func (r *ring) usedBy(way class) int { return r.used[way] + r.used[way+classSlowUp] }

// An extent is memory that one chunk passes through.
type extent struct {
	ring  *ring
	first int // unit
	units int
	class class
	mem   []byte
	fence fence.Fence      // of the GPU's use
	line  *cudart.Timeline // of the stream that uses it, when released; nil for several
}

// A waiter is a job that found no extent. It is served as soon as there is memory
// for it, and not only when it has woken: waking takes longer than a copy.
type waiter struct {
	ring  *ring
	n     int
	class class
	wake  chan<- struct{}
	x     *extent // that it was given
}

func newRing(ctx context.Context, dev *cudart.Device, units, annexed, unit, most int, label string) (*ring, error) {
	buf, err := hostmem.Alloc(ctx, dev, units*unit, hostmem.Options{Label: label})
	if err != nil {
		return nil, err
	}
	if spans := len(buf.Spans()); spans > 1 {
		// Copies of a chunk must not cross from one registration to the next.
		return nil, errors.Join(fmt.Errorf("%v: %w", buf, errPieces), buf.Close())
	}
	r := &ring{dev: dev, buf: buf, unit: unit, units: units, most: most, annex: annex{units: annexed, pinned: new(atomic.Int64)}, free: make([]uint64, (units+1+annexed+63)/64)}
	r.set(0, units, true)
	return r, nil
}

// try takes an extent of n bytes, nil if there is none, or others wait for one.
func (r *ring) try(n int, c class) *extent {
	r.mu.Lock()
	defer r.mu.Unlock()
	for !r.waitedFor(c) {
		if x := r.fit(n, c); x != nil {
			return x
		}
		if !r.reclaim() {
			break
		}
	}
	return nil
}

// waitedFor reports whether one waits who goes first.
func (r *ring) waitedFor(c class) bool {
	return slices.ContainsFunc(r.waiters, func(w *waiter) bool {
		return w.class == c || w.class == c.way()
	})
}

// fit takes an extent if there is room for it.
func (r *ring) fit(n int, c class) *extent {
	units := (n + r.unit - 1) / r.unit
	if r.usedBy(c.way())+units > r.share(c.way()) || c.slow() && r.slowLeft() < units {
		return nil
	}
	return r.take(units, n, c)
}

// slowLeft is how many units slow copies may take still: they have half of the
// ring at the most.
func (r *ring) slowLeft() int { return r.units/2 - r.used[classSlowUp] - r.used[classSlowDown] }

// share is how many units a direction may have: all but the annex, and if the other
// direction wants some, half of all.
func (r *ring) share(way class) int {
	back, units := way.back(), r.units-r.lost
	switch {
	case r.usedBy(back) == 0 && !slices.ContainsFunc(r.waiters, func(w *waiter) bool { return w.class.way() == back }):
		return units
	case r.annex.open:
		units += r.annex.units
	}
	return units / 2
}

// chunk is the size of the largest chunks: a quarter of a direction's share, up
// to most.
func (r *ring) chunk(down bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return min(r.most, max(r.share(classOf(down, false))/4, 1)) * r.unit
}

// serve gives waiters what there is, in the order in which they began to wait.
func (r *ring) serve() {
	var full [classes]bool
	kept := r.waiters[:0]
	for i, w := range r.waiters {
		if !full[w.class] {
			if w.x = r.fit(w.n, w.class); w.x != nil {
				w.poke()
				continue
			}
			full[w.class] = true
			// A slow copy may be kept by its own limit, others by the memory.
			if !w.class.slow() {
				full[w.class+classSlowUp] = true
			}
		}
		kept = append(kept, r.waiters[i])
	}
	clear(r.waiters[len(kept):])
	r.waiters = kept
}

// take takes the first free units in a row.
func (r *ring) take(units, n int, c class) *extent {
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
		r.used[c] += units
		buf, off := r.buf, first*r.unit
		if first > r.units {
			buf, off = r.annex.buf, (first-r.annexAt())*r.unit
		}
		return &extent{ring: r, first: first, units: units, class: c, mem: buf.Bytes()[off : off+n : off+n]}
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

func (r *ring) isFree(first, units int) bool {
	for i := first; i < first+units; i++ {
		if r.free[i/64]&(1<<(i%64)) == 0 {
			return false
		}
	}
	return true
}

// reclaim asks which of the extents that were released the GPU is done with: of
// those of each stream the oldest first. It serves waiters, and returns whether
// there was one.
func (r *ring) reclaim() (some bool) {
	if r.asking {
		return false
	}
	r.asking = true
	var room [4]*cudart.Timeline
	busy := room[:0]
	for i := 0; i < len(r.flying); {
		x := r.flying[i]
		if !slices.Contains(busy, x.line) {
			r.mu.Unlock()
			done := x.fence.Done(asking)
			r.mu.Lock()
			at := slices.Index(r.flying, x)
			if at >= 0 && done {
				r.flying = slices.Delete(r.flying, at, at+1)
				r.put(x)
				some = true
			}
			if i = max(at, 0); at < 0 || done { // it was set aside, or is free
				continue
			}
			busy = append(busy, x.line)
		}
		i++
	}
	r.asking = false
	if some {
		r.serve()
	}
	return some
}

// heads are the Points that the next extents depend on: the oldest of each stream.
func (r *ring) heads() (points []cudart.Point) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var lines []*cudart.Timeline
	for _, x := range r.flying {
		if !slices.Contains(lines, x.line) {
			lines = append(lines, x.line)
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
	x.line = x.fence.Only()
	isHead := !slices.ContainsFunc(r.flying, func(y *extent) bool { return y.line == x.line })
	r.flying = append(r.flying, x)
	if isHead {
		for _, w := range r.waiters {
			w.poke()
		}
	}
}

// poke makes the job that waits look again.
func (w *waiter) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// put makes an extent's memory available.
func (r *ring) put(x *extent) {
	r.set(x.first, x.units, true)
	r.used[x.class] -= x.units
}

// wait begins to wait for an extent of n bytes: wake is sent to when there is
// one. The ring asks the GPU nothing by itself: the caller polls, and before it
// sleeps asks to be notified when one of the heads is reached.
func (r *ring) wait(wake chan<- struct{}, n int, c class) *waiter {
	w := &waiter{ring: r, n: n, class: c, wake: wake}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters = append(r.waiters, w)
	if r.serve(); w.x == nil {
		r.wantAnnex(c)
	}
	return w
}

// leave ends a wait, and returns the extent that came of it.
func (w *waiter) leave() *extent {
	r := w.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiters, w); i >= 0 {
		r.waiters = slices.Delete(r.waiters, i, i+1)
		r.serve() // what it wanted may have kept others
	}
	return w.x
}

// poll asks what the GPU is done with, and reports whether the waiter has got
// memory.
func (w *waiter) poll() bool {
	r := w.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.x == nil {
		r.reclaim()
	}
	if w.x == nil {
		r.wantAnnex(w.class)
	}
	return w.x != nil
}

// setAside keeps extents that a stream uses from holding up others: it is not
// known when, or whether, that ends.
func (r *ring) setAside(line *cudart.Timeline, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.why = why
	var room [4]cudart.Point
	r.flying = slices.DeleteFunc(r.flying, func(x *extent) bool {
		uses := slices.ContainsFunc(x.fence.Points(room[:0]), func(p cudart.Point) bool { return p.Line() == line })
		if uses {
			r.aside = append(r.aside, x)
			r.used[x.class] -= x.units
			r.lost += x.units
			go func() {
				if x.fence.Wait(asking) == nil {
					r.takeBack(x)
				}
			}()
		}
		return uses
	})
	for _, w := range r.waiters { // which may wait in vain
		w.poke()
	}
}

// takeBack makes an extent available that was set aside, and is done.
func (r *ring) takeBack(x *extent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.aside, x); i >= 0 {
		r.aside = slices.Delete(r.aside, i, i+1)
		r.used[x.class] += x.units
		r.lost -= x.units
		r.put(x)
		r.serve()
	}
}

// recover returns an error if there will be no more memory, as far as is known: it
// asks again for what was set aside.
func (r *ring) recover() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lost < r.units-1 { // both directions need one
		return nil
	}
	aside := slices.Clone(r.aside)
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(asking, landTimeout/20)
	for _, x := range aside {
		if x.fence.Wait(ctx) == nil {
			r.takeBack(x)
		}
	}
	cancel()
	r.mu.Lock()
	if r.lost < r.units-1 {
		return nil
	}
	return fmt.Errorf("%v: %w: %w", r.buf, errLost, r.why)
}

// close waits until the GPU is done with all extents, and unmaps the memory. No
// copy uses the ring any more, but for those whose calls into the library have not
// returned: then close fails, and may be tried again.
func (r *ring) close(ctx context.Context) error {
	r.mu.Lock()
	flying := slices.Concat(r.flying, r.aside)
	r.mu.Unlock()
	for _, x := range flying {
		if err := x.fence.Wait(ctx); err != nil {
			return fmt.Errorf("%v may be in use: %w", r.buf, err)
		}
		r.takeBack(x)
	}
	r.mu.Lock()
	r.reclaim()
	held := r.lost
	for _, units := range r.used {
		held += units
	}
	r.mu.Unlock()
	if held > 0 {
		return fmt.Errorf("%v: %w", r.buf, ErrHeld)
	}
	if err := r.closeAnnex(ctx); err != nil {
		return err
	}
	return r.buf.CloseContext(ctx)
}

// errLost says that no copy can use the memory any more.
var errLost = errors.New("all of it may be in use")

// ErrHeld says that a copy was given up, see Stage.Run.
var ErrHeld = errors.New("in use by a copy that waits for a call into the CUDA library")
