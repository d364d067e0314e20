package weights

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

const (
	// failedTimeout bounds the wait for copies that do not end, after a failure.
	failedTimeout = 2 * bounded.Grace
	// releaseTimeout bounds the same wait where all copies have ended: a busy host takes seconds to unmap memory.
	releaseTimeout = 30 * bounded.Grace
)

// A ring is a Fanout or a Copier.
type ring interface {
	CloseContext(ctx context.Context) error
}

// unreleased holds rings of loads and saves that have returned without releasing their rings, for example
// because a call of CUDA had not returned. Callers have no handle to try again, so the runtime's
// next load or save does.
var unreleased bounded.Each[cudart.Runtime, sync.Map] // of *ring

// release closes the ring of a load or save whose caller has the context caller, and that may have failed. If it cannot, the
// runtime's next load or save tries again.
func release(caller context.Context, failed bool, rt *cudart.Runtime, f ring) error {
	timeout := releaseTimeout
	switch {
	case caller.Err() != nil:
		timeout = bounded.SearchTimeout
	case failed:
		timeout = failedTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), timeout)
	defer cancel()
	err := f.CloseContext(ctx)
	if err != nil { // CUDA reports each error once
		err = f.CloseContext(ctx)
	}
	if err != nil {
		unreleased.Of(rt).Store(&f, nil)
	}
	return err
}

// retryUnreleased closes rings that earlier loads and saves could not close. Their errors were
// returned there.
func retryUnreleased(caller context.Context, rt *cudart.Runtime) {
	var rings []ring // first: those that fail are added again
	unreleased.Of(rt).Range(func(f, _ any) bool {
		if _, found := unreleased.Of(rt).LoadAndDelete(f); found {
			rings = append(rings, *f.(*ring))
		}
		return true
	})
	var running sync.WaitGroup
	for _, f := range rings {
		running.Go(func() { _ = release(caller, true, rt, f) })
	}
	running.Wait()
}
