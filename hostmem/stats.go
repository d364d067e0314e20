package hostmem

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
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

// ReadStats returns the present figures. They are read one after the other while
// others work on.
func ReadStats() Stats {
	p := &process
	n := func(v *atomic.Int64) int { return int(v.Load()) }
	return Stats{
		RequestedBytes: n(&p.buffers.requested), ReservedBytes: n(&p.buffers.bytes), PeakReservedBytes: n(&p.buffers.peak), Buffers: n(&p.buffers.objects),
		RegisteredBytes: n(&p.registrations.bytes), PeakRegisteredBytes: n(&p.registrations.peak), Registrations: n(&p.registrations.objects),
		FileBytes: n(&p.files.bytes), PeakFileBytes: n(&p.files.peak), Files: n(&p.files.objects),
		PinnedBytes: limits.Used(),
		Opened:      n(&p.opened), Closed: n(&p.closed), Failures: n(&p.failures),
		PinTime: time.Duration(p.pinTime.Load()), UnpinTime: time.Duration(p.unpinTime.Load()),
		LostObjects: n(&p.lostObjects), LostBytes: n(&p.lostBytes), LeakedBytes: n(&p.leaked),
	}
}

// Outstanding lists what is pinned through this package at the moment, the oldest
// first: at the end of a program, what it should have closed. In debug mode
// (PINNED_DEBUG=1, or cudart.Options.Debug) it has the stacks.
func Outstanding() []Holding { return process.list() }

// process is the ledger of this process.
var process = ledger{open: make(map[uint64]*Holding)}

// A ledger records what is pinned. It does not refer to the memory's owner, which
// could not be garbage collected otherwise.
type ledger struct {
	buffers, registrations, files  tally
	opened, closed, failures       atomic.Int64
	pinTime, unpinTime             atomic.Int64
	lostObjects, lostBytes, leaked atomic.Int64

	mu    sync.RWMutex
	last  uint64
	open  map[uint64]*Holding
	index []indexed // of what Find may find, by address
}

// A tally counts the memory of one kind, with its true peak.
type tally struct{ objects, requested, bytes, peak atomic.Int64 }

func (t *tally) add(objects, requested, bytes int) {
	t.objects.Add(int64(objects))
	t.requested.Add(int64(requested))
	now := t.bytes.Add(int64(bytes))
	for peak := t.peak.Load(); now > peak && !t.peak.CompareAndSwap(peak, now); peak = t.peak.Load() {
	}
}

// An entry is one piece of memory in the ledger.
type entry struct {
	tally            *tally
	id               uint64
	requested, bytes int
	start            uintptr // the first byte's address
}

// add records what was pinned just now, which has taken some time. Find finds it from
// then on.
func (l *ledger) add(m *pinnedMem, t *tally, h Holding, took time.Duration) entry {
	t.add(1, m.n, h.Bytes)
	l.opened.Add(1)
	l.pinTime.Add(int64(took))
	h.Since = time.Now()
	e := entry{tally: t, requested: m.n, bytes: h.Bytes, start: uintptr(m.base)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	h.ID, e.id = l.last, l.last
	l.open[h.ID] = &h
	i, _ := l.search(e.start)
	l.index = slices.Insert(l.index, i, indexed{start: e.start, end: e.start + uintptr(m.n), id: e.id, owner: weak.Make(m)})
	return e
}

// closing hides memory from Find.
func (l *ledger) closing(e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hide(e)
}

// remove undoes add.
func (l *ledger) remove(e entry, took time.Duration) {
	e.tally.add(-1, -e.requested, -e.bytes)
	l.closed.Add(1)
	l.unpinTime.Add(int64(took))
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, e.id)
}

// lose counts an object that was garbage collected without Close. Its memory stays as it
// is, because slices of it may be in use, and copies may use it.
func (l *ledger) lose(e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hide(e)
	if h := l.open[e.id]; h != nil {
		h.Lost = true
	}
	l.lostBytes.Add(int64(e.bytes))
	l.lostObjects.Add(1) // last: who sees it counted sees the rest
}

func (l *ledger) list() []Holding {
	l.mu.RLock()
	defer l.mu.RUnlock()
	all := make([]Holding, 0, len(l.open))
	for _, h := range l.open {
		all = append(all, *h)
	}
	slices.SortFunc(all, func(a, b Holding) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// callerStack returns the stack of the call that pins memory, in debug mode.
func callerStack(dev *cudart.Device) string {
	if !dev.Runtime().Debug() {
		return ""
	}
	return string(debug.Stack())
}
