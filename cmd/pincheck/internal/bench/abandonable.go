package bench

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/internal/bounded"
)

// An abandonable is part of a fixture whose samples may be in a call into CUDA that ctx does not end.
type abandonable struct {
	running   sync.WaitGroup // a sample
	abandoned bool           // it was not waited for when ctx ended, and uses all of the fixture
}

// once calls do, and returns when it has, or when ctx ends.
func once[T any](ctx context.Context, a *abandonable, do func() (T, error)) (none T, err error) {
	if err := bounded.Ended(ctx); err != nil {
		return none, err
	}
	a.running.Add(1)
	return bounded.Do(ctx, bounded.Call[T]{
		Run:     func() (T, error) { defer a.running.Done(); return do() },
		Abandon: func() bool { a.abandoned = true; return true },
		Grace:   -1,
	})
}

// release releases what samples use. It does not wait for one that was abandoned: all is
// released when that returns.
func (a *abandonable) release(release func() error) error {
	if !a.abandoned {
		return release()
	}
	go func() {
		a.running.Wait()
		_ = release() // an interrupted run reports no errors
	}()
	return nil
}
