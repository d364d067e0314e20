package managed

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// Move moves ranges to a place and waits until they are there. It prefetches them in chunks
// from several goroutines, DefaultIn or DefaultOut of them, each of which occupies an OS
// thread: the driver makes the host's pages on the thread that asks, and one Prefetch to
// the host reaches a part of the link's speed only. It is in no order with streams:
// synchronise those whose work uses the ranges before. To copy the bytes elsewhere rather
// than move them, download them with a transfer.Copier.
//
// Errors are those of [Memory.Prefetch], and ctx's, if that ends first. After an error some
// of the bytes may have moved.
func (a *Allocator) Move(ctx context.Context, to cudart.Location, ranges ...Range) error {
	if err := a.move(ctx, to, ranges); err != nil {
		return fmt.Errorf("managed: move %d ranges to %v: %w", len(ranges), to, err)
	}
	return nil
}

func (a *Allocator) move(ctx context.Context, to cudart.Location, ranges []Range) error {
	if ctx == nil {
		return errNilContext
	}
	if err := a.mayPrefetch(to, ranges...); err != nil {
		return err
	}
	var chunks []Range
	for _, r := range ranges {
		if !r.Memory.life.Begin() {
			return fmt.Errorf("%v: %w", r.Memory, ErrClosed)
		}
		defer r.Memory.life.End()
		for base := int(r.Memory.ptr()); r.Len > 0; {
			n := min(DefaultChunk-(base+r.Off)%DefaultChunk, r.Len)
			chunks = append(chunks, r.Memory.Range(r.Off, n))
			r.Off, r.Len = r.Off+n, r.Len-n
		}
	}
	workers := DefaultOut
	if to.Kind == cudart.LocationDevice {
		workers = DefaultIn
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(workers, len(chunks)) {
		wg.Go(func() {
			s, err := a.takeStream()
			if err != nil {
				cancel(err)
				return
			}
			defer a.putStream(s)
			for err == nil && ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(chunks) {
					return
				}
				if err = s.Prefetch(chunks[i].ptr(), chunks[i].Len, to); err == nil {
					err = finished(ctx, s.Point())
				}
			}
			if err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// overrun is how long a move may take after the end of the context.
const overrun = 10 * time.Second

// finished waits for the end of a move, and returns its error. It does so also when ctx has
// ended, so that no move is under way after it.
func finished(ctx context.Context, p cudart.Point) error {
	err := p.Wait(ctx)
	if err != nil && ctx.Err() != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), overrun)
		defer cancel()
		return errors.Join(err, p.Wait(last))
	}
	return errors.Join(err, p.Err())
}
