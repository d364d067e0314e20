package verify

import (
	"context"
	"errors"
	"runtime"

	"github.com/gopinned/pinned/internal/bounded"
)

const (
	segmentBytes = 4 << 20 // that one goroutine claims at a time
	maxWorkers   = 8       // more do not raise a host's memory bandwidth
)

// inSegments calls work for every segment of [0, n), from several goroutines if n is large.
func inSegments(ctx context.Context, n int, work func(lo, hi int) error) error {
	return bounded.ForEach(ctx, n, segmentBytes, min(runtime.GOMAXPROCS(0), maxWorkers), func(_ context.Context, off, n int) error {
		return work(off, off+n)
	})
}

// fillAll is content.fill over a large buffer.
func fillAll(ctx context.Context, c content, dst []byte) error {
	return inSegments(ctx, len(dst), func(lo, hi int) error {
		c.fill(dst[lo:hi], lo)
		return nil
	})
}

var errDiffers = errors.New("a segment differs")

// equalAll is content.equals over a large buffer.
func equalAll(ctx context.Context, c content, found []byte) (bool, error) {
	err := inSegments(ctx, len(found), func(lo, hi int) error {
		if !c.equals(found[lo:hi], lo) {
			return errDiffers
		}
		return nil
	})
	if err == errDiffers {
		return false, nil
	}
	return err == nil, err
}
