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

	// Elapsed is the time in loops over Batches: BatchWaits and Consuming.
	Elapsed time.Duration

	Reading     time.Duration // workers in Read
	Computing   time.Duration // workers in Transform
	TurnWaiting time.Duration // workers waiting for their turn to compute
	SlotWaiting time.Duration // workers waiting for a batch to be given back, and written to again
	Held        time.Duration // of that, the time in which memory was given back, and its last copy not done
	Copying     time.Duration // the copy engine, from the time of one batch in eight
	BatchWaits  time.Duration // the consumer waiting for a batch
	Consuming   time.Duration // the consumer at work between two batches

	PinnedBytes int
	computing   int // at once
}

// Bottleneck names the stage that the others wait for.
//
// Where the loop hardly waits for batches it is the consumer. The copies are,
// where the copy engine is busy nearly all the time. Where memory that was given
// back mostly cannot be written again, its last copy is late: because of the
// engine if that is busy half of the time, and else because the consumer's
// streams still use what was there. Otherwise it is computing, if samples
// spend more time there than in the source, or if nearly all that may compute
// do; and else the source.
func (s Stats) Bottleneck() Stage {
	const hardly, mostly, nearly = 0.1, 0.5, 0.8
	share := func(d time.Duration) float64 { return float64(d) / float64(max(s.Elapsed, 1)) }
	switch {
	case share(s.BatchWaits) < hardly:
		return StageConsumer
	case share(s.Copying) > nearly, share(s.Held) > mostly && share(s.Copying) > mostly:
		return StageCopy
	case share(s.Held) > mostly:
		return StageConsumer
	case s.TurnWaiting+s.Computing > s.Reading, share(s.Computing) > nearly*float64(s.computing):
		return StageCompute
	}
	return StageSource
}

// counters of the loader as a whole.
type counters struct {
	batches, bytes, skipped, retried atomic.Int64
	copying, held, waits, consuming  atomic.Int64
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
		Copying: time.Duration(l.stats.copying.Load()), Held: time.Duration(l.stats.held.Load()),
		BatchWaits: time.Duration(l.stats.waits.Load()), Consuming: time.Duration(l.stats.consuming.Load()),
		PinnedBytes: l.o.slots() * l.layout.bytes, computing: l.o.Computing,
	}
	s.Elapsed = s.BatchWaits + s.Consuming
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
