package loader

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A slot is room for one batch, in pinned memory and on the device. It goes
// from the free ones to the workers, to the consumer, and back.
type slot struct {
	host []byte
	off  int // of host in the loader's buffer
	mem  cudart.DevPtr

	began, copied *cudart.Event   // around its copy
	flying        bool            // copied was recorded, and not waited for
	timed         bool            // began was recorded too
	done          []*cudart.Event // recorded where the consumer used it
	pending       int             // of done: the next copy waits for them

	// What it is filled with.
	number  int   // of the batch
	indices []int // of the samples, in order
	skipped []bool
	holes   atomic.Int32 // of skipped
	left    atomic.Int32 // samples that are not there yet
}

// begin readies the slot for a batch of n samples.
func (s *slot) begin(number, n int) {
	s.number = number
	s.indices, s.skipped = s.indices[:n], s.skipped[:n]
	clear(s.skipped)
	s.holes.Store(0)
	s.left.Store(int32(n))
}

// sample are the places of the sample at a position of the batch.
func (s *slot) sample(l *layout, at int, places [][]byte) {
	for f, n := range l.sizes {
		from := l.offsets[f] + at*n
		places[f] = s.host[from : from+n : from+n]
	}
}

// skip leaves a sample out.
func (s *slot) skip(at int) {
	s.skipped[at] = true
	s.holes.Add(1)
}

// compact closes the holes that samples left which were skipped.
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

// upload queues the copy of what the slot holds, behind the consumer's use of
// what it held before.
func (l *Loader) upload(s *slot) error {
	for s.pending > 0 {
		e := s.done[s.pending-1]
		if done, err := e.Query(); err != nil || !done { // the stream would lose time over one that is
			if err := l.stream.WaitEvent(e); err != nil {
				return err
			}
		}
		s.pending--
	}
	if s.timed = s.number%timedBatches == 0; s.timed {
		if err := l.stream.Record(s.began); err != nil {
			return err
		}
	}
	if n := len(s.indices); n == l.o.BatchSize {
		if err := l.buf.CopyToDevice(l.stream, s.mem, s.off, l.layout.bytes); err != nil {
			return err
		}
	} else {
		for f, size := range l.layout.sizes {
			at := l.layout.offsets[f]
			if err := l.buf.CopyToDevice(l.stream, s.mem+cudart.DevPtr(at), s.off+at, n*size); err != nil {
				return err
			}
		}
	}
	if err := l.stream.Record(s.copied); err != nil {
		return err
	}
	s.flying = true
	return nil
}

// timedBatches is how many share one time on the GPU, which costs the copy
// engine a pause.
const timedBatches = 8

// settle waits until the slot's copy is done, after which its pinned memory may
// be written.
func (l *Loader) settle(ctx context.Context, s *slot) error {
	if !s.flying {
		return nil
	}
	asked := time.Now()
	err := s.copied.Synchronize(ctx)
	l.stats.held.Add(int64(time.Since(asked)))
	if err != nil {
		return err
	}
	s.flying = false
	if !s.timed {
		return nil
	}
	if took, err := s.copied.Since(s.began); err == nil { // else it counts as nothing
		l.stats.copying.Add(timedBatches * int64(took))
	}
	return nil
}

// mark makes the next copy into the slot wait for what was queued on a stream.
// An event serves the streams of its own device only.
func (s *slot) mark(on *cudart.Stream) error {
	at := s.pending
	for at < len(s.done) && s.done[at].Device() != on.Device() {
		at++
	}
	if at == len(s.done) {
		e, err := on.Device().NewEvent(cudart.EventOptions{})
		if err != nil {
			return err
		}
		s.done = append(s.done, e)
	}
	s.done[at], s.done[s.pending] = s.done[s.pending], s.done[at]
	if err := on.Record(s.done[s.pending]); err != nil {
		return err
	}
	s.pending++
	return nil
}

func (s *slot) close() error {
	var errs []error
	for _, e := range append([]*cudart.Event{s.began, s.copied}, s.done...) {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	return errors.Join(errs...)
}
