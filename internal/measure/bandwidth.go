package measure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// Result is the result of [Bandwidth].
type Result struct {
	SizeBytes       int           `json:"size_bytes"` // of one copy
	CopiesPerSample int           `json:"copies_per_sample"`
	WarmUpCopies    int           `json:"warm_up_copies"`
	Pin             time.Duration `json:"pin_ns"` // to map, populate and register SizeBytes
	Series          []Series      `json:"series"`
}

// Series are the samples of one direction, in the order in which they were taken.
type Series struct {
	Direction Direction `json:"direction"`
	Samples   []float64 `json:"samples_gb_per_s"`
	Stats
	// ShareOfLink is Median over the rate of the link under load, nil if that is unknown.
	ShareOfLink *float64 `json:"share_of_link,omitempty"`
}

// Find returns the series of a direction, and whether there is one.
func (r *Result) Find(d Direction) (Series, bool) {
	for _, s := range r.Series {
		if s.Direction == d {
			return s, true
		}
	}
	return Series{}, false
}

// Bandwidth measures copies between pinned memory and the device
// (cudaEventElapsedTime). Every sample is several copies between two events, timed by
// the device, so neither calls nor the clock of the host count. On a link so slow that a
// sample would take longer than a quarter of a second, copies are fewer and smaller, as the
// result says: copies in flight are waited for, so they are how late a ctx's end may be. If
// ctx ends, it waits for
// the copies in flight, releases everything and returns ctx's error, with the directions
// that were measured until then. A plan that is not valid is an error, without a result.
// Other errors are those of CUDA and of hostmem.Alloc, also with what was measured.
func Bandwidth(ctx context.Context, dev *cudart.Device, p Plan) (*Result, error) {
	p, err := p.normal()
	if err != nil {
		return nil, err
	}
	r := &Result{SizeBytes: p.SizeBytes, CopiesPerSample: p.Copies, WarmUpCopies: p.WarmUp}
	b, err := newBench(ctx, dev, p.SizeBytes)
	if err == nil {
		r.Pin = b.pin
		err = b.fit(ctx, &p, longestSample)
		r.SizeBytes, r.CopiesPerSample = p.SizeBytes, p.Copies
	}
	if err == nil {
		for _, d := range p.Directions {
			var s Series
			if s, err = b.series(ctx, d, p); err != nil {
				break
			}
			r.Series = append(r.Series, s)
		}
	}
	if err = errors.Join(err, b.close()); err != nil {
		return r, fmt.Errorf("measure: bandwidth of %v with copies of %d bytes: %w", dev, p.SizeBytes, err)
	}
	return r, nil
}

// bench holds the memory, stream and events of one run.
type bench struct {
	host       *hostmem.Buffer
	device     cudart.DevPtr
	stream     *cudart.Stream
	start, end *cudart.Event
	pin        time.Duration
	undo       []func() error // releases what was made, in the order of making
}

// newBench makes everything. After an error the bench holds what was made before, for
// close.
func newBench(ctx context.Context, dev *cudart.Device, n int) (*bench, error) {
	b := &bench{}
	var err error
	if b.stream, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
		return b, err
	}
	b.undo = append(b.undo, b.stream.Close)
	for _, e := range []**cudart.Event{&b.start, &b.end} {
		if *e, err = dev.NewEvent(cudart.EventOptions{Timing: true}); err != nil {
			return b, err
		}
		b.undo = append(b.undo, (*e).Close)
	}
	if b.device, err = dev.Malloc(n); err != nil {
		return b, err
	}
	b.undo = append(b.undo, func() error { return dev.Free(b.device) })
	began := time.Now()
	if b.host, err = hostmem.Alloc(ctx, dev, n, hostmem.Options{Label: "measure"}); err != nil {
		return b, err
	}
	b.pin = time.Since(began)
	b.undo = append(b.undo, b.host.Close)
	return b, nil
}

// close releases what was made, the last one first. The buffer's Close waits for the
// copies in flight.
func (b *bench) close() error {
	var errs []error
	for i := len(b.undo) - 1; i >= 0; i-- {
		errs = append(errs, b.undo[i]())
	}
	b.undo = nil
	return errors.Join(errs...)
}

const (
	longestSample = 250 * time.Millisecond
	smallestCopy  = 1 << 20 // that a plan is made smaller to
	probes        = 3       // of small copies: the first on an idle link are slow
)

// fit makes the copies of a plan fewer and then smaller, until a sample takes no longer
// than longest at the rate of the fastest of a few small copies.
func (b *bench) fit(ctx context.Context, p *Plan, longest time.Duration) error {
	probe := *p
	probe.SizeBytes, probe.Copies = min(p.SizeBytes, smallestCopy), 1
	for _, d := range p.Directions {
		fit := 1
		for range probes {
			took, err := b.sample(ctx, d, probe)
			if err != nil {
				return err
			}
			fit = max(fit, int(float64(probe.SizeBytes)*float64(longest)/float64(took)))
		}
		p.Copies = min(p.Copies, max(1, fit/p.SizeBytes))
		p.SizeBytes = min(p.SizeBytes, max(probe.SizeBytes, fit))
	}
	return nil
}

func (b *bench) series(ctx context.Context, d Direction, p Plan) (Series, error) {
	s := Series{Direction: d}
	if err := b.copies(d, p.SizeBytes, p.WarmUp); err != nil {
		return s, err
	}
	if err := b.stream.Synchronize(ctx); err != nil {
		return s, err
	}
	var spent time.Duration
	for len(s.Samples) < p.Samples && (spent < p.Budget || len(s.Samples) < fewestSamples) {
		took, err := b.sample(ctx, d, p)
		if err != nil {
			return s, err
		}
		spent += took
		s.Samples = append(s.Samples, float64(p.SizeBytes)*float64(p.Copies)/float64(took.Nanoseconds()))
	}
	s.Stats = Summarize(s.Samples)
	return s, nil
}

// sample returns the time of one sample on the device.
func (b *bench) sample(ctx context.Context, d Direction, p Plan) (time.Duration, error) {
	if err := b.stream.Record(b.start); err != nil {
		return 0, err
	}
	if err := b.copies(d, p.SizeBytes, p.Copies); err != nil {
		return 0, err
	}
	if err := b.stream.Record(b.end); err != nil {
		return 0, err
	}
	if err := b.stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	took, err := b.end.Since(b.start)
	if err == nil && took <= 0 {
		err = fmt.Errorf("the device measured %v for %d copies", took, p.Copies)
	}
	return took, err
}

func (b *bench) copies(d Direction, size, count int) error {
	for range count {
		var err error
		if d == HostToDevice {
			err = b.host.CopyToDevice(b.stream, b.device, 0, size)
		} else {
			err = b.host.CopyToHost(b.stream, 0, b.device, size)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
