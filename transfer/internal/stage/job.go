package stage

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/poll"
)

// A Job is a Copy that runs. Its goroutine and workers fill or drain its chunks in pieces,
// and the one that is done last with a chunk passes it on: see chunk. One of them at a
// time drives the job, under the driver lock: it opens chunks and queries the GPU. That is
// the job's own goroutine, or a worker without a piece while the former copies one.
type Job struct {
	Copy // constant, as is plan
	plan
	outcome // with mu, which guards some of the fields below

	driver driver
	chunks chunkCounts // guarded by mu
	work   workQueue
	ends   fence.Fence // ends of all copies to devices, and of dropped copies from devices
	wake   chan struct{}

	reporter *bounded.Reporter
}

// A plan has the limits that follow from a Copy.
type plan struct {
	small      bool
	pools      []*workerPool // of Stages, in their order, each once
	onePool    [1]*workerPool
	maxWorkers int32 // for each device: see workerPool.workersOf
	devices    int32 // of the smallest group, whose links the workers fill
}

// chunkCounts count a job's bytes and chunks.
type chunkCounts struct {
	opened    int // bytes that were assigned to chunks
	published int // chunks with pieces to be filled or drained
	submitted int // chunks that were submitted to a link and are not queued yet
}

// A driver is the state of the goroutine that drives a job. mu guards all of it until ended
// is set; afterwards only the job's goroutine uses it.
//
//	state   entered by                       | who drives next
//	driven  who takes mu: lockDriver of the  | nobody
//	        job's goroutine, tryDrive of a   |
//	        worker                           |
//	free    who releases mu                  | the job's goroutine, which waits for mu, or a
//	                                         | worker, which does not
//	ended   drive of the job's goroutine, if | nobody: tryDrive returns false
//	        all is copied, or has failed     |
type driver struct {
	mu       sync.Mutex
	ended    bool     // the job needs no driver any more
	active   bool     // see setActive
	round    int      // of the groups, for the next chunk
	arriving []*chunk // whose copy from the device was submitted, in order
	waiter   *waiter  // for memory of a ring

	// Once a job has failed, and nothing uses the caller's memory any more, it waits for
	// calls into CUDA and for the GPU until grace ends. Nil before. Only the job's
	// goroutine uses it.
	grace  context.Context
	cancel context.CancelFunc
}

// newJob returns a job that is ready to run.
func (s *Stage) newJob(c Copy) *Job {
	j := &Job{Copy: c, wake: make(chan struct{}, 1)}
	j.outcome.init(c.N, c.Down)
	if len(j.Stages) == 0 {
		j.Stages, j.Groups = s.self[:], oneGroup
	}
	// The smallest group takes the longest.
	devices := slices.MinFunc(j.Groups, func(a, b []int) int { return len(a) - len(b) })
	j.plan = plan{small: c.N <= MaxSmall, maxWorkers: uploadWorkers, devices: int32(len(devices))}
	j.pools = j.onePool[:0]
	for _, s := range j.Stages {
		if !slices.Contains(j.pools, s.workers) {
			j.pools = append(j.pools, s.workers)
		}
	}
	switch {
	case c.Kernel:
		j.maxWorkers = kernelWorkers
	case c.Down, c.NonTemporal && c.N < minSpread:
		j.maxWorkers = nonTemporalWorkers
	}
	j.reporter = bounded.NewReporter(c.N, c.Progress, j.abort, j.stopped)
	return j
}

// Wake makes the job check for work. It never blocks.
func (j *Job) Wake() { wake(j.wake) }

// wake wakes the goroutine that receives from c, which has a buffer of one.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// abort ends the job because of an error at a byte: no chunk or piece is begun any more.
func (j *Job) abort(at int, err error) {
	j.fail(at, err)
	j.Wake()
}

// Cut ends the job at a byte, because of an error: the bytes before are copied.
func (j *Job) Cut(at int, err error) {
	j.cut(at, err)
	j.Wake()
}

// Pass counts n bytes at off as done. Hosts call it for Parts with Later.
func (j *Job) Pass(off, n int) {
	j.mu.Lock()
	j.pass(off, n)
	j.mu.Unlock()
	j.Wake()
}

// Run copies. It returns the number of bytes, from the first on, that were copied. When
// ctx ends it stops with the pieces that are worked on, and waits for the copies
// that are under way.
func (s *Stage) Run(ctx context.Context, c Copy) (int, error) {
	j := s.newJob(c)
	j.runBounded(ctx, j)
	j.Wake()
	c.Host.Wait(ctx)
	return j.result()
}

