package cudasim

import (
	"time"

	"github.com/gopinned/pinned/cudart"
)

// Flags of cudaEventCreateWithFlags.
const (
	eventDisableTiming = 0x2
	eventInterprocess  = 0x4
	eventFlags         = 0x7
)

// An event refers to its last record.
type event struct {
	dev    *device
	flags  uint32
	record *record // nil before the first
}

// A record is one call of cudaEventRecord. cudaStreamWaitEvent waits for the
// event's last record at that time.
type record struct {
	mark
	done bool
	at   time.Duration // virtual
}

func (c *call) event(h uintptr) (*event, cudart.Code) {
	e := c.events[h]
	if e == nil {
		return nil, c.stale("event", h)
	}
	return e, e.dev.makeContext()
}

// eventHere is event for calls that should be made with its device current.
func (c *call) eventHere(h uintptr) (*event, cudart.Code) {
	e, code := c.event(h)
	if e != nil {
		c.on(e.dev, "event", h)
	}
	return e, code
}

func (c *call) eventCreateWithFlags() cudart.Code {
	flags := c.u32(1)
	switch {
	case c.ptr(0) == 0, flags&^eventFlags != 0,
		flags&eventInterprocess != 0 && flags&eventDisableTiming == 0:
		return cudart.ErrInvalidValue
	}
	h := c.handle()
	c.events[h] = &event{dev: c.dev, flags: flags}
	return put(c, 0, h)
}

func (c *call) eventDestroy() cudart.Code {
	if _, code := c.eventHere(c.ptr(0)); code != success {
		return code
	}
	delete(c.events, c.ptr(0))
	return success
}

// eventRecord refuses a stream of another device than the event's.
func (c *call) eventRecord(st *stream) cudart.Code {
	e, code := c.event(c.ptr(0))
	switch {
	case code != success:
		return code
	case e.dev != st.dev:
		return cudart.ErrInvalidResourceHandle
	}
	o := &operation{took: eventTime, record: &record{}}
	if code := c.enqueue(st, o); code != success {
		return code
	}
	o.record.mark = mark{st, o.seq}
	e.record = o.record
	return success
}

func (c *call) eventQuery() cudart.Code {
	e, code := c.eventHere(c.ptr(0))
	switch {
	case code != success:
		return code
	case e.record == nil:
		return success
	case !e.record.done:
		return cudart.ErrNotReady
	}
	c.hostClock = max(c.hostClock, e.record.at)
	return e.record.takeError()
}

func (c *call) eventSynchronize() cudart.Code {
	e, code := c.eventHere(c.ptr(0))
	if code != success || e.record == nil {
		return code
	}
	return c.report(e.record.mark)
}

// eventElapsedTime returns milliseconds of the virtual clock.
func (c *call) eventElapsedTime() cudart.Code {
	begin, code := c.eventHere(c.ptr(1))
	if code != success {
		return code
	}
	end, code := c.eventHere(c.ptr(2))
	switch {
	case code != success:
		return code
	case begin.dev != end.dev, (begin.flags|end.flags)&eventDisableTiming != 0,
		begin.record == nil, end.record == nil:
		return cudart.ErrInvalidResourceHandle
	case !begin.record.done || !end.record.done:
		return cudart.ErrNotReady
	}
	took := (end.record.at - begin.record.at).Truncate(c.Sim.cfg.EventResolution)
	return put(c, 0, float32(float64(took)/float64(time.Millisecond)))
}

// streamWaitEvent accepts events of any device.
func (c *call) streamWaitEvent(st *stream) cudart.Code {
	e, code := c.event(c.ptr(1))
	switch {
	case code != success:
		return code
	case c.u32(2) > 1:
		return cudart.ErrInvalidValue
	case e.record != nil && !(e.record.done && !st.pending()):
		return c.enqueue(st, &operation{event: e.record})
	case e.record != nil: // both are done: only the clock goes on
		st.clock.virtual = max(st.clock.virtual, e.record.at)
	}
	return success
}
