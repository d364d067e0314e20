package loader

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// A slot is room for one batch, in pinned memory and on the device. It goes
// from Loader.free to the workers, to the consumer, and back. It may go back at
// any time, also after errors: whether its memory may be used again is up to its
// fences.
type slot struct {
	host []byte
	off  int // of host in the loader's buffer
	mem  cudart.DevPtr

	copying fence.Fence  // of its copies: host is filled again after them
	using   fence.Fence  // of the consumer's streams: mem is written again after them
	copied  cudart.Point // the end of the last copy
	turn    int          // of that copy, of all
	timing  timing       // of that copy

	// What it is filled with.
	epoch, number int // of the batch

	indices []int // of the samples, in order
	skipped []bool
	holes   atomic.Int32 // of skipped
	left    atomic.Int32 // samples that are not there yet
}

// begin readies the slot for a batch of n samples.
func (s *slot) begin(epoch, number, n int) {
	s.epoch, s.number = epoch, number
	s.indices, s.skipped = s.indices[:n], s.skipped[:n]
	clear(s.skipped)
	s.holes.Store(0)
	s.left.Store(int32(n))
}

// samples sets places to those of the samples from one position of the batch to
// another.
func (s *slot) samples(l *layout, from, to int, places [][]byte) {
	for f, n := range l.sizes {
		start, end := l.offsets[f]+from*n, l.offsets[f]+to*n
		places[f] = s.host[start:end:end]
	}
}

// skip leaves a sample out.
func (s *slot) skip(at int) {
	s.skipped[at] = true
	s.holes.Add(1)
}

// compact closes the holes that skipped samples left.
func (s *slot) compact(l *layout) {
	if s.holes.Load() == 0 {
		return
	}
	to := 0
	for at, gone := range s.skipped {
		if gone {
			continue
		}
		if to != at {
			s.indices[to] = s.indices[at]
			for f, n := range l.sizes {
				base := s.host[l.offsets[f]:]
				copy(base[to*n:(to+1)*n], base[at*n:])
			}
		}
		to++
	}
	s.indices = s.indices[:to]
}

// upload queues one copy of what the slots hold, which are neighbours in memory,
// after the consumer's work on what they held before. The device waits for that
// work, or the host if the device cannot be made to. One goroutine at a time uploads.
func (l *Loader) upload(ctx context.Context, slots ...*slot) error {
	m := l.meter.begin(l.stream, slots)
	for _, s := range slots {
		if s.using.Done(ctx) { // to wait for what is done costs the stream time
			continue
		}
		if err := s.using.Before(l.stream); err != nil {
			if err := s.using.Wait(ctx); err != nil {
				return fmt.Errorf("the GPU may be using the memory: %w", err)
			}
		}
	}
	m.ordered()
	err := l.queue(slots)
	if err == nil {
		n := 0
		for _, s := range slots {
			n += len(s.indices) * l.layout.sample()
		}
		m.queued(n)
	}
	copied := l.stream.Point()
	l.copies++
	for _, s := range slots {
		s.copied, s.turn = copied, l.copies
		s.copying.AddPoint(copied)
	}
	return err
}

// queue queues the copy of slots. One slot that is not full takes a copy for each
// field; of several all bytes are copied.
func (l *Loader) queue(slots []*slot) error {
	s := slots[0]
	n := len(s.indices)
	switch {
	case len(slots) > 1 || n == l.layout.samples:
		return l.buf.CopyToDevice(l.stream, s.mem, s.off, len(slots)*l.layout.bytes)
	case n == 0: // all were skipped
		return nil
	}
	for f, size := range l.layout.sizes {
		at := l.layout.offsets[f]
		if err := l.buf.CopyToDevice(l.stream, s.mem+cudart.DevPtr(at), s.off+at, n*size); err != nil {
			return err
		}
	}
	return nil
}

// reclaim waits until the slot's pinned memory may be filled again. It returns
// the error of its copy, if that was of this epoch and failed.
func (e *epoch) reclaim(s *slot) error {
	if err := s.copying.Wait(e.ctx); err != nil {
		return fmt.Errorf("the GPU may be using the memory: %w", err)
	}
	e.l.meter.read(s)
	if err := s.copying.Err(); err != nil && s.epoch == e.start.Epoch {
		return fmt.Errorf("copy of batch %d: %w", s.number, err)
	}
	return nil
}

// done reports whether the GPU is done with all of the slot's memory, which it may be
// asked about.
func (s *slot) done(ctx context.Context) bool { return s.copying.Done(ctx) && s.using.Done(ctx) }

// knownDone is done without asking. Of slots that are being copied the Point says at once
// that it is not.
func (s *slot) knownDone() bool { return s.copied.Known() && s.copying.Known() && s.using.Known() }

// wait waits until the GPU is done with all of the slot's memory.
func (s *slot) wait(ctx context.Context) error {
	if err := s.copying.Wait(ctx); err != nil {
		return err
	}
	return s.using.Wait(ctx)
}
