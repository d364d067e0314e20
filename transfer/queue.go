package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// turn waits until the caller's stream is done with what was queued there: a copy
// uses the ring, which all share, only when nothing of the caller's can delay it.
func (c Call) turn(ctx context.Context) error {
	if c.Stream == nil {
		return nil
	}
	err := c.Stream.Point().Wait(ctx)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
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
func (l *leases) get(dev *cudart.Device, n int) (pool.Lease, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pool == nil {
		p, err := pool.New(dev, pool.Options{MaxBytes: queuedBytes, Buffer: hostmem.Options{Label: "transfer queue"}})
		if err != nil {
			return pool.Lease{}, false
		}
		l.pool = p
	}
	at, cancel := context.WithCancel(context.Background())
	cancel()
	lease, err := l.pool.Get(at, n)
	return lease, err == nil
}

func (l *leases) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pool == nil {
		return nil
	}
	if err := l.pool.Close(); err != nil {
		return err
	}
	l.pool = nil
	return nil
}

// queue queues a small upload on the caller's stream, and does not wait for it.
// queued is false if there is no stream, or no memory for it just now.
func (v *View) queue(dst cudart.DevPtr, src []byte) (queued bool, err error) {
	if v.call.Stream == nil || len(src) > mostQueued || v.call.Progress != nil {
		return false, nil
	}
	lease, ok := v.queued.get(v.dev, len(src))
	if !ok {
		return false, nil
	}
	err = stage.Guard(func() error { copy(lease.Bytes(), src); return nil })
	if err == nil {
		err = lease.CopyToDevice(v.call.Stream, dst, 0, len(src))
	}
	if released := lease.Release(); released != nil {
		err = errors.Join(err, fmt.Errorf("release %v: %w", lease, released))
	}
	v.stats.stagedBytes.Add(int64(len(src)))
	return true, err
}
