package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/sentinel"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

var (
	errNilContext    = errors.New("the context is nil")
	errNilDevice     = errors.New("the device is nil")
	errNilReadWriter = errors.New("the reader or writer is nil")
	errNotMade       = errors.New("the Copier or Fanout is nil or zero: make it with NewCopier or NewFanout")
)

// ErrClosed is returned by methods of a Copier or a Fanout that was closed, and of
// its views. errors.Is reports that it is [os.ErrClosed].
var ErrClosed = sentinel.New("already closed", os.ErrClosed)

// ErrUnderWay is in the errors of copies that were abandoned while the GPU may still
// be copying. What they copy to has bytes of any kind until it is done. Pinned memory
// that they copy from or to must stay until then, and memory outside of Go's heap that
// was uploaded must stay mapped.
var ErrUnderWay = stage.ErrUnderWay

// A Copier copies between one device and any host memory, file, reader or
// writer. Its copies are the methods of [View].
type Copier struct{ View }

// NewCopier returns a copier for a device. Close it. The first one of a device
// allocates the ring of pinned memory, 11 MiB on up to four cores and 39 MiB on more,
// and the streams that all copiers of the device share. On more than four cores the ring
// has 28 MiB more while copies of both directions wait for memory. When ctx ends before,
// the error is ctx's; others are of invalid Options, and those of [hostmem.Alloc]. After
// an error nothing is left, unless the error says that it could not be released, and
// NewCopier may be called again.
func NewCopier(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	e, err := newEngine(ctx, fmt.Sprintf("copier on %v", dev), []*cudart.Device{dev}, o)
	if err != nil {
		return nil, err
	}
	return &Copier{View{view{engine: e}}}, nil
}

// Close releases the copier; the last one of a device waits for copies that are
// still queued, and unregisters and unmaps the ring. From its call on new copies
// return [ErrClosed].
//
// Close does not wait for methods that run, as it may be called by one of their
// callbacks: it returns an error then. CloseContext waits for them. After an
// error Close may be called again; once it has returned nil it does nothing.
func (c *Copier) Close() error { return c.opened().close() }

// CloseContext is Close that waits for methods that run as well, until ctx ends:
// the error is ctx's then. Called by a reader, a writer or Progress it waits for
// its own copy until ctx ends.
func (c *Copier) CloseContext(ctx context.Context) error { return c.opened().closeContext(ctx) }

func (c *Copier) opened() *engine {
	if c == nil {
		return nil
	}
	return c.engine
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

func (e *engine) readStats() Stats {
	if e == nil {
		return Stats{}
	}
	c := &e.stats
	s := Stats{
		Copies:       int(c.copies.Load()),
		Failures:     int(c.failures.Load()),
		StagedBytes:  int(c.stagedBytes.Load()),
		DirectBytes:  int(c.directBytes.Load()),
		BatchedBytes: int(c.batchedBytes.Load()),
		PeerBytes:    int(c.peerBytes.Load()),
	}
	for _, st := range e.stages {
		s.RingBytes += st.Bytes()
	}
	return s
}
