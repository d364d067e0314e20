package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/sentinel"
)

// ErrClosed is returned by methods of a Copier that was closed, and of its
// views. errors.Is reports that it is [os.ErrClosed].
var ErrClosed = sentinel.New("already closed", os.ErrClosed)

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
	dev          *cudart.Device
	o            Options
	cores        cores
	large, small *ring
	lanes        [lanes][ways]*cudart.Stream
	stats        counters

	mu       sync.Mutex
	copies   int           // that run
	closed   bool          // refuses copies
	idle     chan struct{} // closed when closed is set and no copy runs
	closer   chan struct{} // one value, which the goroutine takes that releases
	released bool          // guarded by closer
}

// A lane has a stream each way. Chunks of the ring follow on each other on one
// stream, without the gap that a change of streams makes; small and unstaged
// copies have their own, so as not to queue after each other.
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

// NewCopier allocates a ring of pinned memory, of Workers x 2 x Chunk bytes, and
// one MiB for small copies, and makes six streams. When ctx ends before, the
// error is ctx's. After an error nothing is left, unless the error says that it
// could not be released.
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
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	e := &engine{dev: dev, o: o, cores: coresOf(dev), idle: make(chan struct{}), closer: make(chan struct{}, 1)}
	e.closer <- struct{}{}
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

// release releases what allocate made, as far as it got.
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

// begin and end enclose a copy.
func (e *engine) begin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	e.copies++
	return nil
}

func (e *engine) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.copies--
	if e.closed && e.copies == 0 {
		close(e.idle)
	}
}

// refuse makes begin fail from now on, and returns how many copies run.
func (e *engine) refuse() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed && e.copies == 0 {
		close(e.idle)
	}
	e.closed = true
	return e.copies
}

// Close waits for copies that are still queued on streams of callers, unpins
// and unmaps the ring, and destroys the copier's streams. From its call on new
// copies return [ErrClosed].
//
// Close does not wait for methods that run, as it may be called by one of their
// callbacks: it returns an error then. CloseContext waits for them. After an
// error Close may be called again; once it has returned nil it does nothing.
func (c *Copier) Close() error {
	if n := c.refuse(); n > 0 {
		return fmt.Errorf("transfer: close copier on %v: still copying (calls: %d): close it when they have returned, or with CloseContext, which waits for them", c.dev, n)
	}
	return c.CloseContext(context.Background())
}

// CloseContext is Close that waits for methods that run as well, until ctx ends:
// the error is ctx's then. Called by a reader, a writer or Progress it waits for
// its own copy until ctx ends.
func (c *Copier) CloseContext(ctx context.Context) error {
	if err := c.close(ctx); err != nil {
		return fmt.Errorf("transfer: close copier on %v: %w", c.dev, err)
	}
	return nil
}

func (c *Copier) close(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	c.refuse()
	if err := await(ctx, c.idle); err != nil {
		return fmt.Errorf("still copying (calls: %d): %w", c.refuse(), err)
	}
	if err := await(ctx, c.closer); err != nil {
		return err
	}
	defer func() { c.closer <- struct{}{} }()
	if c.released {
		return nil
	}
	if err := c.release(ctx); err != nil {
		return err
	}
	c.released = true
	return nil
}

// await receives from a channel, or returns ctx's error if that ends first.
func await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	default:
	}
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Stats are what a Copier and its views did so far, and in which way.
type Stats struct {
	Copies   int // calls of methods that copy, and had something to
	Failures int // of them
	// Bytes that went through the ring, that were pinned and needed none, and
	// that were parts of UploadAll and DownloadAll.
	StagedBytes, DirectBytes, BatchedBytes int
	// RingBytes are pinned until Close.
	RingBytes int
}

type counters struct {
	copies, failures, stagedBytes, directBytes, batchedBytes atomic.Int64
}

// Stats returns what was done so far by the Copier and all its views.
func (v *View) Stats() Stats {
	return Stats{
		Copies:       int(v.stats.copies.Load()),
		Failures:     int(v.stats.failures.Load()),
		StagedBytes:  int(v.stats.stagedBytes.Load()),
		DirectBytes:  int(v.stats.directBytes.Load()),
		BatchedBytes: int(v.stats.batchedBytes.Load()),
		RingBytes:    v.large.buf.Kept() + v.small.buf.Kept(),
	}
}
