package pool

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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
// there was something. An error says that it cannot be known whether work is done, or that
// ctx ended: blocks stay pending then, but those of other streams do not.
func (p *core) flush(ctx context.Context) (more bool, err error) {
	more, err = p.pending.Drain(ctx, func() error {
		_, err := p.trim(ctx, everything, never)
		return err
	})
	freed, trimErr := p.trim(ctx, everything, never)
	return more || freed > 0, errors.Join(err, trimErr)
}

// flushing is the state of flushLater, guarded by core.mu.
type flushing struct {
	running, again bool
	awaited        map[*cudart.Timeline]bool // streams that a goroutine waits for
}

// flushLater unmaps what leases that were released after Close have left, once the
// work on it is done. However many they are, one goroutine unmaps, and one waits for
// each stream.
func (p *core) flushLater() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.awaitStreams()
	p.unmapLater()
}

// awaitStreams starts the goroutines that wait for streams, with p.mu locked.
func (p *core) awaitStreams() {
	for _, of := range p.pending.Streams(nil) {
		if p.flushing.awaited[of] {
			continue
		}
		p.flushing.awaited[of] = true
		p.moving.begin()
		go func() {
			defer p.moving.end()
			err := p.pending.Wait(context.Background(), of)
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.flushing.awaited, of)
			if err == nil { // else Close tries again, and reports
				p.awaitStreams() // something may have been released meanwhile
			}
			p.unmapLater()
		}()
	}
}

// unmapLater starts the goroutine that unmaps what is idle, with p.mu locked.
func (p *core) unmapLater() {
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
