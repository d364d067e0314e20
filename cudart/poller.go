package cudart

import (
	"runtime"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// idleFor is the time that a poller runs without waits: a device without waits occupies
// nothing.
const idleFor = time.Second

// A round is one round of queries by the poller.
type round struct {
	*waits
	firstWaits []firstWait
	began      time.Time

	ended    bool          // waits have ended
	youngest time.Duration // the age of the youngest wait that has not
}

// A firstWait is the first wait of a queue.
type firstWait struct {
	queue *waitQueue
	n     uint64
	since time.Time
}

// poll is the poller: see waits. It keeps its thread, which ends with it, because the
// precision of sleeps belongs to the thread.
func (w *waits) poll(u *bounded.Runner) {
	runtime.LockOSThread()
	b := newSleeper()
	b.precise()
	defer b.close()
	w.mu.Lock()
	w.sleeper = b
	w.mu.Unlock()
	r := &round{waits: w}
	query := r.query
	for {
		if r.list(); len(r.firstWaits) == 0 {
			if !b.wait(idleFor) && u.Stop(w.idle) {
				return
			}
			continue
		}
		isRunner := u.Call(query)
		clear(r.firstWaits) // keeps no stream from being collected
		if !isRunner {
			w.handOver(b)
			return
		}
		if !r.ended { // else more may be done by now
			b.wait(max(min(max(r.youngest/16, minSleep), maxSleep), time.Since(r.began)))
		}
	}
}

// idle reports whether the poller may end, which wakes it no more.
func (w *waits) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queues) > 0 {
		return false
	}
	w.sleeper = nil
	return true
}

// handOver wakes the poller that has taken over, for the queue that it has left out. A
// poller that has not begun yet will query all queues.
func (w *waits) handOver(b *sleeper) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sleeper == b {
		w.sleeper = nil
	} else if w.sleeper != nil {
		w.sleeper.wake()
	}
}

// list lists the queues that have waits.
func (r *round) list() {
	r.firstWaits = r.firstWaits[:0]
	r.mu.Lock()
	defer r.mu.Unlock()
	rest := r.queues[:0]
	for _, q := range r.queues {
		if q.listed = q.first != nil; q.listed {
			rest = append(rest, q)
			r.firstWaits = append(r.firstWaits, firstWait{q, q.first.at.n, q.first.since})
		}
	}
	clear(r.queues[len(rest):])
	r.queues = rest
}

// query queries for each queue, unless another goroutine is inside a query for it.
func (r *round) query() {
	r.began, r.ended, r.youngest = time.Now(), false, maxSleep*16
	for _, i := range r.firstWaits {
		if !i.queue.of.reached(i.n) {
			r.youngest = min(r.youngest, r.began.Sub(i.since))
			continue
		}
		r.end(i.queue, i.queue.of.done.Load(), 0, nil)
		r.ended = true
	}
}
