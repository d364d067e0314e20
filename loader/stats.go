package loader

import (
	"context"
	"sync/atomic"
	"time"
)

// A Stage is a step of the work on a batch.
type Stage string

const (
	// StageSource is Source.Read.
	StageSource Stage = "source"
	// StageTransform is Options.Transform.
	StageTransform Stage = "transform"
	// StageCopy is the copy to the device.
	StageCopy Stage = "copy"
	// StageConsumer is the loop's body, and the work on its streams.
	StageConsumer Stage = "consumer"
)

// Stats are counts and times of a loader since New. Times of workers are sums over all workers,
// up to the last claim that each of them completed.
type Stats struct {
	// Samples is the number of samples whose copies to the device were queued, or that were
	// filled without one, and Bytes their size.
	Samples, Bytes int
	// Batches is the number of batches that were delivered, and Retained the number of
	// batches that are retained now.
	Batches, Retained int
	// Skipped is the number of samples that failed and were skipped, and Retried the number of
	// attempts after the first one.
	Skipped, Retried int
	// Gathered is the number of samples that the GPU fetched from pinned memory: all, or none.
	Gathered int

	// Elapsed is the time in loops over Batches, up to now.
	Elapsed time.Duration
	// BatchWaits is the part of Elapsed in which the loop waited for a batch, and
	// FirstWaits the part of BatchWaits for the first batch of an epoch.
	BatchWaits, FirstWaits time.Duration
	// Consuming is the part of Elapsed in the loop's body. While all batches are
	// kept, waiting for one counts as Consuming too.
	Consuming time.Duration

	// Reading is the time of workers in Read, and Transforming their time in Transform.
	Reading, Transforming time.Duration
	// TransformWaits is the time of workers that waited because MaxTransforms
	// others were in Transform.
	TransformWaits time.Duration
	// SlotWaits is the time of workers that waited for memory: for the release of a batch, or
	// for its last copy.
	SlotWaits time.Duration

	// Copying is the time of copies, and CopyWaits the time in which copies waited for the
	// consumer's streams, which still used the memory. Both are measured with events
	// (cudaEventElapsedTime) around some of the copies, and scaled to all bytes. Without
	// events they are 0.
	Copying, CopyWaits time.Duration

	// PinnedBytes is the size of the loader's pinned memory, without [Shards], or of that of [NewHost],
	// which it did not pin.
	PinnedBytes int

	maxTransforms int
}

// Bottleneck returns the stage for which the others wait.
//
// It does not count the wait for the first batch of an epoch, unless that is most of the time.
// The copy is the bottleneck if copies run at least 90% of the time and wait for the consumer
// for at most 10%. The consumer is the bottleneck if the loop waits for batches at most 10% of
// the time, or copies wait for the consumer's streams more than 10%. Otherwise the transform is
// the bottleneck if samples spend more time there than in the source, or if transforms run at
// least 90% of the time of MaxTransforms. Otherwise it is the source.
func (s Stats) Bottleneck() Stage {
	const idle, busy = 0.1, 0.9
	steady := s.Elapsed - s.FirstWaits
	exceeds := func(d time.Duration, share float64) bool { return float64(d) > share*float64(steady) }
	waits := exceeds(s.BatchWaits-s.FirstWaits, idle)
	late := exceeds(s.CopyWaits, idle)
	switch {
	case exceeds(s.Copying, busy) && s.Copying > s.FirstWaits && !late:
		return StageCopy
	case !waits && s.Consuming > s.FirstWaits, waits && late:
		return StageConsumer
	case s.TransformWaits+s.Transforming > s.Reading,
		float64(s.Transforming) > busy*float64(s.Elapsed)*float64(s.maxTransforms) && s.Transforming > 0:
		return StageTransform
	}
	return StageSource
}

// counters count what Stats returns.
type counters struct{ batches, samples, skipped, retried, retained atomic.Int64 }

// Stats returns the counts and times so far. It does not block.
func (l *Loader) Stats() Stats {
	if l.check(context.Background()) != nil {
		return Stats{}
	}
	l.mu.Lock()
	spent := l.watch.read()
	l.mu.Unlock()
	c := &l.counters
	samples := int(c.samples.Load())
	s := Stats{
		Samples: samples, Bytes: samples * l.layout.sample(), Batches: int(c.batches.Load()), Retained: int(c.retained.Load()),
		Skipped: int(c.skipped.Load()), Retried: int(c.retried.Load()),
		Elapsed:    spent[starting] + spent[waiting] + spent[consuming] + spent[ending],
		BatchWaits: spent[starting] + spent[waiting], FirstWaits: spent[starting], Consuming: spent[consuming],
		PinnedBytes: l.o.slots() * l.host.bytes, maxTransforms: l.o.MaxTransforms,
	}
	if l.gather != nil {
		s.Gathered = samples
	}
	s.Copying, s.CopyWaits = l.driver.meter.times()
	for i := range l.workers {
		w := &l.workers[i].times
		s.Reading += time.Duration(w.reading.Load())
		s.Transforming += time.Duration(w.transforming.Load())
		s.TransformWaits += time.Duration(w.transformWaits.Load())
		s.SlotWaits += time.Duration(w.slotWaits.Load())
	}
	return s
}

// A stopwatch divides the time of loops into phases. Loader.mu guards the stopwatch of a Loader.
type stopwatch struct {
	clock func() time.Time // or nil for time.Now
	phase phase
	since time.Time
	spent [phases]time.Duration // time in each phase before since
}

// A phase is a state of a loop.
type phase int

const (
	noLoop    phase = iota
	starting        // the loop waits for the first batch of an epoch
	waiting         // the loop waits for another batch
	consuming       // the loop is in its body
	ending          // the loop waits for its goroutines and copies
	phases
)

// setPhase begins a phase of the loader's loops.
func (l *Loader) setPhase(p phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch.setPhase(p)
}

// setPhase begins a phase.
func (w *stopwatch) setPhase(p phase) {
	now := w.now()
	w.spent[w.phase] += now.Sub(w.since)
	w.phase, w.since = p, now
}

// read returns the time in each phase, up to now.
func (w *stopwatch) read() [phases]time.Duration {
	spent := w.spent
	spent[w.phase] += w.now().Sub(w.since)
	return spent
}

func (w *stopwatch) now() time.Time {
	if w.clock != nil {
		return w.clock()
	}
	return time.Now()
}
