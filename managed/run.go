package managed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Run runs the steps: for each it waits until what the step accesses is on its way to the
// card, makes s wait for it, and calls queue, which queues the step's work on s. Meanwhile
// it prefetches what later steps access, and takes away what is not needed soon. When it
// returns, all work is done, and the plan's memory is on the host: CPU and GPU may use it
// as they like. It may run again; one Run of a plan runs at a time.
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
// lost its bytes. So it is if queue panics. queue must not call Run of the same plan, nor close
// its memory: both would wait for this Run.
func (p *Plan) Run(ctx context.Context, s *cudart.Stream, queue func(step int) error) error {
	if err := p.run(ctx, s, queue); err != nil {
		return fmt.Errorf("managed: run plan of %d steps on %v: %w", p.steps, p.a.dev, err)
	}
	return nil
}

func (p *Plan) run(ctx context.Context, s *cudart.Stream, queue func(int) error) error {
	switch {
	case ctx == nil:
		return errNilContext
	case s == nil:
		return errNilStream
	case queue == nil:
		return errNilQueue
	}
	select {
	case p.running <- struct{}{}:
		defer func() { <-p.running }()
	case <-ctx.Done():
		return ctx.Err()
	}
	end, err := p.a.card.begin(p.o.Budget, p.a.o.Reserve)
	if err != nil {
		return err
	}
	defer end()
	entered := make(map[*Memory]bool)
	defer func() {
		for m := range entered {
			m.life.End()
		}
	}()
	enter := func(m *Memory) error {
		if !entered[m] {
			if !m.life.Begin() {
				return fmt.Errorf("%v: %w", m, ErrClosed)
			}
			entered[m] = true
		}
		return nil
	}
	for _, c := range p.chunks {
		if err := enter(c.memory); err != nil {
			return err
		}
	}
	for _, u := range p.inPlace {
		if err := enter(u.Memory); err != nil {
			return err
		}
	}
	r := &planRun{Plan: p, s: s, queue: queue,
		issued: make([]bool, len(p.fetches)), arrived: make([]cudart.Point, len(p.fetches)),
		evicted: make([]bool, len(p.evicts)), ends: make([]cudart.Point, 0, p.steps), copied: make([]bool, len(p.chunks)), home: make([]bool, len(p.chunks))}
	r.changed.L = &r.mu
	if err := p.hold(ctx); err != nil {
		return err
	}
	return r.do(ctx)
}

// A planRun is one run of a plan. Goroutines make the moves, each on a stream of its own
// that has no other work: CUDA makes a prefetch on the calling thread then, and not in a
// queue behind others. They wait here, not in the streams, for what must be over before.
type planRun struct {
	*Plan
	s     *cudart.Stream
	queue func(int) error

	mu      sync.Mutex // not held during calls into the library
	changed sync.Cond  // any of the following
	err     error      // the first

	nextFetch, nextEvict int            // to be made
	issued               []bool         // by fetch: the prefetch is queued
	arrived              []cudart.Point // by fetch: its end, once issued
	allIssued            int            // fetches up to the first that is not
	evicted              []bool         // by evict: it is over
	allEvicted           int            // evicts up to the first that is not over
	ends                 []cudart.Point // of the steps that are queued
	cancel               context.CancelFunc

	// By chunk, and written by the goroutine that moves it.
	copied []bool // it is advised ReadMostly
	home   []bool // the host has its bytes, or had them when it was fetched
}

func (r *planRun) do(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.cancel = cancel
	defer context.AfterFunc(ctx, func() { r.fail(ctx.Err()) })()

	if err := r.adviseFirst(); err != nil {
		return errors.Join(err, r.unadvise())
	}
	var workers sync.WaitGroup
	for range min(r.o.In, len(r.fetches)) {
		workers.Go(func() { r.work(ctx, r.fetchNext) })
	}
	for range min(r.o.Out, len(r.evicts)) {
		workers.Go(func() { r.work(ctx, r.evictNext) })
	}
	if err := r.queueSteps(&workers); err != nil {
		return err
	}
	// The last step may access nothing that left after it.
	if len(r.ends) == 0 {
		return nil
	}
	return r.ends[len(r.ends)-1].Wait(ctx)
}

