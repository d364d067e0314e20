// Package lifetime has things closed that several goroutines use: calls that use the thing
// are counted, refused from the first Close on, and the thing is released after the last
// of them, by one goroutine. No lock is held during the calls, nor during the release.
package lifetime

import (
	"context"
	"fmt"
	"sync"

	"github.com/gopinned/pinned/internal/bounded"
)

// A Lifetime belongs to something that must not be released while it is used. Each call
// that uses it begins with Begin and ends with End. The zero Lifetime is open.
//
//	state     entered by                         | Begin        | Close
//	open                                         | counts, true | seals it
//	sealed    Seal, Close                        | false        | waits until no call is
//	                                             |              | in progress, releases
//	released  a release that has returned nil    | false        | nil
//
// Of several Closes one releases, and the others wait for it. If its release fails, one of
// them releases again, or else the next Close does: the Lifetime stays sealed. A release
// that panics counts as one that fails. One that does not return keeps no Close longer than
// its context: see [Lifetime.Close].
//
// Close called from within a counted call, or from release, deadlocks until its context
// ends.
//
// Methods may be called from any goroutine.
type Lifetime struct {
	users Users // its only generation is 0

	mu        sync.Mutex
	idle      chan struct{} // closed when no call is in progress; nil if nobody waits
	releasing bool
	released  bool          // a release has returned nil
	over      chan struct{} // closed when the release in progress returns; nil if nobody waits
}

// Begin begins a call, or returns false if calls are refused. Only if it returns true may
// the call use the thing, and has to call End.
func (l *Lifetime) Begin() bool { return l.users.Begin(0) }

// Hold counts a call although calls may be refused: of a goroutine that closes part of the
// thing, for which Wait waits. End ends it. A release that has begun does not wait for it.
func (l *Lifetime) Hold() { l.users.Hold() }

// End ends a call.
func (l *Lifetime) End() {
	if l.users.End() {
		l.mu.Lock()
		defer l.mu.Unlock()
		wake(&l.idle)
	}
}

// Seal makes Begin return false from now on, and returns how many calls are in progress.
func (l *Lifetime) Seal() (calls int) {
	l.users.Retire(0)
	return l.Calls()
}

// Calls returns the number of calls in progress.
func (l *Lifetime) Calls() int { return l.users.Calls() }

// Sealed reports whether Begin returns false.
func (l *Lifetime) Sealed() bool { return !l.users.Open(0) }

// Wait waits until no call is in progress of a Lifetime that is sealed. If ctx ends first,
// the error wraps its error and its cause.
func (l *Lifetime) Wait(ctx context.Context) error {
	for {
		l.mu.Lock()
		if l.users.Calls() == 0 {
			l.mu.Unlock()
			return nil
		}
		idle := waitFor(&l.idle)
		l.mu.Unlock()
		if err := await(ctx, idle); err != nil {
			return err
		}
	}
}

// Close seals, waits until no call is in progress, and calls release, unless one has
// returned nil. The error is release's.
//
// ctx bounds the waits and the release; ended before, it does not keep Close from releasing what
// nothing uses. If it ends while calls or another release are in progress, the error wraps its
// error and its cause. If release does not return within a second of the end of ctx, Close does,
// with an error that wraps [bounded.ErrStuck] too. The release then continues, other Closes wait
// for it, and its result counts.
func (l *Lifetime) Close(ctx context.Context, release func(context.Context) error) error {
	l.Seal()
	if err := l.Wait(ctx); err != nil {
		return err
	}
	switch released, err := l.beginRelease(ctx); {
	case err != nil:
		return fmt.Errorf("another Close is in progress: %w", err)
	case released:
		return nil
	}
	_, err := bounded.Do(ctx, bounded.Call[struct{}]{Run: func() (struct{}, error) { return struct{}{}, l.release(ctx, release) }})
	return err
}

// beginRelease reserves the release for the caller, unless one has returned nil.
func (l *Lifetime) beginRelease(ctx context.Context) (released bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.releasing {
		over := waitFor(&l.over)
		l.mu.Unlock()
		err := await(ctx, over)
		l.mu.Lock()
		if err != nil {
			return false, err
		}
	}
	l.releasing = !l.released
	return l.released, nil
}

// release calls release, which beginRelease has reserved.
func (l *Lifetime) release(ctx context.Context, release func(context.Context) error) (err error) {
	returned := false
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.releasing, l.released = false, returned && err == nil
		wake(&l.over)
	}()
	err = release(ctx)
	returned = true
	return err
}

// waitFor returns the channel that wake closes.
func waitFor(c *chan struct{}) chan struct{} {
	if *c == nil {
		*c = make(chan struct{})
	}
	return *c
}

// wake wakes all who wait.
func wake(c *chan struct{}) {
	if *c != nil {
		close(*c)
		*c = nil
	}
}

// await waits until c is closed, or ctx ends.
func await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return bounded.Ended(ctx)
	}
}
