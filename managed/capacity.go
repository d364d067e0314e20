package managed

import (
	"context"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// ledger counts the managed memory of this process. One lock suffices for all devices: it is
// held for a few additions, and not during calls into the library.
var ledger = struct {
	mu      sync.Mutex
	devices map[*cudart.Device]*deviceMemory // devices with an Allocator
	uses    uint64                           // see Memory.used
}{devices: make(map[*cudart.Device]*deviceMemory)}

// A deviceMemory estimates the capacity of a device's memory for managed memory. All Allocators of
// the device share it. ledger.mu guards its numbers.
type deviceMemory struct {
	dev         *cudart.Device
	calls       bounded.Group // calls into the library that the caller may abandon
	allocators  int
	free, total int    // bytes at the last query
	queries     uint64 // begun so far
	newest      uint64 // number of the newest query whose result is here
	allocated   share  // managed memory
	budgets     share  // budgets of the Plans that run
	admitted    int    // bytes that may be allocated before the next query
}

// A share is memory whose location, a device or the host, CUDA does not report: managed memory, or
// the memory of Plans.
type share struct {
	used      int // bytes
	available int // estimate of the device memory for the share, in bytes
}

// update corrects the estimate after a query. What others use is assumed not to have
// changed, as long as that is possible: between none and all of the share is on the
// device. Otherwise others have allocated or freed device memory, and all of the share is
// assumed to be on the device.
func (s *share) update(free, total int) {
	if s.available < free || s.available > free+s.used {
		s.available = min(free+s.used, total)
	}
}

func openDeviceMemory(dev *cudart.Device) *deviceMemory {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	d := ledger.devices[dev]
	if d == nil {
		d = &deviceMemory{dev: dev}
		ledger.devices[dev] = d
	}
	d.allocators++
	return d
}

func (d *deviceMemory) close() {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	if d.allocators--; d.allocators == 0 {
		delete(ledger.devices, d.dev)
	}
}

// checkContext returns an error for a context that is nil or has ended.
func checkContext(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	return bounded.Ended(ctx)
}

// runBounded runs f, unless ctx has ended. If a call into the library does not return, runBounded
// abandons f some time after the end of ctx: see bounded.Do.
func runBounded(ctx context.Context, f func() error) error {
	if err := checkContext(ctx); err != nil {
		return err
	}
	_, err := bounded.Do(ctx, bounded.Call[struct{}]{Run: func() (struct{}, error) { return struct{}{}, f() }})
	return err
}

func (d *deviceMemory) memInfo(ctx context.Context) (free, total int, err error) {
	err = d.calls.Inside(ctx, func() (err error) {
		free, total, err = d.dev.MemInfo()
		return err
	})
	return free, total, err
}

// advise advises the driver about memory.
func (d *deviceMemory) advise(ctx context.Context, r Range, a cudart.Advice, at cudart.Location) error {
	return d.calls.Inside(ctx, func() error { return d.dev.MemAdvise(r.ptr(), r.Len, a, at) })
}

// stayOnHost advises that memory stays on the host, mapped for the device.
func (d *deviceMemory) stayOnHost(ctx context.Context, r Range) error {
	if err := d.advise(ctx, r, cudart.AdvisePreferredLocation, cudart.HostLocation()); err != nil {
		return err
	}
	return d.advise(ctx, r, cudart.AdviseAccessedBy, d.dev.Location())
}

// admittedShare is the divisor of the available memory that may be allocated without a query, if
// half of it is available: cudaMemGetInfo takes longer than the rest of Alloc.
const admittedShare = 64

// queryAndLock queries the free memory (cudaMemGetInfo), again and again while others free some
// and ok returns false: what it saw before may be out of date. It returns with ledger.mu locked,
// and the result of ok, which is called with the lock, unless there is an error.
func (d *deviceMemory) queryAndLock(ctx context.Context, ok func() bool) (bool, error) {
	for last := -1; ; {
		if err := d.queryOnceAndLock(ctx); err != nil {
			return false, err
		}
		if ok() {
			return true, nil
		}
		if d.free <= last {
			return false, nil
		}
		last = d.free
		ledger.mu.Unlock()
	}
}

func (d *deviceMemory) queryOnceAndLock(ctx context.Context) error {
	ledger.mu.Lock()
	d.queries++
	query := d.queries
	ledger.mu.Unlock()
	free, total, err := d.memInfo(ctx)
	if err != nil {
		return err
	}
	ledger.mu.Lock()
	if query < d.newest { // another goroutine has queried since
		return nil
	}
	d.newest = query
	d.free, d.total = free, total
	d.allocated.update(free, total)
	d.budgets.update(free, total)
	d.admitted = min(d.allocated.used+d.allocated.available/admittedShare, d.allocated.available/2)
	return nil
}

// admit counts n bytes as allocated. beyond reports whether they exceed the capacity, less the
// reserve and all other managed memory. Without oversubscribe that is an error, and nothing is
// counted.
func (d *deviceMemory) admit(ctx context.Context, n, reserve int, oversubscribe bool) (beyond bool, err error) {
	a := &d.allocated
	ledger.mu.Lock()
	if n > d.admitted-a.used || !fits(n, reserve, a.available/2-a.used) {
		ledger.mu.Unlock()
		within, err := d.queryAndLock(ctx, func() bool { return fits(n, reserve, a.available-a.used) })
		if err != nil {
			return false, err
		}
		beyond = !within
	}
	defer ledger.mu.Unlock()
	if beyond && !oversubscribe {
		return false, fmt.Errorf("%w: requested %s, %s of managed memory are allocated and %s reserved, of a capacity of %s; the device memory has %s free of %s (request less, free some, lower Options.Reserve, use a Plan, or set Options.Oversubscribe, which is slow, and can hang a device or a host that others use too)",
			ErrOversubscribed, units.ExactBytes(n), units.ExactBytes(a.used), units.ExactBytes(reserve), units.ExactBytes(a.available), units.ExactBytes(d.free), units.ExactBytes(d.total))
	}
	a.used += n
	return beyond, nil
}

// release uncounts bytes.
func (d *deviceMemory) release(n int) {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	d.allocated.used -= n
}

// begin counts the budget of a Plan as used until end is called.
func (d *deviceMemory) begin(ctx context.Context, budget, reserve int) (end func(), err error) {
	b := &d.budgets
	within, err := d.queryAndLock(ctx, func() bool { return fits(budget, reserve, b.available-b.used) })
	if err != nil {
		return nil, err
	}
	defer ledger.mu.Unlock()
	if !within {
		return nil, fmt.Errorf("%w: PlanOptions.Budget is %s and Options.Reserve %s; the device memory has %s free of %s, and the budgets of running plans are %s", ErrOversubscribed,
			units.ExactBytes(budget), units.ExactBytes(reserve), units.ExactBytes(d.free), units.ExactBytes(d.total), units.ExactBytes(b.used))
	}
	b.used += budget
	return func() {
		ledger.mu.Lock()
		defer ledger.mu.Unlock()
		b.used -= budget
	}, nil
}

// checkReserve checks that n more bytes on the device leave the reserve free.
func (d *deviceMemory) checkReserve(ctx context.Context, n, reserve int) error {
	within, err := d.queryAndLock(ctx, func() bool { return fits(n, reserve, d.free) })
	if err != nil {
		return err
	}
	defer ledger.mu.Unlock()
	if !within {
		return fmt.Errorf("%w: %s of the memory stay on the host because it was allocated beyond the capacity, and the device memory has %s free of %s, of which %s are reserved (prefetch less, move other memory to the host with Reclaim, or use a Plan)",
			ErrReserve, units.ExactBytes(n), units.ExactBytes(d.free), units.ExactBytes(d.total), units.ExactBytes(reserve))
	}
	return nil
}

// fits reports whether n and a reserve fit into a capacity, also if their sum overflows.
func fits(n, reserve, capacity int) bool { return n <= capacity && reserve <= capacity-n }
