package bounded

import (
	"context"
	"sync"
	"sync/atomic"
)

// ForEach calls work for the items of [0, to), which begin at multiples of size and are size long
// but for the last one, on several goroutines. It returns when all calls have returned: the first
// error or panic (see [Recovered]), after which no other item begins, or the error of [Ended] if
// parent has ended. The context of work ends in both cases.
func ForEach(parent context.Context, to, size, goroutines int, work func(ctx context.Context, off, n int) error) error {
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	one := func(off int) (err error) {
		defer Recovered(&err)
		return work(ctx, off, min(to-off, size))
	}
	var next atomic.Int64
	worker := func() {
		for off := int(next.Add(1)-1) * size; off < to && ctx.Err() == nil; off = int(next.Add(1)-1) * size {
			if err := one(off); err != nil {
				fail(err)
			}
		}
	}
	if goroutines = min(goroutines, (to+size-1)/size); goroutines <= 1 {
		worker()
	} else {
		var workers sync.WaitGroup
		for range goroutines {
			workers.Go(worker)
		}
		workers.Wait()
	}
	if parent.Err() != nil {
		return Ended(parent)
	}
	return context.Cause(ctx)
}
