package cudart

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
)

// A cEvent is a cudaEvent_t. [Event.Synchronize] waits for one by queries, which are
// numbered: only a query that began after the wait ends it, because the event may have been
// recorded again since an earlier query began.
type cEvent struct {
	handle
	waitQueue // guarded by waits.mu

	queries   atomic.Uint64 // that were begun for waits
	completed atomic.Uint64 // the newest of them that found the work done
	querying  atomic.Bool   // a goroutine is inside cudaEventQuery for waits

	waits     atomic.Int32 // goroutines that wait
	stale     atomic.Bool  // its Event has another one
	discarded atomic.Bool
}

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
	c.owner, c.of = c, c
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

func (c *cEvent) query() (done bool, err error) { return c.queryBy(c.begin()) }

// queryBy queries in a frame of begin, which it ends (cudaEventQuery).
func (c *cEvent) queryBy(f *frame) (done bool, err error) {
	f.args[0] = c.value
	code := c.dev.guard(fnEventQuery, f)
	c.dev.rt.end(f)
	return c.dev.queryResult(fnEventQuery, code, c)
}

// reached reports whether the work that was recorded before query n began is done. It
// does not wait for a goroutine that is inside the library.
func (c *cEvent) reached(n uint64) (done bool, err error) {
	if c.completed.Load() < n && c.querying.CompareAndSwap(false, true) {
		query := c.queries.Add(1)
		if done, err = c.query(); done {
			c.completed.Store(query)
		}
		c.querying.Store(false)
	}
	return c.completed.Load() >= n, err
}

func (c *cEvent) reachedUpTo() uint64 { return c.completed.Load() }

// addWait counts a goroutine that waits, unless the Event has another cudaEvent_t.
func (c *cEvent) addWait(e *Event) bool {
	c.waits.Add(1)
	if e.current.Load() == c {
		return true
	}
	c.removeWait()
	return false
}

func (c *cEvent) removeWait() {
	if c.waits.Add(-1) == 0 && c.stale.Load() {
		c.discard()
	}
}

// replace discards the event when nobody waits for it any more: its Event has another one.
func (c *cEvent) replace() error {
	if !c.dev.own(c) {
		return c.closeTwice()
	}
	c.stale.Store(true)
	if c.waits.Load() == 0 {
		c.discard()
	}
	return nil
}

func (c *cEvent) discard() {
	if !c.discarded.Swap(true) {
		c.dev.discardEvent(c)
	}
}

// An eventPool holds the events of a device that the package itself uses. It is guarded by
// Device.mu.
type eventPool struct {
	free   []*cEvent
	made   []*cEvent // all of them, and replaced ones of Events; some are with streams
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
