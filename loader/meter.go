package loader

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A meter measures the time of copies on the device's clock, for the statistics only: if events
// fail, it measures fewer copies. Events cost the copy engine a pause, so the meter measures the
// first copies of an epoch, and then one of measuredEvery. The result of a copy is scaled to the
// bytes of all copies since the measured one before.
type meter struct {
	copying, waiting     atomic.Int64 // ns
	measured, unmeasured atomic.Int64 // bytes to which the times are scaled, and bytes after them

	// Used by the goroutine that drives.
	sinceMeasured int // copies since the last measured one
	next          int // timing
	timings       [2 * measuredFirst]timing
}

const (
	measuredFirst = 8 // first batches of an epoch, all of which are measured
	measuredEvery = 8 // copies, of which one is measured
)

// A timing has the events around one copy at a time.
type timing struct {
	events [3]*cudart.Event // or nil
	bytes  int              // size of the copy; 0 if there is none
	copied cudart.Point     // end of the copy
}

const (
	queued = iota // the event before the copy waits for the consumer's streams
	began
	ended
)

// create creates the events (cudaEventCreateWithFlags), up to the first error.
func (m *meter) create(dev *cudart.Device) {
	for i := range 3 * len(m.timings) {
		e, err := dev.NewEvent()
		if err != nil {
			return
		}
		m.timings[i/3].events[i%3] = e
	}
}

func (m *meter) close() error {
	var errs []error
	for i := range m.timings {
		for _, e := range m.timings[i].events {
			if e != nil {
				errs = append(errs, e.Close())
			}
		}
	}
	return errors.Join(errs...)
}

// begin must be called before a copy waits for the consumer's streams. batch is the first batch
// of the copy. It returns nil if the copy is not measured.
func (m *meter) begin(s *cudart.Stream, batch int) *timing {
	m.collect()
	m.sinceMeasured++
	t := &m.timings[m.next%len(m.timings)]
	if t.bytes > 0 || batch >= measuredFirst && m.sinceMeasured < measuredEvery {
		return nil
	}
	m.sinceMeasured = 0
	m.next++
	return t.record(s, queued)
}

// record records an event. It returns nil, after which the copy is not measured, on an error and
// for a nil t.
func (t *timing) record(s *cudart.Stream, event int) *timing {
	if t == nil || s.Record(t.events[event]) != nil {
		return nil
	}
	return t
}

// end must be called when a copy of n bytes was queued, with the end of the copy.
func (m *meter) end(t *timing, n int, copied cudart.Point) {
	if t == nil {
		m.unmeasured.Add(int64(n))
	} else {
		t.bytes, t.copied = n, copied
	}
}

// collect adds the times of the copies that have completed.
func (m *meter) collect() {
	for i := range m.timings {
		t := &m.timings[i]
		if t.bytes == 0 || !t.copied.Completed() {
			continue
		}
		n := int64(t.bytes)
		t.bytes = 0
		waited, err := t.events[began].Since(t.events[queued])
		took, err2 := t.events[ended].Since(t.events[began])
		if err != nil || err2 != nil {
			m.unmeasured.Add(n)
			continue
		}
		all := n + m.unmeasured.Swap(0)
		m.copying.Add(scale(took, all, n))
		m.waiting.Add(scale(waited, all, n))
		m.measured.Add(all)
	}
}

// times returns the time of all copies, and their time of waiting for the consumer's streams.
func (m *meter) times() (copying, waiting time.Duration) {
	measured := m.measured.Load()
	all := measured + m.unmeasured.Load()
	return time.Duration(scale(time.Duration(m.copying.Load()), all, measured)),
		time.Duration(scale(time.Duration(m.waiting.Load()), all, measured))
}

// scale returns d * n / of in ns, and 0 if of is 0.
func scale(d time.Duration, n, of int64) int64 {
	if of == 0 {
		return 0
	}
	return int64(float64(d) * float64(n) / float64(of))
}
