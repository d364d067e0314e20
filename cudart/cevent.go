package cudart

import (
	"errors"
	"fmt"
	"slices"
)

// A cEvent is a cudaEvent_t.
type cEvent struct{ handle }

// newCEvent creates a cudaEvent_t (cudaEventCreateWithFlags).
func (d *Device) newCEvent(timing bool) (*cEvent, error) {
	const disableTiming = 2
	var flags uintptr = disableTiming
	if timing {
		flags = 0
	}
	f := d.begin(nil)
	f.args[0], f.args[1] = f.outPtr(0), flags
	out, err := d.do(fnEventCreate, f, func() string { return fmt.Sprintf("flags %#x, on %v", flags, d) })
	if err != nil {
		return nil, err
	}
	return d.cEventOf(uintptr(out[0])), nil
}

func (d *Device) cEventOf(value uintptr) *cEvent {
	c := &cEvent{handle: handle{dev: d, value: value, frame: d.rt.newFrame()}}
	c.owner = c
	return c
}

// String returns the handle and the device, for messages.
func (c *cEvent) String() string { return fmt.Sprintf("event %#x of %v", c.value, c.dev) }

// use is beginUse for [Stream.with].
func (c *cEvent) use() (*cEvent, bool) {
	_, ok := c.beginUse()
	return c, ok
}

func (c *cEvent) finish() error { return c.destroy(fnEventDestroy) }

// query reports whether the work that the event recorded is done (cudaEventQuery). An event that was never recorded is
// done.
func (c *cEvent) query() (done bool, err error) {
	f := c.begin()
	f.args[0] = c.value
	code := c.dev.guard(fnEventQuery, f)
	c.dev.rt.end(f)
	return c.dev.queryResult(fnEventQuery, code, c)
}

// An eventPool holds the events of a device that the package itself uses. It is guarded by
// Device.mu.
type eventPool struct {
	free   []*cEvent
	made   []*cEvent // all of them; some are with streams
	broken []*cEvent // to be destroyed
	closed bool
}

// takeEvent returns a free event, or else a new one.
func (d *Device) takeEvent() (*cEvent, error) {
	d.mu.Lock()
	if n := len(d.events.free); n > 0 {
		c := d.events.free[n-1]
		d.events.free = d.events.free[:n-1]
		d.mu.Unlock()
		return c, nil
	}
	d.mu.Unlock()
	d.destroyBroken()
	c, err := d.newCEvent(false)
	if err != nil {
		return nil, err
	}
	if !d.own(c) {
		return nil, errors.Join(d.rt.errorf(fnEventCreate, codeRuntimeClosed, "%v", d), c.closeTwice())
	}
	return c, nil
}

// own has Runtime.Close destroy an event. It returns false if Close has begun to destroy
// events: the caller must destroy this one.
func (d *Device) own(c *cEvent) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.events.closed {
		return false
	}
	if len(d.events.made) == cap(d.events.made) {
		d.events.made = slices.DeleteFunc(d.events.made, func(c *cEvent) bool { return c.isDestroyed() })
	}
	d.events.made = append(d.events.made, c)
	return true
}

// putEvent makes an event available again. It may still be pending: an event may be
// recorded again at any time.
func (d *Device) putEvent(c *cEvent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.events.closed {
		d.events.free = append(d.events.free, c)
	}
}

// discardEvent takes an event out of use. It is destroyed before another one is
// created, not here: the caller may hold locks, or may not wait.
func (d *Device) discardEvent(c *cEvent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events.broken = append(d.events.broken, c)
}

// destroyBroken destroys discarded events.
func (d *Device) destroyBroken() {
	d.mu.Lock()
	broken := d.events.broken
	d.events.broken = nil
	d.mu.Unlock()
	for _, c := range broken {
		if c.close() != nil {
			d.discardEvent(c) // for the next time
		}
	}
}

// closeTwice destroys an event. It tries twice, because CUDA reports an error of earlier
// work once.
func (c *cEvent) closeTwice() error {
	if c.close() == nil {
		return nil
	}
	return c.close()
}

// closeEvents destroys all events that the package itself uses, also those in use. Those
// that cannot be destroyed are kept for the next call.
func (d *Device) closeEvents() (err error) {
	d.mu.Lock()
	all := append(d.events.made, d.events.broken...)
	d.events.free, d.events.made, d.events.broken, d.events.closed = nil, nil, nil, true
	d.mu.Unlock()
	for _, c := range all {
		if failed := c.closeTwice(); failed != nil {
			d.discardEvent(c)
			err = errors.Join(err, failed)
		}
	}
	return err
}