// released drops the pieces that no worker copies.
func (j *Job) released() bool {
	j.dropPieces()
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.chunks.published == 0
}

// run is the job's own goroutine.
func (j *Job) run() {
	if !j.small {
		j.register()
		defer j.setActive(false)
		defer j.unregister() // first, so that no worker takes the job for one that waits
	}
	j.Host.Start(j)
	defer j.Host.Stop()
	for !j.drive() {
		worked := j.copyPiece()
		j.report()
		if !worked {
			j.pause()
		}
	}
	j.finish()
}

// drive drives the job once, and reports whether the job is over.
func (j *Job) drive() (over bool) {
	j.lockDriver()
	defer j.driver.mu.Unlock()
	j.advance()
	j.driver.ended = j.over()
	return j.driver.ended
}

// lockDriver takes the driver lock. It spins for a while first, because a goroutine that
// sleeps wakes tens of microseconds late.
func (j *Job) lockDriver() {
	if !poll.Memory(maxSpin, j.pools[0].yield).Until(j.driver.mu.TryLock) {
		j.driver.mu.Lock()
	}
}

// tryDrive drives the job if something is due, unless another goroutine drives it. It reports
// whether the job waits for the GPU.
func (j *Job) tryDrive() bool {
	if !j.driver.mu.TryLock() {
		return true
	}
	defer j.driver.mu.Unlock()
	if j.driver.ended || j.failed.Load() {
		return false
	}
	if j.due() {
		j.advance()
		j.Wake() // the job's goroutine may be about to sleep
	}
	return j.waits()
}

// Help copies bytes of an upload that are ready, in the goroutine of a Host that has read them: they are in its core's
// caches, and nobody else is woken.
func (j *Job) Help() {
	if j.driver.mu.TryLock() {
		if !j.driver.ended && !j.failed.Load() {
			j.advance()
		}
		j.driver.mu.Unlock()
	}
	j.copyPiece()
	j.Wake()
}

// waits reports whether the job waits for the GPU; due reports whether that wait is over.
func (j *Job) waits() bool { return len(j.driver.arriving) > 0 || j.driver.waiter != nil }
func (j *Job) due() bool   { return j.arrived() || j.driver.waiter != nil && j.driver.waiter.poll() }

// arrived reports whether the next chunk has arrived from the device.
func (j *Job) arrived() bool {
	list := j.driver.arriving
	return len(list) > 0 && list[0].arrives.Load() && list[0].x.fence.Done(background)
}

// advance publishes the chunks that have arrived, and opens new ones.
func (j *Job) advance() {
	for j.arrived() {
		c := j.driver.arriving[0]
		j.driver.arriving = slices.Delete(j.driver.arriving, 0, 1)
		if err := c.x.fence.Err(); err != nil {
			j.abort(c.Off, err)
		}
		if j.PastEnd(c.Off) {
			c.drop()
		} else {
			j.publish(c)
		}
	}
	for j.openNext() {
	}
}

// progress returns the bytes assigned to chunks, and the bytes not yet assigned. After Cut
// an upload goes on, because the bytes before the error may come after others.
func (j *Job) progress() (opened, remaining int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	opened = j.chunks.opened
	switch {
	case j.failed.Load():
		return opened, 0
	case j.dir == toHost:
		return opened, j.end - opened
	}
	return opened, j.N - opened
}

// openNext opens a chunk, if bytes are ready and there is memory for them.
func (j *Job) openNext() bool {
	opened, remaining := j.progress()
	ready := 0
	if remaining > 0 {
		ready = j.Host.Ready()
	}
	if ready == 0 {
		j.setActive(remaining == 0 && j.driver.active)
		j.stopWaiting() // others may use what it waits for
		return false
	}
	j.setActive(!j.small)
	x := j.extent(opened, min(ready, remaining))
	if x == nil {
		return false
	}
	c := &chunk{job: j, x: x, round: j.driver.round, Part: j.Host.Take(opened, min(len(x.mem), ready, remaining))}
	j.driver.round++
	j.mu.Lock()
	j.chunks.opened += c.N
	past := c.Off >= j.end
	if j.dir == toHost {
		j.chunks.submitted++
	}
	j.mu.Unlock()
	switch {
	case j.dir == toHost:
		j.driver.arriving = append(j.driver.arriving, c)
		c.submit(0)
	case past:
		c.drop()
	default:
		j.publish(c)
	}
	return true
}