var errNotReturned = errors.New("the function did not return")

// queueSteps queues the work of all steps, and waits for the moves. So it does if queue
// panics or ends its goroutine, as a test that fails does: the caller may close the memory
// then.
func (r *planRun) queueSteps(moves *sync.WaitGroup) (err error) {
	failed := errNotReturned
	defer func() {
		if failed != nil {
			r.fail(failed)
		}
		moves.Wait()
		r.mu.Lock()
		err = r.err
		r.mu.Unlock()
		if err != nil {
			err = errors.Join(err, r.unadvise())
		}
	}()
	for i := range r.steps {
		if err := r.step(i); err != nil {
			failed = err
			return nil
		}
	}
	failed = nil
	return nil
}

// adviseFirst advises ReadMostly for all chunks that come to the card as copies at first,
// with one call for those that lie side by side: a call has to wait for the prefetches
// under way.
func (r *planRun) adviseFirst() error {
	var list []int
	seen := make([]bool, len(r.chunks))
	for _, f := range r.fetches {
		if f.copy && !seen[f.chunk] {
			list = append(list, f.chunk)
		}
		seen[f.chunk] = true
	}
	slices.SortFunc(list, func(x, y int) int { return cmp.Compare(r.chunks[x].ptr(), r.chunks[y].ptr()) })
	for len(list) > 0 {
		first, n := r.chunks[list[0]], 1
		end := first.off + first.n
		for ; n < len(list); n++ {
			if c := r.chunks[list[n]]; c.memory != first.memory || c.off != end {
				break
			}
			end += r.chunks[list[n]].n
		}
		if err := r.a.dev.MemAdvise(first.ptr(), end-first.off, cudart.AdviseReadMostly, Host()); err != nil {
			return err
		}
		for _, id := range list[:n] {
			r.copied[id] = true
		}
		list = list[n:]
	}
	return nil
}

// fail records the first error, and ends all waits.
func (r *planRun) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
	}
	r.cancel()
	r.changed.Broadcast()
}

// wait waits until ready returns true, with r.mu locked. It returns false after an error.
func (r *planRun) wait(ready func() bool) bool {
	for r.err == nil && !ready() {
		r.changed.Wait()
	}
	return r.err == nil
}

