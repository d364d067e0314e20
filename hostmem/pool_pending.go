package hostmem

import (
	"context"
	"errors"

	"github.com/gopinned/pinned/cudart"
)

// Blocks that were released on streams wait in the shards' pending lists.
// Nobody watches them: who needs memory asks for their events, outside of all
// locks, with the block taken out of its list. Of blocks that wait for one
// stream only the oldest is asked for, because a stream works in order.

// reap looks for a block of the class whose work is done.
func (p *poolCore) reap(class, n int) *block {
	var room [8]*cudart.Stream
	busy := room[:0]
	for i := range p.shards {
		s := &p.shards[i]
		for len(busy) < cap(room) {
			s.mu.Lock()
			b := s.popPending(class, n, busy)
			s.mu.Unlock()
			if b == nil {
				break
			}
			if b.settled() {
				return b
			}
			busy = append(busy, b.marks[b.live-1].stream)
			p.unpop(s, b)
		}
	}
	return nil
}

// reapAll moves every pending block whose work is done to the idle ones, and
// returns what the others wait for: for each list the oldest mark of a stream.
func (p *poolCore) reapAll() (waits []mark) {
	p.sweep.Lock()
	defer p.sweep.Unlock()
	for i := range p.shards {
		s := &p.shards[i]
		for class := range s.pending {
			s.mu.Lock()
			l := s.pending[class]
			s.pending[class] = blockList{}
			s.mu.Unlock()
			if l.first == nil {
				continue
			}
			var done, still blockList
			var busy []*cudart.Stream
			for b := l.first; b != nil; {
				next := b.next
				switch {
				case b.waitsFor(busy):
					still.pushBack(b)
				case b.settled():
					done.pushBack(b)
				default:
					m := b.marks[b.live-1]
					busy, waits = append(busy, m.stream), append(waits, m)
					still.pushBack(b)
				}
				b = next
			}
			s.putReaped(class, done, still)
		}
	}
	return waits
}

// putReaped puts a list that reapAll took out back, in two.
func (s *shard) putReaped(class int, done, still blockList) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := done.first; b != nil; {
		next := b.next
		s.waiting -= b.size
		s.pushFree(b)
		b = next
	}
	if still.first != nil {
		still.last.next = s.pending[class].first
		if still.last.next == nil {
			s.pending[class].last = still.last
		}
		s.pending[class].first = still.first
	}
}

// settleAll waits until no block is pending.
func (p *poolCore) settleAll(ctx context.Context) error {
	for {
		waits := p.reapAll()
		if len(waits) == 0 {
			return nil
		}
		for _, m := range waits {
			if m.lost {
				continue
			}
			// A failed wait leaves the question to the device.
			if err := m.event.Synchronize(ctx); err != nil && ctx.Err() != nil {
				return err
			}
		}
		if err := p.settleLost(ctx); err != nil {
			return err
		}
	}
}

// settleLost settles blocks whose events cannot tell, by waiting for all work
// of the devices. When that fails too, nothing tells whether the memory is in
// use: it stays as it is.
func (p *poolCore) settleLost(ctx context.Context) error {
	for i := range p.shards {
		s := &p.shards[i]
		for class := range s.pending {
			for {
				b := s.popLost(class)
				if b == nil {
					break
				}
				var err error
				for b.live > 0 && err == nil {
					m := &b.marks[b.live-1]
					if !m.lost {
						break
					}
					if err = m.stream.Device().Synchronize(ctx); err == nil {
						m.lost, m.stream = false, nil
						b.live--
					}
				}
				s.mu.Lock()
				s.unpop(b)
				s.mu.Unlock()
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// popLost takes a block out whose next mark is lost.
func (s *shard) popLost(class int) *block {
	s.mu.Lock()
	defer s.mu.Unlock()
	var before *block
	for b := s.pending[class].first; b != nil; before, b = b, b.next {
		if b.live > 0 && b.marks[b.live-1].lost {
			s.pending[class].remove(before, b)
			s.waiting -= b.size
			return b
		}
	}
	return nil
}

// closeEvents closes the events that no block holds. Those that cannot be
// closed stay for the next try.
func (p *poolCore) closeEvents() error {
	var errs []error
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		events := s.events
		s.events = nil
		s.mu.Unlock()
		for _, e := range events {
			if err := e.Close(); err != nil {
				errs = append(errs, err)
				p.giveEvent(e)
			}
		}
	}
	return errors.Join(errs...)
}
