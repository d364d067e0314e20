package managed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/linux"
)

// Run runs the steps: for each it waits until what the step accesses is in flight to the
// card, makes s wait for it, and calls queue, which queues the step's work on s. Meanwhile
// it prefetches what later steps access, and takes away what is not needed soon. When it
// returns nil, all work is done, and the plan's memory is on the host: CPU and GPU may use
// it as they like. It may run again; one Run of a plan runs at a time.
//
// The memory should be on the host, or untouched, before: what else of it is on the card
// does not count for the budget. While Run runs, no more may access it, and it is advised
// ReadMostly in part: advice of that kind does not outlast it. What is used in place is moved
// to the host and advised PreferredLocation and AccessedBy by the first Run, which takes as
// long as moving it, and keeps that advice, also after an error: see [Memory.Unadvise].
//
// The first error ends Run: of queue, of ctx, of CUDA, one that wraps [ErrOversubscribed]
// if the card has not as much free as Options.Reserve and the budgets of all plans of the process
// that run on it, and [ErrClosed] if memory is closed. Work that was queued may still be
// running then, memory is where it was, and what a later step would have overwritten may have
// lost its bytes. So it is if queue panics.
//
// If queue or a call of CUDA has not returned a second after the end of ctx, Run returns;
// the call goes on, and the plan and its memory are in use until it returns. queue is called
// on another goroutine than Run's if ctx can end. It must not call Run of the same plan, nor
// close its memory: both would wait for this Run.
func (p *Plan) Run(ctx context.Context, s *cudart.Stream, queue func(step int) error) error {
	if !p.made() {
		return fmt.Errorf("managed: run plan: %w", errNotMade)
	}
	if err := p.run(ctx, s, queue); err != nil {
		return fmt.Errorf("managed: run plan of %d steps on %v: %w", p.steps, p.a.dev, err)
	}
	return nil
}

func (p *Plan) run(ctx context.Context, s *cudart.Stream, queue func(int) error) error {
	switch {
	case ctx == nil:
		return errNilContext
	case noStream(s):
		return errNilStream
	case queue == nil:
		return errNilQueue
	}
	select {
	case p.running <- struct{}{}:
	case <-ctx.Done():
		return bounded.Ended(ctx)
	}
	var queueing atomic.Int64 // number of the step whose function is called, from 1 on
	err := leaving(ctx, func() error {
		defer func() { <-p.running }()
		return p.runSteps(ctx, s, func(step int) error {
			queueing.Store(int64(step + 1))
			defer queueing.Store(0)
			return queue(step)
		})
	})
	if step := queueing.Load(); step > 0 && errors.Is(err, bounded.ErrStuck) {
		return fmt.Errorf("step %d: the function has not returned: %w", step-1, err)
	}
	return err
}

func (p *Plan) runSteps(ctx context.Context, s *cudart.Stream, queue func(int) error) error {
	m, err := p.a.newMovers(ctx)
	if err != nil {
		return err
	}
	defer m.end()
	for _, c := range p.chunks {
		if err := m.use(c.Memory); err != nil {
			return err
		}
	}
	for _, r := range p.inPlace {
		if err := m.use(r.Memory); err != nil {
			return err
		}
	}
	end, err := p.a.card.begin(ctx, p.o.Budget, p.a.o.Reserve)
	if err != nil {
		return err
	}
	defer end()
	if err := p.hold(ctx); err != nil {
		return err
	}
	r := &planRun{Plan: p, movers: m, s: s, queue: queue,
		fetched: progress{done: make([]bool, len(p.fetches))}, arriving: make([]cudart.Point, len(p.fetches)),
		evicted: progress{done: make([]bool, len(p.evicts))}, ends: make([]cudart.Point, 0, p.steps),
		copied: make([]bool, len(p.chunks)), home: make([]bool, len(p.chunks))}
	r.changed.L = &r.mu
	return r.do()
}

