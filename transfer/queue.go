package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// turn waits until the caller's stream is done with what was queued there: a copy
// uses the ring, which all share, only when nothing of the caller's can delay it.
func (c Call) turn(ctx context.Context) error {
	if c.Stream == nil {
		return nil
	}
	err := c.Stream.Timeline().End().Wait(ctx) // which calls CUDA elsewhere if ctx can end
	if err != nil && ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	return err
}

const (
	// Uploads of so many bytes at most are queued on the caller's stream, from
	// memory that the GPU is done with at some time.
	mostQueued = mib
	// Together they have so much memory at most.
	queuedBytes = 16 * mib
)

// leases is the pool of memory for copies on callers' streams.
type leases struct {
	mu   sync.Mutex
	pool *pool.Pool
}

// get leases n bytes if there are some at once.
func (l *leases) get(ctx context.Context, dev *cudart.Device, n int) (pool.Lease, bool) {
	p, err := l.open(dev)
	if err != nil {
		return pool.Lease{}, false
	}
	lease, err := p.TryGet(ctx, n)
	return lease, err == nil
}

func (l *leases) open(dev *cudart.Device) (p *pool.Pool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pool == nil {
		l.pool, err = pool.New(dev, pool.Options{MaxBytes: queuedBytes, Buffer: hostmem.Options{Label: "transfer queue"}})
	}
	return l.pool, err
}

// close waits for the copies that are queued. No copy runs any more.
func (l *leases) close(ctx context.Context) error {
	if l.pool == nil {
		return nil
	}
	err := l.pool.CloseContext(ctx)
	if errors.Is(err, pool.ErrLeased) {
		return fmt.Errorf("%w: %w", stage.ErrHeld, err)
	}
	return err
}

// queue queues a small upload on the caller's stream, and does not wait for it.
// queued is false if there is no stream, or no memory for it just now.
func (v *View) queue(ctx context.Context, dst cudart.DevPtr, src []byte) (queued bool, err error) {
	if v.call.Stream == nil || len(src) > mostQueued || v.call.Progress != nil {
		return false, nil
	}
	lease, ok := v.queued.get(ctx, v.dev, len(src))
	if !ok {
		return false, nil
	}
	if err := bounded.Guard(func() error { stage.Put(lease.Bytes(), src); return nil }); err != nil {
		return true, errors.Join(err, lease.Release())
	}
	// A stream with a full queue blocks the call.
	_, err = bounded.Do(ctx, bounded.Call[struct{}]{
		Run: func() (none struct{}, err error) {
			return none, errors.Join(lease.CopyToDevice(v.call.Stream, dst, 0, len(src)), lease.Release())
		},
		Grace: bounded.CallbackGrace,
	})
	if errors.Is(err, bounded.ErrStuck) {
		err = fmt.Errorf("%w: %w", stage.ErrUnderWay, err)
	}
	return true, err
}
