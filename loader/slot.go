package loader

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
)

// A slot is memory for one batch, pinned and on the device.
//
//	state   entered by                   | owned by
//	free    New, Release, driver.begin   | the driver
//	open    driver.open                  | workers: each has the samples that it claimed
//	filled  worker.handIn                | the driver
//	copied  driver.copy                  | the loop
//	lent    loop.give                    | the consumer, until Release
//
// A slot may become free at any time, also after errors: whether its memory may be used
// again is up to copied and using.
type slot struct {
	host []byte
	off  int // of host in the loader's buffer
	mem  cudart.DevPtr

	copied     cudart.Point // end of the last copy: host is filled again after it
	copyNumber int          // of that copy, from 1; 0 if there was none
	using      fence.Fence  // of the consumer's streams: mem is written again after them
	lent       atomic.Bool

	epoch, number int   // of the batch
	indices       []int // of the samples, in order
	skipped       []bool
	holes         atomic.Int32 // skipped samples
	missing       atomic.Int32 // samples that are not there yet
}

// begin readies the slot for a batch of n samples.
func (s *slot) begin(epoch, number, n int) {
	s.epoch, s.number = epoch, number
	s.indices, s.skipped = s.indices[:n], s.skipped[:n]
	clear(s.skipped)
	s.holes.Store(0)
	s.missing.Store(int32(n))
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

// failed returns the error of the last copy, which is done, if that was of the epoch.
func (s *slot) failed(e *epoch) error {
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

// knownDone is done without a query.
func (s *slot) knownDone() bool { return s.copied.Known() && s.using.Known() }

// wait waits until the GPU is done with all of the slot's memory.
func (s *slot) wait(ctx context.Context) error {
	if err := s.copied.Wait(ctx); err != nil {
		return err
	}
	return s.using.Wait(ctx)
}
