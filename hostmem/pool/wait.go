package pool

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/internal/bounded"
)

// A queue holds the state of the Gets that wait for memory.
//
//	state     entered by                | may be changed by
//	waiting   a Get at a limit, Close   | atomic
//	admission the first waiting Get     | it has sent to the channel, and receives at the end
//	wake      whoever returns blocks,   | the admitted Get receives it
//	          or bytes of the limit     |
//	waiter    the admitted Get          | by it alone; class and n never change
type queue struct {
	waiting   atomic.Int64 // waiting Gets, and 1 for Close; other Gets queue behind them
	admission chan struct{}
	wake      chan struct{}
	first     atomic.Pointer[waiter] // of the admitted Get
	retry     time.Duration          // interval of searches without a cause; 0 for none
}

// retryAfter is the time after which a Get searches again although nothing has changed.
const retryAfter = 100 * time.Millisecond

// wakeUp wakes the admitted Get, if there is one.
func (q *queue) wakeUp() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// wait blocks until a block or a reservation for one is available. Waiters queue; the
// first one searches, in this order: blocks that the GPU is done with, idle blocks,
// arenas, idle blocks of other classes that can be unmapped. Then it sleeps until a block
// is released, the GPU is done with one, a limit allows more, or the pool is closed.
// lowMemory reports that the host had no memory for a reservation: then the Get waits until
// the GPU is done with a block that can be unmapped.
func (p *core) wait(ctx context.Context, class, n int, lowMemory bool) (b *block, r *budget.Reservation, err error) {
	p.waits.Add(1)
	p.waiting.Add(1)
	defer p.waiting.Add(-1)
	select {
	case p.admission <- struct{}{}:
	case <-ctx.Done():
		return nil, r, p.canceled(ctx)
	case <-p.began:
		return nil, r, cudart.ErrClosed
	}
	defer func() { <-p.admission }()
	// Calls into CUDA that block must not delay the next Get: see cudart.Point.Done.
	querying, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &waiter{core: p, class: class, n: n, size: p.minSize(class, n), lowMemory: lowMemory, notify: make(chan struct{}, 1)}
	p.first.Store(w)
	defer w.stop()
	for {
		b, r, err = w.search(querying)
		switch {
		case err == nil:
			return b, r, nil
		case p.closed():
			return nil, r, cudart.ErrClosed
		case ctx.Err() != nil:
			return nil, r, p.canceled(ctx)
		case !errors.Is(err, errFull):
			return nil, r, err
		}
		w.sleep(ctx)
	}
}

// A waiter is the state of the admitted Get.
type waiter struct {
	*core
	class, n  int
	size      int // bytes of a new registration
	lowMemory bool

	request *budget.Reservation // waits for the process's limit, nil if none does

	queried  bool          // pending blocks were queried since the last change
	notified bool          // a watched Point was reached, or cannot be known
	unknown  bool          // no block was done then: query again
	notify   chan struct{} // receives when a watched Point is reached
	changes  uint64        // pending.Changes when the Points were watched
	watching []func()      // functions that end the watching

	pause   int  // searches without unmapIdle
	skipped bool // the last search was without unmapIdle
}

// search searches for a block or a reservation, and unmaps idle memory to get one. The error
// is errFull if it has found neither.
func (w *waiter) search(ctx context.Context) (b *block, r *budget.Reservation, err error) {
	if !w.queried {
		w.queried = true
		if err := w.query(ctx); err != nil {
			return nil, r, err
		}
	}
	if b = w.take(); b != nil {
		return b, r, nil
	}
	if w.lowMemory {
		if st := w.stats(); st.CachedBytes == 0 && st.PendingBytes > 0 {
			return nil, r, errFull
		}
		w.lowMemory = false
		chosen, _ := w.plan(everything, never)
		if _, err := w.unmapSoon(ctx, chosen); err != nil {
			return nil, r, err
		}
	}
	if r, err = w.reserve(); !errors.Is(err, errFull) {
		return nil, r, err
	}
	// Unmapping other idle memory may allow it.
	if err := w.unmapIdle(ctx); err != nil {
		return nil, r, err
	}
	if b = w.take(); b != nil { // released meanwhile
		return b, r, nil
	}
	r, err = w.reserve()
	return nil, r, err
}

// query makes the blocks idle that the GPU is done with.
func (w *waiter) query(ctx context.Context) error {
	notified, done := w.notified, w.pending.Reclaim(ctx) > 0
	w.notified, w.unknown = false, !done && (w.unknown || notified)
	if notified && !done {
		return w.unrecoverable(ctx)
	}
	return nil
}

