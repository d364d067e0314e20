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
// with a chunk queues its copy.
type Job struct {
	n        int
	limit    int // workers at most
	crew     *crew
	route    func(chunk int) (*ring, *cudart.Stream) // where a chunk passes through
	send     func(c *chunk) error                    // queues its copy, up or down
	feed     Feed                                    // of an upload
	sink     Sink                                    // of a download
	progress func(done, total int)

	// The conductor's.
	chunks  int
	opened  int         // bytes
	landing []*chunk    // whose copy from the device is under way, in order
	waiter  *waiter     // for memory of a ring
	ring    *ring       // that one
	queued  fence.Fence // of all copies to the device
	told    int         // bytes that progress was called for

	helpers int // guarded by crew.mu
	wake    chan struct{}
	pieces  atomic.Int32 // that can be claimed

	mu     sync.Mutex
	open   []*chunk // that have pieces to claim
	active int      // pieces that are worked on
	passed int      // bytes of chunks that are done with
	done   ranges   // these chunks
	err    error    // the one with the least offset
	at     int      // that offset
}

// A chunk is a part of a job that passes through one extent.
type chunk struct {
	x      *extent
	on     *cudart.Stream
	off, n int
	piece  int // bytes
	next   int // the next to claim
	left   int // bytes not worked on yet
	work   func(mem []byte, off int) error
	end    func() // when all is worked on, nil for nothing
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
	j := &Job{n: n, limit: helpers(down), crew: s.crew, wake: make(chan struct{}, 1), at: math.MaxInt}
	r, on := s.pick(n, down)
	j.route = func(int) (*ring, *cudart.Stream) { return r, on }
	return j
}

// helpers is how many workers a copy keeps busy at most, besides its own
// goroutine. Copying into the ring takes two cores for each that copying out of
// it takes, as that writes past the caches.
func helpers(down bool) int {
	if down {
		return downHelpers
	}
	return upHelpers
}

var upHelpers, downHelpers = 7, 4

// Poke makes the job look again.
func (j *Job) Poke() { j.poke() }

func (j *Job) poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Run copies, and returns how many bytes, from the first on, were copied. When
// ctx ends it stops with the pieces that are worked on.
func (j *Job) Run(ctx context.Context) (int, error) {
	if j.n > alone {
		j.crew.add(j)
		defer j.crew.remove(j)
	}
	for {
		j.advance(ctx)
		worked := j.work(ctx)
		j.report()
		over, idle := j.state(ctx)
		switch {
		case over:
			return j.finish(ctx)
		case idle && !worked:
			j.pause(ctx)
		}
	}
}

// work does one piece, if there is one.
func (j *Job) work(ctx context.Context) bool {
	c, off, n := j.claim()
	if c == nil {
		return false
	}
	j.do(c, off, n)
	return true
}

// help does pieces for as long as there are some.
func (j *Job) help() {
	for {
		c, off, n := j.claim()
		if c == nil {
			return
		}
		j.do(c, off, n)
		if j.crew.crowded(j) {
			return
		}
	}
}

func (j *Job) wants() bool { return j.pieces.Load() > 0 }

// claim takes a piece of the first chunk that has some.
func (j *Job) claim() (c *chunk, off, n int) {
	if j.pieces.Load() <= 0 {
		return nil, 0, 0
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.open) == 0 || j.err != nil {
		return nil, 0, 0
	}
	c = j.open[0]
	off, n = c.next, min(c.piece, c.n-c.next)
	if c.next += n; c.next == c.n {
		j.open = append(j.open[:0], j.open[1:]...)
	}
	j.active++
	j.pieces.Add(-1)
	return c, off, n
}

// do works on a piece, and completes its chunk if it is the last one.
func (j *Job) do(c *chunk, off, n int) {
	err := Guard(func() error { return c.work(c.x.mem[off:off+n], c.off+off) })
	if err != nil {
		j.fail(c.off+off, err)
	}
	j.mu.Lock()
	c.left -= n
	last := c.left == 0
	bad := j.err != nil
	j.mu.Unlock()
	if last {
		j.complete(c, bad)
	}
	j.mu.Lock()
	j.active--
	if last {
		j.passed += c.n
		if !bad {
			j.done.add(c.off, c.n)
		}
	}
	poke := last || j.active == 0
	j.mu.Unlock()
	if poke {
		j.poke()
	}
}

// complete is called once all of a chunk was worked on.
func (j *Job) complete(c *chunk, bad bool) {
	if c.end != nil {
		c.end()
	}
	if j.feed != nil && !bad {
		if err := j.queue(c); err != nil {
			j.fail(c.off, err)
		}
		j.queued.Join(&c.x.fence)
	}
	c.x.release()
}

func (j *Job) fail(at int, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if at < j.at {
		j.at, j.err = at, err
	}
}

// report calls progress, on the job's own goroutine, which holds nothing.
func (j *Job) report() {
	if j.progress == nil {
		return
	}
	j.mu.Lock()
	passed, failed := j.passed, j.err != nil
	j.mu.Unlock()
	if failed || passed == j.told {
		return
	}
	j.told = passed
	if err := Guard(func() error { j.progress(passed, j.n); return nil }); err != nil {
		j.fail(0, fmt.Errorf("progress: %w", err))
	}
}

// advance opens chunks, and those that have landed to be drained.
func (j *Job) advance(ctx context.Context) {
	if j.failed(ctx) {
		return
	}
	if j.sink != nil {
		j.land(ctx)
	}
	for j.opened < j.n && j.openNext(ctx) {
	}
}

