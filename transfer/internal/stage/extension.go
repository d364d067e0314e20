package stage

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
)

// An extension is memory that a ring has only while copies of both directions wait for
// memory. With it each direction has as much as one direction has alone. A goroutine maps it
// while copies run, and unmaps it after extensionIdle without such a wait.
//
//	state    entered by                | buf             | open
//	none     the goroutine, at its end | nil             | false
//	mapping  wantExtension             | nil             | false
//	mapped   the goroutine             | set             | true
//	drained  the goroutine             | set: it unmaps, | false
//	         or closeExtension         | until it works  |
//
// The fields are guarded by ring.mu, but for buf of a drained extension: that is the
// goroutine's, and closeExtension's when the goroutine has ended.
type extension struct {
	units  int           // when it is mapped; 0 for a ring without one
	pinned *atomic.Int64 // counts its bytes

	buf    *hostmem.Buffer
	open   bool      // extents may be taken from it
	closed bool      // no goroutine begins any more
	wanted time.Time // when both directions wanted memory last
	failed time.Time // when mapping failed last

	// Of the goroutine that maps and unmaps it; nil while none runs.
	over    chan struct{} // closed when it has ended
	closing chan struct{} // closed to end it
}

var (
	// extensionTimeout bounds mapping, which may wait for a limit while other allocations
	// queue behind it.
	extensionTimeout = 250 * time.Millisecond
	// extensionIdle is the time after which an unused extension is unmapped.
	extensionIdle = time.Second
	// extensionRetry is the time between attempts to map it.
	extensionRetry = 10 * time.Second
)

// wantExtension is called when there is no memory for a copy. It does nothing while another
// goroutine polls, which may find some.
func (r *ring) wantExtension(d direction) {
	e := &r.extension
	if r.polling || e.units == 0 || e.closed || r.used[d.opposite()] == 0 {
		return
	}
	e.wanted = time.Now()
	if e.over != nil || !e.failed.IsZero() && e.wanted.Sub(e.failed) < extensionRetry {
		return
	}
	e.over, e.closing = make(chan struct{}), make(chan struct{})
	go r.extend(e.over, e.closing)
}

// extend maps the extension, and unmaps it when it is not needed. If mapping fails, copies
// go on without it.
func (r *ring) extend(over chan<- struct{}, closing <-chan struct{}) {
	e := &r.extension
	defer close(over)
	ctx, cancel := context.WithTimeout(background, extensionTimeout)
	buf, err := allocPiece(ctx, r.dev, e.units*r.unit)
	cancel()
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { e.over = nil }()
	if err != nil {
		e.failed = time.Now()
		return
	}
	e.buf, e.open = buf, !e.closed
	e.pinned.Add(int64(buf.Info().Reserved))
	if e.open {
		r.setFree(r.extensionAt(), e.units, true)
		r.serve()
	}
	for e.buf != nil {
		r.mu.Unlock()
		select {
		case <-time.After(extensionIdle):
		case <-closing:
		}
		r.mu.Lock()
		r.poll() // which releases mu meanwhile
		switch {
		case e.closed:
			return
		case e.open && (time.Since(e.wanted) < extensionIdle || slices.Contains(r.free[r.extensionAt():], false)):
		default:
			r.drainExtension()
			r.mu.Unlock()
			_ = e.unmap(background) // nothing is queued on it; closeExtension reports an error
			r.mu.Lock()
		}
	}
}

// drainExtension takes the extension's units, all of them free, out of use.
func (r *ring) drainExtension() {
	if r.extension.open {
		r.extension.open = false
		r.setFree(r.extensionAt(), r.extension.units, false)
	}
}

// unmap unmaps the memory. After an error it must not be used any more.
func (e *extension) unmap(ctx context.Context) error {
	if e.buf == nil {
		return nil
	}
	if err := e.buf.CloseContext(ctx); err != nil {
		return err
	}
	e.pinned.Add(-int64(e.buf.Info().Reserved))
	e.buf = nil
	return nil
}

// extensionAt returns the extension's first unit. The unit before it is never free, so that
// no extent reaches from one buffer into the other.
func (r *ring) extensionAt() int { return r.units + 1 }

// closeExtension unmaps the extension; no extent of it is in use any more.
func (r *ring) closeExtension(ctx context.Context) error {
	e := &r.extension
	r.mu.Lock()
	over := e.over
	if over != nil && !e.closed {
		close(e.closing)
	}
	e.closed = true
	r.drainExtension()
	r.mu.Unlock()
	if over != nil {
		select {
		case <-over:
		case <-ctx.Done():
			return bounded.Ended(ctx)
		}
	}
	return e.unmap(ctx) // nothing else changes it any more
}
