package loader

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A meter measures on the device's clock how long copies take. It is for the statistics
// only: where events fail, less is measured. Events cost the copy engine a pause, so that
// not all copies are measured: the first of an epoch, and then one in some. Each stands for
// those since the one before, by their bytes.
type meter struct {
	copying, waiting     atomic.Int64 // ns
	measured, unmeasured atomic.Int64 // bytes that these stand for, and others so far

	// Of the goroutine that drives.
	since   int // copies since the last one that was measured
	turn    int // of the timings
	timings [2 * measuredFirst]timing
}

const (
	measuredFirst = 8 // batches of an epoch
	measuredEvery = 8 // copies
)

// A timing holds the events of one copy at a time.
type timing struct {
	events [3]*cudart.Event // or nil
	bytes  int              // of the copy; 0 if there is none
	copied cudart.Point     // its end
}

const (
	queued = iota // the event before the copy waits for the consumer's streams
	began
	ended
)

// create creates the events, as far as that works (cudaEventCreateWithFlags).
func (m *meter) create(dev *cudart.Device) {
	for i := range 3 * len(m.timings) {
		e, err := dev.NewEvent(cudart.EventOptions{Timing: true})
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

// begin is called before a copy waits for the consumer's streams. batch is its first batch.
// It returns nil if the copy is not measured.
func (m *meter) begin(s *cudart.Stream, batch int) *timing {
	m.collect()
	m.since++
	t := &m.timings[m.turn%len(m.timings)]
	if t.bytes > 0 || batch >= measuredFirst && m.since < measuredEvery {
		return nil
	}
	m.since = 0
	m.turn++
	return t.record(s, queued)
}

// record returns nil if the copy is not measured, or not any more because it fails.
func (t *timing) record(s *cudart.Stream, event int) *timing {
	if t == nil || s.Record(t.events[event]) != nil {
		return nil
	}
	return t
}

// end is called when n bytes were queued, with the end of the copy.
func (m *meter) end(t *timing, n int, copied cudart.Point) {
	if t == nil {
		m.unmeasured.Add(int64(n))
	} else {
		t.bytes, t.copied = n, copied
	}
}

// collect adds the times of the copies that are known to be done.
func (m *meter) collect() {
	for i := range m.timings {
		t := &m.timings[i]
		if t.bytes == 0 || !t.copied.Known() {
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
		stands := n + m.unmeasured.Swap(0)
		m.copying.Add(scale(took, stands, n))
		m.waiting.Add(scale(waited, stands, n))
		m.measured.Add(stands)
	}
}

// times returns how long all copies took, and waited for the consumer's streams.
func (m *meter) times() (copying, waiting time.Duration) {
	measured := m.measured.Load()
	all := measured + m.unmeasured.Load()
	return time.Duration(scale(time.Duration(m.copying.Load()), all, measured)),
		time.Duration(scale(time.Duration(m.waiting.Load()), all, measured))
}

// scale returns d * n / of in ns, 0 if of is.
func scale(d time.Duration, n, of int64) int64 {
	if of == 0 {
		return 0
	}
	return int64(float64(d) * float64(n) / float64(of))
}
