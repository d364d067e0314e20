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

// KeepReserve makes at least want bytes of the card free, or Options.Reserve if want is 0:
// before a library allocates there, for example. It moves memory of the allocator to the
// host by prefetching it there on s, what was allocated or prefetched longest ago first,
// and waits until it is there. moved is the number of bytes that it prefetched; bytes that
// were on the host already count, too. Memory of which only a part is advised ReadMostly may
// leave copies on the card.
//
// The error wraps [ErrReserve] if that is not enough: other memory fills the card. Others
// are a nil stream, [ErrNotConcurrent] if memory would have to move, those of CUDA, and
// ctx's if that ends first; if a call of CUDA does not return then, moved is 0.
func (a *Allocator) KeepReserve(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	if !a.made() {
		return 0, fmt.Errorf("managed: keep %d bytes free: %w", want, errNotMade)
	}
	want = cmp.Or(want, a.o.Reserve)
	switch {
	case ctx == nil:
		err = errNilContext
	case noStream(s):
		err = errNilStream
	case want < 0:
		err = errors.New("must not be negative")
	default:
		moved, err = bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { return a.keepReserve(ctx, s, want) }})
	}
	if err != nil {
		return moved, fmt.Errorf("managed: keep %d bytes of %v free: %w", want, a.dev, err)
	}
	return moved, nil
}

func (a *Allocator) keepReserve(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	for _, m := range append(a.coldest(), nil) {
		free, total, err := a.card.memInfo(ctx)
		switch {
		case err != nil || free >= want:
			return moved, err
		case m == nil:
			return moved, fmt.Errorf("%w: %s are free of %s, and no managed memory of this allocator is left to move to the host: other memory fills the card", ErrReserve, units.ExactBytes(free), units.ExactBytes(total))
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

// moveOut moves memory to the host. Copies of memory that is read mostly would stay on the
// card, so that advice is undone meanwhile.
func (a *Allocator) moveOut(ctx context.Context, s *cudart.Stream, m *Memory) (err error) {
	if !a.concurrent {
		return ErrNotConcurrent
	}
	var at cudart.RangeAttributes
	err = a.card.call(ctx, func() (err error) {
		at, err = a.dev.RangeAttributes(m.ptr(), m.n)
		return err
	})
	if err != nil && !errors.Is(err, cudart.ErrUnsupported) {
		return err
	}
	if at.ReadMostly {
		if err := a.card.advise(ctx, m.All(), ReadMostly().unset()); err != nil {
			return err
		}
		defer func() {
			err = errors.Join(err, a.card.advise(context.WithoutCancel(ctx), m.All(), ReadMostly()))
		}()
	}
	if err := a.card.call(ctx, func() error { return s.Prefetch(m.ptr(), m.n, Host()) }); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// coldest returns the memory that is not closed, in the order of its last use.
func (a *Allocator) coldest() []*Memory {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	return slices.SortedFunc(maps.Keys(a.live), func(x, y *Memory) int { return cmp.Compare(x.used, y.used) })
}
