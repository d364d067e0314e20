package stage

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// A Reporter calls a Progress function, on a goroutine of its own: it may block.
type Reporter struct {
	total   int
	f       func(done, total int)
	fail    func(at int, err error)
	stopped <-chan struct{}

	done atomic.Int64
	wake chan struct{}
	over chan struct{}
}

// NewReporter returns a Reporter for a copy of total bytes, which calls fail if f
// panics or does not return. It makes no more calls when stopped is closed.
func NewReporter(total int, f func(done, total int), fail func(at int, err error), stopped <-chan struct{}) *Reporter {
	t := &Reporter{total: total, f: f, fail: fail, stopped: stopped, wake: make(chan struct{}, 1), over: make(chan struct{})}
	go t.run()
	return t
}

// Set makes it known how many bytes are done.
func (t *Reporter) Set(done int) {
	if t.done.Swap(int64(done)) == int64(done) {
		return
	}
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

func (t *Reporter) run() {
	defer close(t.over)
	told := 0
	for range t.wake {
		done := int(t.done.Load())
		if done == told || t.isStopped() {
			continue
		}
		told = done
		if err := Foreign(func() error { t.f(done, t.total); return nil }, func(err error) { t.failed(told, err) }); err != nil {
			t.failed(told, err)
			return
		}
	}
}

func (t *Reporter) failed(at int, err error) { t.fail(at, fmt.Errorf("progress: %w", err)) }

func (t *Reporter) isStopped() bool {
	select {
	case <-t.stopped:
		return true
	default:
		return false
	}
}

// Finish waits for the last call, or, once stopped is closed, a while for the one
// that runs. There are no calls to Set any more.
func (t *Reporter) Finish() {
	close(t.wake)
	select {
	case <-t.over:
		return
	case <-t.stopped:
	}
	select {
	case <-t.over:
	case <-time.After(Grace):
	}
}

// Grace is how long a copy that has failed waits for a callback that runs. It
// may go on when the copy has returned.
const Grace = 10 * time.Millisecond

// Linger waits until over is closed, when ctx has ended for [Grace] only. It reports
// whether it is.
func Linger(ctx context.Context, over <-chan struct{}) bool {
	select {
	case <-over:
		return true
	case <-ctx.Done():
	}
	select {
	case <-over:
		return true
	case <-time.After(Grace):
		return false
	}
}
