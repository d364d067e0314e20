package loader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/sentinel"
)

var errReleased = sentinel.New("already released", cudart.ErrClosed)

var (
	errNilStream    = errors.New("the stream is nil or zero")
	errNotDelivered = errors.New("the batch is nil or zero: Loader.Batches delivers batches")
)

// A Batch is some samples on the device. The memory belongs to the [Loader], which uses it
// again after Release. One goroutine at a time may use a Batch.
type Batch struct {
	l          *Loader
	s          *slot
	indices    []int
	epoch      int
	number     int
	position   Position
	retained   bool
	released   atomic.Bool
	ends       []cudart.Point // of the streams' work on it, if the loop released it
	endsBuffer [2]cudart.Point
}

// Use makes work that is queued on s from now on wait until the batch is on the
// device (cudaStreamWaitEvent, unless s waits for the same copy already). The loader does not
// write the batch's memory before s has completed the work that is queued on it until Release.
// Call it once for each stream that uses the batch; s may be of another device, and may be
// closed before Release.
//
// It does not wait for the GPU. It takes no context, as the calls of CUDA for which it is made
// take none: it takes as long as cudaStreamWaitEvent, and cudaEventRecord for the batch before.
//
// The error is [cudart.ErrClosed], a nil or zero stream, a loader of [NewHost], or CUDA's: work that is queued on s then does not
// wait for the batch, and Wait can be called instead.
func (b *Batch) Use(s *cudart.Stream) error {
	err := b.usable()
	switch {
	case err != nil:
	case b.l.dev == nil:
		err = errNoDevice
	case s == nil || s.Device() == nil:
		err = errNilStream
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

// recordEnds records events at the ends of the streams' work on a batch that the loop released.
// It does not use the slot's fence, because the slot may belong to another batch by now.
func (b *Batch) recordEnds() {
	for _, end := range b.ends {
		fence.Record(end)
	}
}

// Wait waits until the batch is on the device (cudaEventQuery), if there is one. It returns ctx's
// error and cause if ctx ends first, [cudart.ErrClosed], or the error of the copy.
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
		return errNotDelivered
	case b.released.Load():
		return errReleased
	}
	return nil
}

func (b *Batch) failed(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("loader: %s %v: %w", doing, b, err)
}

// orZero returns the zero Batch for nil.
func (b *Batch) orZero() *Batch {
	if b == nil {
		return new(Batch)
	}
	return b
}

// Len returns the number of samples: BatchSize, or fewer at the end of an epoch and if
// samples were skipped.
func (b *Batch) Len() int { return len(b.orZero().indices) }

// Indices returns the numbers of the samples in the source, in the order of the batch. The
// slice must not be changed, nor used after Release.
func (b *Batch) Indices() []int { return b.orZero().indices }

// Field returns the device address of field f, counted from 0. The samples' bytes of the field
// stand there back to back, aligned to 256 bytes. It returns 0 if there is no such field or no
// device. Streams may use the memory after Use, copies to the host after Wait, and nothing after
// Release.
func (b *Batch) Field(f int) cudart.DevPtr {
	if !b.has(f) || b.l.dev == nil {
		return 0
	}
	return b.s.mem + cudart.DevPtr(b.l.layout.offsets[f])
}

// Host returns the bytes of field f in pinned memory, or in that of [NewHost]. It returns nil after
// Release, if there is no such field, and where the GPU gathers ([InMemory], [Shards]), whose batches have no host memory. The bytes must not be changed; those of a loader without a
// device may be, until Release.
func (b *Batch) Host(f int) []byte {
	if !b.has(f) || b.released.Load() || b.l.gather != nil {
		return nil
	}
	from := b.l.layout.offsets[f]
	return b.s.host[from : from+len(b.indices)*b.l.layout.sizes[f]]
}

// Offset returns the place of field f in the loader's host memory, in bytes from its beginning: a
// multiple of 256. It returns -1 if there is no such field or no host memory. A process that maps the memory of
// [NewHost] finds the batch by it.
func (b *Batch) Offset(f int) int {
	if !b.has(f) || b.l.gather != nil {
		return -1
	}
	return b.s.off + b.l.layout.offsets[f]
}

func (b *Batch) has(f int) bool {
	return b != nil && b.l != nil && f >= 0 && f < len(b.l.layout.offsets)
}

// Epoch returns the number of the epoch, from 0.
func (b *Batch) Epoch() int { return b.orZero().epoch }

// Number returns the number of the batch in its epoch, from 0.
func (b *Batch) Number() int { return b.orZero().number }

// Position returns the place after this batch, for [Options.Start]. After the last batch of
// an epoch that is the beginning of the next one.
func (b *Batch) Position() Position { return b.orZero().position }

// Retain keeps the batch valid beyond the loop's turn, until Release, which any
// goroutine may call. Meanwhile the loader has memory for one batch less. If all
// (Prefetch + 1) batches are retained, the loop waits until one is released. It does not block.
func (b *Batch) Retain() {
	if b.usable() == nil && !b.retained {
		b.retained = true
		b.l.counters.retained.Add(1)
	}
}

// Release ends the use of the batch. The loader writes its device memory again when the streams
// of Use have completed the work that is queued on them now. Release records the end of that
// work (cudaEventRecord, unless nothing was queued since the last event), and does not wait for
// it. It takes no context, as Use. An event that cannot be recorded is recorded later. The loop
// releases batches that were not retained: then the next Use records the events. A second Release
// returns [cudart.ErrClosed].
func (b *Batch) Release() error {
	if err := b.usable(); err != nil || b.released.Swap(true) {
		return b.failed("release", cmp.Or(err, error(errReleased)))
	}
	b.s.using.Record()
	b.free()
	return nil
}

// endTurn releases the batch at the end of the loop's turn, unless the body has. It makes no
// call into CUDA, because the loop must end with its context.
func (b *Batch) endTurn() {
	if b.retained || b.released.Swap(true) {
		return
	}
	b.s.using.Next() // fixes the ends of the work
	b.ends = b.s.using.Points(b.endsBuffer[:0])
	b.l.unrecorded.Store(b)
	b.free()
}

func (b *Batch) free() {
	if b.retained {
		b.l.counters.retained.Add(-1)
	}
	b.l.driver.release(b.s)
}

// String names the batch in messages.
func (b *Batch) String() string {
	b = b.orZero()
	return fmt.Sprintf("batch %d of epoch %d", b.number, b.epoch)
}
