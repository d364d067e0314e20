package stage

import (
	"math"
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
	most    int32 // workers
	cores   cores
	copying *seats // of all crews

	jobs     atomic.Pointer[[]*Job] // never changed in place
	posted   atomic.Uint64          // changes when a job has more to do
	spinning atomic.Int32           // workers that look for work
	staying  atomic.Int32           // workers that wait for more of their job
	slow     atomic.Int32           // workers of slow jobs
	devices  [2]atomic.Int32        // that have something to copy, for each direction: see demand

	mu      sync.Mutex
	workers int32
	parked  []*worker
}

// Seats bound how many goroutines copy at once, whatever the node. Those that copy
// for themselves have one too, without asking.
type seats struct {
	atomic.Int32 // taken
	most         int32
}

func newSeats(procs int) *seats { return &seats{most: int32(defaultWorkers(procs))} }

// take takes a seat if one is free.
func (s *seats) take() bool {
	if s.Add(1) <= s.most {
		return true
	}
	s.Add(-1)
	return false
}

func (s *seats) free() int32 { return s.most - s.Load() }

// A worker is a goroutine of a crew.
type worker struct {
	wake chan struct{}
	turn int // where it looks for a job first
}

var (
	// parkFor is after what time a parked worker ends.
	parkFor = time.Second
	// fewPieces is how many pieces a worker does until it looks whether another job
	// has fewer workers.
	fewPieces = 4
)

func newCrew(procs int, c cores) *crew {
	n := &crew{most: int32(defaultWorkers(min(procs, c.count()))), cores: c, copying: newSeats(procs)}
	n.jobs.Store(new([]*Job))
	return n
}

// crewsOf appends the crews of stages to list, each once.
func crewsOf(list []*crew, stages []*Stage) []*crew {
	for _, s := range stages {
		if !slices.Contains(list, s.crew) {
			list = append(list, s.crew)
		}
	}
	return list
}

// join makes a job known to the workers. The caller copies too.
func (j *Job) join() {
	j.crews[0].copying.Add(1)
	for _, c := range j.crews {
		c.mu.Lock()
		jobs := append(slices.Clone(*c.jobs.Load()), j)
		c.jobs.Store(&jobs)
		c.mu.Unlock()
	}
}

func (j *Job) leave() {
	j.crews[0].copying.Add(-1)
	for _, c := range j.crews {
		c.mu.Lock()
		jobs := slices.DeleteFunc(slices.Clone(*c.jobs.Load()), func(x *Job) bool { return x == j })
		c.jobs.Store(&jobs)
		c.mu.Unlock()
	}
}

// post says that a job has work for others. Waking a worker takes the caller a
// microsecond, so a few are woken, which wake others.
func (c *crew) post(j *Job) {
	c.posted.Add(1)
	wake := min(c.limitOf(j)-j.helpers.Load(), c.copying.free(), j.pieces.Load(), wakeMost) - c.spinning.Load()
	if wake <= 0 {
		return
	}
	var woken [8]*worker
	n := 0
	c.mu.Lock()
	for ; wake > 0; wake-- {
		if last := len(c.parked) - 1; last >= 0 {
			woken[n], c.parked = c.parked[last], c.parked[:last]
			n++
		} else if c.workers < c.most {
			c.workers++
			go c.run(&worker{wake: make(chan struct{}, 1), turn: int(c.workers)})
		}
	}
	c.mu.Unlock()
	for _, w := range woken[:n] {
		w.wake <- struct{}{}
	}
}

// wakeMost is how many workers are woken at once.
const wakeMost = 3

// find assigns a worker to a job that wants one, and has fewer than others. The
// worker has a seat then.
func (c *crew) find(w *worker) *Job {
	if !c.copying.take() {
		return nil
	}
	if j := c.choose(w); j != nil {
		return j
	}
	c.copying.Add(-1)
	return nil
}

func (c *crew) choose(w *worker) *Job {
	var best *Job
	least := int32(math.MaxInt32)
	jobs := *c.jobs.Load()
	for i := range jobs {
		if j := jobs[(w.turn+i)%len(jobs)]; c.lacks(j, least) {
			best, least = j, j.helpers.Load()
		}
	}
	if best == nil || best.helpers.Add(1) > c.limitOf(best) {
		if best != nil {
			best.helpers.Add(-1)
		}
		return nil
	}
	w.turn++
	return best
}

func (c *crew) run(w *worker) {
	defer c.cores.enter()()
	for {
		seen := c.posted.Load()
		if j := c.find(w); j != nil {
			c.work(j)
			continue
		}
		if !c.spin(seen) && !c.park(w, seen) {
			return
		}
	}
}

// work does a few pieces of a job that find has assigned.
func (c *crew) work(j *Job) {
	if j.Slow {
		c.slow.Add(1)
		defer c.slow.Add(-1)
	}
	if j.pieces.Load() > 1 {
		c.post(j)
	}
	for n := 1; ; n++ {
		if !j.help(1) && !(c.stay(j) && j.help(1)) || n%fewPieces == 0 && c.wanted(j) {
			break
		}
	}
	c.copying.Add(-1)
	j.helpers.Add(-1)
}

// wanted reports whether a worker of j should leave it: for another job that has fewer, or
// none, so that jobs take turns with one; or because j may have fewer by now.
func (c *crew) wanted(j *Job) bool {
	others := j.helpers.Load() - 1
	return others >= c.limitOf(j) || slices.ContainsFunc(*c.jobs.Load(), func(x *Job) bool {
		return x != j && c.lacks(x, max(others, 1))
	})
}

// lacks reports whether a job has work for one more worker, and fewer than so many.
func (c *crew) lacks(j *Job, many int32) bool {
	if j.pieces.Load() <= 0 || j.Slow && c.slow.Load() >= c.most/2 {
		return false
	}
	return j.helpers.Load() < min(many, c.limitOf(j))
}

// stay waits a while for a job's next piece, and conducts the job meanwhile. A worker
// that left would be woken again for the next chunk, which holds up the link.
func (c *crew) stay(j *Job) bool {
	defer c.staying.Add(-1)
	if procs := int32(runtime.GOMAXPROCS(0)); c.staying.Add(1) > procs/2 {
		return false
	}
	seen := c.posted.Load()
	for begin := time.Now(); time.Since(begin) < mostWait; {
		for range 16 {
			if j.pieces.Load() > 0 {
				return true
			}
			if now := c.posted.Load(); now != seen {
				if seen = now; c.wanted(j) {
					return false
				}
			}
			relax()
		}
		if !j.standIn() {
			return false
		}
		c.yield()
	}
	return false
}

// yield lets other goroutines run where there are few cores to spin on.
func (c *crew) yield() {
	if c.most <= 2 || c.crowded() {
		runtime.Gosched()
	}
}

// crowded reports whether goroutines that copy take all seats: those that only wait
// should leave them the cores.
func (c *crew) crowded() bool { return c.copying.free() <= 0 }

// spin looks whether there is something to do, for a while.
func (c *crew) spin(seen uint64) bool {
	defer c.spinning.Add(-1)
	if procs := int32(runtime.GOMAXPROCS(0)); c.spinning.Add(1) > procs/4 {
		return false
	}
	for begin := time.Now(); time.Since(begin) < mostWait; {
		for range 16 {
			if c.posted.Load() != seen {
				return true
			}
			relax()
		}
	}
	return false
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
