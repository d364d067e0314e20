package pages

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// crew does work on [from, to) in items of size bytes with several goroutines.
//
// How many? Making pages resident is the kernel writing zeros, and its speed
// grows with the threads: on 16 cores 16, 30, 40, 48, 58, 67 GB/s with 2, 4, 6,
// 8, 12, 16 of them for huge pages, 6 to 44 GB/s for base pages. So it is as many
// as the process may use cores (GOMAXPROCS, which follows affinity and the
// cgroup's quota), for what is a tenth of a second for 4 GiB, and at most 16: by
// then registering takes longer than populating.
//
// What collapses, from 49 to 12 GB/s at eight threads, is MADV_POPULATE_WRITE in
// large pieces: each call keeps the address space locked for long. In pieces of
// a huge page, as fill does it, no number of threads measured was slower than a
// smaller one. That is why nothing here looks for the best number on the way.
type crew struct {
	from, to, size int
	threads        int
	work           func(ctx context.Context, off, n int) error

	cancel context.CancelFunc
	mu     sync.Mutex
	err    error // the first that work returned
	next   int   // offset of the next item
}

const mostThreads = 16

// run works until all is done, ctx ends or work fails, and waits for everyone.
func (c *crew) run(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	c.cancel = cancel
	c.next = c.from
	items := (c.to - c.from + c.size - 1) / c.size
	if threads := min(c.threads, items); threads <= 1 {
		c.worker(ctx)
	} else {
		var wg sync.WaitGroup
		for range threads {
			wg.Go(func() { c.worker(ctx) })
		}
		wg.Wait()
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

func (c *crew) worker(ctx context.Context) {
	for {
		off, n := c.take(ctx)
		if n == 0 {
			return
		}
		if err := c.work(ctx, off, n); err != nil {
			c.fail(err)
		}
	}
}

// take hands out the next item, of no bytes when there is none.
func (c *crew) take(ctx context.Context) (off, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next >= c.to || ctx.Err() != nil {
		return 0, 0
	}
	// Items end at multiples of size, whatever from is.
	off = c.next
	c.next = min(off-off%c.size+c.size, c.to)
	return off, c.next - off
}

func (c *crew) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.cancel()
}
