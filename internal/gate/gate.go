// Package gate has things closed that several goroutines use: calls that use the thing are
// counted, refused from the first Close on, and the thing is released after the last of
// them, by one goroutine. No lock is held during the calls, nor during the release.
package gate

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
)

// A Gate stands before something that must not be released while it is used. Each call that
// uses it begins with Enter and ends with Leave. The zero Gate is open.
//
//	state     entered by                         | Enter        | Close
//	open                                         | counts, true | shuts it
//	shut      Refuse, Close                      | false        | waits until no call is
//	                                             |              | in progress, releases
//	released  a release that has returned nil    | false        | nil
//
// Of several Closes one releases, and the others wait for it. If its release fails, one of
// them releases again, or else the next Close does: the Gate stays shut. A release that
// panics counts as one that fails. [Once.Do] says what becomes of one that does not return.
//
// A Close that is called by one of the calls, or by a release, waits for itself: until its
// context ends. Refuse returns how many calls there are, and does not wait.
//
// Methods may be called from any goroutine. Enter and Leave are an atomic addition each.
type Gate struct {
	state atomic.Int64 // calls in progress; from the first Refuse on, a negative number
	left  atomic.Int64 // calls in progress at the first Refuse that have not left since

	mu   sync.Mutex
	idle chan struct{} // made by the first Refuse if calls are in progress; closed when left is 0 again

	release Once
}

// refused in a Gate's state makes it negative, however many calls are refused afterwards:
// these stay counted there, so that left counts those alone that were let in.
const refused = math.MinInt64

// Enter begins a call, or returns false if calls are refused. Only if it returns true may
// the call use the thing, and has to Leave.
func (g *Gate) Enter() bool { return g.state.Add(1) > 0 }

// Leave ends a call.
func (g *Gate) Leave() {
	if g.state.Add(-1) < 0 {
		g.leaveLate()
	}
}

// leaveLate ends a call that was in progress at the first Refuse. Until Refuse has added
// how many there were, left is negative.
func (g *Gate) leaveLate() {
	if g.left.Add(-1) == 0 {
		close(g.idle)
	}
}

// Refuse makes Enter return false from now on, and returns how many calls are in progress.
func (g *Gate) Refuse() (calls int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := g.state.Or(refused); n > 0 { // it was open, with calls in progress
		g.idle = make(chan struct{})
		g.left.Add(n)
	}
	return int(g.left.Load())
}

// Refuses reports whether Enter returns false.
func (g *Gate) Refuses() bool { return g.state.Load() < 0 }

// Close refuses calls, waits until none is in progress, and calls release, unless one has
// returned nil. The error is that of release, or the cause of ctx, if that ends first: see
// [Once.Do].
func (g *Gate) Close(ctx context.Context, release func(context.Context) error) error {
	if g.Refuse() > 0 {
		if err := await(ctx, g.idle); err != nil {
			return err
		}
	}
	return g.release.Do(ctx, release)
}

// await waits until c is closed, or returns ctx's cause if that ends first.
func await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
