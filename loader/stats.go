package loader

import (
	"sync/atomic"
	"time"
)

// A Stage is where time goes.
type Stage string

// The stages of a loader.
const (
	StageSource   Stage = "source"   // Read
	StageCompute  Stage = "compute"  // Transform
	StageCopy     Stage = "copy"     // to the device
	StageConsumer Stage = "consumer" // what the loop does with a batch
)

// Stats tell what a loader did so far, and where its time went. Times of workers
// are sums over all of them.
type Stats struct {
	Samples, Batches, Bytes int
	Skipped, Retried        int // samples that failed

	Elapsed time.Duration // in loops over Batches

	Reading     time.Duration // workers in Read
	Computing   time.Duration // workers in Transform
	TurnWaiting time.Duration // workers waiting for their turn to compute
	SlotWaiting time.Duration // workers waiting for a batch to be given back
	Copying     time.Duration // the copy engine, from the time of one batch in eight
	BatchWaits  time.Duration // the consumer waiting for a batch
	Consuming   time.Duration // the consumer at work between two batches

	PinnedBytes int
	computing   int // at once
}

// Bottleneck names the stage that the others wait for.
//
// Where the consumer hardly waits it is the consumer. Otherwise the copy engine
// is, if it is busy nearly all the time; computing is, if workers wait for
// their turn more than they read, or are busy computing nearly all the time on
// as many cores as they may have; and else the source.
func (s Stats) Bottleneck() Stage {
	const nearly, hardly = 0.8, 0.1
	elapsed := float64(s.Elapsed)
	switch {
	case float64(s.BatchWaits) < hardly*elapsed:
		return StageConsumer
	case float64(s.Copying) > nearly*elapsed:
		return StageCopy
	case s.TurnWaiting > s.Reading, float64(s.Computing) > nearly*elapsed*float64(s.computing), s.Computing > s.Reading && s.TurnWaiting > 0:
		return StageCompute
	}
	return StageSource
}

// counters of the loader as a whole.
type counters struct {
	batches, bytes, skipped, retried   atomic.Int64
	elapsed, copying, waits, consuming atomic.Int64
}

// workerCounters are one worker's: none shares a cache line with another's.
type workerCounters struct {
	samples, reading, computing, turn, slot atomic.Int64
	_                                       [128 - 5*8]byte
}

// Stats returns what was done so far. It may be called at any time.
func (l *Loader) Stats() Stats {
	s := Stats{
		Batches: int(l.stats.batches.Load()), Bytes: int(l.stats.bytes.Load()),
		Skipped: int(l.stats.skipped.Load()), Retried: int(l.stats.retried.Load()),
		Elapsed: time.Duration(l.stats.elapsed.Load()), Copying: time.Duration(l.stats.copying.Load()),
		BatchWaits: time.Duration(l.stats.waits.Load()), Consuming: time.Duration(l.stats.consuming.Load()),
		PinnedBytes: l.o.slots() * l.layout.bytes, computing: l.o.Computing,
	}
	for i := range l.workers {
		w := &l.workers[i]
		s.Samples += int(w.samples.Load())
		s.Reading += time.Duration(w.reading.Load())
		s.Computing += time.Duration(w.computing.Load())
		s.TurnWaiting += time.Duration(w.turn.Load())
		s.SlotWaiting += time.Duration(w.slot.Load())
	}
	return s
}
