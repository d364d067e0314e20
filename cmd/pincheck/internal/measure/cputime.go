package measure

import (
	"time"

	"github.com/gopinned/pinned/internal/hostos"
)

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
