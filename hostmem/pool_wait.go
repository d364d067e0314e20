package hostmem

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// queue is a Get that waits for memory. One at a time has the turn: it looks
// for memory of any kind, gives idle memory of other sizes back to make room,
// and else sleeps until the GPU is done with some or some is released.
func (p *poolCore) queue(ctx context.Context, class, n int) (*block, bool, error) {
	p.waits.Add(1)
	p.gate.Add(1)
	defer p.gate.Add(-1)
	if err := p.turn.acquire(ctx, 1); err != nil {
		return nil, false, p.gaveUp(ctx.Err())
	}
	defer p.turn.release(1)
	defer p.setWake(nil)
	for {
		// Before it looks: what comes back from now on wakes it.
		sleep, wake := context.WithCancel(ctx)
		p.setWake(wake)
		b, isHit, waits, err := p.scrape(ctx, class, n)
		if b == nil && errors.Is(err, errFull) {
			err = p.doze(sleep, wake, waits)
		}
		wake()
		switch {
		case b != nil:
			return b, isHit, nil
		case p.closed():
			_ = p.flush(ctx) // what was in hand here was not to be seen by Close
			return nil, false, ErrClosed
		case ctx.Err() != nil:
			return nil, false, p.gaveUp(ctx.Err())
		case err != nil:
			return nil, false, err
		}
	}
}

// scrape looks for memory of any kind, and makes room for more.
func (p *poolCore) scrape(ctx context.Context, class, n int) (b *block, isHit bool, waits []mark, err error) {
	waits = p.reapAll()
	if b := p.steal(class, n); b != nil {
		return b, true, nil, nil
	}
	if b, isHit, err = p.grow(ctx, class, n); !errors.Is(err, errFull) {
		return b, isHit, nil, err
	}
	least := p.least(class, n)
	_, trimErr := p.trim(func(*block) bool { return true }, func(int) bool {
		return p.limit.room() >= least || isSmall(class) && p.hasRun(class)
	})
	b, isHit, err = p.grow(ctx, class, n)
	if errors.Is(err, errFull) && trimErr != nil {
		err = trimErr
	}
	return b, isHit, waits, err
}

// hasRun tells whether an arena has room for blocks of a class.
func (p *poolCore) hasRun(class int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.arenas {
		if s := a.cut(class); s != nil {
			a.join(s)
			return true
		}
	}
	return false
}

// doze waits until one of the marks is reached, or sleep ends.
func (p *poolCore) doze(sleep context.Context, wake func(), waits []mark) error {
	var group sync.WaitGroup
	var once sync.Once
	var failed error
	wait := func(f func() error) {
		group.Go(func() {
			defer wake()
			if err := f(); err != nil && sleep.Err() == nil {
				once.Do(func() { failed = err })
			}
		})
	}
	lost := false
	for _, m := range waits {
		if m.lost {
			lost = true
			continue
		}
		wait(func() error { return m.await(sleep) })
	}
	if lost {
		wait(func() error { return p.settleLost(sleep) })
	}
	<-sleep.Done()
	group.Wait()
	return failed
}

// await waits until the mark is reached. An error of CUDA's is no error here:
// the next look sees it too.
func (m mark) await(ctx context.Context) error {
	err := m.event.Synchronize(ctx)
	var call *cudart.Error
	if errors.As(err, &call) {
		return nil
	}
	return err
}

func (p *poolCore) setWake(wake func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wake = wake
}

// wakeFirst wakes the one whose turn it is to wait, if any.
func (p *poolCore) wakeFirst() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wake != nil {
		p.wake()
	}
}

// gaveUp says what a Get waited for in vain.
func (p *poolCore) gaveUp(cause error) error {
	st := p.stats()
	return fmt.Errorf("limit of %d bytes reached: %d in use by %d leases, %d released but waiting for the GPU, %d cached, %d requests waiting: %w",
		p.o.MaxBytes, st.InUseBytes, st.Leases, st.PendingBytes, st.CachedBytes, st.Waiting, cause)
}
