package stage

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A crew is the workers of the process that serve devices of one NUMA node.
// Goroutines begin when there is work for them and end when there was none for a
// while.
type crew struct {
	most  int // workers, and goroutines that copy for themselves
	cores cores

	posted atomic.Uint64 // changes when a job has more to do

	mu      sync.Mutex
	jobs    []*Job
	callers int // goroutines that copy for themselves
	workers int
	busy    int // of the workers, those that have a job
	parked  []*worker
}

// A worker is a goroutine of a crew.
type worker struct {
	wake chan struct{}
	turn int // where it looks for a job first
}

var (
	// A worker that has no work looks for more as long as it has worked, but
	// not longer than this, before it parks: waking it takes some tens of
	// microseconds. So looking costs at most as much as copying.
	mostSpin = 100 * time.Microsecond
	// parkFor is after what time a parked worker ends.
	parkFor = time.Second
	// A woken worker wakes others, so that one that posts work is not kept by it.
	wakeAtOnce = 2
)

// add makes a job known to the workers. The caller copies too.
func (c *crew) add(j *Job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jobs = append(c.jobs, j)
	c.callers++
}

func (c *crew) remove(j *Job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jobs = slices.DeleteFunc(c.jobs, func(x *Job) bool { return x == j })
	c.callers--
}

// post says that a job has work for so many more.
func (c *crew) post(pieces int) {
	c.posted.Add(1)
	c.mu.Lock()
	wake := min(pieces, wakeAtOnce, c.most-c.callers-c.busy)
	var woken []*worker
	for ; wake > 0; wake-- {
		if n := len(c.parked); n > 0 {
			woken = append(woken, c.parked[n-1])
			c.parked = c.parked[:n-1]
		} else if c.workers < c.most {
			c.workers++
			go c.run(&worker{wake: make(chan struct{}, 1), turn: c.workers})
		}
	}
	c.mu.Unlock()
	for _, w := range woken {
		w.wake <- struct{}{}
	}
}

// take assigns a worker to a job that wants one, and has fewer than others.
func (c *crew) take(w *worker) *Job {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy+c.callers >= c.most && c.busy > 0 {
		return nil
	}
	var best *Job
	for i := range c.jobs {
		j := c.jobs[(w.turn+i)%len(c.jobs)]
		if j.helpers < j.limit && (best == nil || j.helpers < best.helpers) && j.wants() {
			best = j
		}
	}
	if best != nil {
		best.helpers++
		c.busy++
		w.turn++
	}
	return best
}

// leave ends what take began.
func (c *crew) leave(j *Job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	j.helpers--
	c.busy--
	if j.helpers == 0 {
		j.poke()
	}
}

// share is how many workers a job may keep while others want some too.
func (c *crew) crowded(j *Job) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.jobs) > 1 && j.helpers > max(1, c.most/len(c.jobs))
}

func (c *crew) run(w *worker) {
	defer c.cores.enter()()
	var worked time.Duration
	seen := c.posted.Load()
	for {
		if j := c.take(w); j != nil {
			began := time.Now()
			j.help()
			worked = min(worked+time.Since(began), mostSpin)
			c.leave(j)
			continue
		}
		if worked > 0 {
			began := time.Now()
			for n := 0; c.posted.Load() == seen && n < 16; n++ {
				runtime.Gosched()
			}
			worked -= max(time.Since(began), time.Microsecond)
		} else if !c.park(w, seen) {
			return
		}
		seen = c.posted.Load()
	}
}

// park sleeps until there is work, and is false when the worker is to end.
func (c *crew) park(w *worker, seen uint64) bool {
	c.mu.Lock()
	if c.posted.Load() != seen {
		c.mu.Unlock()
		return true
	}
	c.parked = append(c.parked, w)
	c.mu.Unlock()
	timer := time.NewTimer(parkFor)
	defer timer.Stop()
	select {
	case <-w.wake:
		return true
	case <-timer.C:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.parked, w)
	if i < 0 { // it was woken meanwhile
		<-w.wake
		return true
	}
	c.parked = slices.Delete(c.parked, i, i+1)
	c.workers--
	return false
}
