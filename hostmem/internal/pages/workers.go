package pages

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
)

// How many threads make pages resident? That is the kernel writing zeros, and its speed
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
const maxThreads = 16

// defaultThreads returns the number of threads where 0 were requested.
func defaultThreads(requested int) int {
	if requested > 0 {
		return requested
	}
	return min(runtime.GOMAXPROCS(0), maxThreads)
}

// forEach calls work for the items of [0, to), which begin at multiples of size, from
// several goroutines. It returns the first error, after which no other item begins, or
// ctx's, when all calls have returned.
func forEach(parent context.Context, to, size, threads int, work func(ctx context.Context, off, n int) error) error {
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	var next atomic.Int64
	worker := func() {
		// A panic is an error like any other, so that the memory is released.
		defer func() {
			if r := recover(); r != nil {
				fail(fmt.Errorf("panic: %v\n%s", r, debug.Stack()))
			}
		}()
		for ctx.Err() == nil {
			off := int(next.Add(1)-1) * size
			if off >= to {
				return
			}
			if err := work(ctx, off, min(to-off, size)); err != nil {
				fail(err)
			}
		}
	}
	if threads = min(threads, (to+size-1)/size); threads <= 1 {
		worker()
	} else {
		var workers sync.WaitGroup
		for range threads {
			workers.Go(worker)
		}
		workers.Wait()
	}
	if parent.Err() != nil {
		return bounded.Ended(parent)
	}
	return context.Cause(ctx)
}