// A planRun is one run of a plan. Its movers wait here, not in their streams, for what must
// be over before a move:
//
//	a         | is begun by      | when                             | is over when
//	fetch     | a mover of In    | its first evicts are over        | its prefetch is queued (fetched)
//	step      | the run, in      | its fetches and those of earlier | its work is queued (ends)
//	          | order            | steps are over                   |
//	evict     | a mover of Out   | its step's work is done          | the chunk has left (evicted)
//
// Nothing is begun after the first error, which ends movers.ctx.
type planRun struct {
	*Plan
	*movers
	s       *cudart.Stream
	queue   func(int) error
	awaited int // fetches that s waits for

	mu      sync.Mutex // not held during calls into the library
	changed sync.Cond  // of the following, or of movers.ctx
	fetched progress
	evicted progress
	ends    []cudart.Point // of steps

	// Written by the goroutine that moves the chunk.
	arriving []cudart.Point // by fetch: its end, once it is over
	copied   []bool         // by chunk: it is advised ReadMostly
	home     []bool         // by chunk: the host has its bytes, or had them when it was fetched
}

// progress is that of moves that are begun in order, by several goroutines.
type progress struct {
	begun int
	done  []bool
	first int // all before it are done
}

func (r *planRun) do() error {
	defer context.AfterFunc(r.ctx, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.changed.Broadcast()
	})()
	if err := r.adviseFirst(); err != nil {
		r.fail(err)
		return errors.Join(context.Cause(r.ctx), r.unadvise())
	}
	r.start(min(r.o.In, len(r.fetches)), r.fetchNext)
	r.start(min(r.o.Out, len(r.evicts)), r.evictNext)
	if err := r.queueSteps(); err != nil {
		return err
	}
	// The last step may access nothing that left after it.
	if len(r.ends) == 0 {
		return nil
	}
	if err := r.ends[len(r.ends)-1].Wait(r.ctx); err != nil {
		r.fail(err)
		return context.Cause(r.ctx)
	}
	return nil
}

var errNotReturned = errors.New("the function did not return")

// queueSteps queues the work of all steps, and waits for the moves. So it does if queue
// panics or ends its goroutine, as a test that fails does: the caller may close the memory
// then.
func (r *planRun) queueSteps() (err error) {
	failed := errNotReturned
	defer func() {
		if failed != nil {
			r.fail(failed)
		}
		if err = r.movers.wait(); err != nil {
			err = errors.Join(err, r.unadvise())
		}
	}()
	for i := range r.steps {
		if failed = r.step(i); failed != nil {
			return nil
		}
		failed = errNotReturned
	}
	failed = nil
	return nil
}

// adviseFirst advises ReadMostly for all chunks that come to the card as copies at first,
// with one call for chunks side by side: a call has to wait for the prefetches in flight.
func (r *planRun) adviseFirst() error {
	var first []Range
	seen := make([]bool, len(r.chunks))
	for _, f := range r.fetches {
		if f.copy && !seen[f.chunk] {
			first = append(first, r.chunks[f.chunk])
			r.copied[f.chunk] = true
		}
		seen[f.chunk] = true
	}
	for _, c := range merge(first) {
		if err := r.a.card.advise(r.ctx, c, ReadMostly()); err != nil {
			return err
		}
	}
	return nil
}

// waitUntil waits until ready returns true, with r.mu locked. It returns false after an error.
func (r *planRun) waitUntil(ready func() bool) bool {
	for r.ctx.Err() == nil && !ready() {
		r.changed.Wait()
	}
	return r.ctx.Err() == nil
}

// begin returns the next move to be made, when it is ready. ok is false if there is none,
// or after an error.
func (r *planRun) begin(p *progress, ready func(k int) bool) (k int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k = p.begun
	if k == len(p.done) {
		return 0, false
	}
	p.begun++
	return k, r.waitUntil(func() bool { return ready(k) })
}

// over makes known that a move is over.
func (r *planRun) over(p *progress, k int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.done[k] = true
	for p.first < len(p.done) && p.done[p.first] {
		p.first++
	}
	r.changed.Broadcast()
}

