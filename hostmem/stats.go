package hostmem

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
	"weak"

	"github.com/gopinned/pinned/cudart"
)

// Stats are figures of the pinned memory of the whole process, because pinned
// memory is the host's: what one package pins is not available to another. They can
// be published as they are:
//
//	expvar.Publish("hostmem", expvar.Func(func() any { return hostmem.ReadStats() }))
type Stats struct {
	RequestedBytes    int // of buffers that are open
	ReservedBytes     int // that these have mapped, resident and pinned
	PeakReservedBytes int // most that ReservedBytes ever was
	Buffers           int // that are open

	RegisteredBytes     int // of memory mapped by others, through Register, that is registered now
	PeakRegisteredBytes int
	Registrations       int
	FileBytes           int // of files, through MapFile, that are registered now
	PeakFileBytes       int
	Files               int

	PinnedBytes    int           // that count for Limits.MaxBytes: what is open, lost, leaked or being opened
	Opened, Closed int           // buffers, registrations and files so far
	Failures       int           // of opening and closing
	PinTime        time.Duration // spent opening, by all goroutines
	UnpinTime      time.Duration // spent closing, by all goroutines
	LostObjects    int           // garbage collected without Close: their memory stays pinned
	LostBytes      int
	// LeakedBytes are leaked on purpose: opening failed and its memory could not be
	// unregistered, so that it has to stay mapped, and stays pinned.
	LeakedBytes int
}

// A Holding is memory that is pinned at the moment.
type Holding struct {
	ID    uint64    // in the order of pinning
	Kind  string    // "buffer", "registration", "file"
	Label string    // of the options
	Bytes int       // reserved by a buffer, registered of a registration or file
	Since time.Time // of pinning
	Lost  bool      // garbage collected without Close: it stays pinned
	Stack string    // of the call that pinned it, in debug mode
}

// String describes it in one line.
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

// ReadStats returns the present figures.
func ReadStats() Stats {
	process.mu.RLock()
	defer process.mu.RUnlock()
	s := process.stats
	s.PinnedBytes = limits.Used()
	return s
}

// Outstanding lists what is pinned through this package at the moment, the oldest
// first: at the end of a program, what it should have closed. In debug mode
// (PINNED_DEBUG=1, or cudart.Options.Debug) it has the stacks.
func Outstanding() []Holding {
	process.mu.RLock()
	defer process.mu.RUnlock()
	all := make([]Holding, len(process.index))
	for i, h := range process.index {
		all[i] = h.Holding
	}
	slices.SortFunc(all, func(a, b Holding) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// process is the ledger of this process.
var process ledger

// A ledger records what is pinned. It does not refer to the memory's owner, which
// could not be garbage collected otherwise.
type ledger struct {
	mu    sync.RWMutex
	stats Stats      // but for PinnedBytes
	index []*holding // by address
}

// A holding is one piece of memory in the ledger.
type holding struct {
	Holding
	requested int     // bytes
	start     uintptr // the first byte's address
	owner     weak.Pointer[pinnedMem]
	hidden    bool // Find does not find it
}

// count adds objects of a kind, which have some bytes.
func (s *Stats) count(kind string, objects, requested, bytes int) {
	n, now, peak := &s.Files, &s.FileBytes, &s.PeakFileBytes
	switch kind {
	case "buffer":
		n, now, peak = &s.Buffers, &s.ReservedBytes, &s.PeakReservedBytes
		s.RequestedBytes += requested
	case "registration":
		n, now, peak = &s.Registrations, &s.RegisteredBytes, &s.PeakRegisteredBytes
	}
	*n += objects
	*now += bytes
	*peak = max(*peak, *now)
}

// change changes the figures.
func (l *ledger) change(f func(s *Stats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.stats)
}

// add records what was pinned just now, which has taken some time. Find finds it from
// then on.
func (l *ledger) add(m *pinnedMem, h Holding, took time.Duration) *holding {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.count(h.Kind, 1, m.n, h.Bytes)
	l.stats.Opened++
	l.stats.PinTime += took
	h.ID, h.Since = uint64(l.stats.Opened), time.Now()
	e := &holding{Holding: h, requested: m.n, start: uintptr(m.base), owner: weak.Make(m)}
	l.index = slices.Insert(l.index, l.after(e.start), e)
	return e
}

// closing hides memory that is being closed from Find.
func (l *ledger) closing(e *holding) { l.change(func(*Stats) { e.hidden = true }) }

// remove undoes add.
func (l *ledger) remove(e *holding, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.count(e.Kind, -1, -e.requested, -e.Bytes)
	l.stats.Closed++
	l.stats.UnpinTime += took
	l.index = slices.DeleteFunc(l.index, func(h *holding) bool { return h == e })
}

// lose counts an object that was garbage collected without Close. Its memory stays as it
// is, because slices of it may be in use, and copies may use it. Other memory may get its
// addresses, if it was mapped by others.
func (l *ledger) lose(e *holding) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.hidden, e.Lost = true, true
	l.stats.LostBytes += e.Bytes
	l.stats.LostObjects++
}

// callerStack returns the stack of the call that pins memory, in debug mode.
func callerStack(dev *cudart.Device) string {
	if !dev.Runtime().Debug() {
		return ""
	}
	return string(debug.Stack())
}
