package measure

import "time"

// CPUTime returns the CPU time of all threads of this process so far (getrusage). ok is
// false if it is not known.
func CPUTime() (used time.Duration, ok bool) {
	used = cpuTime()
	return used, used >= 0
}
