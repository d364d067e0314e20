package stage

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A workerPool is the goroutines that copy for jobs on devices of one NUMA node, beside the
// goroutines of the jobs. They begin when there is work for them and end when there was
// none for a while.
type workerPool struct {
	max     int32 // workers
	cores   cores
	copying *concurrency // of all pools

	jobs      atomic.Pointer[[]*Job]   // never changed in place
	published atomic.Uint64            // changes when a job has more to do
	spinning  atomic.Int32             // workers that poll for a job
	waiting   atomic.Int32             // workers that wait for more of their job
	slow      atomic.Int32             // workers at slow jobs
	active    [directions]atomic.Int32 // devices with an active job: see setActive

	mu    sync.Mutex
	count int32     // workers
	idle  []*worker // that sleep
}

// A worker is a goroutine of a pool.
type worker struct {
	wake  chan struct{}
	first int // index of the job at which it begins to search
}

// A concurrency limits how many goroutines copy at once, whatever the node. The jobs' own
// count as well, without a limit.
type concurrency struct {
	atomic.Int32
	max int32
}

func newConcurrency(procs int) *concurrency { return &concurrency{max: int32(defaultWorkers(procs))} }

// tryAdd counts one more goroutine, if there may be one.
func (c *concurrency) tryAdd() bool {
	if c.Add(1) <= c.max {
		return true
	}
	c.Add(-1)
	return false
}

func (c *concurrency) free() int32 { return c.max - c.Load() }

// defaultWorkers leaves an eighth of more than four cores to others, and at least one.
func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return procs - (procs+7)/8
}

// How many workers a copy keeps busy, besides its own goroutine, for each device:
// copying into the ring takes twice the cores of copying with non-temporal stores, which is
// done out of it and, by a small upload, into it; and reading or faulting in the page cache
// three times. Uploads to several devices at once take more for each, because a worker gets
// less of the memory's bandwidth then.
const uploadWorkers, nonTemporalWorkers, kernelWorkers, severalWorkers = 7, 4, 9, 11

const (
	// manyCopies is how many copies at once on a device keep its link busy by themselves.
	manyCopies = 4
	// maxSpin is how long a goroutine polls for the GPU, or for work, before it sleeps: as
	// long as a chunk is on its way, since waking takes some tens of microseconds.
	maxSpin = 150 * time.Microsecond
	// maxWake is how many workers are woken at once.
	maxWake = 3
)

var (
	// idleTime is after what time a worker that sleeps ends.
	idleTime = time.Second
	// rebalanceEvery is the number of pieces after which a worker may move to a job with
	// fewer workers.
	rebalanceEvery = 4
)

func newWorkerPool(procs int, c cores, copying *concurrency) *workerPool {
	p := &workerPool{max: int32(defaultWorkers(min(procs, c.count()))), cores: c, copying: copying}
	p.jobs.Store(new([]*Job))
	return p
}

// register makes a job known to the workers of its devices. Its own goroutine copies too.
func (j *Job) register() {
	j.pools[0].copying.Add(1)
	for _, p := range j.pools {
		p.changeJobs(func(jobs []*Job) []*Job { return append(jobs, j) })
	}
}

func (j *Job) unregister() {
	j.pools[0].copying.Add(-1)
	for _, p := range j.pools {
		p.changeJobs(func(jobs []*Job) []*Job {
			return slices.DeleteFunc(jobs, func(x *Job) bool { return x == j })
		})
	}
}

func (p *workerPool) changeJobs(change func([]*Job) []*Job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	jobs := change(slices.Clone(*p.jobs.Load()))
	p.jobs.Store(&jobs)
}

// setActive makes known whether a job has something to copy. Workers are divided among the
// active jobs of their devices: one whose reader or writer is slow is not active meanwhile.
// It needs the driver lock.
func (j *Job) setActive(active bool) {
	if active == j.driver.active {
		return
	}
	j.driver.active = active
	for _, s := range j.Stages {
		switch {
		case active && s.active[j.dir].Add(1) == 1:
			s.workers.active[j.dir].Add(1)
		case !active && s.active[j.dir].Add(-1) == 0:
			s.workers.active[j.dir].Add(-1)
		}
	}
}

// workersOf returns how many workers a job may have: what its devices take, divided by the
// active jobs. Many jobs at once need none, as their own goroutines are enough.
func (p *workerPool) workersOf(j *Job) int32 {
	if j.Workers > 0 {
		return int32(j.Workers) - 1
	}
	limit := j.maxWorkers
	if j.dir == toDevice && p.active[toDevice].Load() > 1 {
		limit = max(limit, severalWorkers)
	}
	limit *= j.devices
	return min(limit, (limit+j.devices)/max(j.Stages[0].active[j.dir].Load(), 1))
}

