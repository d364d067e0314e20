package hostmem

import (
	"sync/atomic"
	"time"
)

// Stats account for the pinned memory of the whole process, because pinned
// memory is the host's: what one package pins another cannot have. They can be
// published as they are:
//
//	expvar.Publish("hostmem", expvar.Func(func() any { return hostmem.ReadStats() }))
type Stats struct {
	AskedBytes    int // of buffers that are open
	KeptBytes     int // that these keep resident and pinned
	PeakKeptBytes int // most that KeptBytes ever was
	Buffers       int // that are open

	RegisteredBytes     int // of memory mapped by others, through Register, that is registered now
	PeakRegisteredBytes int
	Registrations       int
	FileBytes           int // of files, through MapFile, that are registered now
	PeakFileBytes       int
	Files               int

	Opened, Closed int           // buffers, registrations and files so far
	Failures       int           // of opening and closing
	PinTime        time.Duration // spent opening, by all goroutines
	UnpinTime      time.Duration // spent closing, by all goroutines
	LostObjects    int           // garbage collected without Close: their memory stays pinned
	LostBytes      int
	StrandedBytes  int // could not be unregistered when opening failed, and stay pinned
}

// account is what ReadStats reads: one for the process.
var account accounting

type accounting struct {
	asked, kept, foreign, files     tally
	opened, closed, failures        atomic.Int64
	pinTime, unpinTime              atomic.Int64
	lostObjects, lostBytes, strands atomic.Int64
}

// A tally counts what is open, with its true peak.
type tally struct{ objects, bytes, peak atomic.Int64 }

func (t *tally) add(objects, bytes int) {
	t.objects.Add(int64(objects))
	now := t.bytes.Add(int64(bytes))
	for peak := t.peak.Load(); now > peak && !t.peak.CompareAndSwap(peak, now); peak = t.peak.Load() {
	}
}

func (a *accounting) open(took time.Duration) {
	a.opened.Add(1)
	a.pinTime.Add(int64(took))
}

func (a *accounting) close(took time.Duration) {
	a.closed.Add(1)
	a.unpinTime.Add(int64(took))
}

func (a *accounting) strand(bytes int) { a.strands.Add(int64(bytes)) }

// lost describes an object that was garbage collected without Close.
type lost struct {
	id    uint64
	start uintptr // the first byte's address
	bytes int
}

// lose counts one. Its memory is not given back: slices of it may be in use,
// and so may copies be.
func (a *accounting) lose(l lost) {
	atlas.remove(l.start, l.id)
	a.lostObjects.Add(1)
	a.lostBytes.Add(int64(l.bytes))
	holdings.lose(l.id)
}

// ReadStats returns the account of now. Its numbers are read one after the
// other while others work on.
func ReadStats() Stats {
	a := &account
	n := func(v *atomic.Int64) int { return int(v.Load()) }
	return Stats{
		AskedBytes: n(&a.asked.bytes), KeptBytes: n(&a.kept.bytes), PeakKeptBytes: n(&a.kept.peak), Buffers: n(&a.kept.objects),
		RegisteredBytes: n(&a.foreign.bytes), PeakRegisteredBytes: n(&a.foreign.peak), Registrations: n(&a.foreign.objects),
		FileBytes: n(&a.files.bytes), PeakFileBytes: n(&a.files.peak), Files: n(&a.files.objects),
		Opened: n(&a.opened), Closed: n(&a.closed), Failures: n(&a.failures),
		PinTime: time.Duration(a.pinTime.Load()), UnpinTime: time.Duration(a.unpinTime.Load()),
		LostObjects: n(&a.lostObjects), LostBytes: n(&a.lostBytes), StrandedBytes: n(&a.strands),
	}
}
