package bounded

import (
	"context"
	"sync"
)

// Callers are goroutines that make calls of a user's code, such as a reader, which may
// block. They begin when there are calls to make, and end when there are none.
type Callers struct {
	max  int
	next func() (call func() error, done func(error))

	mu      sync.Mutex
	running int
	starts  int // for which no goroutine could begin, up to max
	stopped bool
	idle    chan struct{} // closed when Stop was called and none runs
}

// NewCallers returns up to max Callers. Each of them calls next for a call to make, and
// done with its outcome, until the call is nil. If the call ends its goroutine, the
// outcome is [ErrExited]; a panic is an error, too: see [Guard].
func NewCallers(max int, next func() (call func() error, done func(error))) *Callers {
	return &Callers{max: max, next: next, idle: make(chan struct{})}
}

// Start reports that next may have n more calls.
func (c *Callers) Start(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; n > 0 && !c.stopped && c.running < c.max; n-- {
		c.running++
		go c.run()
	}
	c.starts = min(c.starts+n, c.max)
}

// Stop begins no more calls.
func (c *Callers) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped = true
	if c.running == 0 {
		close(c.idle)
	}
}

// Wait waits for calls that run after Stop: once ctx has ended for CallbackGrace only.
func (c *Callers) Wait(ctx context.Context) { await(c.idle, ctx.Done()) }

func (c *Callers) run() {
	ended := false
	defer func() {
		if !ended { // by a call
			go c.run()
		}
	}()
	for {
		call, done := c.take()
		switch {
		case call != nil:
			done(Foreign(call, done))
		case c.end():
			ended = true
			return
		}
	}
}

// take returns a call to make, if there is one.
func (c *Callers) take() (call func() error, done func(error)) {
	c.mu.Lock()
	stopped := c.stopped
	c.starts = max(c.starts-1, 0)
	c.mu.Unlock()
	if stopped {
		return nil, nil
	}
	return c.next()
}

// end counts a goroutine that ends, or returns false if there may be calls to make.
func (c *Callers) end() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starts > 0 && !c.stopped {
		return false
	}
	if c.running--; c.stopped && c.running == 0 {
		close(c.idle)
	}
	return true
}