// step queues the work of one step.
func (r *planRun) step(i int) error {
	r.mu.Lock()
	ok := r.wait(func() bool { return r.allIssued == len(r.fetches) || r.fetches[r.allIssued].step > i })
	r.mu.Unlock()
	if !ok {
		return nil
	}
	for k := r.firstFetch(i); k < len(r.fetches) && r.fetches[k].step == i; k++ {
		if err := r.s.WaitPoint(r.arrived[k]); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	if err := r.queue(i); err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	end := r.s.Point()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends = append(r.ends, end)
	r.changed.Broadcast()
	return nil
}

// work makes moves on a stream of its own until next returns false.
func (r *planRun) work(ctx context.Context, next func(context.Context, *cudart.Stream) (bool, error)) {
	s, err := r.a.takeStream()
	if err == nil {
		for more := true; more && err == nil; {
			more, err = next(ctx, s)
		}
		r.a.putStream(s)
	}
	if err != nil {
		r.fail(err)
	}
}

// fetchNext brings the next chunk to the card.
func (r *planRun) fetchNext(ctx context.Context, s *cudart.Stream) (more bool, err error) {
	r.mu.Lock()
	k := r.nextFetch
	if k == len(r.fetches) {
		r.mu.Unlock()
		return false, nil
	}
	r.nextFetch++
	f := r.fetches[k]
	ok := r.wait(func() bool { return r.allEvicted >= f.after })
	r.mu.Unlock()
	if !ok {
		return false, nil
	}
	c := r.chunks[f.chunk]
	if f.copy {
		if !r.home[f.chunk] {
			r.home[f.chunk] = c.onHost()
		}
		if !r.copied[f.chunk] {
			if err := r.a.dev.MemAdvise(c.ptr(), c.n, cudart.AdviseReadMostly, Host()); err != nil {
				return false, err
			}
			r.copied[f.chunk] = true
		}
	}
	if f.fresh {
		if err := discard(s, c.ptr(), c.n); err != nil {
			return false, err
		}
	}
	if err := s.Prefetch(c.ptr(), c.n, r.a.dev.Location()); err != nil {
		return false, err
	}
	p := s.Point()
	r.mu.Lock()
	r.issued[k], r.arrived[k] = true, p
	for r.allIssued < len(r.issued) && r.issued[r.allIssued] {
		r.allIssued++
	}
	r.changed.Broadcast()
	r.mu.Unlock()
	return true, finished(ctx, p)
}

// onHost reports whether the host seems to have all of a chunk: it looks at a page of each
// block, because all of them take as long as the move. What is on the card all the same
// stays there when the copy is dropped, and is right there, too.
func (c chunk) onHost() bool {
	var pages []uintptr
	for at := uintptr(c.ptr()); at < uintptr(c.ptr())+uintptr(c.n); at += blockSize {
		pages = append(pages, at)
	}
	all, err := linux.PagesMapped(os.DirFS("/"), append(pages, uintptr(c.ptr())+uintptr(c.n)-1))
	return err == nil && all // without the file it is moved back when it leaves
}

// evictNext takes the next chunk away.
func (r *planRun) evictNext(ctx context.Context, s *cudart.Stream) (more bool, err error) {
	r.mu.Lock()
	k := r.nextEvict
	if k == len(r.evicts) {
		r.mu.Unlock()
		return false, nil
	}
	r.nextEvict++
	e := r.evicts[k]
	ok := r.wait(func() bool { return len(r.ends) > e.step })
	var end cudart.Point
	if ok {
		end = r.ends[e.step]
	}
	r.mu.Unlock()
	if !ok {
		return false, nil
	}
	if err := end.Wait(ctx); err != nil {
		return false, err
	}
	if err := r.takeAway(ctx, s, e); err != nil {
		return false, err
	}
	r.mu.Lock()
	r.evicted[k] = true
	for r.allEvicted < len(r.evicted) && r.evicted[r.allEvicted] {
		r.allEvicted++
	}
	r.changed.Broadcast()
	r.mu.Unlock()
	return true, nil
}

// takeAway drops a copy, or moves a chunk to the host. A copy of what the host never had,
// such as memory that was not touched before, is moved as well.
func (r *planRun) takeAway(ctx context.Context, s *cudart.Stream, e evict) error {
	c := r.chunks[e.chunk]
	if e.drop {
		if err := r.a.dev.MemAdvise(c.ptr(), c.n, cudart.AdviseUnsetReadMostly, Host()); err != nil {
			return err
		}
		r.copied[e.chunk] = false
		if r.home[e.chunk] {
			return nil
		}
	}
	if e.waste {
		if err := discard(s, c.ptr(), c.n); err != nil {
			return err
		}
	}
	if err := s.Prefetch(c.ptr(), c.n, Host()); err != nil {
		return err
	}
	if err := finished(ctx, s.Point()); err != nil {
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
			errs = append(errs, r.a.dev.MemAdvise(c.ptr(), c.n, cudart.AdviseUnsetReadMostly, Host()))
		}
	}
	return errors.Join(errs...)
}

// takeStream returns a stream for moves, which is to be put back.
func (a *Allocator) takeStream() (*cudart.Stream, error) {
	a.mu.Lock()
	if last := len(a.streams) - 1; last >= 0 {
		s := a.streams[last]
		a.streams = a.streams[:last]
		a.mu.Unlock()
		return s, nil
	}
	a.mu.Unlock()
	return a.dev.NewStream(cudart.StreamOptions{})
}

func (a *Allocator) putStream(s *cudart.Stream) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.streams = append(a.streams, s)
}

// closeStreams destroys the streams for moves.
func (a *Allocator) closeStreams() error {
	a.mu.Lock()
	streams := a.streams
	a.streams = nil
	a.mu.Unlock()
	var errs []error
	for _, s := range streams {
		if err := s.Close(); err != nil {
			errs = append(errs, err)
			a.putStream(s)
		}
	}
	return errors.Join(errs...)
}
