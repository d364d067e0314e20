package loader

import (
	"context"
	"fmt"
	"math/bits"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// A slot is memory for one batch, pinned and on the device.
//
//	state      entered by                   | owned by
//	free       New, driver.collect, begin   | the driver
//	published  driver.publishAhead          | workers: each owns the samples of its claim
//	filled     worker.finishClaim           | the driver
//	copied     driver.copy                  | the loop
//	lent       loop.deliver                 | the consumer
//	released   driver.release               | nobody, until driver.collect
//
// A slot may become free at any time, also after errors. Its memory may be used again when
// copied and using are completed.
type slot struct {
	at   int // index of the slot in the loader's memory
	host []byte
	off  int // offset of host in the loader's buffer
	mem  cudart.DevPtr

	copied     cudart.Point // end of the last copy: host may be filled after it
	copyNumber int          // number of that copy, from 1; 0 if there was none
	using      fence.Fence  // the consumer's streams: mem may be written after them
	lent       atomic.Bool  // to the consumer, or released and not collected

	epoch, number int   // epoch and number of the batch
	indices       []int // numbers of the samples in the source
	skipped       []bool
	holes         atomic.Int32 // skipped samples
	missing       atomic.Int32 // samples that are not filled yet
}

// begin prepares the slot for a batch of n samples.
func (s *slot) begin(epoch, number, n int) {
	s.epoch, s.number = epoch, number
	s.indices, s.skipped = s.indices[:n], s.skipped[:n]
	clear(s.skipped)
	s.holes.Store(0)
	s.missing.Store(int32(n))
}

// samples sets fields to the bytes of the samples between two indices of the batch, one slice for
// each field.
func (s *slot) samples(l *layout, from, to int, fields [][]byte) {
	for f, n := range l.sizes {
		start, end := l.offsets[f]+from*n, l.offsets[f]+to*n
		fields[f] = s.host[start:end:end]
	}
}

// skip removes a sample from the batch.
func (s *slot) skip(at int) {
	s.skipped[at] = true
	s.holes.Add(1)
}

// compact moves the other samples to the front after samples were skipped.
func (s *slot) compact(l *layout) {
	if s.holes.Load() == 0 {
		return
	}
	to := 0
	for at, skipped := range s.skipped {
		if skipped {
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

// copyErr returns the error of the last copy, which has completed, if it was a copy of the epoch.
func (s *slot) copyErr(e *epoch) error {
	if err := s.copied.Err(); err != nil && s.epoch == e.number {
		return fmt.Errorf("copy of batch %d: %w", s.number, err)
	}
	return nil
}

// done reports whether the GPU is done with all of the slot's memory. It may query CUDA
// on the caller's goroutine.
func (s *slot) done() bool {
	background := context.Background()
	return s.copied.Done(background) && s.using.Done(background)
}

// completed reports whether the GPU is known to be done with all of the slot's memory. It makes no
// call.
func (s *slot) completed() bool { return s.copied.Completed() && s.using.Completed() }

// fillable reports whether the GPU is known to be done with the slot's host memory. It makes no call.
func (s *slot) fillable() bool { return s.copied.Completed() }

// wait waits until the GPU is done with all of the slot's memory.
func (s *slot) wait(ctx context.Context) error {
	if err := s.copied.Wait(ctx); err != nil {
		return err
	}
	return s.using.Wait(ctx)
}

// A slotSet is a set of the loader's slots: a bit for each, in memory order.
type slotSet struct {
	slots []*slot // all of the loader's
	bits  []uint64
}

func newSlotSet(slots []*slot) slotSet { return slotSet{slots, make([]uint64, (len(slots)+63)/64)} }

func (x *slotSet) add(s *slot)      { x.bits[s.at/64] |= 1 << (s.at % 64) }
func (x *slotSet) remove(s *slot)   { x.bits[s.at/64] &^= 1 << (s.at % 64) }
func (x *slotSet) has(s *slot) bool { return x.bits[s.at/64]&(1<<(s.at%64)) != 0 }

// completed returns the first slot with which the GPU is known to be done, and of the slots before
// it the one whose copy was queued first. It makes no call.
func (x *slotSet) completed() (first, oldest *slot) {
	for s := range x.all {
		if s.completed() {
			return s, oldest
		}
		if oldest == nil || s.copyNumber < oldest.copyNumber {
			oldest = s
		}
	}
	return nil, oldest
}

// all calls yield with each slot, until it returns false.
func (x *slotSet) all(yield func(*slot) bool) {
	for i, word := range x.bits {
		for ; word != 0; word &= word - 1 {
			if !yield(x.slots[64*i+bits.TrailingZeros64(word)]) {
				return
			}
		}
	}
}
