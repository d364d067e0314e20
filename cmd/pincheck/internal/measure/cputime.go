package measure

import "time"

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
func (w *Stopwatch) Start() { w.began, w.cpu = w.now(), cpuTime() }

// Stop ends a part, and returns how long it took.
func (w *Stopwatch) Stop() time.Duration {
	took := w.now() - w.began
	w.used += cpuTime() - w.cpu
	return took
}

// CPU returns the CPU time of this process in all parts so far: see [Case.CPU].
func (w *Stopwatch) CPU() time.Duration { return w.used }

// CPUTime returns the CPU time of all threads of this process so far (getrusage). ok is
// false if it is not known.
func CPUTime() (used time.Duration, ok bool) {
	used = cpuTime()
	return used, used >= 0
}
