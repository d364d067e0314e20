package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/hostmem/internal/budget"
)

// wait is a Get that waits for a block, or for room to make one. One at a time has
// the turn: it looks for memory of any kind, unmaps idle memory of other sizes to make
// room, and else sleeps until a block is released, the GPU is done with one, the
// budget of the process has room, or the pool is closed. short says that the host had
// no memory for the room that there was: then it waits until the GPU is done with
// something that can be unmapped.
func (p *core) wait(ctx context.Context, class, n int, short bool) (b *block, hit bool, r room, err error) {
	p.waits.Add(1)
	p.gate.Add(1)
	defer p.gate.Add(-1)
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, false, room{}, p.canceled(ctx.Err())
	case <-p.closing:
		return nil, false, room{}, ErrClosed
	}
	defer func() { <-p.turn }()
	// Calls into CUDA that block must not keep the turn: see cudart.Point.Done.
	looking, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &waiter{core: p, class: class, n: n, least: p.least(class, n), short: short, reached: make(chan struct{}, 1)}
	defer w.stop()
	for {
		b, hit, r, err = w.look(looking)
		switch {
		case err == nil:
			return b, hit, r, nil
		case p.closed():
			return nil, false, room{}, ErrClosed
		case ctx.Err() != nil:
			return nil, false, room{}, p.canceled(ctx.Err())
		case !errors.Is(err, errFull):
			return nil, false, room{}, err
		}
		w.sleep(ctx)
	}
}

// A waiter is the state of the Get that has the turn to wait.
type waiter struct {
	*core
	class, n, least int
	short           bool

	grant    *budget.Grant // a request that waits for the process's limit
	reached  chan struct{} // the GPU is done with something
	asked    bool          // the pending blocks were, since then
	pause    int           // looks until makeRoom is of use again
	ended    bool          // a watched point was reached, or cannot be known
	heads    uint64        // what pending.Changes was when the points were watched
	watching []func()      // stop that
}

// look looks for memory of any kind, and makes room for more. The error is errFull
// if it has found neither.
func (w *waiter) look(ctx context.Context) (b *block, hit bool, r room, err error) {
	if !w.asked {
		w.asked = true
		if w.pending.Reclaim(ctx) == 0 && w.ended {
			if err := w.hopeless(ctx); err != nil {
				return nil, false, room{}, err
			}
		}
		w.ended = false
	}
	if b := w.steal(w.class, w.n); b != nil {
		return b, true, room{}, nil
	}
	if isSmall(w.class) {
		if b := w.cut(w.class); b != nil {
			return b, false, room{}, nil
		}
	}
	if w.short {
		if w.idle() == 0 && w.pending.Bytes() > 0 {
			return nil, false, room{}, errFull
		}
		w.short = false
		chosen, _ := w.plan(everything, never)
		if _, err := w.unmapSoon(ctx, chosen); err != nil {
			return nil, false, room{}, err
		}
	}
	if r, err = w.room(); !errors.Is(err, errFull) {
		return nil, false, r, err
	}
	// Other idle memory may make room.
	if err := w.makeRoom(ctx); err != nil {
		return nil, false, room{}, err
	}
	if b := w.steal(w.class, w.n); b != nil { // released meanwhile
		return b, true, room{}, nil
	}
	if isSmall(w.class) {
		if b := w.cut(w.class); b != nil {
			return b, false, room{}, nil
		}
	}
	r, err = w.room()
	return nil, false, r, err
}

// makeRoom unmaps idle memory until the limit of the pool, or of the process, allows the
// request, if it can. Going through all lists in vain takes time for each idle block:
// after it a part of as many have to be released before the next time, or some time has
// to pass.
func (w *waiter) makeRoom(ctx context.Context) error {
	st := w.stats()
	unused := st.ReservedBytes - st.InUseBytes - st.PendingBytes
	missing := w.least // of the process's limit
	if w.grant == nil {
		missing = st.ReservedBytes + w.least - w.o.MaxBytes // of the pool's
	}
	if unused == 0 || w.grant == nil && unused < missing {
		return nil
	}
	if w.pause > 0 {
		w.pause--
		return nil
	}
	chosen, left := w.plan(func(b *block) bool { return b.Class != w.class || b.Size < w.n }, func(freed int) bool {
		return freed >= missing || isSmall(w.class) && w.hasRun(w.class)
	})
	w.pause = 1 + left/8 // at least one, because plan wakes this Get
	_, err := w.unmapSoon(ctx, chosen)
	return err
}

// room takes room for the least that the request takes. Where the process's limit
// does not allow it, the request waits there, in the order of the process's requests.
func (w *waiter) room() (room, error) {
	if w.grant == nil {
		r, err := w.tryRoom(w.least)
		if errors.Is(err, errFull) && (w.o.MaxBytes == 0 || w.o.MaxBytes-w.reserved.value() >= w.least) {
			w.grant = w.budget.Ask(w.least)
		}
		return r, err
	}
	select {
	case <-w.grant.Done():
	default:
		return room{}, errFull
	}
	g := w.grant
	w.grant = nil
	err := g.Err()
	if err == nil && !w.reserve(w.least) {
		err = errFull // of the pool's limit meanwhile
	}
	if err != nil {
		g.Withdraw()
		return room{}, err
	}
	return room{w.least, g}, nil
}

// retryAfter is when points are asked anew that could not be known.
const retryAfter = 100 * time.Millisecond

// sleep waits until another look may find something.
func (w *waiter) sleep(ctx context.Context) {
	w.watch()
	retry := time.NewTimer(retryAfter)
	defer retry.Stop()
	var granted <-chan struct{}
	if w.grant != nil {
		granted = w.grant.Done()
	}
	select {
	case <-w.wake:
	case <-w.reached:
		w.asked, w.ended = false, true
	case <-retry.C:
		w.asked, w.pause = false, 0
		w.unmapper() // another may be stuck
	case <-granted:
	case <-ctx.Done():
	case <-w.closing:
	}
}

// hopeless returns an error if nothing is leased, and of no pending block it can be
// known whether the GPU is done with it: no memory returns to the pool then. It asks
// only streams that have returned errors, and waits for each answer for a moment.
func (w *waiter) hopeless(ctx context.Context) (err error) {
	if w.stats().Leases > 0 {
		return nil
	}
	for _, at := range w.pending.Oldest(nil) {
		if at.Known() || at.Err() == nil {
			return nil
		}
		soon, cancel := context.WithTimeout(ctx, retryAfter)
		err = at.Wait(soon)
		late := soon.Err() != nil
		cancel()
		if err == nil || late {
			return nil
		}
	}
	return err
}

// watch has reached sent to when the oldest block of any stream is done, as far as that is
// known.
func (w *waiter) watch() {
	heads := w.pending.Changes()
	if heads == w.heads {
		return
	}
	w.unwatch()
	w.heads = heads
	for _, at := range w.pending.Oldest(nil) {
		w.watching = append(w.watching, at.Notify(w.reached))
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
	w.unwatch()
	if w.grant != nil {
		w.grant.Withdraw()
	}
}

// canceled returns the error of a Get whose context has ended.
func (p *core) canceled(cause error) error {
	st := p.stats()
	limit := fmt.Sprintf("limit of %d bytes", p.o.MaxBytes)
	if p.o.MaxBytes == 0 {
		limit = "limit of the process or the host"
	}
	return fmt.Errorf("%s reached: %d in use by %d leases, %d released but waiting for the GPU, %d cached, %d requests waiting: %w",
		limit, st.InUseBytes, st.Leases, st.PendingBytes, st.CachedBytes, st.Waiting, cause)
}
