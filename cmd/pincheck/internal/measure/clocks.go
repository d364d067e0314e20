package measure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostos"
)

// A Span times work of a stream by two events (cudaEventElapsedTime). The time of the calls and
// the host's clock do not count.
type Span struct {
	start, end *cudart.Event
}

// ErrNoTime is wrapped by the error for work that took less than a step of the device's clock.
var ErrNoTime = errors.New("too short for the device's clock")

// NewSpan makes the events. Close it.
func NewSpan(dev *cudart.Device) (*Span, error) {
	s := &Span{}
	var err error
	for _, e := range []**cudart.Event{&s.start, &s.end} {
		if *e, err = dev.NewEvent(); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}

// Close destroys the events.
func (s *Span) Close() error {
	var errs []error
	for _, e := range []*cudart.Event{s.start, s.end} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	return errors.Join(errs...)
}

// Begin records the start on a stream (cudaEventRecord). Work of other streams is in the Span if
// they wait for the start, and the stream waits for them before Stop.
func (s *Span) Begin(on *cudart.Stream) error { return on.Record(s.start) }

// Stop records the end on a stream (cudaEventRecord).
func (s *Span) Stop(on *cudart.Stream) error { return on.Record(s.end) }

// Took waits for the stream, and returns the device's time from start to end.
func (s *Span) Took(ctx context.Context, on *cudart.Stream) (time.Duration, error) {
	if err := on.Synchronize(ctx); err != nil {
		return 0, err
	}
	took, err := s.end.Since(s.start)
	if err == nil && took <= 0 {
		err = fmt.Errorf("the device measured %v: %w", took, ErrNoTime)
	}
	return took, err
}

// End calls Stop and Took.
func (s *Span) End(ctx context.Context, on *cudart.Stream) (time.Duration, error) {
	if err := s.Stop(on); err != nil {
		return 0, err
	}
	return s.Took(ctx, on)
}

// Time returns the device's time of the work that queue queues on the stream.
func (s *Span) Time(ctx context.Context, on *cudart.Stream, queue func() error) (time.Duration, error) {
	if err := s.Begin(on); err != nil {
		return 0, err
	}
	if err := queue(); err != nil {
		return 0, errors.Join(err, on.Synchronize(context.WithoutCancel(ctx)))
	}
	return s.End(ctx, on)
}

// A Stopwatch measures the wall time and the CPU time of parts of samples, so that preparation
// and cleanup do not count.
type Stopwatch struct {
	// Now returns the time since some moment. nil is the clock of the host.
	Now func() time.Duration

	began     time.Duration
	cpu, used time.Duration
}

var started = time.Now()

func (w *Stopwatch) now() time.Duration {
	if w.Now == nil {
		return time.Since(started)
	}
	return w.Now()
}

// Start begins a part.
func (w *Stopwatch) Start() { w.began, w.cpu = w.now(), hostos.CPUTime() }

// Stop ends a part, and returns how long it took.
func (w *Stopwatch) Stop() time.Duration {
	took := w.now() - w.began
	w.used += hostos.CPUTime() - w.cpu
	return took
}

// CPU returns the CPU time of this process in all parts so far: see [Case.CPU].
func (w *Stopwatch) CPU() time.Duration { return w.used }
