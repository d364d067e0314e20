package managed

import (
	"context"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// ledger is the managed memory of this process. One lock is enough for all devices: it is
// held for some additions, and not during calls into the library.
var ledger = struct {
	mu    sync.Mutex
	cards map[*cudart.Device]*card // those that have an Allocator
	uses  uint64                   // see Memory.used
}{cards: make(map[*cudart.Device]*card)}

// A card is the memory of a device. All Allocators of the device share it. Its numbers are
// guarded by ledger.mu.
type card struct {
	dev         *cudart.Device
	inside      bounded.Group // calls into the library whose callers may leave
	allocators  int
	free, total int   // bytes at the last query
	allocated   share // managed memory
	budgets     share // of the Plans that run
	admitted    int   // bytes that may be allocated before the next query
}

// A share is memory that may be on a device or on the host, and of which CUDA does not
// report where it is: managed memory, or the memory of Plans.
type share struct {
	used      int // bytes
	available int // estimate of the device memory that the share can have
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

func openCard(dev *cudart.Device) *card {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	c := ledger.cards[dev]
	if c == nil {
		c = &card{dev: dev}
		ledger.cards[dev] = c
	}
	c.allocators++
	return c
}

func (c *card) close() {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	if c.allocators--; c.allocators == 0 {
		delete(ledger.cards, c.dev)
	}
}

// call makes a call into the library whose caller may leave when ctx ends. It waits while
// bounded.MaxInside of them are in progress.
func (c *card) call(ctx context.Context, f func() error) error {
	if err := c.inside.Enter(ctx); err != nil {
		return err
	}
	defer c.inside.Leave()
	return f()
}

// leaving runs f, whose caller leaves some time after the end of ctx although a call into
// the library does not return.
func leaving(ctx context.Context, f func() error) error {
	_, err := bounded.Do(ctx, bounded.Call[struct{}]{Run: func() (struct{}, error) { return struct{}{}, f() }})
	return err
}

func (c *card) memInfo(ctx context.Context) (free, total int, err error) {
	err = c.call(ctx, func() (err error) {
		free, total, err = c.dev.MemInfo()
		return err
	})
	return free, total, err
}

// advise advises the driver about memory.
func (c *card) advise(ctx context.Context, r Range, a Advice) error {
	return c.call(ctx, func() error { return c.dev.MemAdvise(r.ptr(), r.Len, a.kind, a.at) })
}

// stayOnHost advises that memory stays on the host, mapped for the device.
func (c *card) stayOnHost(ctx context.Context, r Range) error {
	for _, a := range []Advice{PreferredLocation(Host()), AccessedBy(c.dev.Location())} {
		if err := c.advise(ctx, r, a); err != nil {
			return err
		}
	}
	return nil
}

// admittedShare is the share of the device memory that may be allocated without a query,
// where half of it is available: cudaMemGetInfo takes longer than the rest of Alloc.
const admittedShare = 64

// queryAndLock queries the free memory (cudaMemGetInfo). It returns with ledger.mu locked,
// unless there is an error.
func (c *card) queryAndLock(ctx context.Context) error {
	free, total, err := c.memInfo(ctx)
	if err != nil {
		return err
	}
	ledger.mu.Lock()
	c.free, c.total = free, total
	c.allocated.update(free, total)
	c.budgets.update(free, total)
	c.admitted = min(c.allocated.used+c.allocated.available/admittedShare, c.allocated.available/2)
	return nil
}

// admit counts n bytes as allocated. beyond reports that the device has no capacity for
// them next to all others and the reserve; without oversubscribe that is an error instead,
// and nothing is counted.
func (c *card) admit(ctx context.Context, n, reserve int, oversubscribe bool) (beyond bool, err error) {
	a := &c.allocated
	ledger.mu.Lock()
	if n > c.admitted-a.used || !fits(n, reserve, a.available/2-a.used) {
		ledger.mu.Unlock()
		if err := c.queryAndLock(ctx); err != nil {
			return false, err
		}
		beyond = !fits(n, reserve, a.available-a.used)
	}
	defer ledger.mu.Unlock()
	if beyond && !oversubscribe {
		return false, fmt.Errorf("%w: asked for %s, %s of managed memory are allocated and %s reserved, of %s that it could have; the card has %s free of %s (ask for less, free some, lower Options.Reserve, move data through the card with a Plan, or set Options.Oversubscribe, which is slow, and can hang a card or a host that others use too)",
			ErrOversubscribed, units.ExactBytes(n), units.ExactBytes(a.used), units.ExactBytes(reserve), units.ExactBytes(a.available), units.ExactBytes(c.free), units.ExactBytes(c.total))
	}
	a.used += n
	return beyond, nil
}

// release uncounts bytes.
func (c *card) release(n int) {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	c.allocated.used -= n
}

// begin counts the budget of a Plan as used, until end is called.
func (c *card) begin(ctx context.Context, budget, reserve int) (end func(), err error) {
	if err := c.queryAndLock(ctx); err != nil {
		return nil, err
	}
	defer ledger.mu.Unlock()
	b := &c.budgets
	if !fits(budget, reserve, b.available-b.used) {
		return nil, fmt.Errorf("%w: PlanOptions.Budget is %s and Options.Reserve %s; the card has %s free of %s, and the budgets of plans that run are %s", ErrOversubscribed,
			units.ExactBytes(budget), units.ExactBytes(reserve), units.ExactBytes(c.free), units.ExactBytes(c.total), units.ExactBytes(b.used))
	}
	b.used += budget
	return func() {
		ledger.mu.Lock()
		defer ledger.mu.Unlock()
		b.used -= budget
	}, nil
}

// checkReserve checks that n more bytes on the device leave the reserve free.
func (c *card) checkReserve(ctx context.Context, n, reserve int) error {
	if err := c.queryAndLock(ctx); err != nil {
		return err
	}
	defer ledger.mu.Unlock()
	if !fits(n, reserve, c.free) {
		return fmt.Errorf("%w: %s of it stay on the host because the card had no room, and it has %s free of %s, of which %s are reserved (prefetch less, move other memory to the host with KeepReserve, or use a Plan)",
			ErrReserve, units.ExactBytes(n), units.ExactBytes(c.free), units.ExactBytes(c.total), units.ExactBytes(reserve))
	}
	return nil
}

// fits reports whether both fit into a capacity, also if their sum is no int.
func fits(n, reserve, capacity int) bool { return n <= capacity && reserve <= capacity-n }
