package stage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
)

// A Copy describes the copying of N bytes between the host and devices.
type Copy struct {
	N    int
	Down bool
	Feed Feed // of an upload
	Sink Sink // of a download

	// Queue queues the copy between mem, which is pinned, and the device's part
	// of the bytes from off on, on a stream of Over[to].
	Queue func(on *cudart.Stream, to int, mem []byte, off int) error

	// Over are the stages of an upload to several devices, and Groups which of
	// them share the work: each chunk is queued on the links of one stage of each
	// group, by turns, from the ring of the first group's. None stands for the
	// stage that runs the copy.
	Over   []*Stage
	Groups [][]int
	// Forward is called when the n bytes at off were queued on the link of
	// Over[from], up to a Point. It queues the copies from there to the others of
	// the group, and returns their ends, also after an error. It may be nil.
	Forward func(from, off, n int, after cudart.Point) ([]cudart.Point, error)

	// Progress is called by one goroutine, which is not the caller's, with the
	// bytes that are done of all.
	Progress func(done, total int)

	// Await is called when nothing more is begun, before the bytes are counted: it
	// waits for writers that run still. It may be nil.
	Await func()

	Workers  int  // at most, the caller included; 0 stands for a default
	MaxChunk int  // bytes; 0 stands for a default
	Piece    int  // bytes that a worker does at a time; 0 stands for a default
	Slow     bool // Fill or Drain may wait for a disk
	Kernel   bool // Fill or Drain is mostly the kernel's work, which takes more workers
	Past     bool // Fill writes past the caches, as Drain mostly does, which takes fewer
}

// A Feed gives an upload its bytes. Its methods are called by one goroutine at a time,
// and do not block.
type Feed interface {
	// Start begins to read ahead. From then on methods of the Job may be called.
	Start(j *Job)
	// Ready returns how many bytes Take could return. When that was 0, Job.Poke
	// must be called when there are some.
	Ready() int
	// Take returns up to most bytes, in any order; most is no more than Ready
	// returned.
	Take(most int) Segment
	// Stop ends reading ahead.
	Stop()
}

// A Segment is bytes that are ready to be copied to a device.
type Segment struct {
	Off, N int
	// Fill writes the bytes from off on. It is called by several goroutines at
	// once. After [ErrNotReady] the whole segment is taken back.
	Fill func(to []byte, off int) error
	// End is called when Fill was called for the last time; filled is false if
	// the bytes were not copied, and must come again unless the copy has failed.
	// It may be nil.
	End func(filled bool)
}

// ErrNotReady is returned by Fill if it would have to wait.
var ErrNotReady = errors.New("the bytes are not ready")

// A Sink takes the bytes of a download. Room, Take and Stop are called by one
// goroutine at a time, and do not block.
type Sink interface {
	Start(j *Job)
	// Room returns how many bytes Take could take. When that was 0, Job.Poke must
	// be called when there is room.
	Room() int
	// Take returns what takes n bytes at off, which follow on those of the last
	// call; n is no more than Room returned.
	Take(off, n int) Space
	// Stop ends writing behind.
	Stop()
}

// A Space is where bytes of a device go.
type Space struct {
	// Drain takes the bytes from off on. It is called by several goroutines at
	// once.
	Drain func(from []byte, off int) error
	// End is called when Drain was called for the last time; drained is false if
	// the bytes did not come. It may be nil.
	End func(drained bool)
	// Later says that the sink calls Job.Pass itself.
	Later bool
}

// A Job is a Copy that runs. One goroutine conducts it: it opens chunks and asks
// the GPU what is done. It and workers of the crew fill or drain the chunks in
// pieces. The one that is last with a chunk passes it on: to the link, or back to
// the ring. While the conductor is at a piece, a worker without one conducts.
type Job struct {
	Copy
	crews    []*crew // of Over, the conductor's first
	oneCrew  [1]*crew
	limit    int32 // workers at most, for each device: see crew.limitOf
	devices  int32 // that the workers serve
	brief    bool
	reporter *bounded.Reporter

	conducting sync.Mutex
	// Guarded by conducting until ended is set, then the conductor's.
	ended   bool     // nothing is left to be conducted
	demands bool     // there is something to copy: see demand
	turn    int      // of the groups, for the next chunk
	landing []*chunk // whose copy from the device was or will be queued, in order
	waiter  *waiter  // for memory of its ring
	stopped time.Time

	helpers atomic.Int32
	wake    chan struct{}
	pieces  atomic.Int32          // that can be claimed
	first   atomic.Pointer[chunk] // that has some

	mu     sync.Mutex
	more   []*chunk      // behind first
	opened int           // bytes
	out    int           // chunks that are worked on
	queue  int           // chunks that were submitted to a link and are not queued
	passed int           // bytes of chunks that are done with
	done   ranges        // these chunks
	ends   fence.Fence   // of all copies to devices, and those from there that are dropped
	end    int           // of the copy
	err    error         // the one with the least offset
	at     int           // that offset
	open   error         // why copies may be under way
	failed atomic.Bool   // nothing more is begun
	abort  chan struct{} // closed when failed is set
}

