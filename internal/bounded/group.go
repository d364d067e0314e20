package bounded

import (
	"context"
	"fmt"
	"sync"
)

// MaxInside is the number of goroutines that a Group admits at once.
const MaxInside = 16

// A Group bounds how many goroutines, and so threads, are inside calls of one kind on one
// device. Calls that do not return keep their places; the others wait for a place until
// their contexts end. No place may be held while its goroutine waits for anything else
// than CUDA. The zero Group is ready.
type Group struct {
	once  sync.Once
	slots chan struct{}
}

// Inside makes a call in a slot of the group, on the caller's goroutine: [Do] has Call.Group for a
// call that its caller may abandon. If ctx ends before a slot is free, the error wraps ctx's and
// [ErrStuck]. Otherwise it is the call's.
func (g *Group) Inside(ctx context.Context, call func() error) error {
	if err := g.Begin(ctx); err != nil {
		return err
	}
	defer g.End()
	return call()
}

// Begin takes a slot, which End returns. The error wraps ctx's, and [ErrStuck].
func (g *Group) Begin(ctx context.Context) error {
	if g.TryBegin() {
		return nil
	}
	select {
	case g.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d goroutines wait for such calls: %w: %w", MaxInside, ErrStuck, Ended(ctx))
	}
}

// End returns a slot.
func (g *Group) End() { <-g.slots }

// TryBegin takes a slot if there is one.
func (g *Group) TryBegin() bool {
	g.once.Do(func() { g.slots = make(chan struct{}, MaxInside) })
	select {
	case g.slots <- struct{}{}:
		return true
	default:
		return false
	}
}
