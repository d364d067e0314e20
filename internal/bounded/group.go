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
	once   sync.Once
	places chan struct{}
}

// Enter takes a place. Leave returns it. The error wraps ctx's, and [ErrStuck].
func (g *Group) Enter(ctx context.Context) error {
	if g.TryEnter() {
		return nil
	}
	select {
	case g.places <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d goroutines wait for such calls: %w: %w", MaxInside, ErrStuck, Ended(ctx))
	}
}

// Leave returns a place.
func (g *Group) Leave() { <-g.places }

// TryEnter takes a place if there is one.
func (g *Group) TryEnter() bool {
	g.once.Do(func() { g.places = make(chan struct{}, MaxInside) })
	select {
	case g.places <- struct{}{}:
		return true
	default:
		return false
	}
}
