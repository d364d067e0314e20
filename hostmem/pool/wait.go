package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/hostmem/internal/budget"
)

func tooLarge(least, limit int) error {
	return fmt.Errorf("%w: it takes %d bytes, and Options.MaxBytes is %d", ErrTooLarge, least, limit)
}

// wait is a Get that waits for memory. One at a time has the turn: it looks for
// memory of any kind, unmaps idle memory of other sizes to make room, and else
// sleeps until a block is released, the GPU is done with one, the budget of the
// process has room, or the pool is closed.
func (p *core) wait(ctx context.Context, class, n int) (*block, bool, error) {
	p.waits.Add(1)
	p.gate.Add(1)
	defer p.gate.Add(-1)
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, false, p.gaveUp(ctx.Err())
	case <-p.closing:
		return nil, false, ErrClosed
	}
	defer func() { <-p.turn }()
	s := &search{core: p, class: class, n: n, least: p.least(class, n), reached: make(chan struct{}, 1)}
	defer s.stop()
	for {
		b, hit, err := s.look(ctx)
		switch {
		case b != nil:
			return b, hit, nil
		case p.closed():
			return nil, false, ErrClosed
		case ctx.Err() != nil:
			return nil, false, p.gaveUp(ctx.Err())
		case !errors.Is(err, errFull):
			return nil, false, err
		}
		s.sleep(ctx)
	}
}

// A search is the state of the Get that has the turn to wait.
type search struct {
	*core
	class, n, least int

	grant    *budget.Grant // a request that waits for the process's limit
	reached  chan struct{} // the GPU is done with something
	asked    bool          // the pending blocks were, since then
	heads    uint64        // what pending.heads was when the points were watched
	watching func()        // stops that
}

// look looks for memory of any kind, and makes room for more.
func (s *search) look(ctx context.Context) (b *block, hit bool, err error) {
	if !s.asked {
		s.reclaimAll(ctx)
		s.asked = true
	}
	if b := s.steal(s.class, s.n); b != nil {
		return b, true, nil
	}
	if b, hit, err = s.grow(ctx, s.class, s.n, s.granted()); !errors.Is(err, errFull) {
		return b, hit, err
	}
	// Another class's idle memory may make room. Else there is no use in going
	// through all lists.
	if s.o.MaxBytes > 0 && s.o.MaxBytes-s.reserved.value()+s.idle() >= s.least {
		_, trimErr := s.trim(everything, func(int) bool {
			return s.o.MaxBytes-s.reserved.value() >= s.least || isSmall(s.class) && s.hasRun(s.class)
		})
		if b, hit, err = s.grow(ctx, s.class, s.n, s.granted()); !errors.Is(err, errFull) {
			return b, hit, err
		}
		if trimErr != nil {
			return nil, false, trimErr
		}
	}
	// The request keeps its place among those that wait for the process's limit.
	if s.grant == nil && (s.o.MaxBytes == 0 || s.o.MaxBytes-s.reserved.value() >= s.least) {
		s.grant = s.budget.Ask(s.least, false)
	}
	return nil, false, errFull
}

// granted takes the request that waited, if it was decided.
func (s *search) granted() (g *budget.Grant) {
	if s.grant == nil {
		return nil
	}
	select {
	case <-s.grant.Done():
		g, s.grant = s.grant, nil
		return g
	default:
		return nil
	}
}

// retryAfter is when points are asked anew that could not be known.
const retryAfter = 100 * time.Millisecond

// sleep waits until another look may find something.
func (s *search) sleep(ctx context.Context) {
	s.watch()
	retry := time.NewTimer(retryAfter)
	defer retry.Stop()
	var granted <-chan struct{}
	if s.grant != nil {
		granted = s.grant.Done()
	}
	select {
	case <-s.wake:
	case <-s.reached:
		s.asked = false
	case <-retry.C:
		s.asked = false
	case <-granted:
	case <-ctx.Done():
	case <-s.closing:
	}
}

// watch sees to it that reached is sent to when the oldest block of any stream
// is done.
func (s *search) watch() {
	heads := s.pending.headsNow()
	if s.watching != nil && s.asked && heads == s.heads {
		return
	}
	if s.watching != nil {
		s.watching()
	}
	s.heads, s.watching = heads, s.notify(s.reached)
}

// stop ends what the search has begun.
func (s *search) stop() {
	if s.watching != nil {
		s.watching()
	}
	if s.grant != nil {
		s.grant.Release()
	}
}

// gaveUp says what a Get has waited for.
func (p *core) gaveUp(cause error) error {
	st := p.stats()
	return fmt.Errorf("limit of %d bytes reached: %d in use by %d leases, %d released but waiting for the GPU, %d cached, %d requests waiting: %w",
		p.o.MaxBytes, st.InUseBytes, st.Leases, st.PendingBytes, st.CachedBytes, st.Waiting, cause)
}