// step queues the work of one step.
func (r *planRun) step(i int) error {
	r.mu.Lock()
	ok := r.waitUntil(func() bool { return r.fetched.first == len(r.fetches) || r.fetches[r.fetched.first].step > i })
	r.mu.Unlock()
	if !ok {
		return context.Cause(r.ctx)
	}
	err := r.a.card.call(r.ctx, func() (err error) {
		for ; r.awaited < len(r.fetches) && r.fetches[r.awaited].step == i && err == nil; r.awaited++ {
			err = r.s.WaitPoint(r.arriving[r.awaited])
		}
		return err
	})
	if err == nil {
		err = r.queue(i)
	}
	var end cudart.Point
	if err == nil {
		err = r.a.card.call(r.ctx, func() error { end = r.s.Point(); return nil })
	}
	if err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends = append(r.ends, end)
	r.changed.Broadcast()
	return nil
}

// fetchNext brings the next chunk to the card.
func (r *planRun) fetchNext(s *cudart.Stream) (more bool, err error) {
	k, ok := r.begin(&r.fetched, func(k int) bool { return r.evicted.first >= r.fetches[k].after })
	if !ok {
		return false, nil
	}
	f := r.fetches[k]
	c := r.chunks[f.chunk]
	if f.copy {
		if !r.home[f.chunk] {
			r.home[f.chunk] = c.onHost()
		}
		if !r.copied[f.chunk] {
			if err := r.a.card.advise(r.ctx, c, ReadMostly()); err != nil {
				return false, err
			}
			r.copied[f.chunk] = true
		}
	}
	end, err := r.move(s, c, f.fresh, r.a.dev.Location())
	if err != nil {
		return false, err
	}
	r.arriving[k] = end
	r.over(&r.fetched, k)
	return true, r.arrive(end)
}

// move queues the move of a chunk, whose bytes may be discarded.
func (r *planRun) move(s *cudart.Stream, c Range, discarded bool, to cudart.Location) (end cudart.Point, err error) {
	if discarded {
		if err := r.a.card.call(r.ctx, func() error { return discard(s, c) }); err != nil {
			return end, err
		}
	}
	return r.prefetch(s, c.ptr(), c.Len, to)
}

// onHost reports whether the host seems to have all of a chunk. It checks a page of each
// block, because all of them take as long as the move. A page that is on the card all the
// same stays there when the copy is dropped, and has the right bytes there, too.
func (c Range) onHost() bool {
	var pages []uintptr
	for at := uintptr(c.ptr()); at < uintptr(c.ptr())+uintptr(c.Len); at += blockSize {
		pages = append(pages, at)
	}
	pages = append(pages, uintptr(c.ptr())+uintptr(c.Len)-1)
	mapped, err := linux.CountPages(os.DirFS("/"), linux.PagesMapped, 1, pages...)
	return err == nil && mapped == len(pages) // without the file it is moved back when it leaves
}

// evictNext takes the next chunk away, after the work of its last step.
func (r *planRun) evictNext(s *cudart.Stream) (more bool, err error) {
	k, ok := r.begin(&r.evicted, func(k int) bool { return len(r.ends) > r.evicts[k].step })
	if !ok {
		return false, nil
	}
	e := r.evicts[k]
	r.mu.Lock()
	end := r.ends[e.step]
	r.mu.Unlock()
	if err := end.Wait(r.ctx); err != nil {
		return false, err
	}
	if err := r.takeAway(s, e); err != nil {
		return false, err
	}
	r.over(&r.evicted, k)
	return true, nil
}

// takeAway drops a copy, or moves a chunk to the host. A copy of what the host never had,
// such as memory that was not touched before, is moved as well.
func (r *planRun) takeAway(s *cudart.Stream, e evict) error {
	c := r.chunks[e.chunk]
	if e.drop {
		if err := r.a.card.advise(r.ctx, c, ReadMostly().unset()); err != nil {
			return err
		}
		r.copied[e.chunk] = false
		if r.home[e.chunk] {
			return nil
		}
	}
	end, err := r.move(s, c, e.waste, Host())
	if err = errors.Join(err, r.arrive(end)); err != nil {
		return err
	}
	r.home[e.chunk] = true
	return nil
}

// unadvise undoes the advice of chunks that are on the card after an error.
func (r *planRun) unadvise() error {
	var errs []error
	for id, copied := range r.copied {
		if c := r.chunks[id]; copied {
			errs = append(errs, r.a.card.advise(r.rest, c, ReadMostly().unset()))
		}
	}
	return errors.Join(errs...)
}
