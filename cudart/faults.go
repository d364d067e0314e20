package cudart

import (
	"slices"
	"sync/atomic"
)

// The faults of a timeline are the errors of calls that recorded or queried its events,
// and each of them may be an error of the stream's work. They are guarded by timeline.mu.
type faults struct {
	inRow  int         // since the last call that succeeded
	some   atomic.Bool // ranges is not empty
	ranges []faultRange
	unseen atomic.Pointer[error] // the newest that Stream.Query or Synchronize has not returned
}

// A faultRange is an error that may be one of the work between two Points.
type faultRange struct {
	after, upTo uint64
	err         error
}

const (
	// maxFaults is the number of ranges of failed Points that are remembered.
	maxFaults = 16
	// drainAfter is the number of failures in a row after which the device as a
	// whole is queried.
	drainAfter = 2
)

// fail remembers an error of recording or querying an event. It needs t.mu.
func (t *timeline) fail(err error) {
	f := &t.faults
	f.inRow++
	f.some.Store(true)
	f.unseen.Store(&err)
	f.ranges = append(f.ranges, faultRange{after: t.done.Load(), upTo: t.marks.begun, err: err})
	if len(f.ranges) > maxFaults {
		f.ranges = slices.Delete(f.ranges, 0, 1)
	}
}

// err returns the first error that was found at or before Point n and is not one of
// earlier work.
func (t *timeline) err(n uint64) error {
	if !t.faults.some.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.faults.ranges {
		if f.after < n && n <= f.upTo {
			return f.err
		}
	}
	return nil
}

// report returns, once, an error of the stream's work that a query of a Point has found.
func (t *timeline) report() error {
	if t.faults.unseen.Load() == nil {
		return nil
	}
	if err := t.faults.unseen.Swap(nil); err != nil {
		return *err
	}
	return nil
}
