package hostmem

import (
	"sync/atomic"
	"time"
)

// Stats account for the pinned memory of the whole process, because pinned
// memory is the host's: what one package pins another cannot have.
type Stats struct {
	AskedBytes     int           // bytes of buffers that are open
	KeptBytes      int           // bytes that these keep resident and pinned
	PeakKeptBytes  int           // most that KeptBytes ever was
	Buffers        int           // buffers that are open
	Allocs, Closes int           // buffers made and closed so far
	Failures       int           // allocations and closes that failed
	PinTime        time.Duration // spent in Alloc, by all goroutines
	UnpinTime      time.Duration // spent in Close, by all goroutines
	LostBuffers    int           // garbage collected without Close: their memory stays pinned
	LostBytes      int
	StrandedBytes  int // could not be unregistered when an allocation failed
}

// account is what ReadStats reads: one for the process.
var account accounting

type accounting struct {
	asked, kept, peak, buffers          atomic.Int64
	allocs, closes, failures            atomic.Int64
	pinTime, unpinTime                  atomic.Int64
	lostBuffers, lostBytes, strandBytes atomic.Int64
}

func (a *accounting) pinned(asked, kept int, took time.Duration) {
	a.asked.Add(int64(asked))
	now := a.kept.Add(int64(kept))
	for peak := a.peak.Load(); now > peak && !a.peak.CompareAndSwap(peak, now); peak = a.peak.Load() {
	}
	a.buffers.Add(1)
	a.allocs.Add(1)
	a.pinTime.Add(int64(took))
}

func (a *accounting) unpinned(asked, kept int, took time.Duration) {
	a.asked.Add(-int64(asked))
	a.kept.Add(-int64(kept))
	a.buffers.Add(-1)
	a.closes.Add(1)
	a.unpinTime.Add(int64(took))
}

func (a *accounting) strand(bytes int) { a.strandBytes.Add(int64(bytes)) }

// lost describes a buffer that nobody closed.
type lost struct {
	bytes int
	label string
}

// lose counts a buffer that was garbage collected. Its memory is not given
// back: slices of it may be in use, and so may copies be.
func (a *accounting) lose(l lost) {
	a.lostBuffers.Add(1)
	a.lostBytes.Add(int64(l.bytes))
}

// ReadStats returns the account of now. Its numbers are read one after the
// other while others work on.
func ReadStats() Stats {
	a := &account
	return Stats{
		AskedBytes: int(a.asked.Load()), KeptBytes: int(a.kept.Load()), PeakKeptBytes: int(a.peak.Load()),
		Buffers: int(a.buffers.Load()), Allocs: int(a.allocs.Load()), Closes: int(a.closes.Load()),
		Failures: int(a.failures.Load()),
		PinTime:  time.Duration(a.pinTime.Load()), UnpinTime: time.Duration(a.unpinTime.Load()),
		LostBuffers: int(a.lostBuffers.Load()), LostBytes: int(a.lostBytes.Load()),
		StrandedBytes: int(a.strandBytes.Load()),
	}
}
