package stage

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// A Job is one copy of n bytes. The goroutine that runs it conducts: it opens
// chunks, asks the GPU what is done, and calls the caller's callbacks. It and
// workers of the crew fill or drain the chunks' pieces, and the one that is last
// with a chunk passes it on: to the link, or back to the ring.
type Job struct {
	n        int
	down     bool
	limit    int32 // workers at most
	crew     *crew
	route    func(chunk int) (*ring, *link)                     // where a chunk passes through
	copy     func(on *cudart.Stream, mem []byte, off int) error // queues the copy of a chunk
	feed     Feed                                               // of an upload
	sink     Sink                                               // of a download
	progress func(done, total int)

	// The conductor's.
	chunks  int
	opened  int      // bytes
	landing []*chunk // whose copy from the device is queued, in order
	waiter  *waiter  // for memory of a ring
	ring    *ring    // that one
	told    int      // bytes that progress was called for
	ended   time.Time

	helpers atomic.Int32
	wake    chan struct{}
	pieces  atomic.Int32          // that can be claimed
	first   atomic.Pointer[chunk] // that has some

	mu     sync.Mutex
	more   []*chunk    // behind first
	out    int         // chunks that are worked on
	queue  int         // chunks that are about to be queued
	passed int         // bytes of chunks that are done with
	done   ranges      // these chunks
	ends   fence.Fence // of all copies to the device
	failed atomic.Bool
	err    error // the one with the least offset
	at     int   // that offset
}

// A chunk is a part of a job that passes through one extent.
type chunk struct {
	job    *Job
	link   *link
	x      *extent
	off, n int
	work   func(mem []byte, off int) error
	end    func() // when all is worked on, nil for nothing

	piece  int          // bytes
	pieces int32        // in all
	next   atomic.Int32 // to claim
	left   atomic.Int32 // not done
	err    error        // of queueing its copy
	landed atomic.Bool  // its copy from the device was queued
}

// A Segment is bytes that are ready to be copied to a device.
type Segment struct {
	Off, N int
	// Fill writes the bytes from off on, of the job. It is called by several
	// goroutines at once and does not block.
	Fill func(to []byte, off int) error
	// Release is called when all was filled. It may be nil.
	Release func()
}

// A Feed gives a job its segments, in any order. Its methods are called by the
// job's goroutine.
type Feed interface {
	// Take returns the next segment, of at most most bytes, or one of none when
	// none is ready: [Job.Poke] is then called when there is.
	Take(most int) (Segment, error)
}

// A Sink takes the bytes of a download.
type Sink interface {
	// Take returns what drains the bytes [off, off+n), nil when it cannot take
	// them yet: [Job.Poke] is then called when it can. The functions are called
	// by several goroutines at once and do not block. end, which may be nil, is
	// called when all was drained.
	Take(off, n int) (drain func(from []byte, off int) error, end func())
}

func newJob(s *Stage, n int, down bool) *Job {
	j := &Job{n: n, down: down, limit: helpers(down), crew: s.crew, wake: make(chan struct{}, 1), at: math.MaxInt}
	r, l := s.pick(n, down)
	j.route = func(int) (*ring, *link) { return r, l }
	return j
}

// helpers is how many workers a copy keeps busy at most, besides its own
// goroutine. Copying into the ring takes twice the cores of copying out of it,
// which writes past the caches.
func helpers(down bool) int32 {
	if down {
		return downHelpers
	}
	return upHelpers
}

var upHelpers, downHelpers int32 = 7, 4

// Poke makes the job look again.
func (j *Job) Poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Run copies, and returns how many bytes, from the first on, were copied. When
// ctx ends it stops with the pieces that are worked on.
func (j *Job) Run(ctx context.Context) (int, error) {
	j.crew.join(j)
	defer j.crew.leave(j)
	for {
		j.advance(ctx)
		worked := j.help(1)
		j.report()
		switch over := j.over(ctx); {
		case over:
			return j.finish(ctx)
		case !worked:
			j.pause(ctx)
		}
	}
}

// help does so many pieces, or fewer if there are none left.
func (j *Job) help(most int) (worked bool) {
	for range most {
		c, i := j.claim()
		if c == nil {
			return worked
		}
		j.do(c, int(i))
		worked = true
	}
	return worked
}

// claim takes a piece.
func (j *Job) claim() (*chunk, int32) {
	for j.pieces.Load() > 0 && !j.failed.Load() {
		c := j.first.Load()
		if c == nil {
			return nil, 0
		}
		if i := c.next.Add(1) - 1; i < c.pieces {
			j.pieces.Add(-1)
			return c, i
		}
		j.mu.Lock()
		if j.first.Load() == c {
			j.shift()
		}
		j.mu.Unlock()
	}
	return nil, 0
}