// publish makes known that a job has work for others. Waking a worker takes the caller a
// microsecond, so a few are woken, which wake others.
func (p *workerPool) publish(j *Job) {
	p.published.Add(1)
	wake := min(p.workersOf(j)-j.work.workers.Load(), p.copying.free(), j.work.pieces.Load(), maxWake) - p.spinning.Load()
	if wake <= 0 {
		return
	}
	var woken [maxWake]*worker
	n := 0
	p.mu.Lock()
	for ; wake > 0; wake-- {
		if last := len(p.idle) - 1; last >= 0 {
			woken[n], p.idle = p.idle[last], p.idle[:last]
			n++
		} else if p.count < p.max {
			p.count++
			go p.run(&worker{wake: make(chan struct{}, 1), first: int(p.count)})
		}
	}
	p.mu.Unlock()
	for _, w := range woken[:n] {
		w.wake <- struct{}{}
	}
}

func (p *workerPool) run(w *worker) {
	defer p.cores.enter()()
	for {
		seen := p.published.Load()
		if j := p.find(w); j != nil {
			p.work(j)
			continue
		}
		if !p.spin(seen) && !p.sleep(w, seen) {
			return
		}
	}
}

// find assigns a worker to a job that has work, and fewer workers than others. The worker
// counts as copying then.
func (p *workerPool) find(w *worker) *Job {
	if !p.copying.tryAdd() {
		return nil
	}
	var best *Job
	minWorkers := int32(math.MaxInt32)
	jobs := *p.jobs.Load()
	for i := range jobs {
		if j := jobs[(w.first+i)%len(jobs)]; p.lacks(j, minWorkers) {
			best, minWorkers = j, j.work.workers.Load()
		}
	}
	if best != nil {
		if best.work.workers.Add(1) <= p.workersOf(best) {
			w.first++
			return best
		}
		best.work.workers.Add(-1)
	}
	p.copying.Add(-1)
	return nil
}

// work copies pieces of a job that find has assigned.
func (p *workerPool) work(j *Job) {
	if j.Slow {
		p.slow.Add(1)
		defer p.slow.Add(-1)
	}
	if j.work.pieces.Load() > 1 {
		p.publish(j)
	}
	for n := 1; ; n++ {
		if !j.copyPiece() && !(p.awaitPiece(j) && j.copyPiece()) || n%rebalanceEvery == 0 && p.wanted(j) {
			break
		}
	}
	p.copying.Add(-1)
	j.work.workers.Add(-1)
}

// wanted reports whether a worker of j should leave it: for another job that has fewer, or
// none, so that jobs take turns with one; or because j may have fewer by now.
func (p *workerPool) wanted(j *Job) bool {
	others := j.work.workers.Load() - 1
	return others >= p.workersOf(j) || slices.ContainsFunc(*p.jobs.Load(), func(x *Job) bool {
		return x != j && p.lacks(x, max(others, 1))
	})
}

// lacks reports whether a job has work for one more worker, and fewer than so many.
func (p *workerPool) lacks(j *Job, many int32) bool {
	if j.work.pieces.Load() <= 0 || j.Slow && p.slow.Load() >= p.max/2 {
		return false
	}
	return j.work.workers.Load() < min(many, p.workersOf(j))
}

// awaitPiece waits a while for a job's next piece, and drives the job meanwhile. A worker
// that left would be woken again for the next chunk, which holds up the link.
func (p *workerPool) awaitPiece(j *Job) bool {
	defer p.waiting.Add(-1)
	if procs := int32(runtime.GOMAXPROCS(0)); p.waiting.Add(1) > procs/2 {
		return false
	}
	seen := p.published.Load()
	for begin := time.Now(); time.Since(begin) < maxSpin; {
		for range 16 {
			if j.work.pieces.Load() > 0 {
				return true
			}
			if now := p.published.Load(); now != seen {
				if seen = now; p.wanted(j) {
					return false
				}
			}
			relax()
		}
		if !j.tryDrive() {
			return false
		}
		p.yield()
	}
	return false
}

// yield lets other goroutines run where there are few cores to spin on.
func (p *workerPool) yield() {
	if p.max <= 2 || p.saturated() {
		runtime.Gosched()
	}
}

// saturated reports whether as many goroutines copy as should: those that only wait
// should leave them the cores.
func (p *workerPool) saturated() bool { return p.copying.free() <= 0 }

// spin polls for work, for a while.
func (p *workerPool) spin(seen uint64) bool {
	defer p.spinning.Add(-1)
	if procs := int32(runtime.GOMAXPROCS(0)); p.spinning.Add(1) > procs/4 {
		return false
	}
	for begin := time.Now(); time.Since(begin) < maxSpin; {
		for range 16 {
			if p.published.Load() != seen {
				return true
			}
			relax()
		}
	}
	return false
}

// sleep waits until there is work, and is false when the worker is to end.
func (p *workerPool) sleep(w *worker, seen uint64) bool {
	p.mu.Lock()
	if p.published.Load() != seen {
		p.mu.Unlock()
		return true
	}
	p.idle = append(p.idle, w)
	p.mu.Unlock()
	timer := time.NewTimer(idleTime)
	defer timer.Stop()
	select {
	case <-w.wake:
		return true
	case <-timer.C:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.idle, w)
	if i < 0 { // it was woken meanwhile
		<-w.wake
		return true
	}
	p.idle = slices.Delete(p.idle, i, i+1)
	p.count--
	return false
}
