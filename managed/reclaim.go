package managed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// Reclaim frees device memory until at least want bytes of it are free, or Options.Reserve bytes if
// want is 0: before a library allocates device memory, for example. It prefetches memory of the
// allocator to the host on s (cudaMemPrefetchAsync), the least recently allocated or prefetched
// first, and waits for that. moved is the number of bytes that it prefetched, also of bytes that
// were on the host already. If only a part of a Memory is advised ReadMostly, copies of the part
// may stay on the device.
//
// The error wraps [ErrReserve] if too little is free although all memory of the allocator is on
// the host. Others are a nil stream, a negative want, [ErrNotConcurrent] if memory would have to
// move, those of CUDA, and ctx's error and cause if ctx ends first; if a call of CUDA does not
// return then, moved is 0.
func (a *Allocator) Reclaim(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	if !a.made() {
		return 0, fmt.Errorf("managed: reclaim %d bytes: %w", want, errNotMade)
	}
	want = cmp.Or(want, a.o.Reserve)
	switch err = checkContext(ctx); {
	case err != nil:
	case noStream(s):
		err = errNilStream
	case want < 0:
		err = errors.New("must not be negative")
	default:
		moved, err = bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { return a.reclaim(ctx, s, want) }})
	}
	if err != nil {
		return moved, fmt.Errorf("managed: reclaim %d bytes of %v: %w", want, a.dev, err)
	}
	return moved, nil
}

func (a *Allocator) reclaim(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	for _, m := range append(a.byLastUse(), nil) {
		free, total, err := a.mem.memInfo(ctx)
		switch {
		case err != nil || free >= want:
			return moved, err
		case m == nil:
			return moved, fmt.Errorf("%w: %s are free of %s, and all managed memory of this allocator is on the host: other memory occupies the device", ErrReserve, units.ExactBytes(free), units.ExactBytes(total))
		case !m.life.Begin():
			continue
		}
		err = a.moveOut(ctx, s, m)
		m.life.End()
		if err != nil {
			return moved, fmt.Errorf("move %v to the host: %w", m, err)
		}
		moved += m.n
	}
	return moved, nil
}

// moveOut moves memory to the host. It undoes the advice ReadMostly meanwhile, with which copies
// would stay on the device.
func (a *Allocator) moveOut(ctx context.Context, s *cudart.Stream, m *Memory) (err error) {
	if !a.concurrent {
		return ErrNotConcurrent
	}
	var at cudart.RangeAttributes
	err = a.mem.calls.Inside(ctx, func() (err error) {
		at, err = a.dev.RangeAttributes(m.ptr(), m.n)
		return err
	})
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	if at.ReadMostly {
		if err := a.mem.advise(ctx, m.Whole(), cudart.AdviseUnsetReadMostly, cudart.HostLocation()); err != nil {
			return err
		}
		defer func() {
			err = errors.Join(err, a.mem.advise(context.WithoutCancel(ctx), m.Whole(), cudart.AdviseReadMostly, cudart.HostLocation()))
		}()
	}
	if err := a.mem.calls.Inside(ctx, func() error { return s.Prefetch(m.ptr(), m.n, cudart.HostLocation()) }); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// byLastUse returns the memory that is not closed, the least recently used first.
func (a *Allocator) byLastUse() []*Memory {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	return slices.SortedFunc(maps.Keys(a.live), func(x, y *Memory) int { return cmp.Compare(x.used, y.used) })
}
