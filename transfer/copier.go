package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

var (
	errNilContext    = errors.New("the context is nil")
	errNilDevice     = errors.New("the device is nil")
	errNilReadWriter = errors.New("the reader or writer is nil")
)

// A Copier copies between one device and any host memory, file, reader or
// writer. Its copies are the methods of [View].
type Copier struct{ View }

// An engine is what a Copier and its views share.
type engine struct {
	dev    *cudart.Device
	o      Options
	stage  *stage.Stage
	direct [2]*cudart.Stream // for pinned memory, up and down
	queued leases            // of copies on callers' streams
	stats  counters
	life   lifetime.Lifetime
}

// NewCopier returns a copier for a device. Close it. The first one of a device
// allocates the ring of pinned memory, 11 MiB on up to four cores and 39 MiB on more,
// and the streams that all copiers of the device share. On more than four cores the ring
// has 28 MiB more while copies of both directions wait for memory. When ctx ends before,
// the error is ctx's; others are of invalid Options, and those of [hostmem.Alloc]. After
// an error nothing is left, unless the error says that it could not be released, and
// NewCopier may be called again.
func NewCopier(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	e, err := newEngine(ctx, dev, o)
	if err != nil {
		return nil, fmt.Errorf("transfer: new copier on %v: %w", dev, err)
	}
	return &Copier{View{engine: e}}, nil
}

func newEngine(ctx context.Context, dev *cudart.Device, o Options) (*engine, error) {
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil:
		return nil, errNilDevice
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	e := &engine{dev: dev, o: o}
	if err := opened(ctx, e); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *engine) open(ctx context.Context) (err error) {
	if e.stage, err = stage.Acquire(ctx, e.dev); err != nil {
		return err
	}
	for way := range e.direct {
		if e.direct[way], err = e.dev.NewStream(cudart.StreamOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// release releases what open made, as far as it got.
func (e *engine) release(ctx context.Context) error {
	if err := e.queued.close(ctx); err != nil {
		return err
	}
	for _, s := range e.direct {
		if s == nil {
			continue
		}
		if err := s.Close(); err != nil {
			return err
		}
	}
	if e.stage == nil {
		return nil
	}
	return e.stage.Release(ctx)
}

// Close releases the copier; the last one of a device waits for copies that are
// still queued, and unregisters and unmaps the ring. From its call on new copies
// return [ErrClosed].
//
// Close does not wait for methods that run, as it may be called by one of their
// callbacks: it returns an error then. CloseContext waits for them. After an
// error Close may be called again; once it has returned nil it does nothing.
func (c *Copier) Close() error {
	if n := c.life.Seal(); n > 0 {
		return fmt.Errorf("transfer: close copier on %v: still copying (calls: %d): close it when they have returned, or with CloseContext, which waits for them", c.dev, n)
	}
	return c.CloseContext(context.Background())
}

// CloseContext is Close that waits for methods that run as well, until ctx ends:
// the error is ctx's then. Called by a reader, a writer or Progress it waits for
// its own copy until ctx ends.
func (c *Copier) CloseContext(ctx context.Context) error {
	if err := closeLifetime(ctx, &c.life, c.release); err != nil {
		return fmt.Errorf("transfer: close copier on %v: %w", c.dev, err)
	}
	return nil
}

// Stats are what a Copier and its views did so far, and in which way.
type Stats struct {
	Copies   int // calls of methods that copy, and had something to
	Failures int // of them
	// Bytes that went through the ring, that were pinned and needed none, and
	// that were parts of UploadAll and DownloadAll.
	StagedBytes, DirectBytes, BatchedBytes int
	// PeerBytes went from device to device: see [Fanout].
	PeerBytes int
	// RingBytes are pinned for all copiers of the device together, until the last
	// one is closed.
	RingBytes int
}

type counters struct {
	copies, failures, stagedBytes, directBytes, batchedBytes, peerBytes atomic.Int64
}

func (c *counters) read() Stats {
	return Stats{
		Copies:       int(c.copies.Load()),
		Failures:     int(c.failures.Load()),
		StagedBytes:  int(c.stagedBytes.Load()),
		DirectBytes:  int(c.directBytes.Load()),
		BatchedBytes: int(c.batchedBytes.Load()),
		PeerBytes:    int(c.peerBytes.Load()),
	}
}

// Stats returns what was done so far by the Copier and all its views.
func (v *View) Stats() Stats {
	s := v.stats.read()
	s.RingBytes = v.stage.Bytes()
	return s
}
