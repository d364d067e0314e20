package budget

import (
	"context"
	"fmt"
	"math"
	"runtime/metrics"
	"time"

	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/units"
)

// DefaultShare is the maximum share of pinned memory where Set was not called.
const DefaultShare = 0.9

// A guard is the state of a Budget's guard. Budget.mu guards it.
type guard struct {
	share float64 // more than 1 switches it off

	taken    int // bytes of all reservations
	files    int // bytes of resident page cache among these, which the kernel reports as available
	arriving int // bytes among these that are not yet resident
	unseen   int // bytes among these that became resident after the last reading

	reading  linux.Headroom
	readings uint64    // number of readings
	readAt   time.Time // time of the last one
	since    int       // bytes taken after it
	reserve  int       // bytes by the last reading
}

// A reading is used for at most this time and number of bytes: making one takes as long as
// pinning 64 KiB.
const (
	freshFor   = time.Second
	freshBytes = 64 << 20
)

// admit checks the guard. Before it refuses, it counts the bytes that are in use already, and
// reclaims unused memory.
func (b *Budget) admit(ctx context.Context, r *Reservation, request Request) error {
	take := request.Bytes
	if request.Reserved {
		take = 0
	}
	err := b.tryAdmit(r, take, request.File)
	if err != nil && request.InUse != nil && !request.File {
		if take = max(0, request.Bytes-request.InUse()); take < request.Bytes {
			err = b.tryAdmit(r, take, false)
		}
	}
	if err != nil && b.reclaimFor(ctx, func(freed int) int { return take - b.allowed() - freed }) > 0 {
		err = b.tryAdmit(r, take, request.File)
	}
	return err
}

// tryAdmit takes n of the available bytes for a reservation, if there are as many.
func (b *Budget) tryAdmit(r *Reservation, n int, file bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > 0 {
		if err := b.check(n); err != nil {
			return err
		}
	}
	r.taken, r.file = n, file
	b.guard.taken += n
	b.guard.arriving += n
	b.guard.since += n
	return nil
}

// guarded is the guard's part of a reservation.
type guarded struct {
	taken    int  // bytes
	file     bool // page cache
	resident bool
	reading  uint64 // guard.readings when it became resident
}

// check returns an error if the host or the cgroup does not have n available bytes. It
// needs b.mu.
func (b *Budget) check(n int) error {
	q := &b.guard
	if q.share > 1 {
		return nil
	}
	stale := q.readings == 0 || q.since+n > freshBytes || time.Since(q.readAt) > freshFor
	if (stale || n > b.allowed()) && !b.refresh() { // memory may have been released meanwhile
		return nil // nothing to compare with: the kernel decides
	}
	if n <= b.allowed() {
		return nil
	}
	return fmt.Errorf("%w: %s: available are %v, less %s that are being populated and a reserve of %s for the Go heap and the rest of the process; all pinned memory together (%s now) may take a share of %.2f of that and itself (close buffers, or raise Limits.MaxShare)",
		ErrLimit, units.ExactBytes(n), q.reading, units.Bytes(q.arriving+q.unseen), units.Bytes(q.reserve), units.Bytes(q.taken), q.share)
}

// refresh makes a reading, if the system has figures. It needs b.mu.
func (b *Budget) refresh() bool {
	q := &b.guard
	reading, err := b.read(q.files)
	if err != nil {
		return false
	}
	q.reading, q.readAt, q.since, q.unseen = reading, time.Now(), 0, 0
	q.readings++
	q.reserve = min(minReserve, reading.Total/8) + b.heap()
	return true
}

// minReserve is the reserve in bytes besides the growth of the heap: for stacks, memory of C
// libraries, page tables.
const minReserve = 64 << 20

// allowed returns the maximum of bytes that may be taken now. It needs b.mu.
func (b *Budget) allowed() int {
	q := &b.guard
	available := max(0, q.reading.Available-q.arriving-q.unseen)
	total := q.share * (float64(q.taken) + float64(available))
	return min(int(total)-q.taken, available-q.reserve)
}

// MarkResident records that the pages of the reservation are resident.
func (r *Reservation) MarkResident() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	q := &r.b.guard
	if r.state == over || r.resident {
		return
	}
	r.resident, r.reading = true, q.readings
	q.arriving -= r.taken
	q.unseen += r.taken
	if r.file {
		q.files += r.taken
	}
}

// remove undoes what tryAdmit and MarkResident did. It needs Budget.mu.
func (q *guard) remove(r *Reservation) {
	q.taken -= r.taken
	switch {
	case !r.resident:
		q.arriving -= r.taken
	case r.reading == q.readings:
		q.unseen -= r.taken
	}
	if r.resident && r.file {
		q.files -= r.taken
	}
}

// Headroom returns what the host, or the cgroup that binds tighter, has available
// now, less page cache that is pinned through this budget.
func (b *Budget) Headroom() (linux.Headroom, error) {
	b.mu.Lock()
	files := b.guard.files
	b.mu.Unlock()
	return b.read(files)
}

// LowMemory reports whether so little memory is available that pinning n bytes, which are
// resident, may fail for it: less than the process keeps as its reserve, and the driver and
// the kernel need to list the pages. It is false where the system does not
// report the available bytes.
func (b *Budget) LowMemory(n int) bool {
	h, err := b.Headroom()
	return err == nil && h.Available < min(minReserve, h.Total/8)+n/pagesPerList
}

// pagesPerList is the number of bytes for which lists of pages take a byte: they have 16 bytes
// for each page of 4 KiB.
const pagesPerList = 4096 / 16

// heapGrowth returns the bytes that the Go heap may take from the kernel until the
// next garbage collection ends.
func heapGrowth() int {
	samples := []metrics.Sample{
		{Name: "/gc/heap/goal:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(samples)
	value := func(i int) int {
		if samples[i].Value.Kind() != metrics.KindUint64 || samples[i].Value.Uint64() > math.MaxInt/2 {
			return 0
		}
		return int(samples[i].Value.Uint64())
	}
	return max(0, value(0)-value(1)-value(2)-value(3))
}
