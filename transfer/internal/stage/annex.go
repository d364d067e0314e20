package stage

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/hostmem"
)

// An annex is memory that a ring has only while copies of both directions wait for it:
// each direction then has as much as one has alone. It is mapped beside the copies, and
// unmapped when none has waited beside the other direction for a while.
type annex struct {
	units  int           // that it has when it is mapped, 0 for a ring without one
	pinned *atomic.Int64 // counts its bytes

	// Guarded by ring.mu.
	buf      *hostmem.Buffer // nil if it is not mapped
	last     time.Time       // when both directions wanted memory
	tried    time.Time       // when mapping failed last
	timer    *time.Timer     // for unmapping
	changing chan struct{}   // closed when mapping or unmapping has ended
	closed   bool
}

var (
	// annexIdle is how long the annex stays when it is not needed.
	annexIdle = time.Second
	// annexRetry is after what time it is tried again to map it.
	annexRetry = time.Second
)

// wantAnnex is called when a copy has to wait. It needs r.mu.
func (r *ring) wantAnnex(c class) {
	a := &r.annex
	if a.units == 0 || a.closed || r.usedBy(c.way().back()) == 0 {
		return
	}
	a.last = time.Now()
	if a.buf != nil || a.changing != nil || a.last.Sub(a.tried) < annexRetry {
		return
	}
	a.changing = make(chan struct{})
	go r.addAnnex()
}

// addAnnex maps the annex. That there is no memory for it is no error: copies go on
// with what there is.
func (r *ring) addAnnex() {
	a := &r.annex
	buf, err := hostmem.Alloc(context.Background(), r.dev, a.units*r.unit, hostmem.Options{Label: ringLabel})
	if err == nil && len(buf.Spans()) > 1 {
		_ = buf.Close() // its ledger has what stays
		err = errPieces
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	close(a.changing)
	a.changing = nil
	if err != nil {
		a.tried = time.Now()
		return
	}
	a.buf = buf
	a.pinned.Add(int64(buf.Reserved()))
	if a.closed {
		return // close unmaps it
	}
	r.set(r.annexAt(), a.units, true)
	a.timer = time.AfterFunc(annexIdle, r.dropAnnex)
	r.serve()
}

// dropAnnex unmaps the annex, if it is neither needed nor used.
func (r *ring) dropAnnex() {
	a := &r.annex
	r.mu.Lock()
	if a.closed || a.changing != nil {
		r.mu.Unlock()
		return
	}
	r.reclaim()
	if time.Since(a.last) < annexIdle || !r.isFree(r.annexAt(), a.units) {
		a.timer.Reset(annexIdle)
		r.mu.Unlock()
		return
	}
	r.set(r.annexAt(), a.units, false)
	a.changing = make(chan struct{})
	buf := a.buf
	r.mu.Unlock()

	err := buf.Close() // nothing is queued on it
	r.mu.Lock()
	defer r.mu.Unlock()
	close(a.changing)
	a.changing = nil
	if err == nil {
		a.buf = nil
		a.pinned.Add(-int64(buf.Reserved()))
	} else if !a.closed { // try again later, and then report it in close
		r.set(r.annexAt(), a.units, true)
		a.timer.Reset(annexIdle)
	}
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
			return context.Cause(ctx)
		}
	}
	r.mu.Lock()
	buf := a.buf
	r.mu.Unlock()
	if buf == nil {
		return nil
	}
	if err := buf.CloseContext(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	a.buf = nil
	a.pinned.Add(-int64(buf.Reserved()))
	return nil
}

var errPieces = errors.New("registered in several pieces, which copies cannot cross")