// newJob returns a job that is ready to run.
func (s *Stage) newJob(c Copy) *Job {
	j := &Job{Copy: c, brief: c.N <= Alone, wake: make(chan struct{}, 1), abort: make(chan struct{}), at: math.MaxInt, end: c.N}
	if len(j.Over) == 0 {
		j.Over, j.Groups = s.alone[:], oneGroup
	}
	j.crews = crewsOf(j.oneCrew[:0], j.Over)
	j.limit = upHelpers
	switch {
	case c.Kernel:
		j.limit = kernelHelpers
	case c.Down, c.Past:
		j.limit = pastHelpers
	}
	// The smallest group takes the longest.
	j.devices = int32(len(slices.MinFunc(j.Groups, func(a, b []int) int { return len(a) - len(b) })))
	if c.Progress != nil {
		j.reporter = bounded.NewReporter(c.N, c.Progress, j.Abort, j.abort)
	}
	return j
}

// Poke makes the job look again.
func (j *Job) Poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Abort ends the job because of an error that was met at a byte.
func (j *Job) Abort(at int, err error) {
	j.mu.Lock()
	j.keep(at, err)
	j.fail()
	j.mu.Unlock()
	j.Poke()
}

// fail makes it so that nothing more is begun. It needs j.mu.
func (j *Job) fail() {
	if !j.failed.Swap(true) {
		close(j.abort)
	}
}

// Cut ends the job at a byte, because of an error: the bytes before are copied.
func (j *Job) Cut(at int, err error) {
	j.mu.Lock()
	j.keep(at, err)
	j.end = min(j.end, at)
	j.mu.Unlock()
	j.Poke()
}

// keep keeps the error with the least offset, and of several the first.
func (j *Job) keep(at int, err error) {
	if at < j.at {
		j.at, j.err = at, err
	}
}

// Past reports whether nothing more is to be copied at a byte.
func (j *Job) Past(off int) bool {
	if j.failed.Load() {
		return true
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return off >= j.end
}

// Run copies, and returns how many bytes, from the first on, were copied. When
// ctx ends it stops with the pieces that are worked on, and waits for the copies
// that are under way.
func (s *Stage) Run(ctx context.Context, c Copy) (int, error) {
	j := s.newJob(c)
	ended, _ := bounded.Do(ctx, bounded.Call[bool]{
		Run: func() (bool, error) {
			j.conduct()
			return true, nil
		},
		Stop: func(error) { j.Abort(math.MaxInt-1, bounded.Ended(ctx)) },
		Abandon: func() bool {
			j.dropPieces()
			return j.working() == 0 // else workers use the caller's memory
		},
		Grace: Grace,
	})
	if !ended {
		j.giveUp(errStuck)
	}
	if c.Await != nil {
		c.Await()
	}
	return j.result()
}

// working returns how many chunks are worked on.
func (j *Job) working() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.out
}

// conduct runs the job.
func (j *Job) conduct() {
	if !j.brief {
		j.join()
		defer j.leave()
		defer j.demand(false)
	}
	if j.Down {
		j.Sink.Start(j)
		defer j.Sink.Stop()
	} else {
		j.Feed.Start(j)
		defer j.Feed.Stop()
	}
	for !j.step() {
		worked := j.help(1)
		j.report()
		if !worked {
			j.pause()
		}
	}
	j.finish()
}

// step does what is to be conducted now, and reports whether the job is over.
func (j *Job) step() (over bool) {
	j.takeOver()
	defer j.conducting.Unlock()
	j.advance()
	j.ended = j.over()
	return j.ended
}

