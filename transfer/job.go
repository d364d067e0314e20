package transfer

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// A job is one copy of n bytes, in chunks that workers claim in order.
type job struct {
	engine *engine
	call   Call
	ring   *ring // nil for memory that is pinned
	stream *cudart.Stream
	moved  *atomic.Int64 // of the statistics

	n       int // bytes
	unit    int // of chunks' sizes, in bytes
	least   int // bytes of a chunk
	chunk   int // bytes of a chunk, at most
	workers int // at most

	mu      sync.Mutex
	idle    sync.Cond // atWork is 0
	atWork  int       // workers but the caller
	claimed int       // bytes
	uploads []upload  // queued
	err     error     // the one with the least offset
	at      int       // that offset

	reporting sync.Mutex // one call of Progress at a time
	done      int        // bytes
}

// An upload is a chunk whose copy was queued.
type upload struct {
	fence *fence.Fence
	off   int
}

// A source puts the bytes from off on into to: so many, after the first skip
// bytes of it. Fewer come with an error.
type source func(ctx context.Context, to []byte, off, n int) (skip, got int, err error)

// A sink takes the bytes from off on, and returns how many it took. Fewer come
// with an error.
type sink func(from []byte, off int) (took int, err error)

// newJob plans a copy through a ring.
func (v *View) newJob(n int, w way) *job {
	j := &job{engine: v.engine, call: v.call, ring: v.large, moved: &v.stats.stagedBytes,
		n: n, unit: chunkUnit, least: leastChunk, chunk: v.o.Chunk, workers: min(v.o.Workers, (n+leastChunk-1)/leastChunk), at: math.MaxInt}
	j.idle.L = &j.mu
	lane := bulk
	if n <= smallCopy {
		j.ring, lane, j.chunk = v.small, brief, smallCopy
	}
	j.stream = v.pick(lane, w)
	return j
}

// alone makes one worker do it all, in order.
func (j *job) alone() *job {
	j.workers, j.least = 1, j.chunk
	return j
}

// upload copies from a source through slots, whose copies send queues, and
// returns how many bytes, from the first on, are on the device or will be.
func (j *job) upload(ctx context.Context, from source, send func(slot *slot, off, skip, n int) error) (int, error) {
	j.run(func() {
		for off, n, ok := j.claim(ctx); ok; off, n, ok = j.claim(ctx) {
			if got, err := j.uploadChunk(ctx, from, send, off, n); err != nil {
				j.fail(off+got, err)
			} else {
				j.pass(off, n)
			}
		}
	})
	return j.result()
}

func (j *job) uploadChunk(ctx context.Context, from source, send func(slot *slot, off, skip, n int) error, off, n int) (got int, err error) {
	slot, err := j.ring.acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer j.ring.release(slot)
	var skip int
	err = j.foreign(off, func() (err error) {
		skip, got, err = from(ctx, slot.mem, off, n)
		return err
	})
	if got > 0 {
		failed := send(slot, off, skip, got)
		j.sent(upload{slot.queued(j.stream), off})
		if failed != nil {
			return 0, failed
		}
	}
	return got, err
}

func (j *job) sent(u upload) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.uploads = append(j.uploads, u)
}

// uploadTo is upload to one place on the device.
func (j *job) uploadTo(ctx context.Context, dst cudart.DevPtr, from source) (int, error) {
	return j.upload(ctx, from, func(slot *slot, off, skip, n int) error {
		return j.stream.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&slot.mem[skip]), n)
	})
}

// download copies to a sink through slots, whose copies receive queues, and
// returns how many bytes, from the first on, the sink took.
func (j *job) download(ctx context.Context, receive func(slot *slot, off, n int) error, to sink) (int, error) {
	j.run(func() {
		j.flow(ctx, receive, func(slot *slot, off, n int) (took int, err error) {
			err = j.foreign(off, func() (err error) {
				took, err = to(slot.mem[:n], off)
				return err
			})
			return took, err
		})
	})
	return j.result()
}

// downloadFrom is download from one place on the device.
func (j *job) downloadFrom(ctx context.Context, src cudart.DevPtr, to sink) (int, error) {
	return j.download(ctx, func(slot *slot, off, n int) error {
		return j.stream.CopyToHost(unsafe.Pointer(&slot.mem[0]), src+cudart.DevPtr(off), n)
	}, to)
}

// A flight is a chunk that a copy engine is at work on.
type flight struct {
	slot   *slot
	off, n int
}

// mostFlights is how many flights a worker has that is alone.
const mostFlights = 4

// window is how many flights a worker has at a time: one is landed while
// another is under way. A worker that is alone needs more of them.
func (j *job) window() int {
	if j.workers == 1 {
		return mostFlights
	}
	return 2
}

