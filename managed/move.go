package managed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// Move moves ranges to a location and waits until they are there. The ranges may belong to several
// allocators. It prefetches them in chunks (cudaMemPrefetchAsync) from defaultIn or defaultOut
// goroutines, each of which occupies an OS thread: the driver allocates the host's pages on the
// calling thread, so one Prefetch to the host reaches only a part of the link's speed. Move is not
// ordered with streams: synchronise streams whose work uses the ranges before. To copy the bytes
// elsewhere instead, download them with a transfer.Copier.
//
// Errors are those of [Range.Prefetch]. After an error some of the bytes may have moved. If ctx
// ends, Move waits up to a second for the moves in flight.
func (a *Allocator) Move(ctx context.Context, to cudart.Location, ranges ...Range) error {
	if err := runBounded(ctx, func() error { return a.move(ctx, to, ranges) }); err != nil {
		return fmt.Errorf("managed: move %d ranges to %v: %w", len(ranges), to, err)
	}
	return nil
}

func (a *Allocator) move(ctx context.Context, to cudart.Location, ranges []Range) error {
	if err := a.mayPrefetch(ctx, to, ranges...); err != nil {
		return err
	}
	m, err := a.newMovers(ctx)
	if err != nil {
		return err
	}
	defer m.end()
	var chunks []Range
	for _, r := range ranges {
		if err := m.use(r.Memory); err != nil {
			return err
		}
		for base := int(r.Memory.ptr()); r.Len > 0; {
			n := min(defaultChunk-(base+r.Off)%defaultChunk, r.Len)
			chunks = append(chunks, r.Memory.Range(r.Off, n))
			r.Off, r.Len = r.Off+n, r.Len-n
		}
	}
	goroutines := defaultOut
	if to.Kind == cudart.LocationDevice {
		goroutines = defaultIn
	}
	var next atomic.Int64
	m.start(min(goroutines, len(chunks)), func(s *cudart.Stream) error {
		for i := int(next.Add(1)) - 1; i < len(chunks) && m.ctx.Err() == nil; i = int(next.Add(1)) - 1 {
			p, err := m.prefetch(s, chunks[i].ptr(), chunks[i].Len, to)
			if err = errors.Join(err, m.arrive(p)); err != nil {
				return err
			}
		}
		return nil
	})
	return m.wait()
}

// movers are goroutines that move memory, each on a stream of its own that has no other
// work: CUDA executes a prefetch on the calling thread then, and does not queue it behind others.
type movers struct {
	of   *Allocator
	ctx  context.Context // ends with the caller's context, or with the first error as its cause
	fail context.CancelCauseFunc
	rest context.Context // does not end: for calls that must be made although ctx has ended
	stop func() bool     // no longer ends ctx with the caller's
	wg   sync.WaitGroup
	used map[*Memory]bool // memory that is not freed before end
}

// newMovers counts a call of the Allocator until end.
func (a *Allocator) newMovers(ctx context.Context) (*movers, error) {
	switch {
	case ctx.Err() != nil:
		return nil, bounded.Ended(ctx)
	case !a.life.Begin():
		return nil, cudart.ErrClosed
	}
	m := &movers{of: a, rest: context.WithoutCancel(ctx), used: make(map[*Memory]bool)}
	m.ctx, m.fail = context.WithCancelCause(m.rest)
	m.stop = context.AfterFunc(ctx, func() { m.fail(bounded.Ended(ctx)) })
	return m, nil
}

// use counts a call of the memory until end, so that it is not freed before.
func (m *movers) use(memory *Memory) error {
	if !m.used[memory] {
		if !memory.life.Begin() {
			return fmt.Errorf("%v: %w", memory, cudart.ErrClosed)
		}
		m.used[memory] = true
	}
	return nil
}

// start starts n goroutines that call work, each with a stream. work must return soon after the end
// of ctx.
func (m *movers) start(n int, work func(s *cudart.Stream) error) {
	for range n {
		m.wg.Go(func() {
			s, err := m.stream()
			if err == nil {
				err = work(s)
				ledger.mu.Lock()
				m.of.streams = append(m.of.streams, s)
				ledger.mu.Unlock()
			}
			if err != nil {
				m.fail(err)
			}
		})
	}
}

// wait waits for the goroutines, and returns the first error.
func (m *movers) wait() error {
	m.wg.Wait()
	return context.Cause(m.ctx)
}

// end ends the calls that newMovers and use have counted.
func (m *movers) end() {
	for memory := range m.used {
		memory.life.End()
	}
	m.stop()
	m.of.life.End()
}

// stream returns an idle stream.
func (m *movers) stream() (s *cudart.Stream, err error) {
	ledger.mu.Lock()
	if last := len(m.of.streams) - 1; last >= 0 {
		s, m.of.streams = m.of.streams[last], m.of.streams[:last]
	}
	ledger.mu.Unlock()
	if s == nil {
		err = m.of.mem.calls.Inside(m.ctx, func() (err error) {
			s, err = m.of.dev.NewStream(cudart.StreamOptions{})
			return err
		})
	}
	return s, err
}

// prefetch queues a prefetch and returns its end.
func (m *movers) prefetch(s *cudart.Stream, p cudart.DevPtr, n int, to cudart.Location) (end cudart.Point, err error) {
	err = m.of.mem.calls.Inside(m.ctx, func() error {
		if err := s.Prefetch(p, n, to); err != nil {
			return err
		}
		end = s.Point()
		return nil
	})
	return end, err
}

// arrive waits for a prefetch, and returns its error. It waits also after the end of ctx, so
// that no move is in flight after the movers' end.
func (m *movers) arrive(end cudart.Point) error {
	return errors.Join(end.Wait(m.rest), end.Err())
}

// closeStreams destroys the streams, which no goroutine uses any more. After an error it may be
// called again.
func (a *Allocator) closeStreams() error {
	var errs []error
	a.streams = slices.DeleteFunc(a.streams, func(s *cudart.Stream) bool {
		err := s.Close()
		errs = append(errs, err)
		return err == nil
	})
	return errors.Join(errs...)
}
