package loader

import (
	"context"
	"sync/atomic"
	"time"
)

// A Stage is a part of the way of a batch.
type Stage string

const (
	// StageSource is Source.Read.
	StageSource Stage = "source"
	// StageTransform is Transformer.Transform.
	StageTransform Stage = "transform"
	// StageCopy is the copy to the device.
	StageCopy Stage = "copy"
	// StageConsumer is the loop's body, and the work on its streams.
	StageConsumer Stage = "consumer"
)

// Stats are what a loader did so far, and where its time went. Times of workers
// are sums over all of them, of samples that they have done.
type Stats struct {
	// Samples and Bytes were queued to be copied to the device.
	Samples, Bytes int
	// Batches were given to the loop. Kept of them are kept just now.
	Batches, Kept int
	// Skipped are samples that failed and were left out, Retried the attempts
	// after the first.
	Skipped, Retried int

	// Elapsed is the time in loops over Batches, up to now.
	Elapsed time.Duration
	// BatchWaits is the part of Elapsed in which the loop waited for a batch, and
	// FirstWaits the part of that for the first batch of an epoch.
	BatchWaits, FirstWaits time.Duration
	// Consuming is the part of Elapsed in the loop's body. While all batches are
	// kept, waiting for one counts as Consuming too.
	Consuming time.Duration

	// Reading is the time of workers in Read, and Transforming that in Transform.
	Reading, Transforming time.Duration
	// TransformWaits is the time of workers that waited because MaxTransforms
	// others were in Transform.
	TransformWaits time.Duration
	// SlotWaits is the time of workers that waited for memory to fill: for a batch
	// to be released, or for its last copy.
	SlotWaits time.Duration

	// Copying is the time that copies took, and CopyWaits how long they waited
	// for the consumer's streams, which still used the memory. Both are from
	// events (cudaEventElapsedTime) around some of the copies; without events
	// they are 0.
	Copying, CopyWaits time.Duration

	// PinnedBytes is the pinned memory of the loader.
	PinnedBytes int

	maxTransforms int
}

// Bottleneck returns the stage that the others wait for.
//
// What the loop waits for before the first batch of an epoch is left out, unless
// it is most of the time. The copy is the bottleneck if copies are under way
// nearly all the time and do not wait for the consumer. The consumer is, if the
// loop hardly waits for batches, or copies wait for its streams. Otherwise it is
// the transform, if samples spend more time there than in the source, or if
// nearly all of MaxTransforms are at work; and else the source.
func (s Stats) Bottleneck() Stage {
	const hardly, nearly = 0.1, 0.9
	steady := s.Elapsed - s.FirstWaits
	exceeds := func(d time.Duration, share float64) bool { return float64(d) > share*float64(steady) }
	waits := exceeds(s.BatchWaits-s.FirstWaits, hardly)
	late := exceeds(s.CopyWaits, hardly)
	switch {
	case exceeds(s.Copying, nearly) && s.Copying > s.FirstWaits && !late:
		return StageCopy
	case !waits && s.Consuming > s.FirstWaits, waits && late:
		return StageConsumer
	case s.TransformWaits+s.Transforming > s.Reading,
		float64(s.Transforming) > nearly*float64(s.Elapsed)*float64(s.maxTransforms) && s.Transforming > 0:
		return StageTransform
	}
	return StageSource
}

// counters of the loader as a whole.
type counters struct{ batches, samples, skipped, retried, kept atomic.Int64 }

// Stats returns what was done so far. It may be called at any time.
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
		Samples: samples, Bytes: samples * l.layout.sample(), Batches: int(c.batches.Load()), Kept: int(c.kept.Load()),
		Skipped: int(c.skipped.Load()), Retried: int(c.retried.Load()),
		Elapsed:    spent[starting] + spent[waiting] + spent[consuming] + spent[ending],
		BatchWaits: spent[starting] + spent[waiting], FirstWaits: spent[starting], Consuming: spent[consuming],
		PinnedBytes: l.o.slots() * l.layout.bytes, maxTransforms: l.o.MaxTransforms,
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

// A stopwatch divides the time of loops into phases. That of a Loader is guarded by Loader.mu.
type stopwatch struct {
	clock func() time.Time // or nil for the real one
	phase phase
	since time.Time
	spent [phases]time.Duration // before since
}

// A phase is what a loop does.
type phase int

const (
	idle      phase = iota // there is none
	starting               // waits for its first batch
	waiting                // waits for another
	consuming              // is in its body
	ending
	phases
)

// enter begins a phase of the loader's loops.
func (l *Loader) enter(p phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch.enter(p)
}

// enter begins a phase.
func (w *stopwatch) enter(p phase) {
	now := w.now()
	w.spent[w.phase] += now.Sub(w.since)
	w.phase, w.since = p, now
}

// read returns the time in each phase up to now.
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