// takeOver waits until nobody stands in. It is mostly a matter of microseconds, and a
// goroutine that sleeps wakes later.
func (j *Job) takeOver() {
	if j.conducting.TryLock() {
		return
	}
	for begin := time.Now(); time.Since(begin) < mostWait; j.crews[0].yield() {
		for range 16 {
			relax()
			if j.conducting.TryLock() {
				return
			}
		}
	}
	j.conducting.Lock()
}

// standIn conducts for the conductor, if something is due and nobody is at it. It reports
// whether the job waits for the GPU.
func (j *Job) standIn() bool {
	if !j.conducting.TryLock() {
		return true
	}
	defer j.conducting.Unlock()
	if j.ended || j.failed.Load() {
		return false
	}
	if j.due() {
		j.advance()
		j.Poke() // the conductor may be about to sleep
	}
	return j.waits()
}

// waits reports whether the job waits for the GPU, due whether that is done.
func (j *Job) waits() bool { return len(j.landing) > 0 || j.waiter != nil }
func (j *Job) due() bool   { return j.landed() || j.waiter != nil && j.waiter.poll() }

// advance opens chunks, and those that have landed to be drained.
func (j *Job) advance() {
	for j.landed() {
		c := j.landing[0]
		j.landing = slices.Delete(j.landing, 0, 1)
		if err := c.x.fence.Err(); err != nil {
			j.Abort(c.off, err)
		}
		if j.Past(c.off) {
			c.drop()
		} else {
			j.offer(c)
		}
	}
	for j.openNext() {
	}
}

// progress is how many bytes were opened, and how many are to be. After an error
// that was met at a byte those of a feed may come in any order still: see openNext.
func (j *Job) progress() (opened, left int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.failed.Load():
		return j.opened, 0
	case j.Down:
		return j.opened, j.end - j.opened
	}
	return j.opened, j.N - j.opened
}

// openNext opens a chunk, if there is something to copy, and memory for it.
func (j *Job) openNext() bool {
	opened, left := j.progress()
	ready := 0
	if left > 0 && j.Down {
		ready = j.Sink.Room()
	} else if left > 0 {
		ready = j.Feed.Ready()
	}
	if ready == 0 {
		j.demand(left == 0 && j.demands)
		j.leaveRing() // others may use what it waits for
		return false
	}
	j.demand(!j.brief)
	x := j.extent(opened, min(ready, left))
	if x == nil {
		return false
	}
	c := &chunk{job: j, x: x, turn: j.turn}
	most := min(len(x.mem), ready, left)
	if j.Down {
		space := j.Sink.Take(opened, most)
		c.off, c.n, c.work, c.end, c.later = opened, most, space.Drain, space.End, space.Later
	} else {
		seg := j.Feed.Take(most)
		c.off, c.n, c.work, c.end = seg.Off, seg.N, seg.Fill, seg.End
	}
	j.turn++
	j.mu.Lock()
	j.opened += c.n
	past := c.off >= j.end
	if j.Down {
		j.queue++
	}
	j.mu.Unlock()
	switch {
	case j.Down:
		j.landing = append(j.landing, c)
		to := c.via(0)
		j.Over[to].down(j.brief).submit(c, to)
	case past:
		c.drop()
	default:
		j.offer(c)
	}
	return true
}

// Chunks are small at both ends of a copy, where the link has nothing to do
// until the first is in the ring, and the workers nothing while the last is on
// its way.
const leastChunk = 512 * kib

func (j *Job) chunkSize(r *ring, opened, ready int) int {
	least := leastChunk
	if j.Over[0].copies[j.way()].Load() >= manyCopies {
		least *= 2 // the others keep the link and the workers busy
	}
	size := min(opened+least, (j.N-opened)/2)
	size = max(size/least*least, least)
	most := r.chunk(j.Down)
	if j.MaxChunk > 0 {
		most = min(most, j.MaxChunk)
	}
	return min(size, ready, most)
}

// extent takes memory for the next chunk, of which so many bytes are ready, nil if
// there is none yet. If the ring whose turn it is has none, others of the group may:
// their links are faster, or have less to do.
func (j *Job) extent(opened, ready int) *extent {
	if j.waiter == nil {
		class := classOf(j.Down, j.Slow)
		for range j.Groups[0] {
			r := j.ring()
			if x := r.try(j.chunkSize(r, opened, ready), class); x != nil {
				return x
			}
			j.turn++
		}
		j.turn -= len(j.Groups[0])
		r := j.ring()
		j.waiter = r.wait(j.wake, j.chunkSize(r, opened, ready), class)
	}
	if !j.waiter.poll() {
		if err := j.waiter.ring.recover(); err != nil {
			j.Abort(opened, err)
		}
		if !j.waiter.poll() {
			return nil
		}
	}
	w := j.waiter
	j.waiter = nil
	return w.leave()
}

