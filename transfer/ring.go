package transfer

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/fence"
)

// A ring is pinned memory in slots of one size. They are used first in, first
// out: the next slot is the one whose copy was queued first.
type ring struct {
	buf   *hostmem.Buffer
	slots []*slot
	free  chan *slot
}

// A slot is memory that one chunk goes through. The goroutine that acquired it
// has it alone.
type slot struct {
	mem   []byte
	batch cudart.CopyBatch
	fence *fence.Fence // of the copies queued last
}

func newSlot(mem []byte) *slot { return &slot{mem: mem, fence: new(fence.Fence)} }

func newRing(ctx context.Context, dev *cudart.Device, slots, size int, label string) (*ring, error) {
	buf, err := hostmem.Alloc(ctx, dev, slots*size, hostmem.Options{Label: label})
	if err != nil {
		return nil, err
	}
	r := &ring{buf: buf, free: make(chan *slot, slots)}
	for _, off := range cut(buf.Spans(), size) {
		s := newSlot(buf.Bytes()[off : off+size : off+size])
		r.slots = append(r.slots, s)
		r.free <- s
	}
	if len(r.slots) == 0 {
		return r, fmt.Errorf("%v is registered in pieces of less than Options.Chunk, %d bytes: set a smaller Chunk", buf, size)
	}
	return r, nil
}

// cut returns the offsets of slots. CUDA copies only within one registration,
// so no slot crosses from one to the next.
func cut(spans []hostmem.Span, size int) (offs []int) {
	for _, s := range spans {
		for off := s.Off; off+size <= s.Off+s.Len; off += size {
			offs = append(offs, off)
		}
	}
	return offs
}

// acquire waits for a slot, and until the GPU is done with its memory. A nil
// ring has slots without memory, as many as are asked for.
func (r *ring) acquire(ctx context.Context) (*slot, error) {
	if r == nil {
		return newSlot(nil), nil
	}
	select {
	case s := <-r.free:
		return r.ready(ctx, s)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// tryAcquire returns nil if all slots are in use.
func (r *ring) tryAcquire(ctx context.Context) (*slot, error) {
	if r == nil {
		return newSlot(nil), nil
	}
	select {
	case s := <-r.free:
		return r.ready(ctx, s)
	default:
		return nil, nil
	}
}

// ready waits for the GPU. After an error the slot is back in the ring, where
// the next goroutine that acquires it waits again.
func (r *ring) ready(ctx context.Context, s *slot) (*slot, error) {
	err := s.fence.Wait(ctx)
	if err == nil {
		return s, nil
	}
	r.release(s)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, undetermined(err)
}

// release makes a slot available. Copies may still use it.
func (r *ring) release(s *slot) {
	if r != nil {
		r.free <- s
	}
}

// close waits until the GPU is done with all slots, unregisters and unmaps. It
// may be called again after an error.
func (r *ring) close(ctx context.Context) error {
	for _, s := range r.slots {
		if err := s.fence.Wait(ctx); err != nil {
			return undetermined(err)
		}
	}
	return r.buf.CloseContext(ctx)
}

// queued is to be called after copies that use the slot were queued on a
// stream, even if that failed, because some of them may be. The fence is a new
// one for each chunk: an upload asks its own for errors, when other copies may
// use the slot already.
func (s *slot) queued(on *cudart.Stream) *fence.Fence {
	s.fence = new(fence.Fence)
	s.fence.Add(on)
	s.fence.Record()
	return s.fence
}

// completed waits until the GPU is done with copies, and returns their error.
// There is no limit to the wait: their memory is in use until then.
func completed(f *fence.Fence) error {
	if err := f.Wait(context.Background()); err != nil {
		return undetermined(err)
	}
	return f.Err()
}

// undetermined is what an error of Fence.Wait means.
func undetermined(err error) error {
	return fmt.Errorf("the GPU may still be copying: %w", err)
}
