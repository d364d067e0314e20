package hostmem

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/units"
)

// A refusal is the error of memory that could not be registered in any size.
type refusal struct {
	tried []int // sizes in bytes
	err   error // of the last attempt
}

func (r *refusal) Error() string {
	meaning := "the driver limits the size or the number of registrations, or all that is pinned"
	if errors.Is(r.err, cudart.ErrNotSupported) {
		meaning = "registering is not supported here: hosts with confidential computing refuse it"
	}
	return fmt.Sprintf("%s refused (%s): %v", sizes(r.tried), meaning, r.err)
}

func (r *refusal) Unwrap() error { return r.err }

// sizes lists registrations that were tried: "registrations of 200 MiB, 100 MiB were".
func sizes(tried []int) string {
	list := make([]string, len(tried))
	for i, n := range tried {
		list[i] = units.ExactBytes(n)
	}
	if len(tried) == 1 {
		return "a registration of " + list[0] + " was"
	}
	return "registrations of " + strings.Join(list, ", ") + " were"
}

// tooLarge reports whether a smaller registration, or fewer of them, may succeed where
// one failed with this error.
func tooLarge(err error) bool {
	return errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, cudart.ErrOperatingSystem) || errors.Is(err, cudart.ErrUnknown)
}

// lowMemory returns the error of a call that failed because the host is low on memory, nil if
// it is not.
func lowMemory(n int, err error) error {
	if !limits.LowMemory(n) {
		return nil
	}
	return fmt.Errorf("memory is short (%s): %w", headroom(), err)
}

// headroom describes the memory that is available for pinning, for messages.
func headroom() string {
	lock := "RLIMIT_MEMLOCK is unknown"
	if n, ok := pages.MemlockLimit(); ok {
		lock = "RLIMIT_MEMLOCK is " + units.ExactBytes(n)
		if n == math.MaxInt {
			lock = "RLIMIT_MEMLOCK is unlimited"
		}
	}
	h, err := limits.Headroom()
	if err != nil {
		return lock
	}
	return fmt.Sprintf("available are %v, %s", h, lock)
}
