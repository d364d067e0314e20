package bounded

import (
	"sync"
	"sync/atomic"
	"time"
)

// Takeover is the time that one call keeps a Relay before another goroutine takes over.
const Takeover = 5 * time.Millisecond

// A Relay runs a loop of calls on one goroutine at a time. When a call does not return,
// another goroutine takes the loop over, and the first one ends when its call returns.
//
//	Runner    entered by                     | Call
//	running   Start, a Call that returns     | makes the call
//	inside    Call                           | –
//	replaced  Takeover after Call            | returns false when the call returns: the
//	                                         | loop must return
//
// At most MaxInside goroutines are replaced and inside at a time: then the loop waits for
// one of their calls.
type Relay struct {
	loop func(*Runner)

	mu      sync.Mutex
	current *Runner // nil if the loop does not run
	stuck   int     // replaced Runners
}

// NewRelay returns a Relay that does not run yet.
func NewRelay(loop func(*Runner)) *Relay { return &Relay{loop: loop} }

// A Runner is a goroutine with the loop.
type Runner struct {
	relay *Relay
	watch *time.Timer
	state atomic.Int32
}

const (
	runnerRunning int32 = iota
	runnerInside
	runnerReplaced
)

// Start starts the loop on a new goroutine, unless it runs.
func (r *Relay) Start() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil {
		r.start()
	}
}

// start needs r.mu.
func (r *Relay) start() {
	u := &Runner{relay: r}
	u.watch = time.AfterFunc(time.Hour, u.replace)
	u.watch.Stop()
	r.current = u
	go r.loop(u)
}

// Call makes a call, and returns whether the loop still is this goroutine's.
func (u *Runner) Call(call func()) (mine bool) {
	u.state.Store(runnerInside)
	u.watch.Reset(Takeover)
	call()
	u.watch.Stop()
	if u.state.CompareAndSwap(runnerInside, runnerRunning) {
		return true
	}
	u.relay.mu.Lock()
	defer u.relay.mu.Unlock()
	u.relay.stuck--
	return false
}

// Stop ends the loop if idle returns true, and returns whether it did: the loop must
// return then. A Start that comes later starts it again.
func (u *Runner) Stop(idle func() bool) (stopped bool) {
	u.relay.mu.Lock()
	defer u.relay.mu.Unlock()
	if !idle() {
		return false
	}
	u.relay.current = nil
	return true
}

// replace has another goroutine take over, if this one is inside a call.
func (u *Runner) replace() {
	r := u.relay
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.stuck == MaxInside:
		u.watch.Reset(Takeover)
	case u.state.CompareAndSwap(runnerInside, runnerReplaced):
		r.stuck++
		r.start()
	}
}
