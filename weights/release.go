package weights

import (
	"context"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// releaseTimeout bounds the wait for copies that do not end, for a caller whose context has not
// ended.
const releaseTimeout = 2 * bounded.Grace

// A ring is a Fanout or a Copier.
type ring interface {
	CloseContext(ctx context.Context) error
}

// unreleased holds rings of loads and saves that have returned without releasing their rings, for example
// because a call of CUDA had not returned. Callers have no handle to try again, so the runtime's
// next load or save does.
var unreleased = struct {
	sync.Mutex
	of map[*cudart.Runtime][]ring
}{of: map[*cudart.Runtime][]ring{}}

// release closes the ring of a load or save whose caller has the context caller. If that fails, the
// runtime's next load or save tries again.
func release(caller context.Context, rt *cudart.Runtime, f ring) error {
	timeout := releaseTimeout
	if caller.Err() != nil {
		timeout = bounded.SearchTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), timeout)
	defer cancel()
	err := f.CloseContext(ctx)
	if err != nil { // CUDA reports each error once
		err = f.CloseContext(ctx)
	}
	if err != nil {
		unreleased.Lock()
		defer unreleased.Unlock()
		unreleased.of[rt] = append(unreleased.of[rt], f)
	}
	return err
}

// retryUnreleased closes rings that earlier loads and saves could not close. Their errors were
// returned there.
func retryUnreleased(caller context.Context, rt *cudart.Runtime) {
	unreleased.Lock()
	rings := unreleased.of[rt]
	delete(unreleased.of, rt)
	unreleased.Unlock()
	var running sync.WaitGroup
	for _, f := range rings {
		running.Go(func() { _ = release(caller, rt, f) })
	}
	running.Wait()
}