// take takes an idle block, or cuts one.
func (w *waiter) take() *block {
	b := w.steal(w.class, w.n)
	if b == nil && isSmall(w.class) {
		b = w.cut(w.class)
	}
	return b
}

// unmapIdle unmaps idle memory until the limit of the pool, or of the process, allows the
// request. A search of all lists takes time for each idle block. After one in vain it pauses
// until an eighth as many blocks were released, or retryAfter has passed.
func (w *waiter) unmapIdle(ctx context.Context) error {
	w.skipped = w.pause > 0
	st := w.stats()
	unused := st.ReservedBytes - st.InUseBytes - st.PendingBytes
	missing := w.size // of the process's limit
	if w.request == nil {
		missing = st.ReservedBytes + w.size - w.o.MaxBytes // of the pool's
	}
	if unused == 0 || w.request == nil && unused < missing {
		w.skipped = false
		return nil
	}
	if w.pause > 0 {
		w.pause--
		return nil
	}
	chosen, remaining := w.plan(w.cannotUse, func(freed int) bool {
		return freed >= missing || isSmall(w.class) && w.hasRun(w.class)
	})
	w.pause = 1 + remaining/8 // at least one, because plan wakes this Get
	_, err := w.unmapSoon(ctx, chosen)
	return err
}

// cannotUse reports whether a block does not serve the request.
func (w *waiter) cannotUse(b *block) bool { return b.Class != w.class || b.Size < w.n }

// reserve reserves the bytes of a new registration, or leaves a request waiting.
func (w *waiter) reserve() (r *budget.Reservation, err error) {
	if r, err = w.core.request(w.size, w.request); err != nil {
		w.request = r
		return nil, err
	}
	w.request = nil
	return r, nil
}

// sleep waits until another search may find something.
func (w *waiter) sleep(ctx context.Context) {
	w.watch()
	retry, after := ctx, w.retry
	if w.unknown || w.skipped {
		after = retryAfter
	}
	if after > 0 {
		var cancel context.CancelFunc
		retry, cancel = context.WithTimeout(ctx, after)
		defer cancel()
	}
	var decided <-chan struct{}
	if w.request != nil {
		decided = w.request.Done()
	}
	select {
	case <-w.wake:
	case <-w.notify:
		w.queried, w.notified = false, true
	case <-retry.Done():
		w.queried, w.pause = false, 0
	case <-decided:
	case <-w.began:
	}
}

// unrecoverable returns an error if nothing is leased and CUDA reports of no pending block
// whether the GPU is done with it: no memory returns to the pool then. It queries only
// streams that have returned errors, and waits at most bounded.Look for each result.
func (w *waiter) unrecoverable(ctx context.Context) (err error) {
	if w.stats().Leases > 0 {
		return nil
	}
	for _, at := range w.pending.Oldest() {
		if at.Completed() || at.Err() == nil {
			return nil
		}
		soon, cancel := context.WithTimeout(ctx, bounded.QueryTimeout)
		err = at.Wait(soon)
		late := soon.Err() != nil
		cancel()
		if err == nil || late {
			return nil
		}
	}
	return err
}

// watch has notify sent to when the oldest block of any stream is done, or CUDA cannot report
// whether it is.
func (w *waiter) watch() {
	changes := w.pending.Changes()
	if changes == w.changes {
		return
	}
	w.unwatch()
	w.changes = changes
	for _, at := range w.pending.Oldest() {
		w.watching = append(w.watching, at.Notify(w.notify))
	}
}

func (w *waiter) unwatch() {
	for _, stop := range w.watching {
		stop()
	}
	w.watching = nil
}

// stop ends what the waiter has begun.
func (w *waiter) stop() {
	w.first.Store(nil)
	w.unwatch()
	if w.request != nil {
		w.request.Withdraw()
	}
}

// canceled returns the error of a Get whose context has ended.
func (p *core) canceled(ctx context.Context) error {
	st := p.stats()
	limit := fmt.Sprintf("limit of %d bytes", p.o.MaxBytes)
	if p.o.MaxBytes == 0 {
		limit = "limit of the process or the host"
	}
	count := func(n int, one string) string {
		if n == 1 {
			return "1 " + one
		}
		return fmt.Sprintf("%d %ss", n, one)
	}
	return fmt.Errorf("%s reached: %d in use by %s, %d released but waiting for the GPU, %d cached, %s waiting: %w",
		limit, st.InUseBytes, count(st.Leases, "lease"), st.PendingBytes, st.CachedBytes, count(st.Waiting, "request"), bounded.Ended(ctx))
}
