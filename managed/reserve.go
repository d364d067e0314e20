package managed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// room checks that n more bytes on the card leave the reserve free.
func (a *Allocator) room(n int) error {
	if err := a.card.look(); err != nil {
		return err
	}
	c := a.card
	c.mu.Lock()
	defer c.mu.Unlock()
	if !fits(n, a.o.Reserve, c.free) {
		return fmt.Errorf("%w: %s of it stay on the host because the card had no room, and it has %s free of %s, of which %s are reserved (prefetch less, move other memory to the host with KeepReserve, or use a Plan)",
			ErrReserve, units.ExactBytes(n), units.ExactBytes(c.free), units.ExactBytes(c.total), units.ExactBytes(a.o.Reserve))
	}
	return nil
}

// KeepReserve makes at least want bytes of the card free, or Options.Reserve if want is 0:
// before a library allocates there, for example. It moves memory of the allocator to the
// host by prefetching it there on s, what was allocated or prefetched longest ago first,
// and waits until it is there. moved is how many bytes it prefetched; those that were on
// the host already count, too. Memory of which only a part is advised ReadMostly may leave
// copies on the card.
//
// The error wraps [ErrReserve] if that is not enough: other memory fills the card. Others
// are a nil stream, [ErrNotConcurrent] if memory would have to move, those of CUDA, and
// ctx's if that ends first.
func (a *Allocator) KeepReserve(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	if want == 0 {
		want = a.o.Reserve
	}
	moved, err = a.keepReserve(ctx, s, want)
	if err != nil {
		return moved, fmt.Errorf("managed: keep %d bytes of %v free: %w", want, a.dev, err)
	}
	return moved, nil
}

func (a *Allocator) keepReserve(ctx context.Context, s *cudart.Stream, want int) (moved int, err error) {
	switch {
	case ctx == nil:
		return 0, errNilContext
	case s == nil:
		return 0, errNilStream
	case want < 0:
		return 0, errors.New("must not be negative")
	}
	for _, m := range a.coldest() {
		free, _, err := a.dev.MemInfo()
		if err != nil {
			return moved, err
		}
		if free >= want {
			return moved, nil
		}
		if !m.life.Begin() {
			continue
		}
		err = a.moveOut(ctx, s, m)
		m.life.End()
		if err != nil {
			return moved, fmt.Errorf("move %v to the host: %w", m, err)
		}
		moved += m.n
	}
	free, total, err := a.dev.MemInfo()
	if err != nil {
		return moved, err
	}
	if free < want {
		return moved, fmt.Errorf("%w: %s are free of %s, and no managed memory of this allocator is left to move to the host: other memory fills the card", ErrReserve, units.ExactBytes(free), units.ExactBytes(total))
	}
	return moved, nil
}

// moveOut moves memory to the host. Copies of memory that is read mostly would stay on the
// card, so that advice is undone meanwhile.
func (a *Allocator) moveOut(ctx context.Context, s *cudart.Stream, m *Memory) (err error) {
	if !a.concurrent {
		return ErrNotConcurrent
	}
	at, err := a.dev.RangeAttributes(m.ptr(), m.n)
	if err != nil && !errors.Is(err, cudart.ErrUnsupported) {
		return err
	}
	if at.ReadMostly {
		if err := a.dev.MemAdvise(m.ptr(), m.n, cudart.AdviseUnsetReadMostly, Host()); err != nil {
			return err
		}
		defer func() {
			err = errors.Join(err, a.dev.MemAdvise(m.ptr(), m.n, cudart.AdviseReadMostly, Host()))
		}()
	}
	if err := s.Prefetch(m.ptr(), m.n, Host()); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// coldest returns the memory that is open, that used longest ago first.
func (a *Allocator) coldest() []*Memory {
	a.mu.Lock()
	defer a.mu.Unlock()
	type at struct {
		m    *Memory
		used uint64
	}
	var list []at
	for m := a.live.first; m != nil; m = m.next {
		list = append(list, at{m, m.used})
	}
	slices.SortFunc(list, func(x, y at) int { return cmp.Compare(x.used, y.used) })
	open := make([]*Memory, len(list))
	for i, l := range list {
		open[i] = l.m
	}
	return open
}
