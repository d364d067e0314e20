package pages

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// crew does work on [from, to) in items of size bytes with several goroutines.
//
// How many? Making pages resident is the kernel writing zeros, so speed grows with
// the threads until cores or memory bandwidth end. Where that is nobody can tell
// beforehand, and past it more threads may be slower than fewer, by 4x in the
// worst case measured (MADV_POPULATE_WRITE in large pieces on 16 cores: 49 GB/s
// with six threads, 12 with eight). So the crew starts with few, grows by half,
// and keeps the larger number only if it raised the rate by gain. There are never
// more threads than GOMAXPROCS, which follows the cores that the process may use
// and its cgroup's quota. Above eight they are no more than half of it, and
// sixteen at the most: by then registering takes longer than populating, and the
// program has other things to do.
//
// Items are small, so that threads end together and a wrong number is found out
// soon; handing one out costs nothing beside the millisecond it takes.
type crew struct {
	from, to, size int
	want           int // threads wanted; 0 to adapt
	procs          int // threads that the host runs at once
	work           func(ctx context.Context, off, n int) error

	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	err     error // the first that work returned
	next    int   // offset of the next item
	running int
	limit   int // want may grow to this; equal once settled
	rate    meter
	best    float64 // bytes a second with best threads
	fewer   int     // the count that reached best
	poor    int     // windows in a row in which want was not worth it
}

const (
	firstThreads = 4
	gain         = 1.15
	// An item for each thread must pass before a new count is measured, then
	// this many for each. Two windows must agree before a count is given up, for
	// one may have been disturbed by something else.
	windowItems = 2
	poorWindows = 2
)

// run works until all is done, ctx ends or work fails, and waits for everyone.
func (c *crew) run(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	c.cancel = cancel
	c.next = c.from
	items := (c.to - c.from + c.size - 1) / c.size
	c.limit = c.want
	if c.want <= 0 {
		c.limit = mostThreads(c.procs)
		c.want = min(firstThreads, c.limit)
	}
	c.limit = min(c.limit, items)
	c.want = min(c.want, items)
	if c.limit <= 1 {
		c.running = 1
		c.worker(ctx)
	} else {
		c.mu.Lock()
		c.start(ctx)
		c.mu.Unlock()
		c.wg.Wait()
	}
	if err := ended(parent); err != nil {
		return err
	}
	return c.err
}

// ended is nil while ctx goes on, and afterwards both its error and its cause.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// mostThreads for a host that lets procs run at once.
func mostThreads(procs int) int {
	if procs <= 8 {
		return procs
	}
	return min(max(8, procs/2), 16)
}

// start brings running up to want. The caller holds mu.
func (c *crew) start(ctx context.Context) {
	for ; c.running < c.want; c.running++ {
		c.wg.Go(func() { c.worker(ctx) })
	}
	c.rate = meter{skip: c.running}
}

func (c *crew) worker(ctx context.Context) {
	for {
		off, n := c.take(ctx)
		if n == 0 {
			return
		}
		c.finish(ctx, n, c.work(ctx, off, n))
	}
}

// take hands out the next item, of no bytes to a worker that should leave.
func (c *crew) take(ctx context.Context) (off, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running > c.want || c.next >= c.to || ctx.Err() != nil {
		c.running--
		return 0, 0
	}
	// Items end at multiples of size, whatever from is.
	off = c.next
	c.next = min(off-off%c.size+c.size, c.to)
	return off, c.next - off
}

// finish counts an item and changes want when it is time to.
func (c *crew) finish(ctx context.Context, n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		if c.err == nil {
			c.err = err
		}
		c.cancel()
		return
	}
	if c.want == c.limit && c.fewer == 0 || c.next >= c.to {
		return // nothing to find out, or no time left to use it
	}
	rate, ok := c.rate.add(n, windowItems*c.want)
	if !ok {
		return
	}
	switch {
	case rate >= gain*c.best:
		c.best, c.fewer, c.poor = rate, c.want, 0
		if c.want == c.limit {
			c.fewer = 0
			return
		}
		c.want = min(c.want+c.want/2, c.limit)
		c.start(ctx)
	case c.poor+1 < poorWindows:
		c.poor++
		c.rate = meter{}
	default:
		c.want, c.limit, c.fewer = c.fewer, c.fewer, 0
	}
}

// meter measures a rate over a window of items.
type meter struct {
	skip  int // items still to ignore
	items int
	bytes int
	since time.Time
}

// add counts an item of n bytes, and tells the rate at the end of a window.
func (m *meter) add(n, window int) (bytesPerSecond float64, ok bool) {
	if m.skip > 0 {
		m.skip--
		if m.skip == 0 {
			m.since = time.Now()
		}
		return 0, false
	}
	if m.since.IsZero() {
		m.since = time.Now()
		return 0, false
	}
	m.items++
	m.bytes += n
	if m.items < window {
		return 0, false
	}
	took := max(time.Since(m.since), time.Nanosecond)
	return float64(m.bytes) / took.Seconds(), true
}
