package transfer

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
)

// A job is one copy of n bytes, in chunks that workers claim in order.
type job struct {
	engine *engine
	call   Call
	ring   *ring
	stream *cudart.Stream
	moved  *atomic.Int64 // of the statistics

	n       int
	unit    int // of chunks' sizes, in bytes
	least   int // bytes of a chunk
	chunk   int // at most
	workers int // at most

	mu      sync.Mutex
	idle    sync.Cond // nobody is at work
	atWork  int
	claimed int   // bytes
	done    int   // bytes
	err     error // the one with the least offset
	at      int   // that offset
}

// A source puts the bytes from off on into to: so many, behind the first skip
// bytes of it. Fewer come with an error.
type source func(ctx context.Context, to []byte, off, n int) (skip, got int, err error)

// A sink takes the bytes from off on.
type sink func(from []byte, off int) error

// newJob plans a copy by way of a ring.
func (c *Copier) newJob(n int, w way) *job {
	j := &job{engine: c.engine, call: c.call, ring: c.large, moved: &c.stats.stagedBytes,
		n: n, unit: chunkUnit, least: leastChunk, chunk: c.o.Chunk, workers: min(c.o.Workers, (n+leastChunk-1)/leastChunk), at: math.MaxInt}
	j.idle.L = &j.mu
	lane := bulk
	if n <= smallCopy {
		j.ring, lane, j.chunk = c.small, brief, smallCopy
	}
	j.stream = c.pick(lane, w)
	return j
}

// alone makes one worker do it all, in order.
func (j *job) alone() *job {
	j.workers, j.least = 1, j.chunk
	return j
}

// upload copies from a source by way of slots, which send queues the copies of,
// and returns how many bytes, from the first on, are there or will be.
func (j *job) upload(ctx context.Context, from source, send func(slot *slot, off, skip, n int) error) (int, error) {
	j.run(func() {
		for off, n, ok := j.claim(ctx); ok; off, n, ok = j.claim(ctx) {
			if got, err := j.uploadChunk(ctx, from, send, off, n); err != nil {
				j.fail(off+got, err)
			} else {
				j.pass(n)
			}
		}
	})
	// Copies on the caller's stream are that stream's to be waited for.
	if j.call.Stream == nil || j.err != nil {
		j.settle()
	}
	return j.result()
}

func (j *job) uploadChunk(ctx context.Context, from source, send func(slot *slot, off, skip, n int) error, off, n int) (got int, err error) {
	slot, err := j.ring.take(ctx)
	if err != nil {
		return 0, err
	}
	defer j.ring.put(slot)
	var skip int
	err = guarded(func() error {
		skip, got, err = from(ctx, slot.mem, off, n)
		return err
	})
	if got > 0 {
		if failed := send(slot, off, skip, got); failed != nil {
			return 0, failed
		}
	}
	return got, err
}

// uploadTo is upload to one place on the device.
func (j *job) uploadTo(ctx context.Context, dst cudart.DevPtr, from source) (int, error) {
	return j.upload(ctx, from, func(slot *slot, off, skip, n int) error {
		return slot.send(j.stream, dst+cudart.DevPtr(off), skip, n)
	})
}

// download copies to a sink by way of slots, which receive queues the copies
// of, and returns how many bytes, from the first on, are there.
func (j *job) download(ctx context.Context, receive func(slot *slot, off, n int) error, to sink) (int, error) {
	j.run(func() {
		j.flow(ctx, receive, func(slot *slot, off, n int) error {
			return guarded(func() error { return to(slot.mem[:n], off) })
		})
	})
	return j.result()
}

// downloadFrom is download from one place on the device.
func (j *job) downloadFrom(ctx context.Context, src cudart.DevPtr, to sink) (int, error) {
	return j.download(ctx, func(slot *slot, off, n int) error {
		return slot.receive(j.stream, src+cudart.DevPtr(off), n)
	}, to)
}

// A flight is a chunk that a copy engine is at work on.
type flight struct {
	slot   *slot
	off, n int
}

// window is how many flights a worker has at a time: one is landed while
// another is under way. A worker that is alone needs more of them.
func (j *job) window() int {
	if j.workers == 1 {
		return 4
	}
	return 2
}

// flow launches chunks and lands them in the same order, some behind.
func (j *job) flow(ctx context.Context, launch, land func(slot *slot, off, n int) error) {
	var flights []flight
	off, n, ok := j.claim(ctx)
	for ok || len(flights) > 0 {
		for ok && len(flights) < j.window() {
			lend := j.ring.take
			if len(flights) > 0 {
				lend = j.ring.try // others may wait for those this worker has
			}
			slot, err := lend(ctx)
			if slot == nil && err == nil {
				break
			}
			if err == nil {
				flights = append(flights, flight{slot, off, n})
				err = launch(slot, off, n)
			}
			if err != nil {
				j.fail(off, err)
			}
			off, n, ok = j.claim(ctx)
		}
		if len(flights) > 0 {
			j.land(ctx, flights[0], land)
			flights = append(flights[:0], flights[1:]...)
		}
	}
}

// land waits for a flight, which ends well if it and all before it did.
func (j *job) land(ctx context.Context, f flight, land func(slot *slot, off, n int) error) {
	defer j.ring.put(f.slot)
	err := f.slot.settle(context.WithoutCancel(ctx))
	if err == nil {
		err = context.Cause(ctx)
	}
	if err == nil && !j.reaches(f.off) {
		return
	}
	if err == nil {
		err = land(f.slot, f.off, f.n)
	}
	if err != nil {
		j.fail(f.off, err)
		return
	}
	j.pass(f.n)
}

// run lets the workers work. The caller is one of them, and waits for those
// that have begun when there was something left to claim: the others are still
// waking up, which takes as long as copying half a mebibyte.
func (j *job) run(work func()) {
	for range j.workers - 1 {
		go func() {
			if !j.join() {
				return
			}
			defer j.leave()
			leave := j.engine.cores.enter()
			defer leave()
			work()
		}()
	}
	work()
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.atWork > 0 {
		j.idle.Wait()
	}
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

// settle waits for what was queued. Where the stream cannot tell, the device
// can.
func (j *job) settle() {
	ctx := context.Background()
	if j.stream.Synchronize(ctx) == nil {
		return
	}
	if err := j.engine.dev.Synchronize(ctx); err != nil {
		j.fail(0, err) // which of the bytes are there nobody knows
	}
}

// claim gives the next chunk, as long as nothing has failed. Chunks are small
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

func (j *job) failed(at int, err error) {
	if at < j.at {
		j.at, j.err = at, err
	}
}

// reaches tells whether nothing up to an offset has failed.
func (j *job) reaches(off int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return off < j.at
}

func (j *job) pass(n int) {
	j.moved.Add(int64(n))
	if j.call.Progress == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.done += n
	j.call.Progress(j.done, j.n)
}

func (j *job) result() (int, error) {
	if j.err == nil {
		return j.n, nil
	}
	return j.at, fmt.Errorf("at byte %d of %d: %w", j.at, j.n, j.err)
}
