package loader

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// ErrReleased is returned by methods of a batch that was released.
var ErrReleased = errors.New("loader: batch already released")

// A Batch is samples on the device, lent by a [Loader] until it is released.
// It is for one goroutine at a time.
type Batch struct {
	l        *Loader
	s        *slot
	indices  []int
	epoch    int
	number   int
	position Position
	used     []*cudart.Stream
	kept     bool
	released bool
}

// Use makes work that is queued on s from now on wait until the batch is there
// (cudaStreamWaitEvent), and the memory of the batch wait for s when it is
// released. Call it once for each stream that uses the batch.
func (b *Batch) Use(s *cudart.Stream) error {
	if b.released {
		return ErrReleased
	}
	if s == nil {
		return fmt.Errorf("loader: use %v: the stream is nil", b)
	}
	if err := s.WaitEvent(b.s.copied); err != nil {
		return fmt.Errorf("loader: use %v: %w", b, err)
	}
	if !slices.Contains(b.used, s) {
		b.used = append(b.used, s)
	}
	return nil
}

// Wait waits on the host until the batch is there.
func (b *Batch) Wait(ctx context.Context) error {
	if b.released {
		return ErrReleased
	}
	if err := b.s.copied.Synchronize(ctx); err != nil {
		return fmt.Errorf("loader: wait for %v: %w", b, err)
	}
	return nil
}

// Len returns the number of samples: BatchSize, or fewer where samples were
// skipped and at an epoch's end.
func (b *Batch) Len() int { return len(b.indices) }

// Indices returns which samples these are, in the order of the batch. The slice
// is the batch's, until it is released.
func (b *Batch) Indices() []int { return b.indices }

// Field returns where field f of the samples lies on the device, back to back,
// aligned to 256 bytes. It may be used by streams after Use, and on the host
// after Wait.
func (b *Batch) Field(f int) cudart.DevPtr {
	return b.s.mem + cudart.DevPtr(b.l.layout.offsets[f])
}

// Host returns the same bytes in pinned memory, until the batch is released,
// and nil afterwards. They must not be changed.
func (b *Batch) Host(f int) []byte {
	if b.released {
		return nil
	}
	from := b.l.layout.offsets[f]
	return b.s.host[from : from+len(b.indices)*b.l.layout.sizes[f]]
}

// Epoch returns the number of the epoch, from 0 on.
func (b *Batch) Epoch() int { return b.epoch }

// Number returns the number of the batch in its epoch, from 0 on.
func (b *Batch) Number() int { return b.number }

// Position returns where to go on after this batch: see [Options.Start].
func (b *Batch) Position() Position { return b.position }

// Keep keeps the batch beyond the loop's turn, until Release. It is one less to
// be filled meanwhile.
func (b *Batch) Keep() { b.kept = true }

// Release gives the batch back. Its memory on the device is written again when
// the streams that it was given to by Use have done what was queued so far. The
// loop does so itself for batches that were not kept. A second Release gives
// [ErrReleased].
func (b *Batch) Release() error {
	if b.released {
		return ErrReleased
	}
	b.released = true
	for _, s := range b.used {
		if err := b.l.leave(b.s, s); err != nil {
			b.l.giveUp(err)
			return fmt.Errorf("loader: release %v: %w", b, err)
		}
	}
	b.l.free <- b.s
	return nil
}

// leave makes the slot's next copy wait for a stream, or, where that cannot be
// marked, waits itself.
func (l *Loader) leave(s *slot, on *cudart.Stream) error {
	if s.mark(on) == nil {
		return nil
	}
	if on.Synchronize(context.Background()) == nil {
		return nil
	}
	return on.Device().Synchronize(context.Background())
}

// String names the batch in messages.
func (b *Batch) String() string { return fmt.Sprintf("batch %d of epoch %d", b.number, b.epoch) }
