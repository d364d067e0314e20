package bounded

import (
	"fmt"
	"sync/atomic"
)

// A Reporter calls a user's progress callback on a goroutine of its own, so that a callback
// that blocks delays nothing else. Progress that is made meanwhile is reported by one call.
type Reporter struct {
	total   int
	f       func(done, total int)
	fail    func(at int, err error)
	stopped <-chan struct{}

	done   atomic.Int64
	wake   chan struct{}
	finish chan struct{} // closed by Finish
	over   chan struct{} // closed when the goroutine ends
}

// NewReporter returns a Reporter for work of total bytes. It calls fail with the bytes that
// were reported last if f panics or ends its goroutine, and begins no call of f once stopped
// is closed. Finish must be called. Without f the Reporter is nil, and does nothing.
func NewReporter(total int, f func(done, total int), fail func(at int, err error), stopped <-chan struct{}) *Reporter {
	if f == nil {
		return nil
	}
	r := &Reporter{
		total: total, f: f, fail: fail, stopped: stopped,
		wake: make(chan struct{}, 1), finish: make(chan struct{}), over: make(chan struct{}),
	}
	go r.run()
	return r
}

// Set reports that done bytes are done. It never blocks, and has no effect if as many
// bytes were done before, or after Finish. Any goroutine may call it.
func (r *Reporter) Set(done int) {
	if r == nil {
		return
	}
	for before := r.done.Load(); ; before = r.done.Load() {
		if int64(done) <= before {
			return
		}
		if r.done.CompareAndSwap(before, int64(done)) {
			break
		}
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Reporter) run() {
	defer close(r.over)
	reported := 0
	for last := false; !last; {
		select {
		case <-r.wake:
		case <-r.finish:
			last = true
		}
		done := int(r.done.Load())
		if done == reported {
			continue
		}
		select {
		case <-r.stopped:
			continue
		default:
		}
		reported = done
		failed := func(err error) { r.fail(done, fmt.Errorf("progress: %w", err)) }
		if err := Foreign(func() error { r.f(done, r.total); return nil }, failed); err != nil {
			failed(err)
			return
		}
	}
}

// Finish waits until the last number is reported. Once stopped is closed, it waits for the
// call that runs for CallbackGrace at most; the call may go on then. It returns whether all
// calls have returned.
func (r *Reporter) Finish() (returned bool) {
	if r == nil {
		return true
	}
	close(r.finish)
	return await(r.over, r.stopped)
}
