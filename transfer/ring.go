package transfer

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// A ring is pinned memory in slots of one size, lent first in, first out: the
// one lent next is the one whose copy began first.
type ring struct {
	dev  *cudart.Device
	buf  *hostmem.Buffer
	size int
	free chan *slot
}

// A slot is memory that one chunk goes through. Whoever took it has it alone.
type slot struct {
	dev   *cudart.Device
	mem   []byte
	batch cudart.CopyBatch
	event *cudart.Event // recorded behind the copies
	state slotState
}

type slotState int

const (
	idle    slotState = iota
	flying            // until event
	unknown           // a copy may be under way, and no event tells
)

func newRing(ctx context.Context, dev *cudart.Device, slots, size int, label string) (*ring, error) {
	buf, err := hostmem.Alloc(ctx, dev, slots*size, hostmem.Options{Label: label})
	if err != nil {
		return nil, err
	}
	r := &ring{dev: dev, buf: buf, size: size, free: make(chan *slot, slots)}
	// No slot may cross from one registration to the next.
	for _, span := range buf.Spans() {
		for off := span.Off; off+size <= span.Off+span.Len; off += size {
			e, err := dev.NewEvent(cudart.EventOptions{})
			if err != nil {
				return nil, errors.Join(err, r.close(ctx))
			}
			r.free <- &slot{dev: dev, mem: buf.Bytes()[off : off+size : off+size], event: e}
		}
	}
	if len(r.free) == 0 {
		return nil, errors.Join(fmt.Errorf("%v is registered in pieces that are less than a chunk of %d bytes: set a smaller Chunk", buf, size), r.close(ctx))
	}
	return r, nil
}

// take lends a slot whose memory is free to be used.
func (r *ring) take(ctx context.Context) (*slot, error) {
	select {
	case s := <-r.free:
		return r.settled(ctx, s)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// try lends a slot if one is there.
func (r *ring) try(ctx context.Context) (*slot, error) {
	select {
	case s := <-r.free:
		return r.settled(ctx, s)
	default:
		return nil, nil
	}
}

func (r *ring) settled(ctx context.Context, s *slot) (*slot, error) {
	if err := s.settle(ctx); err != nil {
		r.put(s)
		return nil, err
	}
	return s, nil
}

// put takes a slot back, whose copy may still be under way.
func (r *ring) put(s *slot) { r.free <- s }

// close waits for all slots and their copies. It may be tried again.
func (r *ring) close(ctx context.Context) error {
	for n := len(r.free); n > 0; n-- {
		s := <-r.free
		err := s.settle(ctx)
		if err == nil {
			err = s.event.Close()
		}
		if err != nil {
			r.put(s)
			return err
		}
	}
	return r.buf.CloseContext(ctx)
}

// settle waits until no copy uses the slot.
func (s *slot) settle(ctx context.Context) error {
	err := error(nil)
	if s.state == flying {
		if err = s.event.Synchronize(ctx); err != nil && ctx.Err() == nil {
			s.state = unknown
		}
	}
	if s.state == unknown {
		err = s.dev.Synchronize(ctx)
	}
	if err == nil {
		s.state = idle
	}
	return err
}

// send queues a copy of n bytes of the slot, from off on, to the device.
func (s *slot) send(on *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	err := on.CopyToDevice(dst, unsafe.Pointer(&s.mem[off]), n)
	if err != nil {
		return err
	}
	return s.mark(on)
}

// receive queues a copy of n bytes from the device to the slot's begin.
func (s *slot) receive(on *cudart.Stream, src cudart.DevPtr, n int) error {
	err := on.CopyToHost(unsafe.Pointer(&s.mem[0]), src, n)
	if err != nil {
		return err
	}
	return s.mark(on)
}

// mark remembers that work just queued uses the slot.
func (s *slot) mark(on *cudart.Stream) error {
	s.state = unknown
	if err := on.Record(s.event); err != nil {
		return err
	}
	s.state = flying
	return nil
}
