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

// Run runs the steps. For each step it waits until the moves of the step's memory to the device
// are queued, makes s wait for them (cudaStreamWaitEvent), and calls queue, which queues the
// step's work on s. Meanwhile it prefetches the memory of later steps (cudaMemPrefetchAsync), and
// moves memory that is not needed soon to the host. When Run returns nil, all work is
// complete, and the plan's memory is on the host. Run may be called again; one Run of a plan runs
// at a time.
//
// The memory should be on the host, or untouched, before: memory that is on the device already
// does not count for the budget. While Run runs, only the steps may access the memory. Run advises
// ReadMostly for parts of it, and undoes this advice at its end. The first Run moves memory that
// is used in place to the host and advises PreferredLocation and AccessedBy, which takes as long
// as the move. This advice stays, also after an error: see [Range.Advise].
//
// The first error ends Run: of queue, of ctx, of CUDA, one that wraps [ErrOversubscribed]
// if the device has less free memory than Options.Reserve and the budgets of all plans of the
// process that run on it, or [cudart.ErrClosed] if memory is closed. Work that was queued may still be
// running then, memory stays where it is, and bytes that a later step would have overwritten may
// be lost. A panic of queue has the same effects.
//
// If queue or a call of CUDA has not returned a second after the end of ctx, Run returns;
// the call continues, and the plan and its memory are in use until it returns. If ctx can end,
// queue is called on another goroutine than Run's. queue must not call Run of the same plan, nor
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
	case noStream(s):
		return errNilStream
	case queue == nil:
		return errNilQueue
	}
	var queueing atomic.Int64 // number of the step whose function is called, from 1 on
	err := runBounded(ctx, func() error {
		select {
		case p.running <- struct{}{}:
		case <-ctx.Done():
			return bounded.Ended(ctx)
		}
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
	end, err := p.a.mem.begin(ctx, p.o.Budget, p.a.o.Reserve)
	if err != nil {
		return err
	}
	defer end()
	if err := p.adviseInPlace(ctx); err != nil {
		return err
	}
	r := &planRun{
		Plan: p, movers: m, s: s, queue: queue,
		fetched: newSignals(len(p.fetches)), evicted: newSignals(len(p.evicts)), queued: newSignals(p.steps),
		arriving: make([]cudart.Point, len(p.fetches)), ends: make([]cudart.Point, p.steps),
		copied: make([]bool, len(p.chunks)), hostHas: make([]bool, len(p.chunks)),
	}
	return r.do()
}

// A planRun is one run of a plan. Its movers wait here, not in their streams, for the conditions of
// a move:
//
//	operation | begun by           | when                               | signals when
//	fetch     | a goroutine of In  | fetch.after evicts have signaled   | its prefetch is queued (fetched)
//	step      | the run, in order  | its fetches have signaled          | its work is queued (queued)
//	evict     | a goroutine of Out | the work of its step has completed | the chunk is on the host (evicted)
//
// An operation writes its elements of the slices below before its signal, and others read them
// after the signal. No operation begins after the first error, which ends movers.ctx.
type planRun struct {
	*Plan
	*movers
	s     *cudart.Stream
	queue func(int) error

	fetched, evicted, queued signals
	fetching, evicting       atomic.Int64   // number of fetches and evicts that have begun
	arriving                 []cudart.Point // by fetch: end of its prefetch
	ends                     []cudart.Point // by step: end of its work
	copied                   []bool         // by chunk: ReadMostly is advised
	hostHas                  []bool         // by chunk: the host has its bytes, or had them before the fetch
}

// signals has a channel for each fetch, evict or step, which closes it as its signal.
type signals []chan struct{}

func newSignals(n int) signals {
	s := make(signals, n)
	for k := range s {
		s[k] = make(chan struct{})
	}
	return s
}

// await waits for all signals. It returns false after an error.
func (r *planRun) await(s signals) bool {
	for _, signal := range s {
		select {
		case <-signal:
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
	// No evict waits for the last step if it accesses no chunk.
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

// queueSteps queues the work of all steps, and waits for the moves. It waits also if queue
// panics or ends its goroutine, as a failed test does: the caller may close the memory then.
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

// adviseFirst advises ReadMostly for all chunks whose first fetch is a copy, with one call for
// adjacent chunks: a call during the run would wait for the prefetches in flight.
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
		if err := r.a.mem.advise(r.ctx, c, cudart.AdviseReadMostly, cudart.HostLocation()); err != nil {
			return err
		}
	}
	return nil
}

// step queues the work of one step, after its fetches, which are those from first to end-1.
func (r *planRun) step(i, first, end int) error {
	if !r.await(r.fetched[first:end]) {
		return context.Cause(r.ctx)
	}
	err := r.a.mem.calls.Inside(r.ctx, func() error {
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
		err = r.a.mem.calls.Inside(r.ctx, func() error { r.ends[i] = r.s.Point(); return nil })
	}
	if err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	close(r.queued[i])
	return nil
}

// fetchAll moves chunks to the device, until there are no more.
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

// fetch moves a chunk to the device. It returns when the chunk is there.
func (r *planRun) fetch(s *cudart.Stream, k int) error {
	f := r.fetches[k]
	c := r.chunks[f.chunk]
	if f.copy {
		r.hostHas[f.chunk] = r.hostHas[f.chunk] || c.onHost()
		if !r.copied[f.chunk] {
			if err := r.a.mem.advise(r.ctx, c, cudart.AdviseReadMostly, cudart.HostLocation()); err != nil {
				return err
			}
			r.copied[f.chunk] = true
		}
	}
	end, err := r.move(s, c, f.discard, r.a.dev.Location())
	if err != nil {
		return err
	}
	r.arriving[k] = end
	close(r.fetched[k])
	return r.arrive(end)
}

// move queues the move of a chunk, whose bytes may be discarded before.
func (r *planRun) move(s *cudart.Stream, c Range, discarded bool, to cudart.Location) (end cudart.Point, err error) {
	if discarded {
		if err := r.a.mem.calls.Inside(r.ctx, func() error { return discard(s, c) }); err != nil {
			return end, err
		}
	}
	return r.prefetch(s, c.ptr(), c.Len, to)
}

// onHost reports whether the host seems to have all of a chunk. It checks one page of each block
// of 2 MiB, because a check of all pages takes as long as the move. If another page of the block is
// on the device, it stays there when the copy is dropped, with the right bytes.
func (c Range) onHost() bool {
	var pages []uintptr
	for at := uintptr(c.ptr()); at < uintptr(c.ptr())+uintptr(c.Len); at += blockSize {
		pages = append(pages, at)
	}
	pages = append(pages, uintptr(c.ptr())+uintptr(c.Len)-1)
	mapped, err := linux.CountPages(os.DirFS("/"), linux.PagesMapped, 1, pages...)
	return err == nil && mapped == len(pages) // without the file the chunk is moved to the host, not dropped
}

// evictAll moves chunks to the host, each after the work of its last step, until there are no more.
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
		if err := r.evict(s, e); err != nil {
			return err
		}
		close(r.evicted[k])
	}
}

// evict drops a copy, or moves a chunk to the host. It also moves a copy of bytes that the host
// did not have, as of memory that was not touched before.
func (r *planRun) evict(s *cudart.Stream, e evict) error {
	c := r.chunks[e.chunk]
	if e.drop {
		if err := r.a.mem.advise(r.ctx, c, cudart.AdviseUnsetReadMostly, cudart.HostLocation()); err != nil {
			return err
		}
		r.copied[e.chunk] = false
		if r.hostHas[e.chunk] {
			return nil
		}
	}
	end, err := r.move(s, c, e.discard, cudart.HostLocation())
	if err = errors.Join(err, r.arrive(end)); err != nil {
		return err
	}
	r.hostHas[e.chunk] = true
	return nil
}

// unadvise undoes the advice ReadMostly of chunks that are on the device after an error.
func (r *planRun) unadvise() error {
	var errs []error
	for id, copied := range r.copied {
		if c := r.chunks[id]; copied {
			errs = append(errs, r.a.mem.advise(r.rest, c, cudart.AdviseUnsetReadMostly, cudart.HostLocation()))
		}
	}
	return errors.Join(errs...)
}
