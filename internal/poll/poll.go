// Package poll is how a goroutine waits for what mostly comes within microseconds: a goroutine that sleeps wakes tens of
// microseconds late.
package poll

import (
	"sync/atomic"
	"time"
)

// A Poller describes how a goroutine polls.
type Poller struct {
	// For is the time after which it ends in vain, unless More ends it.
	For time.Duration
	// Polls is the number of polls between two looks at the clock, which takes as long as a query of CUDA.
	Polls int
	// Hints is the number of hints after each poll that the core's other thread may have the core, 0.2 µs each: 1 for
	// memory, which other cores write, 0 for queries of CUDA, which take as long, and more to query rarely.
	Hints int
	// More is called after each look at the clock, and ends the polling if it returns false. It yields to other
	// goroutines where the one that polls should. It may be nil.
	More func() bool
}

// Memory returns a Poller of memory that other goroutines write.
func Memory(d time.Duration, more func() bool) Poller {
	return Poller{For: d, Polls: 16, Hints: 1, More: more}
}

// Until polls until done returns true, and reports whether it did. It calls done once at least, and reads no clock before.
func (p Poller) Until(done func() bool) bool {
	var began time.Time
	for {
		for range p.Polls {
			if done() {
				return true
			}
			if began.IsZero() {
				began = time.Now()
			}
			for range p.Hints {
				core()
			}
		}
		if time.Since(began) >= p.For {
			return done() // the goroutine may not have run for a while
		}
		if p.More != nil && !p.More() {
			return false
		}
	}
}

// A Limit bounds the goroutines that work or poll at once: each keeps a core busy.
type Limit struct{ atomic.Int32 }

// TryBegin counts one more goroutine, unless there are as many as allowed. Add(-1) ends it.
func (l *Limit) TryBegin(allowed int32) bool {
	if l.Add(1) <= allowed {
		return true
	}
	l.Add(-1)
	return false
}
