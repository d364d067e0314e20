package loader

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrClosed is returned by methods of a loader that was closed. It matches
	// [os.ErrClosed].
	ErrClosed = sentinel.New("already closed", os.ErrClosed)

	// ErrRunning is returned by what must wait until a loop over Batches ends.
	ErrRunning = errors.New("a loop over its batches is running")

	errNilContext = errors.New("the context is nil")
)

// A Loader fills batches with samples and copies them to a device. Its methods
// may be called from any goroutine.
type Loader struct {
	dev       *cudart.Device
	src       Source
	n         int         // samples
	batch     BatchSource // src, or nil
	transform Transformer // src, or nil
	o         Options
	layout    layout
	order     string // of the samples: see Position.Order

	buf    *hostmem.Buffer
	mem    cudart.DevPtr
	stream *cudart.Stream // of all copies
	copies int            // queued there
	slots  []*slot
	free   freeSlots
	turns  chan struct{} // one for each worker that may transform
	kept   atomic.Int32  // batches

	meter   meter
	loops   stopwatch
	stats   counters
	workers []workerCounters

	mu     sync.Mutex // not held during calls into the library
	next   Position
	cancel context.CancelCauseFunc // of the loop that is running
	closed bool                    // to loops

	released lifetime.Lifetime // what allocate has allocated
}

// New returns a loader with all the pinned memory, device memory and streams
// that it will ever use: (Prefetch + 1) batches of both. The context bounds New
// only. Errors are those of [hostmem.Alloc] and [cudart.Device.Malloc], or name
// what is wrong with the source or the options. After an error nothing stays
// allocated, unless the error says so.
func New(ctx context.Context, dev *cudart.Device, src Source, o Options) (*Loader, error) {
	l, err := newLoader(ctx, dev, src, o)
	if err != nil {
		return nil, fmt.Errorf("loader: new: %w", err)
	}
	return l, nil
}

func newLoader(ctx context.Context, dev *cudart.Device, src Source, o Options) (*Loader, error) {
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil:
		return nil, errors.New("the device is nil")
	case src == nil:
		return nil, errors.New("the source is nil")
	}
	o, layout, err := o.resolve(src)
	if err != nil {
		return nil, err
	}
	l := &Loader{
		dev: dev, src: src, n: src.Len(), o: o, layout: layout,
		turns:   make(chan struct{}, o.MaxTransforms),
		workers: make([]workerCounters, o.Workers),
		free:    freeSlots{added: make(chan struct{}, 1)},
	}
	l.batch, _ = src.(BatchSource)
	if m, ok := src.(memory); ok && l.layout.bytes <= mostUnread {
		l.batch = unread{m}
	}
	l.transform, _ = src.(Transformer)
	l.order = o.order(l.n)
	if err := o.Start.check(l.order, l.batches()); err != nil {
		return nil, err
	}
	l.next = o.Start.tidy()
	l.next.Order = l.order
	if err := l.allocate(ctx); err != nil {
		return nil, errors.Join(err, lifetime.Undo(ctx, l.release))
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
	for i := range count {
		off := i * size
		s := &slot{
			host: l.buf.Bytes()[off : off+size], off: off, mem: l.mem + cudart.DevPtr(off),
			indices: make([]int, l.layout.samples), skipped: make([]bool, l.layout.samples),
			timing: newTiming(l.dev),
		}
		l.slots = append(l.slots, s)
		l.free.put(s)
	}
	return nil
}

// Close waits for the copies and for the consumer's streams, as far as they use
// batches, and releases all memory. A second Close does nothing. After an error
// Close may be called again; memory is then still allocated if the GPU may be
// using it. While a loop over Batches runs, Close ends the loop and returns
// [ErrRunning]. While batches are kept, it returns an error that says how many.
func (l *Loader) Close() error { return l.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting when ctx ends. The loader is closed
// to loops then, and its memory stays allocated.
func (l *Loader) CloseContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("loader: close: %w", errNilContext)
	}
	err := l.shut()
	if err == nil {
		err = l.released.Close(ctx, l.release)
	}
	if err != nil {
		return fmt.Errorf("loader: close: %w", err)
	}
	return nil
}

// shut refuses loops from now on, and returns why the memory is in use.
func (l *Loader) shut() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.cancel != nil {
		l.cancel(ErrClosed)
		return fmt.Errorf("%w: it ends now, Close again when it has", ErrRunning)
	}
	if kept := l.kept.Load(); kept > 0 {
		return fmt.Errorf("%d batches are kept: Close again when they are released", kept)
	}
	return nil
}

// release undoes allocate, as far as that came. It may be called again.
func (l *Loader) release(ctx context.Context) error {
	for _, s := range l.slots {
		if err := s.wait(ctx); err != nil {
			return fmt.Errorf("all memory stays allocated, the GPU may be using it: %w", err)
		}
	}
	var errs []error
	if l.mem != 0 {
		err := l.dev.Free(l.mem)
		if err == nil {
			l.mem = 0
		}
		errs = append(errs, err)
	}
	for _, s := range l.slots {
		errs = append(errs, s.timing.close())
	}
	if l.stream != nil {
		errs = append(errs, l.stream.Close())
	}
	if l.buf != nil {
		errs = append(errs, l.buf.CloseContext(ctx))
	}
	return errors.Join(errs...)
}

// Batches returns the batches of an epoch: the first call those of the first
// epoch, or what is left of it after Options.Start, and each call those of the
// next epoch. A batch belongs to the loop's body for one turn, unless it is kept.
// An error ends the loop; the epoch is not begun again.
//
// The error is that of a sample or of a copy; ctx's, when that ends; [ErrClosed];
// or [ErrRunning], because one loop runs at a time.
//
// When the loop ends, also by break or panic, so do all workers: it waits until
// calls of the source return. Copies of batches that the loop did not get may go on
// then, Close waits for them.
//
// If all batches are kept when the loop asks for another, it waits, because
// other goroutines may release one. Nothing can show that none will: the wait
// ends with ctx, or when another goroutine calls Close, and the error says that
// all are kept. [Stats].Kept shows how many are.
func (l *Loader) Batches(ctx context.Context) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		e, err := l.begin(ctx)
		if err != nil {
			yield(nil, fmt.Errorf("loader: batches: %w", err))
			return
		}
		defer e.end()
		for {
			s, err := e.get()
			if s == nil && err == nil {
				err = e.finish()
			}
			switch {
			case err != nil:
				yield(nil, err)
				return
			case s == nil || !e.give(s, yield):
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
	case ctx == nil:
		return nil, errNilContext
	case l.closed:
		return nil, ErrClosed
	case l.cancel != nil:
		return nil, ErrRunning
	}
	l.loops.enter(starting)
	e := newEpoch(ctx, l, l.next)
	l.cancel = e.cancel
	l.next = Position{Epoch: l.next.Epoch + 1, Order: l.order}
	return e, nil
}

// batches returns how many an epoch has.
func (l *Loader) batches() int {
	n := l.n / l.o.BatchSize
	if l.n%l.o.BatchSize > 0 && !l.o.DropLast {
		n++
	}
	return n
}

// sizeOf returns how many samples a batch has.
func (l *Loader) sizeOf(batch int) int {
	return min(l.o.BatchSize, l.n-batch*l.o.BatchSize)
}
