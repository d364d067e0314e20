package loader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/sentinel"
)

// ErrReleased is returned by methods of a batch that was released. It matches
// [os.ErrClosed].
var ErrReleased = sentinel.New("already released", os.ErrClosed)

var (
	errNoStream = errors.New("the stream is nil")
	errNotGiven = errors.New("no loader has given it")
)

// A Batch is samples on the device, in memory of a [Loader], until it is
// released. It is for one goroutine at a time.
type Batch struct {
	l        *Loader
	s        *slot
	indices  []int
	epoch    int
	number   int
	position Position
	kept     bool
	released atomic.Bool
	ends     []cudart.Point // of the work on it, if the loop has released it
	room     [2]cudart.Point
}

// Use makes work that is queued on s from now on wait until the batch is on the
// device (cudaStreamWaitEvent, unless s waits for that already, for another batch of the
// same copy). The batch's memory is then not written again before s has done what is
// queued on it until Release. Call it once for each stream that uses the batch; s may be
// of another device, and may be closed before Release.
//
// The error is [ErrReleased], or CUDA's: work that is queued on s then does not
// wait for the batch, and Wait can be tried instead.
func (b *Batch) Use(s *cudart.Stream) error {
	err := b.usable()
	if err == nil && s == nil {
		err = errNoStream
	}
	if err == nil {
		if last := b.l.unrecorded.Swap(nil); last != nil {
			last.recordEnds() // before s gets work for this batch
		}
		err = s.WaitPoint(b.s.copied)
		b.s.using.Add(s)
	}
	return b.failed("use", err)
}

// recordEnds records events for the ends of the work on a batch that the loop has released.
// It leaves the slot's fence alone, because the slot may be another batch's by now.
func (b *Batch) recordEnds() {
	for _, end := range b.ends {
		end.Record()
	}
}

// Wait waits until the batch is on the device. It returns ctx's error if that
// ends first, [ErrReleased], or the copy's error if it failed.
func (b *Batch) Wait(ctx context.Context) error {
	err := b.usable()
	if err == nil {
		err = b.s.copied.Wait(ctx)
	}
	if err == nil {
		err = b.s.copied.Err()
	}
	return b.failed("wait for", err)
}

// usable returns why the batch cannot be used.
func (b *Batch) usable() error {
	switch {
	case b == nil || b.l == nil:
		return errNotGiven
	case b.released.Load():
		return ErrReleased
	}
	return nil
}

func (b *Batch) failed(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("loader: %s %v: %w", doing, b, err)
}

// orZero returns a batch of nothing for nil.
func (b *Batch) orZero() *Batch {
	if b == nil {
		return new(Batch)
	}
	return b
}

// Len returns the number of samples: BatchSize, or fewer if samples were skipped
// and at an epoch's end.
func (b *Batch) Len() int { return len(b.orZero().indices) }

// Indices returns which samples these are, in the order of the batch. The slice
// must not be changed, nor used after Release.
func (b *Batch) Indices() []int { return b.orZero().indices }

// Field returns the device address of field f, counted from 0: that of the
// samples back to back, aligned to 256 bytes; 0 if there is no such field. It may be used
// by streams after Use, by the host after Wait, and not after Release.
func (b *Batch) Field(f int) cudart.DevPtr {
	if !b.has(f) {
		return 0
	}
	return b.s.mem + cudart.DevPtr(b.l.layout.offsets[f])
}

// Host returns the bytes of field f in pinned memory until the batch is
// released, and nil afterwards, or if there is no such field. They must not be changed.
func (b *Batch) Host(f int) []byte {
	if !b.has(f) || b.released.Load() {
		return nil
	}
	from := b.l.layout.offsets[f]
	return b.s.host[from : from+len(b.indices)*b.l.layout.sizes[f]]
}

func (b *Batch) has(f int) bool {
	return b != nil && b.l != nil && f >= 0 && f < len(b.l.layout.offsets)
}

// Epoch returns the number of the epoch, from 0.
func (b *Batch) Epoch() int { return b.orZero().epoch }

// Number returns the number of the batch in its epoch, from 0.
func (b *Batch) Number() int { return b.orZero().number }

// Position returns where to go on after this batch: see [Options.Start].
func (b *Batch) Position() Position { return b.orZero().position }

// Keep keeps the batch beyond the loop's turn, until Release, which any
// goroutine may call. Meanwhile the loader has one batch less to fill. If all
// (Prefetch + 1) batches are kept, the loop waits until one is released.
func (b *Batch) Keep() {
	if b.usable() == nil && !b.kept {
		b.kept = true
		b.l.counters.kept.Add(1)
	}
}

// Release ends the use of the batch. Its device memory is written again when
// the streams that were passed to Use have done what is queued on them now
// (cudaEventRecord, unless nothing was queued since the last event); Release does not
// wait for that, and an event that cannot be recorded is recorded later. The loop
// releases batches that were not kept: then the next Use records the events. A second
// Release returns [ErrReleased].
func (b *Batch) Release() error {
	if err := b.usable(); err != nil || b.released.Swap(true) {
		return b.failed("release", cmp.Or(err, error(ErrReleased)))
	}
	b.s.using.Record()
	b.free()
	return nil
}

// endTurn releases the batch for the loop, unless the body has. It makes no call into CUDA,
// as the loop must end with its context.
func (b *Batch) endTurn() {
	if b.kept || b.released.Swap(true) {
		return
	}
	b.s.using.Next() // fixes the ends
	b.ends = b.s.using.Points(b.room[:0])
	b.l.unrecorded.Store(b)
	b.free()
}

func (b *Batch) free() {
	if b.kept {
		b.l.counters.kept.Add(-1)
	}
	b.l.driver.release(b.s)
}

// String names the batch in messages.
func (b *Batch) String() string {
	b = b.orZero()
	return fmt.Sprintf("batch %d of epoch %d", b.number, b.epoch)
}