// flow launches chunks and lands them in the same order, some later.
func (j *job) flow(ctx context.Context, launch func(slot *slot, off, n int) error, land func(slot *slot, off, n int) (int, error)) {
	flights := make([]flight, 0, mostFlights)
	defer func() {
		for _, f := range flights { // a callback has ended this goroutine
			_ = completed(f.slot.fence) // the job has failed already
			j.ring.release(f.slot)
		}
	}()
	off, n, ok := j.claim(ctx)
	for ok || len(flights) > 0 {
		for ok && len(flights) < j.window() {
			acquire := j.ring.acquire
			if len(flights) > 0 {
				acquire = j.ring.tryAcquire // other jobs may wait for the slots of these
			}
			slot, err := acquire(ctx)
			if slot == nil && err == nil {
				break
			}
			if err == nil {
				err = launch(slot, off, n)
				slot.queued(j.stream)
				flights = append(flights, flight{slot, off, n})
			}
			if err != nil {
				j.fail(off, err)
			}
			off, n, ok = j.claim(ctx)
		}
		if len(flights) > 0 {
			f := flights[0]
			flights = append(flights[:0], flights[1:]...)
			took, err := j.land(ctx, f, land)
			switch {
			case err != nil:
				j.fail(f.off+took, err)
			case took == f.n:
				j.pass(f.off, f.n)
			}
		}
	}
}

// land waits for a flight, and takes its bytes unless an earlier chunk failed.
func (j *job) land(ctx context.Context, f flight, land func(slot *slot, off, n int) (int, error)) (took int, err error) {
	defer j.ring.release(f.slot)
	err = completed(f.slot.fence)
	switch {
	case err != nil:
		return 0, err
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case !j.reaches(f.off):
		return 0, nil
	}
	return land(f.slot, f.off, f.n)
}

// run lets the workers work, of which the caller is one, and waits for them and
// for what they queued.
func (j *job) run(work func()) {
	for range j.workers - 1 {
		go j.help(work)
	}
	defer j.finish() // also if a callback ends this goroutine
	work()
}

// help works unless there is nothing left to claim: waking up takes as long as
// copying half a mebibyte.
func (j *job) help(work func()) {
	if !j.join() {
		return
	}
	defer j.leave()
	defer j.engine.cores.enter()()
	work()
}

func (j *job) join() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil || j.claimed == j.n {
		return false
	}
	j.atWork++
	return true
}

func (j *job) leave() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.atWork--
	j.idle.Signal()
}

// finish waits until no worker is at work, and for the uploads. Those on the
// caller's stream are left to the stream, unless something failed.
func (j *job) finish() {
	j.mu.Lock()
	for j.atWork > 0 {
		j.idle.Wait()
	}
	failed := j.err != nil
	j.mu.Unlock()
	if j.call.Stream != nil && !failed {
		return
	}
	for _, u := range j.uploads {
		if err := completed(u.fence); err != nil {
			j.fail(u.off, err)
		}
	}
}

// claim returns the next chunk, as long as nothing has failed. Chunks are small
// at both ends of a copy, where the copy engine has nothing to do until the
// first is there, and workers nothing while the last is on its way.
func (j *job) claim(ctx context.Context) (off, n int, ok bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	off = j.claimed
	switch {
	case j.err != nil || off == j.n:
		return 0, 0, false
	case ctx.Err() != nil:
		j.failed(off, context.Cause(ctx))
		return 0, 0, false
	}
	n = min(off, j.n-off) / j.workers / j.unit * j.unit
	n = min(max(n, j.least), j.chunk, j.n-off)
	j.claimed += n
	return off, n, true
}

func (j *job) fail(at int, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.failed(at, err)
}

// failed keeps the error with the least offset, and of several the first.
func (j *job) failed(at int, err error) {
	if at < j.at {
		j.at, j.err = at, err
	}
}

// reaches reports whether nothing up to an offset has failed.
func (j *job) reaches(off int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return off < j.at
}

// pass counts the n bytes at off as done.
func (j *job) pass(off, n int) {
	j.moved.Add(int64(n))
	if j.call.Progress == nil {
		return
	}
	j.reporting.Lock()
	defer j.reporting.Unlock()
	j.done += n
	err := j.foreign(off+n, func() error {
		j.call.Progress(j.done, j.n)
		return nil
	})
	if err != nil {
		j.fail(off+n, err)
	}
}

// result returns how many bytes, from the first on, are done.
func (j *job) result() (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		return j.n, nil
	}
	return j.at, fmt.Errorf("at byte %d of %d: %w", j.at, j.n, j.err)
}
