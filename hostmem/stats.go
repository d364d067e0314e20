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
	"github.com/gopinned/pinned/internal/raw"
)

// Stats are figures of the pinned memory of the whole process, because pinned
// memory is the host's: what one package pins is not available to another. They can
// be published as they are:
//
//	expvar.Publish("hostmem", expvar.Func(func() any { return hostmem.ReadStats() }))
type Stats struct {
	RequestedBytes    int // bytes requested of open buffers
	ReservedBytes     int // bytes that open buffers have mapped, resident and pinned
	PeakReservedBytes int // maximum of ReservedBytes
	Buffers           int // open buffers

	RegisteredBytes     int // bytes of open registrations, of memory mapped by others
	PeakRegisteredBytes int // maximum of RegisteredBytes
	Registrations       int // open registrations
	FileBytes           int // bytes of open files
	PeakFileBytes       int // maximum of FileBytes
	Files               int // open files

	PinnedBytes    int           // bytes that count for Limits.MaxBytes: open, lost, leaked or being opened
	Opened, Closed int           // number of buffers, registrations and files that were opened and closed
	Failures       int           // number of failures to open or close
	PinTime        time.Duration // spent opening, by all goroutines
	UnpinTime      time.Duration // spent closing, by all goroutines
	LostObjects    int           // garbage collected without Close: their memory stays pinned
	LostBytes      int           // bytes of these
	LeakedBytes    int           // bytes that stay mapped: opening failed, and unregistering a part of them, too
}

// A Holding is memory that is pinned now.
type Holding struct {
	ID    uint64    // counts up in the order of pinning
	Kind  string    // "buffer", "registration", "file"
	Label string    // Label of the options
	Bytes int       // reserved bytes of a buffer, registered bytes of a registration or file
	Since time.Time // time of pinning
	Lost  bool      // garbage collected without Close: it stays pinned
	Stack string    // stack of the call that pinned it, in debug mode
}

// String describes the memory in one line.
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

// ReadStats returns the present figures. It does not block.
func ReadStats() Stats {
	process.mu.RLock()
	defer process.mu.RUnlock()
	s := process.stats
	s.PinnedBytes = limits.Used()
	return s
}

// Outstanding lists the memory that is pinned through this package now, the oldest first: at
// the end of a program, what it should have closed. In debug mode (PINNED_DEBUG=1, or
// cudart.Options.Debug) the list has the stacks. It does not block.
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

// A ledger records all pinned memory. It refers weakly to the owners of the memory, so that
// they can be garbage collected.
type ledger struct {
	mu    sync.RWMutex
	stats Stats      // without PinnedBytes
	index []*holding // by address
}

// A holding is one piece of memory in the ledger.
type holding struct {
	Holding
	requested int     // bytes
	start     uintptr // the first byte's address
	owner     weak.Pointer[Buffer]
	hidden    bool // Find does not find it
}

// count adds objects of a kind, and their bytes.
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

// change has f change the figures.
func (l *ledger) change(f func(s *Stats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.stats)
}

// add records memory that was pinned just now, and how long that took. From now on Find
// finds it.
func (l *ledger) add(m *Buffer, h Holding, took time.Duration) *holding {
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

// lose counts an object that was garbage collected without Close. Its memory stays pinned,
// because slices and copies may use it. Memory of others may be mapped at its addresses
// later.
func (l *ledger) lose(e *holding) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.hidden, e.Lost = true, true
	l.stats.LostBytes += e.Bytes
	l.stats.LostObjects++
}

// callerStack returns the stack of the call that pins memory, in debug mode.
func callerStack(dev *cudart.Device) string {
	if !raw.Debug(dev.Runtime()) {
		return ""
	}
	return string(debug.Stack())
}
