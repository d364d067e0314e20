package cudart

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// A drainer waits for all work of a device (cudaDeviceSynchronize). One goroutine, so
// one thread, serves all requests. Requests that come during a call are served by the
// next one, because the call in progress may not cover their work.
type drainer struct {
	begun atomic.Uint64 // calls

	// Guarded by Device.mu.
	running bool
	next    map[*drainRequest]struct{}
}

// A drainRequest is for a timeline, for a caller that waits, or for both.
type drainRequest struct {
	timeline  *timeline
	n, queued uint64
	done      chan error
}

func (d *Device) addDrain(r *drainRequest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.drainer.next == nil {
		d.drainer.next = make(map[*drainRequest]struct{})
	}
	d.drainer.next[r] = struct{}{}
	if !d.drainer.running {
		d.drainer.running = true
		go d.drain()
	}
}

// removeDrain withdraws a request whose caller has returned.
func (d *Device) removeDrain(r *drainRequest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.drainer.next, r)
}

func (d *Device) takeDrains() map[*drainRequest]struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	requests := d.drainer.next
	d.drainer.next = nil
	d.drainer.running = len(requests) > 0
	return requests
}

func (d *Device) drain() {
	for requests := d.takeDrains(); len(requests) > 0; requests = d.takeDrains() {
		for r := range requests {
			if r.timeline != nil {
				r.n, r.queued = r.timeline.beginQuery()
			}
		}
		number := d.drainer.begun.Add(1)
		err := d.synchronize()
		for r := range requests {
			if r.timeline != nil {
				r.timeline.drained(r.n, r.queued, number, err)
			}
			if r.done != nil {
				r.done <- err
			}
		}
	}
}

// waitClosed waits for all of a stream's work when the runtime was closed, and with it
// the events: it queries the device as a whole, for bounded.QueryTimeout at most.
func (t *timeline) waitClosed(ctx context.Context) error {
	r := &drainRequest{timeline: t, done: make(chan error, 1)}
	t.dev.addDrain(r)
	timer := time.NewTimer(bounded.QueryTimeout)
	defer timer.Stop()
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
		t.dev.removeDrain(r)
		return waitCanceled(t, ctx)
	case <-timer.C:
		return fmt.Errorf("wait for %v: the Runtime was closed, and the work is not done: %w", t, ErrClosed)
	}
}

func (d *Device) synchronize() error {
	f := d.begin(nil)
	_, err := d.do(fnDeviceSynchronize, f, d.String)
	return err
}

// Synchronize waits until all work that is queued on the device so far is done
// (cudaDeviceSynchronize), and returns an error of that work. If ctx ends first, it
// returns ctx's error, and the GPU's work goes on. If the Runtime is closed, the error
// wraps [ErrClosed]; a nil ctx is an error. All callers together occupy one thread,
// and mostly one core: prefer [Stream.Synchronize].
func (d *Device) Synchronize(ctx context.Context) error {
	switch {
	case !d.made():
		return notMade(fnDeviceSynchronize)
	case ctx == nil:
		return fmt.Errorf("cudaDeviceSynchronize: %v: %w", d, errNilContext)
	case d.rt.isClosed():
		return d.rt.errorf(fnDeviceSynchronize, codeRuntimeClosed, "%v", d)
	case ctx.Err() != nil:
		return waitCanceled(d, ctx)
	}
	r := &drainRequest{done: make(chan error, 1)}
	d.addDrain(r)
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
		d.removeDrain(r)
		return waitCanceled(d, ctx)
	case <-d.rt.closing:
		d.removeDrain(r)
		return d.rt.errorf(fnDeviceSynchronize, codeRuntimeClosed, "%v", d)
	}
}
