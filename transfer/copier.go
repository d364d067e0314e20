package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// ErrClosed is returned by methods of a copier that was closed.
var ErrClosed = errors.New("transfer: copier already closed")

// A Copier copies between one device and any host memory, file or stream of
// bytes.
type Copier struct {
	*engine
	call Call
}

// An engine is what all copiers made by With share.
type engine struct {
	dev          *cudart.Device
	o            Options
	cores        cores
	large, small *ring
	lanes        [lanes][ways]*cudart.Stream
	stats        counters

	use    sync.RWMutex // copies have it shared, Close alone
	closed bool
	gone   bool // all was given back
}

// A lane has a stream each way. Chunks of the ring follow on each other on one
// stream, without the gap that a change of streams makes; small and unstaged
// copies have their own, so as not to queue behind each other.
type lane int

const (
	bulk lane = iota
	brief
	unstaged
	lanes
)

type way int

const (
	up way = iota
	down
	ways
)

// pick is the caller's stream, or else one of a lane's.
func (c *Copier) pick(l lane, w way) *cudart.Stream {
	if c.call.Stream != nil {
		return c.call.Stream
	}
	return c.lanes[l][w]
}

// NewCopier allocates a ring of pinned memory, of Workers x 2 x Chunk bytes, and
// one MiB for small copies.
func NewCopier(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	e, err := newEngine(ctx, dev, o)
	if err != nil {
		return nil, fmt.Errorf("transfer: new copier on %v: %w", dev, err)
	}
	return &Copier{engine: e}, nil
}

func newEngine(ctx context.Context, dev *cudart.Device, o Options) (*engine, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	e := &engine{dev: dev, o: o, cores: coresOf(dev)}
	if err := e.allocate(ctx); err != nil {
		return nil, errors.Join(err, e.release(context.WithoutCancel(ctx)))
	}
	return e, nil
}

func (e *engine) allocate(ctx context.Context) (err error) {
	if e.large, err = newRing(ctx, e.dev, slotsAWorker*e.o.Workers, e.o.Chunk, e.o.Label); err != nil {
		return err
	}
	if e.small, err = newRing(ctx, e.dev, smallSlots, smallCopy, e.o.Label); err != nil {
		return err
	}
	for lane := range e.lanes {
		for way := range e.lanes[lane] {
			if e.lanes[lane][way], err = e.dev.NewStream(cudart.StreamOptions{}); err != nil {
				return err
			}
		}
	}
	return nil
}

// With returns a copier that shapes its copies by call, and shares everything
// else with c. It needs no Close of its own.
func (c *Copier) With(call Call) *Copier { return &Copier{engine: c.engine, call: call} }

// Device returns the copier's device.
func (c *Copier) Device() *cudart.Device { return c.dev }

// Close waits for copies that run, and for those still queued on streams of
// callers, and gives everything back. A second Close does nothing. After an
// error it may be called again.
func (c *Copier) Close() error { return c.CloseContext(context.Background()) }

// CloseContext is Close that gives up waiting for the GPU when ctx ends.
func (c *Copier) CloseContext(ctx context.Context) error {
	c.use.Lock()
	defer c.use.Unlock()
	c.closed = true
	if c.gone {
		return nil
	}
	if err := c.release(ctx); err != nil {
		return fmt.Errorf("transfer: close copier on %v: %w", c.dev, err)
	}
	c.gone = true
	return nil
}

// release gives back what allocate got, as far as it got.
func (e *engine) release(ctx context.Context) error {
	for _, r := range []*ring{e.large, e.small} {
		if r == nil {
			continue
		}
		if err := r.close(ctx); err != nil {
			return err
		}
	}
	for _, lane := range e.lanes {
		for _, s := range lane {
			if s == nil {
				continue
			}
			if err := s.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// do runs one copy of n bytes, while the copier is open.
func (c *Copier) do(ctx context.Context, n int, copies func() (int, error)) (int, error) {
	c.use.RLock()
	defer c.use.RUnlock()
	switch s := c.call.Stream; {
	case c.closed:
		return 0, ErrClosed
	case n < 0:
		return 0, fmt.Errorf("%d bytes: must not be negative", n)
	case s != nil && s.Device() != c.dev:
		return 0, fmt.Errorf("%v is not of the copier's %v", s, c.dev)
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case n == 0:
		return 0, nil
	}
	c.stats.copies.Add(1)
	done, err := copies()
	if err != nil {
		c.stats.failures.Add(1)
	}
	return done, err
}