func (j *Job) failed(ctx context.Context) bool {
	if ctx.Err() != nil {
		j.fail(math.MaxInt-1, context.Cause(ctx))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err != nil
}

// openNext opens a chunk, if there is memory for it and something to copy.
func (j *Job) openNext(ctx context.Context) bool {
	r, on := j.route(j.chunks)
	size := j.chunkSize(r)
	x := r.try(ctx, size, j.waiter)
	if x == nil {
		j.starve(r)
		return false
	}
	j.fed()
	c := &chunk{x: x, on: on}
	if j.feed != nil {
		seg, err := j.feed.Take(size)
		if err != nil {
			j.fail(seg.Off, err)
		}
		if err != nil || seg.N == 0 {
			x.release()
			return false
		}
		c.off, c.n, c.work, c.end = seg.Off, seg.N, seg.Fill, seg.Release
	} else {
		c.off, c.n = j.opened, size
		if c.work, c.end = j.sink.Take(c.off, c.n); c.work == nil {
			x.release()
			return false
		}
		if err := j.queue(c); err != nil {
			j.fail(c.off, err)
			x.release()
			return false
		}
	}
	j.chunks++
	j.opened += c.n
	if j.feed != nil {
		j.offer(c)
	} else {
		j.landing = append(j.landing, c)
	}
	return true
}

// queue queues a chunk's copy.
func (j *Job) queue(c *chunk) error {
	err := j.send(c)
	c.x.fence.Add(c.on) // also after an error, of which some may be queued
	c.x.fence.Record()
	return err
}

// Chunks are small at both ends of a copy, where the link has nothing to do
// until the first is in the ring, and the workers nothing while the last is on
// its way.
var (
	leastChunk = 512 * kib
	leastPiece = 64 * kib
	mostPiece  = 512 * kib
)

func (j *Job) chunkSize(r *ring) int {
	left := j.n - j.opened
	size := min(j.opened+leastChunk, left/2)
	size = max(size/leastChunk*leastChunk, leastChunk)
	return min(size, left, r.bytes())
}

// pieceOf is the size of a chunk's pieces.
func pieceOf(n int) int {
	piece := (n/8 + leastPiece - 1) / leastPiece * leastPiece
	return min(max(piece, leastPiece), mostPiece)
}

// offer opens a chunk's pieces to all.
func (j *Job) offer(c *chunk) {
	c.left, c.piece = c.n, pieceOf(c.n)
	pieces := (c.n + c.piece - 1) / c.piece
	j.mu.Lock()
	j.open = append(j.open, c)
	j.mu.Unlock()
	j.pieces.Add(int32(pieces))
	if pieces > 1 && j.n > alone {
		j.crew.post(pieces - 1)
	}
}

// land offers the chunks whose copy from the device is done.
func (j *Job) land(ctx context.Context) {
	for len(j.landing) > 0 {
		c := j.landing[0]
		if !c.x.fence.Done(ctx) {
			return
		}
		j.landing = append(j.landing[:0], j.landing[1:]...)
		if err := c.x.fence.Err(); err != nil {
			j.fail(c.off, err)
			c.x.release()
			return
		}
		j.offer(c)
	}
}

// state reports whether the job is over, and whether its goroutine has nothing
// to do.
func (j *Job) state(ctx context.Context) (over, idle bool) {
	failed := j.failed(ctx)
	j.mu.Lock()
	defer j.mu.Unlock()
	if failed {
		return j.active == 0, true
	}
	return j.passed == j.n, j.pieces.Load() <= 0
}

// spinFor is how long a job's goroutine looks again and again before it sleeps.
var spinFor = 30 * time.Microsecond

// pause waits until there may be more to do.
func (j *Job) pause(ctx context.Context) {
	for begin := time.Now(); time.Since(begin) < spinFor; {
		select {
		case <-j.wake:
			return
		default:
		}
		if len(j.landing) > 0 && j.landing[0].x.fence.Done(ctx) {
			return
		}
		if j.waiter != nil && j.ring.ready(ctx, j.waiter) {
			return
		}
	}
	var stops []func()
	if len(j.landing) > 0 {
		for _, p := range j.landing[0].x.fence.Points(nil) {
			stops = append(stops, p.Notify(j.wake))
		}
	}
	if j.waiter != nil {
		stops = append(stops, j.ring.notify(j.waiter))
	}
	select {
	case <-j.wake:
	case <-ctx.Done():
		select { // the pieces that are worked on are waited for
		case <-j.wake:
		case <-time.After(time.Millisecond):
		}
	}
	for _, stop := range stops {
		stop()
	}
}

// starve queues for memory of a ring, and fed ends that.
func (j *Job) starve(r *ring) {
	if j.waiter != nil && j.ring != r {
		j.fed()
	}
	if j.waiter == nil {
		j.ring, j.waiter = r, r.wait(j.wake)
	}
}

func (j *Job) fed() {
	if j.waiter != nil {
		j.ring.leave(j.waiter)
		j.waiter = nil
	}
}

// landTimeout bounds the wait for copies that are under way after a job failed.
const landTimeout = 2 * time.Second

// finish waits for the copies that were queued, and returns what came of all.
func (j *Job) finish(ctx context.Context) (int, error) {
	j.fed()
	j.mu.Lock()
	failed, open := j.err != nil, j.open
	j.open = nil
	j.mu.Unlock()
	if failed {
		for _, c := range append(open, j.landing...) {
			if c.end != nil {
				c.end()
			}
			c.x.release()
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), landTimeout)
		defer cancel()
	}
	if err := j.queued.Wait(ctx); err != nil {
		j.fail(0, fmt.Errorf("copies may be under way: %w", err))
	}
	if err := j.queued.Err(); err != nil {
		j.fail(0, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		return j.n, nil
	}
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
