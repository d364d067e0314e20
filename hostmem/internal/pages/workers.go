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

// maxThreads bounds the threads that make pages resident, one for each core that the
// process may use (GOMAXPROCS, which follows affinity and the cgroup's quota). With more of
// them registering takes longer than populating. In pieces of a huge page more threads were
// never slower, so nothing here searches for the best number: see RATIONALE.md.
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
