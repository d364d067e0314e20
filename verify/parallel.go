package verify

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
)

const (
	segmentBytes = 4 << 20 // that one goroutine claims at a time
	maxWorkers   = 8       // more do not raise a host's memory bandwidth
)

// inSegments calls work for every segment of [0, n), from several goroutines if n is large.
// It stops when work returns false, or ctx ends: the error is ctx's.
func inSegments(ctx context.Context, n int, work func(lo, hi int) bool) error {
	segments := (n + segmentBytes - 1) / segmentBytes
	var next atomic.Int64
	loop := func() {
		for ctx.Err() == nil {
			lo := int(next.Add(1)-1) * segmentBytes
			if lo >= n {
				return
			}
			if !work(lo, min(lo+segmentBytes, n)) {
				next.Store(int64(segments))
				return
			}
		}
	}
	var others sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), maxWorkers, segments) - 1 {
		others.Go(loop)
	}
	loop()
	others.Wait()
	if ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	return nil
}

// fillAll is content.fill over a large buffer.
func fillAll(ctx context.Context, c content, dst []byte) error {
	return inSegments(ctx, len(dst), func(lo, hi int) bool {
		c.fill(dst[lo:hi], lo)
		return true
	})
}

// equalAll is content.equals over a large buffer.
func equalAll(ctx context.Context, c content, found []byte) (bool, error) {
	var differs atomic.Bool
	err := inSegments(ctx, len(found), func(lo, hi int) bool {
		if !c.equals(found[lo:hi], lo) {
			differs.Store(true)
			return false
		}
		return true
	})
	return err == nil && !differs.Load(), err
}