// minChunk is the size of the first and the last chunks. Chunks are small at both ends of a
// copy, because the link is idle until the first is in the ring, and the workers are idle
// while the last is in flight.
const minChunk = 512 * kib

func (j *Job) chunkSize(r *ring, opened, ready int) int {
	minSize := minChunk
	if j.Stages[0].active[j.dir].Load() >= manyCopies {
		minSize *= 2 // the others keep the link and the workers busy
	}
	size := min(opened+minSize, (j.N-opened)/2)
	size = max(size/minSize*minSize, minSize)
	maxSize := r.chunk(j.dir)
	if j.NonTemporal {
		maxSize = min(maxSize, maxNonTemporalChunk(j.N))
	}
	if j.MaxChunk > 0 {
		maxSize = min(maxSize, j.MaxChunk)
	}
	return min(size, ready, maxSize)
}

// extent takes memory for the next chunk, for up to ready bytes. It returns nil if there is
// none yet. If the next ring has none, another ring of the group may: its link is faster, or
// less busy.
func (j *Job) extent(opened, ready int) *extent {
	d := &j.driver
	if d.waiter == nil {
		for range j.Groups[0] {
			r := j.ring()
			if x := r.try(j.request(r, opened, ready)); x != nil {
				return x
			}
			d.round++
		}
		d.round -= len(j.Groups[0])
		r := j.ring()
		d.waiter = r.wait(j.wake, j.request(r, opened, ready))
	}
	if !d.waiter.poll() {
		if err := d.waiter.ring.check(); err != nil {
			j.abort(opened, err)
		}
		if !d.waiter.poll() {
			return nil
		}
	}
	w := d.waiter
	d.waiter = nil
	return w.stop()
}

func (j *Job) request(r *ring, opened, ready int) request {
	return request{n: j.chunkSize(r, opened, ready), dir: j.dir, slow: j.Slow}
}

// ring returns the ring of the next stage of the first group.
func (j *Job) ring() *ring {
	group := j.Groups[0]
	s := j.Stages[group[j.driver.round%len(group)]]
	if j.small {
		return s.smallRing
	}
	return s.ring
}

// stopWaiting ends a wait for memory.
func (j *Job) stopWaiting() {
	w := j.driver.waiter
	if w == nil {
		return
	}
	if x := w.stop(); x != nil {
		x.release()
	}
	j.driver.waiter = nil
}