// shift makes the next open chunk the first. It needs j.mu.
func (j *Job) shift() {
	if len(j.more) == 0 {
		j.first.Store(nil)
		return
	}
	j.first.Store(j.more[0])
	j.more[0] = nil
	j.more = j.more[1:]
}

// do works on a piece, and passes its chunk on if it is the last one.
func (j *Job) do(c *chunk, i int) {
	from := i * c.piece
	mem := c.x.mem[from:min(from+c.piece, c.n)]
	if err := Guard(func() error { return c.work(mem, c.off+from) }); err != nil {
		j.fail(c.off+from, err)
	}
	if c.left.Add(-1) > 0 {
		return
	}
	mark("worked", c.off, int(j.helpers.Load()))
	if c.end != nil {
		c.end()
	}
	failed := j.failed.Load()
	j.mu.Lock()
	j.out--
	switch {
	case failed:
	case j.down:
		j.pass(c)
	default:
		j.queue++
	}
	j.mu.Unlock()
	if failed || j.down {
		c.x.release()
		j.Poke()
	} else {
		c.link.submit(c)
	}
}

// send queues the chunk's copy.
func (c *chunk) send(on *cudart.Stream) error { return c.job.copy(on, c.x.mem[:c.n], c.off) }

// queued is called when the chunk's copy was queued, up to a point, or that has
// failed.
func (c *chunk) queued(p cudart.Point) {
	mark("queued", c.off, c.n)
	j := c.job
	if c.err != nil {
		j.fail(c.off, c.err)
	}
	if j.down {
		c.landed.Store(true)
		j.Poke()
		return
	}
	c.x.release()
	j.mu.Lock()
	j.ends.AddPoint(p)
	j.queue--
	if c.err == nil {
		j.pass(c)
	}
	j.mu.Unlock()
	j.Poke()
}

// pass counts a chunk that is done with. It needs j.mu.
func (j *Job) pass(c *chunk) {
	j.passed += c.n
	j.done.add(c.off, c.n)
}

func (j *Job) fail(at int, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if at < j.at {
		j.at, j.err = at, err
	}
	j.failed.Store(true)
}

// report calls progress, on the job's own goroutine, which holds nothing.
func (j *Job) report() {
	if j.progress == nil || j.failed.Load() {
		return
	}
	j.mu.Lock()
	passed := j.passed
	j.mu.Unlock()
	if passed == j.told {
		return
	}
	j.told = passed
	if err := Guard(func() error { j.progress(passed, j.n); return nil }); err != nil {
		j.fail(0, fmt.Errorf("progress: %w", err))
	}
}

// advance opens chunks, and those that have landed to be drained.
func (j *Job) advance(ctx context.Context) {
	for len(j.landing) > 0 && !j.failed.Load() {
		c := j.landing[0]
		if !c.landed.Load() || !c.x.fence.Done(ctx) {
			break
		}
		j.landing = append(j.landing[:0], j.landing[1:]...)
		if err := c.x.fence.Err(); err != nil {
			j.fail(c.off, err)
		}
		if j.failed.Load() {
			j.drop(c)
			break
		}
		j.offer(c)
	}
	for j.opened < j.n && !j.failed.Load() && j.openNext(ctx) {
	}
}

// openNext opens a chunk, if there is memory for it and something to copy.
func (j *Job) openNext(ctx context.Context) bool {
	r, l := j.route(j.chunks)
	x := j.extent(ctx, r)
	if x == nil {
		return false
	}
	size := min(len(x.mem), j.n-j.opened)
	c := &chunk{job: j, link: l, x: x}
	if j.down {
		c.off, c.n = j.opened, size
		if c.work, c.end = j.sink.Take(c.off, c.n); c.work == nil {
			x.release()
			return false
		}
		j.landing = append(j.landing, c)
		l.submit(c)
	} else {
		seg, err := j.feed.Take(size)
		if err != nil {
			j.fail(seg.Off, err)
		}
		if err != nil || seg.N == 0 {
			x.release()
			return false
		}
		c.off, c.n, c.work, c.end = seg.Off, seg.N, seg.Fill, seg.Release
		j.offer(c)
	}
	j.chunks++
	j.opened += c.n
	return true
}

// Chunks are small at both ends of a copy, where the link has nothing to do
// until the first is in the ring, and the workers nothing while the last is on
// its way.
var (
	leastChunk = 512 * kib
	leastPiece = 32 * kib
	mostPiece  = 512 * kib
)

func (j *Job) chunkSize(r *ring) int {
	left := j.n - j.opened
	size := min(j.opened+leastChunk, left/2)
	size = max(size/leastChunk*leastChunk, leastChunk)
	return min(size, left, r.chunk(j.down))
}

