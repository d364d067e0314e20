package stage

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
)

// An annex is memory that a ring has only while copies of both directions wait for it:
// each direction then has as much as one has alone. It is mapped beside the copies, and
// unmapped when none has waited beside the other direction for a while.
type annex struct {
	units  int           // that it has when it is mapped, 0 for a ring without one
	pinned *atomic.Int64 // counts its bytes

	// Guarded by ring.mu, but for buf while changing is set or after closed.
	buf      *hostmem.Buffer // nil if it is not mapped
	open     bool            // extents may be taken from it
	last     time.Time       // when both directions wanted memory
	tried    time.Time       // when mapping failed last
	timer    *time.Timer     // for unmapping
	changing chan struct{}   // closed when mapping or unmapping has ended
	closed   bool
}

var (
	// annexPatience is how long mapping may take, as it may wait for a limit: others wait
	// behind it.
	annexPatience = 250 * time.Millisecond
	// annexIdle is how long the annex stays when it is not needed.
	annexIdle = time.Second
	// annexRetry is after what time it is tried again to map it.
	annexRetry = 10 * time.Second
)

// wantAnnex is called when there is no memory for a copy. While another goroutine asks what
// the GPU is done with there may be some. It needs r.mu.
func (r *ring) wantAnnex(c class) {
	a := &r.annex
	if r.asking || a.units == 0 || a.closed || r.usedBy(c.way().back()) == 0 {
		return
	}
	a.last = time.Now()
	if a.changing != nil || a.buf != nil || !a.tried.IsZero() && a.last.Sub(a.tried) < annexRetry {
		return
	}
	a.changing = make(chan struct{})
	go r.addAnnex()
}

// addAnnex maps the annex. That there is no memory for it is no error: copies go on
// with what there is.
func (r *ring) addAnnex() {
	a := &r.annex
	ctx, cancel := context.WithTimeout(context.Background(), annexPatience)
	defer cancel()
	buf, err := hostmem.Alloc(ctx, r.dev, a.units*r.unit, hostmem.Options{Label: ringLabel})
	if err == nil && len(buf.Spans()) > 1 {
		_ = buf.Close() // its ledger has what stays
		err = errPieces
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	defer a.changed()
	if err != nil {
		a.tried = time.Now()
		return
	}
	a.buf = buf
	a.pinned.Add(int64(buf.Reserved()))
	if a.closed {
		return // closeAnnex unmaps it
	}
	a.open = true
	r.set(r.annexAt(), a.units, true)
	a.timer = time.AfterFunc(annexIdle, r.dropAnnex)
	r.serve()
}

// dropAnnex unmaps the annex, if it is neither needed nor used. It tries again until
// that has worked.
func (r *ring) dropAnnex() {
	a := &r.annex
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reclaim() // which unlocks meanwhile
	switch {
	case a.closed:
		return
	case a.open && (time.Since(a.last) < annexIdle || !r.isFree(r.annexAt(), a.units)):
		a.timer.Reset(annexIdle)
		return
	case a.open:
		a.open = false
		r.set(r.annexAt(), a.units, false)
	}
	a.changing = make(chan struct{})
	r.mu.Unlock()
	err := a.unmap(context.Background()) // nothing is queued on it
	r.mu.Lock()
	a.changed()
	if err != nil && !a.closed { // closeAnnex reports it
		a.timer.Reset(annexIdle)
	}
}

// unmap unmaps the memory. After an error it must not be used any more.
func (a *annex) unmap(ctx context.Context) error {
	if a.buf == nil {
		return nil
	}
	if err := a.buf.CloseContext(ctx); err != nil {
		return err
	}
	a.pinned.Add(-int64(a.buf.Reserved()))
	a.buf = nil
	return nil
}

// changed ends mapping or unmapping.
func (a *annex) changed() {
	close(a.changing)
	a.changing = nil
}

// annexAt is its first unit: one that is never free lies before it, so that no extent
// reaches from one buffer into the other.
func (r *ring) annexAt() int { return r.units + 1 }

// closeAnnex unmaps the annex; no extent of it is in use any more.
func (r *ring) closeAnnex(ctx context.Context) error {
	a := &r.annex
	r.mu.Lock()
	a.closed = true
	if a.timer != nil {
		a.timer.Stop()
	}
	changing := a.changing
	r.mu.Unlock()
	if changing != nil {
		select {
		case <-changing:
		case <-ctx.Done():
			return bounded.Ended(ctx)
		}
	}
	return a.unmap(ctx) // nothing else changes it any more
}

var errPieces = errors.New("registered in several pieces, which copies cannot cross")
