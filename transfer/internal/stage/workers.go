package stage

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/poll"
)

// A workerPool starts goroutines that copy for jobs on devices of one NUMA node, beside the
// goroutines of the jobs. A worker ends after idleTime without work.
type workerPool struct {
	max     int32 // workers
	cores   cores
	copying *concurrency // of all pools

	jobs      atomic.Pointer[[]*Job]   // never changed in place
	published atomic.Uint64            // incremented when a job has more pieces
	spinning  poll.Limit               // workers that poll for a job
	waiting   poll.Limit               // workers that wait for the next piece of their job
	slow      atomic.Int32             // workers that work on slow jobs
	active    [directions]atomic.Int32 // devices with an active job: see setActive

	mu    sync.Mutex
	count int32     // workers
	idle  []*worker // asleep, in the order in which they fell asleep
}

// A worker is a goroutine of a pool.
type worker struct {
	wake  chan struct{}
	first int // index of the job at which it begins to search
}

// A concurrency limits the workers that copy at once, on all NUMA nodes together. Goroutines
// of jobs count as well, and are never refused.
type concurrency struct {
	poll.Limit
	max int32
}

func newConcurrency(procs int) *concurrency { return &concurrency{max: int32(defaultWorkers(procs))} }

func (c *concurrency) free() int32 { return c.max - c.Load() }

// defaultWorkers returns the number of workers: of more than four cores an eighth, at least
// one core, stays free.
func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return procs - (procs+7)/8
}

// The workers that a copy keeps busy, besides its own goroutine, for each device. Uploads from
// minSpread on take more than downloads and smaller uploads: their bytes come from memory. Reading
// from the page cache, or faulting its pages in, takes still more. While several devices have
// uploads, each upload takes more workers, because a worker gets less of the memory's bandwidth.
const uploadWorkers, nonTemporalWorkers, kernelWorkers, severalWorkers = 7, 4, 9, 11

const (
	minSpread = 8 * mib
	// manyCopies is the number of copies at once that keep a device's link busy without
	// workers.
	manyCopies = 4
	// maxSpin is the time for which a goroutine polls for the GPU, or for work, before it
	// sleeps. A chunk is in flight for about as long, and waking takes tens of microseconds.
	maxSpin = 150 * time.Microsecond
	// maxWake is the number of workers that one goroutine wakes at once.
	maxWake = 3
)

var (
	// idleTime is the time after which a sleeping worker ends.
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

// register makes a job known to the workers of its devices, and counts its own goroutine as
// one that copies.
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

// setActive counts the job as active on its devices while it has bytes to copy. Workers are
// divided among active jobs only: a job that waits for its reader or writer is not active.
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

// workersOf returns the maximum number of workers of a job: the workers that its devices
// take, divided by the number of active jobs. Many jobs at once need none, because their own
// goroutines are enough.
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

// publish makes known that a job has pieces for workers. Waking a worker takes the caller a
// microsecond, so it wakes maxWake workers at most, which wake others.
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
	defer p.cores.bind()()
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
	if !p.copying.TryBegin(p.copying.max) {
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

// work copies pieces of the job that find has assigned.
func (p *workerPool) work(j *Job) {
	if j.Slow {
		p.slow.Add(1)
		defer p.slow.Add(-1)
	}
	if j.work.pieces.Load() > 1 {
		p.publish(j)
	}
	for n := 1; ; n++ {
		if !j.copyPiece() {
			if p.awaitPiece(j); !j.copyPiece() {
				break
			}
		}
		if n%rebalanceEvery == 0 && p.wanted(j) {
			break
		}
	}
	p.copying.Add(-1)
	j.work.workers.Add(-1)
}

// wanted reports whether a worker of j should move on: because another job has fewer workers,
// or none, or because j's limit has fallen.
func (p *workerPool) wanted(j *Job) bool {
	others := j.work.workers.Load() - 1
	return others >= p.workersOf(j) || slices.ContainsFunc(*p.jobs.Load(), func(x *Job) bool {
		return x != j && p.lacks(x, max(others, 1))
	})
}

// lacks reports whether a job has work for one more worker, and fewer than many workers.
func (p *workerPool) lacks(j *Job, many int32) bool {
	if j.work.pieces.Load() <= 0 || j.Slow && p.slow.Load() >= p.max/2 {
		return false
	}
	return j.work.workers.Load() < min(many, p.workersOf(j))
}

// awaitPiece polls for a job's next piece for maxSpin, unless other jobs want the worker, and drives the job meanwhile. A
// worker that slept instead would have to be woken for the next chunk, while the link is idle.
func (p *workerPool) awaitPiece(j *Job) {
	if !p.waiting.TryBegin(int32(runtime.GOMAXPROCS(0)) / 2) {
		return
	}
	defer p.waiting.Add(-1)
	seen := p.published.Load()
	more := func() bool { return j.tryDrive() && p.yield() }
	poll.Memory(maxSpin, more).Until(func() bool {
		if j.work.pieces.Load() > 0 {
			return true
		}
		before := seen
		seen = p.published.Load()
		return seen != before && p.wanted(j)
	})
}

// yield lets other goroutines run where there are few cores to spin on. It returns true.
func (p *workerPool) yield() bool {
	if p.max <= 2 || p.saturated() {
		runtime.Gosched()
	}
	return true
}

// saturated reports whether as many goroutines copy as there may be: a goroutine that only
// waits should yield its core to them.
func (p *workerPool) saturated() bool { return p.copying.free() <= 0 }

// spin polls for work for maxSpin, and reports whether there may be some. It does not while there are only jobs that wait
// for their readers or writers: several workers would spin all the time then, at four times the cost of the copy.
func (p *workerPool) spin(seen uint64) bool {
	if p.stalled() || !p.spinning.TryBegin(int32(runtime.GOMAXPROCS(0))/4) {
		return false
	}
	defer p.spinning.Add(-1)
	active := func() bool { return !p.stalled() }
	return poll.Memory(maxSpin, active).Until(func() bool { return p.published.Load() != seen })
}

// stalled reports whether there are jobs, and none of them is active.
func (p *workerPool) stalled() bool {
	return p.active[toDevice].Load()+p.active[toHost].Load() == 0 && len(*p.jobs.Load()) > 0
}

// sleep waits until the worker is woken. It returns false when the worker is to end.
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
