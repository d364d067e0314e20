package hostmem

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// A Holding is memory that is pinned at the moment.
type Holding struct {
	ID    uint64    // in the order of pinning
	Kind  string    // "buffer", "registration", "file"
	Label string    // of the options
	Bytes int       // kept, or registered of somebody else's
	Since time.Time // of pinning
	Lost  bool      // garbage collected without Close: it stays pinned
	Stack string    // of who pinned it, in debug mode
}

// String tells it in one line.
func (h Holding) String() string {
	s := fmt.Sprintf("%s #%d of %d bytes", h.Kind, h.ID, h.Bytes)
	if h.Label != "" {
		s = fmt.Sprintf("%s %q", s, h.Label)
	}
	if h.Lost {
		s += ", lost"
	}
	return s
}

// Outstanding lists what is pinned through this package at the moment, the
// oldest first: what a program should have closed, at its end. Stacks are kept
// in debug mode (PINNED_DEBUG=1, or cudart.Options.Debug).
func Outstanding() []Holding { return holdings.list() }

// holdings are those of the process. They do not refer to the memory's owner,
// which would never be lost then.
var holdings = ledger{open: make(map[uint64]*Holding)}

type ledger struct {
	mu   sync.Mutex
	last uint64
	open map[uint64]*Holding
}

func (l *ledger) add(h Holding, withStack bool) uint64 {
	if withStack {
		h.Stack = string(debug.Stack())
	}
	h.Since = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	h.ID = l.last
	l.open[h.ID] = &h
	return h.ID
}

func (l *ledger) remove(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, id)
}

func (l *ledger) lose(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.open[id]; h != nil {
		h.Lost = true
	}
}

func (l *ledger) list() []Holding {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]Holding, 0, len(l.open))
	for _, h := range l.open {
		all = append(all, *h)
	}
	slices.SortFunc(all, func(a, b Holding) int { return int(a.ID) - int(b.ID) })
	return all
}