// over reports whether all is copied, or, after an error, no chunk is published or
// submitted any more. It waits for a call into the library until the grace ends, and for
// workers that use the caller's memory without a limit.
func (j *Job) over() bool {
	failed := j.failed.Load()
	if failed {
		j.dropPieces()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	c, d := &j.chunks, &j.driver
	if !failed {
		return j.done.prefix >= j.end && c.published == 0 && c.submitted == 0 && len(d.arriving) == 0
	}
	if c.published > 0 {
		return false
	}
	d.beginGrace()
	return c.submitted == 0 || d.grace.Err() != nil
}

func (d *driver) beginGrace() {
	if d.grace == nil {
		d.grace, d.cancel = context.WithTimeout(background, bounded.Grace)
	}
}

// minSpin is the time for which a job's own goroutine polls, if it does not wait for the GPU,
// before it sleeps. If all jobs wait for readers or writers, it sleeps at once.
const minSpin = 30 * time.Microsecond

// pause waits until the job may have work to do.
func (j *Job) pause() {
	began := time.Now()
	more := func() bool {
		if !j.tryDrive() && (time.Since(began) >= minSpin || !j.small && j.pools[0].stalled()) {
			return false
		}
		return j.pools[0].yield()
	}
	polls := poll.Poller{For: maxSpin, Polls: 8, Hints: 1, More: more} // fewer of memory: driving queries the GPU
	if polls.Until(func() bool { return len(j.wake) > 0 || j.work.pieces.Load() > 0 }) {
		select {
		case <-j.wake:
		default:
		}
		return
	}
	points, arriving, ring := j.awaited()
	j.sleep(points)
	for i, p := range points {
		switch err := unknown(p); {
		case err == nil:
		case i < arriving:
			j.abort(math.MaxInt-1, fmt.Errorf("%v: %w", fence.TimelineAt(p), err))
		default: // there may be other memory
			ring.quarantine(fence.TimelineAt(p), errUnknown(p, err))
		}
	}
}

// awaited returns the Points that the job waits for: first those at which the next chunk
// arrives, arriving in number, then those at which a ring has memory for another chunk.
func (j *Job) awaited() (points []cudart.Point, arriving int, r *ring) {
	j.driver.mu.Lock()
	defer j.driver.mu.Unlock()
	if list := j.driver.arriving; len(list) > 0 && list[0].arrives.Load() {
		points = list[0].x.fence.Points(nil)
	}
	arriving = len(points)
	if w := j.driver.waiter; w != nil {
		r = w.ring
		points = r.oldestPoints(points)
	}
	return points, arriving, r
}

// sleep waits until the job is woken, a Point is reached, or the grace ends. Meanwhile a
// worker may have its core.
func (j *Job) sleep(points []cudart.Point) {
	for _, p := range points {
		defer p.Notify(j.wake)()
	}
	if !j.small {
		j.pools[0].copying.Add(-1)
		defer j.pools[0].copying.Add(1)
	}
	if j.driver.grace == nil {
		<-j.wake
		return
	}
	select {
	case <-j.wake:
	case <-j.driver.grace.Done():
	}
}

// unknown returns why CUDA cannot report whether a Point is reached. It queries CUDA only
// if there was an error on the Point's stream.
func unknown(p cudart.Point) error {
	if p.Completed() || p.Err() == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(background, bounded.QueryTimeout)
	defer cancel()
	if err := p.Wait(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}

// finish waits for the copies that were queued.
func (j *Job) finish() {
	j.stopWaiting()
	for _, c := range j.driver.arriving {
		j.mu.Lock()
		c.orphan = !c.arrives.Load()
		j.mu.Unlock()
		if !c.orphan {
			for _, p := range c.x.fence.Points(nil) {
				j.ends.AddPoint(p)
			}
			c.drop()
		}
	}
	j.driver.arriving = nil
	j.mu.Lock()
	stuck := j.chunks.submitted > 0
	j.mu.Unlock()
	if stuck {
		j.abandon(errStuck)
	}
	j.waitForEnds()
	if j.driver.cancel != nil {
		j.driver.cancel()
	}
	j.report()
	j.reporter.Finish()
}

// endSpin is the time for which a goroutine polls for the end of its copy: all that is in the ring may
// be in flight then, which takes 0.7 ms on a link of PCIe 5, and a goroutine that sleeps wakes 30 to 70 µs
// late, 3 % of a copy of 256 MiB. It sleeps at once if other copies use all cores.
const endSpin = time.Millisecond

// waitForEnds waits for the copies that were queued, and takes their errors. After an error
// it waits for all devices at once until the grace ends, so that a device that does not
// respond takes no time from the others.
func (j *Job) waitForEnds() {
	var buf [4]cudart.Point
	ends := j.ends.Points(buf[:0])
	ctx := background
	if j.failed.Load() {
		j.driver.beginGrace()
		ctx = j.driver.grace
		for _, p := range ends {
			defer p.Notify(make(chan struct{}, 1))() // so that it is known when the loop below waits for it
		}
	} else {
		notSaturated := func() bool { return j.pools[0].yield() && !j.pools[0].saturated() }
		poll.Poller{For: endSpin, Polls: 1, Hints: 64, More: notSaturated}.Until(func() bool { return j.ends.Done(background) })
	}
	for _, p := range ends {
		if err := p.Wait(ctx); err != nil {
			err = errUnknown(p, err)
			j.abandon(err)
			for _, s := range j.Stages {
				s.ring.quarantine(fence.TimelineAt(p), err)
				s.smallRing.quarantine(fence.TimelineAt(p), err)
			}
		}
	}
	// The fence has the errors of all chunks; the Point of a later chunk has no error that was
	// reported before it. Bytes that failed to come from a device were not passed on.
	j.ends.Completed()
	if err := j.ends.Err(); err != nil && j.dir == toDevice {
		j.abort(0, err)
	}
}

// report makes progress known.
func (j *Job) report() {
	if j.reporter == nil || j.failed.Load() {
		return
	}
	j.mu.Lock()
	copied := j.copied
	j.mu.Unlock()
	j.reporter.Set(copied)
}
