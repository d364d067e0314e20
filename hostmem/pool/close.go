package pool

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/lifetime"
)

// closing is the state of a pool's Close.
type closing struct {
	// life counts the goroutines that search for memory or unmap it. They may have blocks
	// that are neither leased nor in a list, so Close waits for them.
	life       lifetime.Lifetime
	once       sync.Once
	began      chan struct{} // closed by Close
	unregister func()        // ends the calls of reclaim

	// flushing has the streams whose blocks a goroutine of flushLater unmaps; the value is
	// true if other blocks were released since. It is guarded by memory.mu.
	flushing map[fence.Timeline]bool
}

func (p *closing) closed() bool { return p.life.Sealed() }

// Close waits for the work on released blocks and unmaps all idle memory. After that, Get returns
// [cudart.ErrClosed], and waiting Gets return too. While there are leases, Close returns an error
// with their number that wraps [cudart.ErrInUse]: they stay valid, and their memory is unmapped
// when they are released. After any other error memory stays pinned, because the GPU may use it, or
// because it could not be unregistered (cudaHostUnregister). Close may be called again; when all is
// unmapped it returns nil.
func (p *Pool) Close() error { return p.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting when ctx ends, with an error that wraps ctx's. The
// pool is closed all the same, and Close may be called again for the rest.
func (p *Pool) CloseContext(ctx context.Context) error {
	var err error
	switch c := p.impl(); {
	case c == nil:
		err = errNoPool
	case ctx == nil:
		err = errNilContext
	default:
		p.cleanup.Stop()
		err = c.close(ctx)
	}
	runtime.KeepAlive(p)
	if err != nil {
		return fmt.Errorf("pool: close %v: %w", p, err)
	}
	return nil
}

func (p *core) close(ctx context.Context) error {
	p.once.Do(func() {
		p.life.Seal()
		p.waiting.Add(1) // for blocks that are released from now on, and for good
		close(p.began)
		p.unregister()
		p.timer.Stop()
	})
	for {
		more, err := p.flush(ctx)
		if err == nil {
			err = p.life.Wait(ctx)
		}
		if err != nil {
			return err
		}
		switch st := p.stats(); {
		case st.ReservedBytes == 0:
			return nil
		case st.Leases > 0 && !more:
			return fmt.Errorf("%w: %d with %d bytes%s", errLeased, st.Leases, st.InUseBytes, p.whose())
		}
		// Something was released, or put into a list, meanwhile.
	}
}

// flush waits for the work on released blocks and unmaps idle memory. more reports that there
// was any. The error is that CUDA cannot report whether work is done, or that ctx has ended:
// blocks of that stream stay pending, those of other streams do not.
func (p *core) flush(ctx context.Context) (more bool, err error) {
	more, err = p.pending.Drain(ctx, func() error {
		_, err := p.trim(ctx, everything, never)
		return err
	})
	freed, trimErr := p.trim(ctx, everything, never)
	return more || freed > 0, errors.Join(err, trimErr)
}

// flushLater unmaps memory of leases that were released after Close, once the work on it is
// done. It has one goroutine for each stream with such work, and one, with a nil stream, for
// memory that is idle already.
func (p *core) flushLater() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, stream := range append(p.pending.Streams(), nil) {
		_, running := p.flushing[stream]
		p.flushing[stream] = running
		if !running {
			p.life.Hold()
			go p.flushStream(stream)
		}
	}
}

func (p *core) flushStream(stream fence.Timeline) {
	defer p.life.End()
	for again := true; again; {
		err := p.pending.Wait(context.Background(), stream)
		p.trimEach(everything)
		p.mu.Lock()
		if again = p.flushing[stream] && err == nil; again {
			p.flushing[stream] = false
		} else {
			delete(p.flushing, stream)
		}
		p.mu.Unlock()
	}
}
