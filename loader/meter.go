package loader

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A meter measures on the device's clock how long copies take. It is for the
// statistics only: where events fail, less is measured.
//
// Events cost the copy engine a pause, so that not all copies are measured: the
// first of an epoch, and then one in some. Each stands for those since the one
// before, by their bytes.
type meter struct {
	copying, waiting     atomic.Int64 // ns
	measured, unmeasured atomic.Int64 // bytes that these stand for, and others so far

	since int // copies since the last one that was measured, of the goroutine that uploads
}

const (
	measuredFirst = 8 // batches of an epoch
	measuredEvery = 8 // copies
)

// A timing holds the events of a slot: asked, before a copy waits for the
// consumer's streams, and began and ended, around the copy. A copy of several slots
// uses those of the first.
type timing struct {
	asked, began, ended *cudart.Event // or nil
	bytes               int           // of the copy that they were recorded for, or 0
}

func newTiming(dev *cudart.Device) (t timing) {
	for _, e := range t.events() {
		var err error
		if *e, err = dev.NewEvent(cudart.EventOptions{Timing: true}); err != nil {
			break
		}
	}
	return t
}

func (t *timing) events() [3]**cudart.Event { return [...]**cudart.Event{&t.asked, &t.began, &t.ended} }

func (t *timing) close() error {
	var errs []error
	for _, e := range t.events() {
		if *e != nil {
			errs = append(errs, (*e).Close())
		}
	}
	return errors.Join(errs...)
}

// A measurement is of one upload. They do not overlap.
type measurement struct {
	m      *meter
	stream *cudart.Stream
	t      *timing
	on     bool
}

// begin is called before the copy waits for the consumer's streams.
func (m *meter) begin(stream *cudart.Stream, slots []*slot) measurement {
	m.since++
	c := measurement{m: m, stream: stream, t: &slots[0].timing}
	if c.on = slots[0].number < measuredFirst || m.since == measuredEvery; c.on {
		m.since = 0
	}
	c.record(c.t.asked)
	return c
}

func (c *measurement) record(e *cudart.Event) {
	c.on = c.on && e != nil && c.stream.Record(e) == nil
}

// ordered is called before the copy is queued.
func (c *measurement) ordered() { c.record(c.t.began) }

// queued is called when a copy of n bytes was queued.
func (c *measurement) queued(n int) {
	c.record(c.t.ended)
	if c.on {
		c.t.bytes = n
	} else {
		c.m.unmeasured.Add(int64(n))
	}
}

// read adds the times of the slot's copy, if it was measured. The copy is done.
func (m *meter) read(s *slot) {
	t := &s.timing
	n := int64(t.bytes)
	if t.bytes = 0; n == 0 {
		return
	}
	waited, err := t.began.Since(t.asked)
	took, err2 := t.ended.Since(t.began)
	if err != nil || err2 != nil {
		m.unmeasured.Add(n)
		return
	}
	stands := n + m.unmeasured.Swap(0)
	m.copying.Add(scale(took, stands, n))
	m.waiting.Add(scale(waited, stands, n))
	m.measured.Add(stands)
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