// extent takes memory for the next chunk, nil if there is none yet.
func (j *Job) extent(ctx context.Context, r *ring) *extent {
	if j.waiter == nil {
		n := j.chunkSize(r)
		if x := r.try(ctx, n, j.down); x != nil {
			return x
		}
		j.ring, j.waiter = r, r.wait(j.wake, n, j.down)
	}
	if !j.ring.poll(ctx, j.waiter) {
		return nil
	}
	w := j.waiter
	j.waiter = nil
	return j.ring.leave(w)
}

// pieceOf is the size of a chunk's pieces.
func pieceOf(n int) int {
	piece := (n/8 + leastPiece - 1) / leastPiece * leastPiece
	return min(max(piece, leastPiece), mostPiece)
}

// offer opens a chunk's pieces to all.
func (j *Job) offer(c *chunk) {
	c.piece = pieceOf(c.n)
	c.pieces = int32((c.n + c.piece - 1) / c.piece)
	c.left.Store(c.pieces)
	j.mu.Lock()
	j.out++
	if j.first.Load() == nil {
		j.first.Store(c)
	} else {
		j.more = append(j.more, c)
	}
	j.mu.Unlock()
	mark("offer", c.off, c.n)
	j.pieces.Add(c.pieces)
	if c.pieces > 1 {
		j.crew.post(j)
	}
}

// over reports whether all is copied, or, after an error, nothing is in hand any
// more. Memory of the caller's is always waited for; a call into the library that
// does not return, for a while.
func (j *Job) over(ctx context.Context) bool {
	if ctx.Err() != nil {
		j.fail(math.MaxInt-1, context.Cause(ctx))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.failed.Load() {
		return j.passed == j.n
	}
	if j.ended.IsZero() {
		j.ended = time.Now()
	}
	// What nobody has claimed is dropped.
	for c := j.first.Load(); c != nil; c = j.first.Load() {
		left := c.pieces - min(c.next.Swap(c.pieces), c.pieces)
		j.pieces.Add(-left)
		if left > 0 && c.left.Add(-left) == 0 {
			j.out--
			j.drop(c)
		}
		j.shift()
	}
	return j.out == 0 && (j.queue == 0 || time.Since(j.ended) > landTimeout)
}

// drop ends a chunk that is not copied.
func (j *Job) drop(c *chunk) {
	if c.end != nil {
		c.end()
	}
	c.x.release()
}

// spinFor is how long a job's goroutine looks again and again before it sleeps.
var spinFor = 30 * time.Microsecond

// pause waits until there may be more to do.
func (j *Job) pause(ctx context.Context) {
	for begin := time.Now(); time.Since(begin) < spinFor; {
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
		if j.pieces.Load() > 0 {
			return
		}
		if len(j.landing) > 0 && j.landing[0].landed.Load() && j.landing[0].x.fence.Done(ctx) {
			return
		}
		if j.waiter != nil && j.ring.poll(ctx, j.waiter) {
			return
		}
	}
	var stops []func()
	if len(j.landing) > 0 && j.landing[0].landed.Load() {
		for _, p := range j.landing[0].x.fence.Points(nil) {
			stops = append(stops, p.Notify(j.wake))
		}
	}
	if j.waiter != nil {
		stops = append(stops, j.ring.notify(j.waiter))
	}
	if j.failed.Load() {
		select {
		case <-j.wake:
		case <-time.After(landTimeout / 10):
		}
	} else {
		select {
		case <-j.wake:
		case <-ctx.Done():
		}
	}
	for _, stop := range stops {
		stop()
	}
}

// landTimeout bounds the wait for copies that are under way after a job failed.
const landTimeout = 2 * time.Second

// finish waits for the copies that were queued, and returns what came of all.
func (j *Job) finish(ctx context.Context) (int, error) {
	if j.waiter != nil {
		if x := j.ring.leave(j.waiter); x != nil {
			x.release()
		}
		j.waiter = nil
	}
	if j.failed.Load() {
		for _, c := range j.landing {
			j.drop(c)
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), landTimeout)
		defer cancel()
	}
	mark("finish", 0, 0)
	if err := j.ends.Wait(ctx); err != nil {
		j.fail(0, fmt.Errorf("copies may be under way: %w", err))
	}
	if err := j.ends.Err(); err != nil {
		j.fail(0, err)
	}
	if !j.failed.Load() {
		return j.n, nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	done := min(j.at, j.done.prefix())
	return done, fmt.Errorf("at byte %d of %d: %w", done, j.n, j.err)
}

// ranges are chunks that were copied. They are few: what is at the start is
// joined.
type ranges struct {
	start int // all before it is copied
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
