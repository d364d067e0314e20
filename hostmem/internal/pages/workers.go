package pages

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
)

// workers do work on [from, to) in items of size bytes, with several goroutines.
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
// smaller one. That is why nothing here searches for the best number.
type workers struct {
	from, to, size int
	threads        int
	work           func(ctx context.Context, off, n int) error

	cancel context.CancelFunc
	mu     sync.Mutex
	err    error // the first that work returned
	next   int   // offset of the next item
}

const mostThreads = 16

// run works until all is done, ctx ends or work fails, and waits for all workers.
func (w *workers) run(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	w.cancel = cancel
	w.next = w.from
	items := (w.to - w.from + w.size - 1) / w.size
	if threads := min(w.threads, items); threads <= 1 {
		w.worker(ctx)
	} else {
		var group sync.WaitGroup
		for range threads {
			group.Go(func() { w.worker(ctx) })
		}
		group.Wait()
	}
	if err := ended(parent); err != nil {
		return err
	}
	return w.err
}

// ended returns nil while ctx goes on, and afterwards both its error and its cause.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// worker works on item after item. A panic is an error like any other, so that the
// memory is released.
func (w *workers) worker(ctx context.Context) {
	defer func() {
		if r := recover(); r != nil {
			w.fail(fmt.Errorf("panic: %v\n%s", r, debug.Stack()))
		}
	}()
	for {
		off, n := w.take(ctx)
		if n == 0 {
			return
		}
		if err := w.work(ctx, off, n); err != nil {
			w.fail(err)
		}
	}
}

// take returns the next item, of no bytes when there is none.
func (w *workers) take(ctx context.Context) (off, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.next >= w.to || ctx.Err() != nil {
		return 0, 0
	}
	// Items end at multiples of size, also if from is none.
	off = w.next
	w.next = min(off-off%w.size+w.size, w.to)
	return off, w.next - off
}

func (w *workers) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.cancel()
}
