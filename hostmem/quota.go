package hostmem

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
)

// ErrTooLarge is returned when a request is larger than its limit, so that
// waiting would not help.
var ErrTooLarge = errors.New("hostmem: larger than the limit")

// A quota is a limit of bytes that those who ask wait for, in the order in
// which they asked: a large request is not overtaken by small ones for ever. A
// max of 0 is no limit.
type quota struct {
	mu      sync.Mutex
	max     int
	used    int
	waiters []*quotaWaiter // the first has waited longest
}

type quotaWaiter struct {
	n    int
	done chan error // gets one value, under quota.mu
}

func newQuota(maximum int) *quota { return &quota{max: maximum} }

// acquire takes n bytes, and waits until it can. An error is ctx's, or wraps
// ErrTooLarge when n can never fit.
func (q *quota) acquire(ctx context.Context, n int) error {
	q.mu.Lock()
	if q.fits(n) && len(q.waiters) == 0 {
		q.used += n
		q.mu.Unlock()
		return nil
	}
	if err := q.never(n); err != nil {
		q.mu.Unlock()
		return err
	}
	w := &quotaWaiter{n: n, done: make(chan error, 1)}
	q.waiters = append(q.waiters, w)
	q.mu.Unlock()
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	ahead := slices.Index(q.waiters, w)
	if ahead < 0 {
		// It was decided while ctx ended: what was given goes back.
		if err := <-w.done; err != nil {
			return err
		}
		q.used -= n
		q.serve()
		return fmt.Errorf("wait for %d bytes: %w", n, ctx.Err())
	}
	used := q.used
	q.waiters = slices.Delete(q.waiters, ahead, ahead+1)
	q.serve()
	return fmt.Errorf("wait for %d bytes: %d of %d are in use, %d requests came before: %w", n, used, q.max, ahead, ctx.Err())
}

// tryAcquire takes n bytes if there are as many and nobody waits.
func (q *quota) tryAcquire(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiters) > 0 || !q.fits(n) {
		return false
	}
	q.used += n
	return true
}

// release gives n bytes back.
func (q *quota) release(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.used -= n
	q.serve()
}

// setMax changes the limit. What is in use beyond it stays; requests that wait
// and cannot fit any more fail.
func (q *quota) setMax(maximum int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.max = maximum
	q.waiters = slices.DeleteFunc(q.waiters, func(w *quotaWaiter) bool {
		err := q.never(w.n)
		if err != nil {
			w.done <- err
		}
		return err != nil
	})
	q.serve()
}

// room returns how many bytes could be taken now; without a limit, all.
func (q *quota) room() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.max == 0 {
		return math.MaxInt
	}
	return q.max - q.used
}

func (q *quota) fits(n int) bool { return q.max == 0 || n <= q.max-q.used }

func (q *quota) never(n int) error {
	if q.max == 0 || n <= q.max {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, of %d in all", ErrTooLarge, n, q.max)
}

// serve gives to those who wait, in order, what there is.
func (q *quota) serve() {
	served := 0
	for _, w := range q.waiters {
		if !q.fits(w.n) {
			break
		}
		q.used += w.n
		w.done <- nil
		served++
	}
	q.waiters = slices.Delete(q.waiters, 0, served)
}
