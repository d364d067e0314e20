package managed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
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
// long as moving it, and keeps that advice, also after an error: see [Range.Unadvise].
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
	for _, c := range slices.Concat(p.chunks, p.inPlace) {
		if err := m.use(c.Memory); err != nil {
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
	r := &planRun{
		Plan: p, movers: m, s: s, queue: queue,
		fetched: newSignals(len(p.fetches)), evicted: newSignals(len(p.evicts)), queued: newSignals(p.steps),
		arriving: make([]cudart.Point, len(p.fetches)), ends: make([]cudart.Point, p.steps),
		copied: make([]bool, len(p.chunks)), home: make([]bool, len(p.chunks)),
	}
	return r.do()
}

// A planRun is one run of a plan. Its movers wait here, not in their streams, for what must
// be over before a move:
//
//	a         | is begun by      | when                             | is over when
//	fetch     | a mover of In    | its first evicts are over        | its prefetch is queued (fetched)
//	step      | the run, in      | its fetches and those of earlier | its work is queued (queued)
//	          | order            | steps are over                   |
//	evict     | a mover of Out   | its step's work is done          | the chunk has left (evicted)
//
// What one of them writes below it writes before its signal, and others read it after that.
// Nothing is begun after the first error, which ends movers.ctx.
type planRun struct {
	*Plan
	*movers
	s     *cudart.Stream
	queue func(int) error

	fetched, evicted, queued signals
	fetching, evicting       atomic.Int64   // begun
	arriving                 []cudart.Point // by fetch: its end
	ends                     []cudart.Point // by step: of its work
	copied                   []bool         // by chunk: it is advised ReadMostly
	home                     []bool         // by chunk: the host has its bytes, or had them when it was fetched
}

// signals has a channel for each move, or step, which is closed when that is over.
type signals []chan struct{}

func newSignals(n int) signals {
	s := make(signals, n)
	for k := range s {
		s[k] = make(chan struct{})
	}
	return s
}

// await waits for signals. It returns false after an error.
func (r *planRun) await(s signals) bool {
	for _, over := range s {
		select {
		case <-over:
		case <-r.ctx.Done():
			return false
		}
	}
	return r.ctx.Err() == nil
}

func (r *planRun) do() error {
	if err := r.adviseFirst(); err != nil {
		r.fail(err)
		return errors.Join(context.Cause(r.ctx), r.unadvise())
	}
	r.start(min(r.o.In, len(r.fetches)), r.fetchAll)
	r.start(min(r.o.Out, len(r.evicts)), r.evictAll)
	if err := r.queueSteps(); err != nil {
		return err
	}
	// The last step may access nothing that left after it.
	if r.steps == 0 {
		return nil
	}
	if err := r.ends[r.steps-1].Wait(r.ctx); err != nil {
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
	fetch := 0
	for i := range r.steps {
		first := fetch
		for fetch < len(r.fetches) && r.fetches[fetch].step == i {
			fetch++
		}
		if failed = r.step(i, first, fetch); failed != nil {
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

// step queues the work of one step, after its fetches, the first up to end.
func (r *planRun) step(i, first, end int) error {
	if !r.await(r.fetched[first:end]) {
		return context.Cause(r.ctx)
	}
	err := r.a.card.call(r.ctx, func() error {
		for _, arriving := range r.arriving[first:end] {
			if err := r.s.WaitPoint(arriving); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = r.queue(i)
	}
	if err == nil {
		err = r.a.card.call(r.ctx, func() error { r.ends[i] = r.s.Point(); return nil })
	}
	if err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	close(r.queued[i])
	return nil
}

// fetchAll brings chunks to the card, until there are no more.
func (r *planRun) fetchAll(s *cudart.Stream) error {
	for evicted := 0; ; {
		k := int(r.fetching.Add(1)) - 1
		if k >= len(r.fetches) || !r.await(r.evicted[evicted:r.fetches[k].after]) {
			return nil
		}
		evicted = r.fetches[k].after
		if err := r.fetch(s, k); err != nil {
			return err
		}
	}
}

// fetch brings a chunk to the card.
func (r *planRun) fetch(s *cudart.Stream, k int) error {
	f := r.fetches[k]
	c := r.chunks[f.chunk]
	if f.copy {
		r.home[f.chunk] = r.home[f.chunk] || c.onHost()
		if !r.copied[f.chunk] {
			if err := r.a.card.advise(r.ctx, c, ReadMostly()); err != nil {
				return err
			}
			r.copied[f.chunk] = true
		}
	}
	end, err := r.move(s, c, f.fresh, r.a.dev.Location())
	if err != nil {
		return err
	}
	r.arriving[k] = end
	close(r.fetched[k])
	return r.arrive(end)
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

// evictAll takes chunks away, each after the work of its last step, until there are no more.
func (r *planRun) evictAll(s *cudart.Stream) error {
	for {
		k := int(r.evicting.Add(1)) - 1
		if k >= len(r.evicts) || !r.await(r.queued[r.evicts[k].step:][:1]) {
			return nil
		}
		e := r.evicts[k]
		if err := r.ends[e.step].Wait(r.ctx); err != nil {
			return err
		}
		if err := r.takeAway(s, e); err != nil {
			return err
		}
		close(r.evicted[k])
	}
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
