package managed

import (
	"fmt"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A card is the memory of a device, as all allocators of the process share it. It
// decides what is too much.
//
// CUDA reports how much device memory is free, but not how much of the rest is pages of
// our managed memory: those come and go. So what managed memory can have is estimated
// as what was free before there was any, or, if less, what is free now and all that is
// allocated.
type card struct {
	dev *cudart.Device

	mu        sync.Mutex // not held during calls into the library
	users     int        // allocators
	allocated int        // bytes of managed memory
	before    int        // bytes that were free when none was allocated
	free      int        // bytes, when asked last
	total     int
	enough    int // bytes that may be allocated without asking again
	budgets   int // of the plans that run
	room      int // bytes that were free when none ran
}

// cards are those that have an allocator.
var cards = struct {
	mu sync.Mutex
	of map[*cudart.Device]*card
}{of: make(map[*cudart.Device]*card)}

func openCard(dev *cudart.Device) *card {
	cards.mu.Lock()
	defer cards.mu.Unlock()
	c := cards.of[dev]
	if c == nil {
		c = &card{dev: dev}
		cards.of[dev] = c
	}
	c.users++
	return c
}

func (c *card) close() {
	cards.mu.Lock()
	defer cards.mu.Unlock()
	if c.users--; c.users == 0 {
		delete(cards.of, c.dev)
	}
}

// lookShare is the share of the card that may be allocated, where half of it and more is
// free, before it is asked again what is free: cudaMemGetInfo takes longer than all else
// here.
const lookShare = 64

// look asks how much is free (cudaMemGetInfo).
func (c *card) look() error {
	free, total, err := c.dev.MemInfo()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.free, c.total = free, total
	if c.allocated == 0 {
		c.before = free
	}
	c.enough = min(c.allocated+c.available()/lookShare, c.available()/2)
	return nil
}

// available is the most that managed memory can have of the card.
func (c *card) available() int { return min(c.before, c.free+c.allocated) }

// admit counts n bytes as allocated. beyond reports that they do not fit onto the card
// next to all others and the reserve; without oversubscribe that is an error instead, and
// nothing is counted.
func (c *card) admit(n, reserve int, oversubscribe bool) (beyond bool, err error) {
	c.mu.Lock()
	if n <= c.enough-c.allocated && fits(n, reserve, c.available()/2-c.allocated) {
		c.allocated += n
		c.mu.Unlock()
		return false, nil
	}
	c.mu.Unlock()
	if err := c.look(); err != nil {
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !fits(n, reserve, c.available()-c.allocated) {
		if !oversubscribe {
			return false, c.refuse(n, reserve)
		}
		beyond = true
	}
	c.allocated += n
	return beyond, nil
}

// begin counts the budget of a plan as used, until end is called. What of it is on the card
// at a time is not known, so that plans that run at once share what was free before them.
func (c *card) begin(budget, reserve int) (end func(), err error) {
	free, total, err := c.dev.MemInfo()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.budgets == 0 {
		c.room = free
	}
	if room := min(c.room, free+c.budgets) - c.budgets; !fits(budget, reserve, room) {
		return nil, fmt.Errorf("%w: PlanOptions.Budget is %s and Options.Reserve %s; the card has %s free of %s, and the budgets of plans that run are %s", ErrOversubscribed,
			units.ExactBytes(budget), units.ExactBytes(reserve), units.ExactBytes(free), units.ExactBytes(total), units.ExactBytes(c.budgets))
	}
	c.budgets += budget
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.budgets -= budget
	}, nil
}

// fits reports whether there is room for both, whose sum may be no int.
func fits(n, reserve, room int) bool { return n <= room && reserve <= room-n }

// refuse makes the error of a request that is too large, with c locked.
func (c *card) refuse(n, reserve int) error {
	return fmt.Errorf("%w: asked for %s, %s of managed memory are allocated and %s reserved, of %s that it could have; the card has %s free of %s (ask for less, free some, lower Options.Reserve, move data through the card with a Plan, or set Options.Oversubscribe, which is slow, and can hang a card or a host that others use too)",
		ErrOversubscribed, units.ExactBytes(n), units.ExactBytes(c.allocated), units.ExactBytes(reserve), units.ExactBytes(max(c.available(), 0)), units.ExactBytes(c.free), units.ExactBytes(c.total))
}

// release uncounts bytes.
func (c *card) release(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.allocated -= n
}