// ring is the ring whose turn it is.
func (j *Job) ring() *ring {
	group := j.Groups[0]
	s := j.Over[group[j.turn%len(group)]]
	if j.brief {
		return s.few
	}
	return s.ring
}

// leaveRing ends a wait for memory.
func (j *Job) leaveRing() {
	if j.waiter == nil {
		return
	}
	if x := j.waiter.leave(); x != nil {
		x.release()
	}
	j.waiter = nil
}

// over reports whether all is copied, or, after an error, nothing is in hand any
// more. Memory of the caller's is always waited for; a call into the library that
// does not return, for a while.
func (j *Job) over() bool {
	failed := j.failed.Load()
	if failed {
		if j.stopped.IsZero() {
			j.stopped = time.Now()
		}
		j.dropPieces()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if failed {
		return j.out == 0 && (j.queue == 0 || time.Since(j.stopped) > landTimeout)
	}
	return j.done.prefix() >= j.end && j.out == 0 && j.queue == 0 && len(j.landing) == 0
}

// mostWait is how long a goroutine asks again and again what the GPU is done with, or what
// there is to copy, before it sleeps: as long as a chunk is on its way, since waking takes
// some tens of microseconds. leastWait is how long a job's own asks for all else.
const mostWait, leastWait = 150 * time.Microsecond, 30 * time.Microsecond

// pause waits until there may be more to do.
func (j *Job) pause() {
	most := mostWait
	for begin := time.Now(); time.Since(begin) < most; {
		for range 8 {
			if len(j.wake) > 0 || j.pieces.Load() > 0 {
				break
			}
			relax()
		}
		select {
		case <-j.wake:
			return
		default:
		}
		due, waits := j.look()
		if due || j.pieces.Load() > 0 {
			return
		}
		if !waits {
			most = leastWait
		}
		j.crews[0].yield()
	}
	landing, memory, ring := j.awaited()
	j.sleep(slices.Concat(landing, memory))
	for _, p := range landing {
		if err := unknown(p); err != nil {
			j.Abort(math.MaxInt-1, fmt.Errorf("%v: %w", p.Line(), err))
		}
	}
	for _, p := range memory {
		if err := unknown(p); err != nil { // there may be other memory
			ring.setAside(p.Line(), UnderWay(p, err))
		}
	}
}

// look is due and waits for a goroutine that does not conduct. It does not wait for one
// that does.
func (j *Job) look() (due, waits bool) {
	if !j.conducting.TryLock() {
		return false, true
	}
	defer j.conducting.Unlock()
	return j.due(), j.waits()
}

// awaited returns what the job waits for: the Points at which the next chunk lands, and
// those at which a ring has memory for another.
func (j *Job) awaited() (landing, memory []cudart.Point, r *ring) {
	j.conducting.Lock()
	defer j.conducting.Unlock()
	if len(j.landing) > 0 && j.landing[0].sent.Load() {
		landing = j.landing[0].x.fence.Points(landing)
	}
	if j.waiter != nil {
		r = j.waiter.ring
		memory = r.heads()
	}
	return landing, memory, r
}

// sleep waits until the job is poked or a Point is reached. Meanwhile a worker may
// have its core.
func (j *Job) sleep(points []cudart.Point) {
	for _, p := range points {
		defer p.Notify(j.wake)()
	}
	if !j.brief {
		j.crews[0].copying.Add(-1)
		defer j.crews[0].copying.Add(1)
	}
	if !j.failed.Load() {
		<-j.wake
		return
	}
	select {
	case <-j.wake:
	case <-time.After(landTimeout / 20):
	}
}

// unknown returns why CUDA cannot report whether a Point is reached. It asks only if
// CUDA has returned an error for it.
func unknown(p cudart.Point) error {
	if p.Known() || p.Err() == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(asking, landTimeout/20)
	defer cancel()
	if err := p.Wait(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}

// landed reports whether the next chunk has come from the device.
func (j *Job) landed() bool {
	return len(j.landing) > 0 && j.landing[0].sent.Load() && j.landing[0].x.fence.Done(asking)
}

// finish waits for the copies that were queued.
func (j *Job) finish() {
	j.leaveRing()
	for _, c := range j.landing {
		j.mu.Lock()
		c.orphan = !c.sent.Load()
		j.mu.Unlock()
		if !c.orphan {
			for _, p := range c.x.fence.Points(nil) {
				j.ends.AddPoint(p)
			}
			c.drop()
		}
	}
	j.landing = nil
	j.mu.Lock()
	stuck := j.queue > 0
	j.mu.Unlock()
	if stuck {
		j.giveUp(errStuck)
	}
	j.settle()
	if j.reporter != nil {
		j.report()
		j.reporter.Finish()
	}
}

// giveUp ends a job although the GPU may still copy, and why: that is reported beside
// any other error. Of an upload it cannot be known what has arrived; what has come from
// a device and was passed on has.
func (j *Job) giveUp(why error) {
	j.mu.Lock()
	j.open = errors.Join(j.open, why)
	if !j.Down {
		j.at = 0
	}
	j.fail()
	j.mu.Unlock()
	j.Poke()
}

// settleSpin is how long a goroutine asks again and again for the end of its copy: the
// last chunk takes that long, and a goroutine that sleeps wakes some 50 µs late. It sleeps
// if others copy on all cores: they would wait for it longer.
const settleSpin = 100 * time.Microsecond

// settle waits until the copies are done that were queued, and takes their errors. After
// an error it waits for all devices at once, a while: one that does not answer leaves
// the others their time.
func (j *Job) settle() {
	var room [4]cudart.Point
	ends := j.ends.Points(room[:0])
	if j.failed.Load() {
		ctx, cancel := context.WithTimeout(asking, landTimeout)
		defer cancel()
		var all sync.WaitGroup
		for _, p := range ends {
			all.Go(func() { j.settled(ctx, p) })
		}
		all.Wait()
	} else {
		for begin := time.Now(); !j.crews[0].crowded() && time.Since(begin) < settleSpin && !j.ends.Done(asking); {
			for range 64 {
				relax()
			}
		}
		for _, p := range ends {
			j.settled(asking, p)
		}
	}
	// Those of all chunks: a later one's Point does not have an error that was found before
	// it. What failed to come from a device was not passed on.
	j.ends.Known()
	if err := j.ends.Err(); err != nil && !j.Down {
		j.Abort(0, err)
	}
}

// settled waits for one end.
func (j *Job) settled(ctx context.Context, p cudart.Point) {
	err := p.Wait(ctx)
	if err == nil {
		return
	}
	err = UnderWay(p, err)
	j.giveUp(err)
	for _, s := range j.Over {
		s.ring.setAside(p.Line(), err)
		s.few.setAside(p.Line(), err)
	}
}

// result returns how many bytes, from the first on, were copied.
func (j *Job) result() (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil && j.open == nil {
		return j.N, nil
	}
	done := min(j.at, j.done.prefix())
	switch {
	case j.err == nil:
		return done, fmt.Errorf("at byte %d of %d: %w", done, j.N, j.open)
	case j.open == nil:
		return done, fmt.Errorf("at byte %d of %d: %w", done, j.N, j.err)
	}
	return done, fmt.Errorf("at byte %d of %d: %w; %w", done, j.N, j.err, j.open)
}

// report makes progress known.
func (j *Job) report() {
	if j.reporter == nil || j.failed.Load() {
		return
	}
	j.mu.Lock()
	passed := j.passed
	j.mu.Unlock()
	j.reporter.Set(passed)
}

// Pass counts n bytes at off as done. It is for sinks whose Space says so.
func (j *Job) Pass(off, n int) {
	j.mu.Lock()
	j.pass(off, n)
	j.mu.Unlock()
	j.Poke()
}

// pass needs j.mu.
func (j *Job) pass(off, n int) {
	j.passed += n
	j.done.add(off, n)
}

// ranges are parts of a job that are done. What is at the start is joined.
type ranges struct {
	start int // all before it is done
	after map[int]int
}

func (r *ranges) add(off, n int) {
	if off != r.start {
		if r.after == nil {
			r.after = make(map[int]int)
		}
		r.after[off] = n
		return
	}
	for ; n > 0; n = r.after[r.start] {
		delete(r.after, r.start)
		r.start += n
	}
}

func (r *ranges) prefix() int { return r.start }
