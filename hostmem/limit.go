package hostmem

import (
	"fmt"

	"github.com/gopinned/pinned/hostmem/internal/budget"
)

var (
	// ErrLimit is returned when memory is not pinned because a limit forbids it.
	ErrLimit = budget.ErrLimit

	// ErrTooLarge is returned when a request is larger than its limit, so that
	// waiting would not help. The error wraps ErrLimit, too, if the limit is that
	// of the process.
	ErrTooLarge = budget.ErrTooLarge
)

// Limits bound how much memory this process pins through this package. The
// zero value is what a process starts with.
type Limits struct {
	// MaxBytes is the maximum of pinned memory in bytes. Requests for more
	// wait until enough was released, in the order of the calls, or until their
	// context ends. 0 is no limit.
	MaxBytes int
	// MaxShare is the maximum share of memory pinned through this package: of this
	// memory and the available memory together, on the host and in the
	// process's cgroup. Pinned memory cannot be swapped out, and a host without
	// available memory kills processes. 0 means 0.9; more than 1 switches the guard off.
	//
	// Besides, the growth of the Go heap until the next garbage collection,
	// and 64 MiB (an eighth of the limit, where that is less), stay available.
	//
	// Memory that was resident before it was registered, and hugetlb pages, do not
	// count here: they were not available to others before.
	MaxShare float64
}

// SetLimits sets the limits of the process. It does not block. Memory that is pinned already
// stays pinned. A negative limit, or a share that is not a number, is an error, and changes
// nothing.
func SetLimits(l Limits) error {
	if l.MaxBytes < 0 {
		return fmt.Errorf("hostmem: set limits: Limits.MaxBytes of %d: must not be negative", l.MaxBytes)
	}
	if !(l.MaxShare >= 0) {
		return fmt.Errorf("hostmem: set limits: Limits.MaxShare of %v: must be 0 or more", l.MaxShare)
	}
	if l.MaxShare == 0 {
		l.MaxShare = budget.DefaultShare
	}
	limits.Set(l.MaxBytes, l.MaxShare)
	return nil
}

// Available returns the bytes of host memory that are available without swapping,
// and without exceeding a limit of the process's cgroup (/proc/meminfo, memory.max).
// Page cache that is pinned through this package is not among them. ok is false where
// the system does not report it. Each call reads the host's state anew. It does not block.
func Available() (bytes int, ok bool) {
	reading, err := limits.Headroom()
	return reading.Available, err == nil
}

// limits are those of the process.
var limits = budget.Process()
