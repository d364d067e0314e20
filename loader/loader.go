package loader

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

var (
	// ErrClosed is returned by methods of a loader that was closed.
	ErrClosed = errors.New("loader: already closed")

	// ErrRunning is returned where a loop over Batches must end first.
	ErrRunning = errors.New("loader: a loop over its batches is running")
)

// A Loader fills batches with samples and puts them onto a device.
type Loader struct {
	dev    *cudart.Device
	src    Source
	n      int         // samples
	comp   Transformer // src, or nil
	o      Options
	layout layout

	buf    *hostmem.Buffer
	mem    cudart.DevPtr
	stream *cudart.Stream // of all copies
	slots  []*slot
	free   chan *slot
	turns  chan struct{} // one for each that may compute

	stats   counters
	workers []workerCounters

	mu     sync.Mutex
	next   Position
	cancel context.CancelCauseFunc // of the loop that is running
	broken error                   // memory is out of use for good
	closed bool
	gone   bool
}

// New makes a loader, with all the pinned memory, device memory and streams
// that it will ever use: (Prefetch + 1) batches of both.
func New(ctx context.Context, dev *cudart.Device, src Source, o Options) (*Loader, error) {
	l, err := newLoader(ctx, dev, src, o)
	if err != nil {
		return nil, fmt.Errorf("loader: %w", err)
	}
	return l, nil
}

func newLoader(ctx context.Context, dev *cudart.Device, src Source, o Options) (*Loader, error) {
	o, layout, err := o.resolve(src)
	if err != nil {
		return nil, err
	}
	l := &Loader{
		dev: dev, src: src, n: src.Len(), o: o, layout: layout, next: o.Start.tidy(),
		turns:   make(chan struct{}, o.Computing),
		workers: make([]workerCounters, o.Workers),
	}
	l.comp, _ = src.(Transformer)
	if last := l.next.last(); last > l.batches() {
		return nil, fmt.Errorf("cannot start behind batch %d: an epoch has %d", last-1, l.batches())
	}
	if err := l.allocate(ctx); err != nil {
		return nil, errors.Join(err, l.release(context.WithoutCancel(ctx)))
	}
	return l, nil
}

func (l *Loader) allocate(ctx context.Context) (err error) {
	count, size := l.o.slots(), l.layout.bytes
	what := fmt.Sprintf("%d batches of %d bytes", count, size)
	if l.buf, err = hostmem.Alloc(ctx, l.dev, count*size, hostmem.Options{Label: l.o.Label}); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if l.mem, err = l.dev.Malloc(count * size); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if l.stream, err = l.dev.NewStream(cudart.StreamOptions{}); err != nil {
		return err
	}
	l.free = make(chan *slot, count)
	for i := range count {
		off := i * size
		s := &slot{
			host: l.buf.Bytes()[off : off+size], off: off, mem: l.mem + cudart.DevPtr(off),
			indices: make([]int, l.o.BatchSize), skipped: make([]bool, l.o.BatchSize),
		}
		l.slots = append(l.slots, s)
		for _, e := range []**cudart.Event{&s.began, &s.copied} {
			if *e, err = l.dev.NewEvent(cudart.EventOptions{Timing: true}); err != nil {
				return err
			}
		}
		l.free <- s
	}
	return nil
}

// Close gives everything back. A second Close does nothing. While a loop over
// Batches runs, it ends the loop and returns [ErrRunning], and where batches are
// kept it returns an error: Close again when they are not. The same goes for
// other errors.
func (l *Loader) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	switch {
	case l.gone:
		return nil
	case l.cancel != nil:
		l.cancel(ErrClosed)
		return fmt.Errorf("loader: close: %w: it is told to end, Close again when it has", ErrRunning)
	case l.broken == nil && len(l.free) < len(l.slots):
		return fmt.Errorf("loader: close: %d batches are kept: Close again when they are released", len(l.slots)-len(l.free))
	}
	if err := l.release(context.Background()); err != nil {
		return fmt.Errorf("loader: close: %w", err)
	}
	l.gone = true
	return nil
}

// release gives back what allocate got, as far as it got. Work of the consumer
// may still use the batches, so the device is waited for.
func (l *Loader) release(ctx context.Context) error {
	if l.mem != 0 {
		if err := l.dev.Synchronize(ctx); err != nil {
			return err
		}
		if err := l.dev.Free(l.mem); err != nil {
			return err
		}
		l.mem = 0
	}
	for _, s := range l.slots {
		if err := s.close(); err != nil {
			return err
		}
	}
	if l.stream != nil {
		if err := l.stream.Close(); err != nil {
			return err
		}
	}
	if l.buf == nil {
		return nil
	}
	return l.buf.CloseContext(ctx)
}

// Batches gives the batches of an epoch, the first call those of the first
// epoch, or what is left of it after Options.Start, and each call the next
// epoch. A batch is the loop's until its next turn, unless it is kept. An error
// ends the loop; the epoch is not begun again.
//
// When the loop ends, by whatever means, so do all workers, and nothing is in
// flight any more.
func (l *Loader) Batches(ctx context.Context) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		e, err := l.begin(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		defer e.end()
		for {
			asked := time.Now()
			s, err := e.get()
			l.stats.waits.Add(int64(time.Since(asked)))
			more := s != nil
			if more {
				more, err = e.give(s, yield)
			}
			if err != nil {
				// A loop that was left cannot be told any more.
				if s == nil || more {
					yield(nil, err)
				}
				return
			}
			if !more {
				return
			}
		}
	}
}

// begin starts the next epoch.
func (l *Loader) begin(ctx context.Context) (*epoch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, ErrClosed
	case l.cancel != nil:
		return nil, ErrRunning
	case l.broken != nil:
		return nil, l.broken
	}
	e := newEpoch(ctx, l, l.next)
	l.cancel = e.cancel
	l.next = Position{Epoch: l.next.Epoch + 1}
	return e, nil
}

// giveUp says that some of the memory may be in use for good. The loop that is
// running could wait for it forever.
func (l *Loader) giveUp(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cancel != nil {
		l.cancel(err)
	}
	l.broken = fmt.Errorf("loader: the device cannot tell what it is done with: %w", err)
}

// batches of an epoch.
func (l *Loader) batches() int {
	n := l.n / l.o.BatchSize
	if l.n%l.o.BatchSize > 0 && !l.o.DropLast {
		n++
	}
	return n
}

// sizeOf is the samples of a batch.
func (l *Loader) sizeOf(batch int) int {
	return min(l.o.BatchSize, l.n-batch*l.o.BatchSize)
}
