package transfer

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/gopinned/pinned/internal/sentinel"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// ErrClosed is returned by methods of a Copier or a Fanout that was closed, and of
// its views. errors.Is reports that it is [os.ErrClosed].
var ErrClosed = sentinel.New("already closed", os.ErrClosed)

// ErrUnderWay is in the errors of copies that were given up while the GPU may still
// be copying. What they copy to has bytes of any kind until it is done. Pinned memory
// that they copy from or to must stay until then, and memory outside of Go's heap that
// was uploaded must stay mapped.
var ErrUnderWay = stage.ErrUnderWay

// A gate lets copies in until it is closed, and lets one goroutine at a time
// release what they use when none runs any more.
type gate struct {
	mu       sync.Mutex
	copies   int           // that run
	closed   bool          // refuses copies
	idle     chan struct{} // closed when closed is set and no copy runs
	closer   chan struct{} // one value, which the goroutine takes that releases
	released bool          // guarded by closer
}

// init makes the gate ready for use.
func (g *gate) init() {
	g.idle, g.closer = make(chan struct{}), make(chan struct{}, 1)
	g.closer <- struct{}{}
}

// begin and end enclose a copy.
func (g *gate) begin() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	g.copies++
	return nil
}

func (g *gate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.copies--
	if g.closed && g.copies == 0 {
		close(g.idle)
	}
}

// refuse makes begin fail from now on, and returns how many copies run.
func (g *gate) refuse() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed && g.copies == 0 {
		close(g.idle)
	}
	g.closed = true
	return g.copies
}

// shut refuses copies, waits until none runs and calls release, unless it has
// returned nil before.
func (g *gate) shut(ctx context.Context, release func(context.Context) error) error {
	if ctx == nil {
		return errNilContext
	}
	g.refuse()
	if err := await(ctx, g.idle); err != nil {
		return fmt.Errorf("still copying (calls: %d): %w", g.refuse(), err)
	}
	if err := await(ctx, g.closer); err != nil {
		return err
	}
	var err error
	left := stage.Apart(ctx, stage.Patience, func() {
		defer func() { g.closer <- struct{}{} }()
		if !g.released {
			err = release(ctx)
			g.released = err == nil
		}
	}, func(error) {}, func() bool { return true })
	if left != nil {
		return left
	}
	return err
}

// await receives from a channel, or returns ctx's error if that ends first.
func await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	default:
	}
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
