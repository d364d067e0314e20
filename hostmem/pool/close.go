package pool

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
)

// moving counts the goroutines that may hold blocks or memory which is neither leased
// nor in a list: those that look for memory, or unmap it. Close waits for them.
type moving struct {
	n    atomic.Int64
	none chan struct{} // sent to when the last of them ends
}

func (m *moving) begin() { m.n.Add(1) }

func (m *moving) end() {
	if m.n.Add(-1) == 0 {
		m.signal()
	}
}

func (m *moving) signal() {
	select {
	case m.none <- struct{}{}:
	default:
	}
}

// wait waits until there are none.
func (m *moving) wait(ctx context.Context) error {
	for m.n.Load() > 0 {
		select {
		case <-m.none:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	m.signal() // another Close may wait
	return nil
}

func (p *core) closed() bool { return p.gate.Load() >= gateClosed }

// Close waits for the work on released blocks and unmaps all idle memory. From
// then on Get returns [ErrClosed], also where it waits. While there are leases,
// Close returns an error that counts them and wraps [ErrLeased]: they stay
// valid, and their memory is unmapped when they are released. Any other error
// says that memory may be in use, or could not be unregistered, and stays
// pinned. Close may be called again; when all is unmapped it returns nil.
func (p *Pool) Close() error { return p.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting when ctx ends. The pool is
// closed all the same, and Close may be called again for the rest.
func (p *Pool) CloseContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("pool: close %v: %w", p, errNilContext)
	}
	p.cleanup.Stop()
	err := p.core.close(ctx)
	runtime.KeepAlive(p)
	if err != nil {
		return fmt.Errorf("pool: close %v: %w", p, err)
	}
	return nil
}

func (p *core) close(ctx context.Context) error {
	if p.gate.Or(gateClosed) < gateClosed {
		close(p.closing)
		p.relief()
	}
	p.timer.Stop()
	for {
		more, err := p.flush(ctx)
		if err == nil {
			err = p.moving.wait(ctx)
		}
		if err != nil {
			return err
		}
		switch st := p.stats(); {
		case st.ReservedBytes == 0:
			return nil
		case st.Leases > 0 && !more:
			return fmt.Errorf("%w: %d with %d bytes%s", ErrLeased, st.Leases, st.InUseBytes, p.whose())
		}
		// Something was released, or put into a list, meanwhile.
	}
}

// flush waits for the work on released blocks and unmaps what is idle. more says that
// there was something.
func (p *core) flush(ctx context.Context) (more bool, err error) {
	more, err = p.drain(ctx)
	freed, trimErr := p.trim(ctx, everything, never)
	return more || freed > 0, errors.Join(err, trimErr)
}

// drain waits until the work is done on all blocks that are pending now. An error
// says that it cannot be known whether it is, or that ctx ended: blocks stay pending
// then, but those of other streams do not.
func (p *core) drain(ctx context.Context) (any bool, err error) {
	var mu sync.Mutex
	var errs []error
	var group sync.WaitGroup
	wait := func(of *cudart.Timeline) error {
		for b := p.pending.take(of); b != nil; b = p.pending.take(of) {
			if err := b.fence.Wait(ctx); err != nil {
				p.pending.unpop(of, b)
				return err
			}
			p.pending.done(b)
			b.home.put(b)
		}
		// Other streams may take long.
		_, err := p.trim(ctx, everything, never)
		return err
	}
	for _, of := range p.pending.all(-1, nil) {
		any = true
		goroutines := 1
		if of == nil { // blocks of several streams are in no order
			goroutines = p.pending.count(of)
		}
		for range goroutines {
			group.Go(func() {
				if err := wait(of); err != nil {
					mu.Lock()
					defer mu.Unlock()
					errs = append(errs, err)
				}
			})
		}
	}
	group.Wait()
	return any, errors.Join(errs...)
}

// flushing is the state of flushLater, guarded by core.mu.
type flushing struct{ running, again bool }

// flushLater unmaps what leases that were released after Close have left, once the
// work on it is done. However many they are, one goroutine unmaps, and one waits for
// each stream.
func (p *core) flushLater() {
	for _, of := range p.pending.undrained() {
		p.moving.begin()
		go func() {
			defer p.moving.end()
			for b := p.pending.takeOrStop(of); b != nil; b = p.pending.takeOrStop(of) {
				if b.fence.Wait(context.Background()) != nil { // Close tries again, and reports
					p.pending.stopDrain(of, b)
					return
				}
				p.pending.done(b)
				p.putIdle(b)
			}
		}()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flushing.again = true
	if p.flushing.running {
		return
	}
	p.flushing.running = true
	p.moving.begin()
	go func() {
		defer p.moving.end()
		for p.flushAgain() {
			_, _ = p.trim(context.Background(), everything, never) // Close tries again, and reports
		}
	}()
}

func (p *core) flushAgain() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flushing.running = p.flushing.again
	p.flushing.again = false
	return p.flushing.running
}
