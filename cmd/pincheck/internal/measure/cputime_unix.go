//go:build unix

package measure

import (
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime returns the CPU time of all threads of this process so far (getrusage), or a
// negative time if it is not known.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return -1
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
