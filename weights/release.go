package weights

import (
	"context"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// releaseTimeout bounds the wait for copies that CUDA does not end.
const releaseTimeout = 2 * time.Second

// unreleased are Fanouts of loads that have returned. Their rings could not be
// released, mostly because a call into CUDA had not returned. The runtime's next load
// tries again, as no caller can.
var unreleased struct {
	sync.Mutex
	of map[*cudart.Runtime][]*transfer.Fanout
}

// release closes a Fanout, or leaves that to the runtime's next load.
func release(f *transfer.Fanout) error {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	err := f.CloseContext(ctx)
	if err != nil { // CUDA reports each error once
		err = f.CloseContext(ctx)
	}
	if err != nil {
		unreleased.Lock()
		defer unreleased.Unlock()
		if unreleased.of == nil {
			unreleased.of = make(map[*cudart.Runtime][]*transfer.Fanout)
		}
		rt := f.Devices()[0].Runtime()
		unreleased.of[rt] = append(unreleased.of[rt], f)
	}
	return err
}

// releaseOthers tries to release what other loads have left. Those have reported it.
func releaseOthers(rt *cudart.Runtime) {
	unreleased.Lock()
	fanouts := unreleased.of[rt]
	delete(unreleased.of, rt)
	unreleased.Unlock()
	var running sync.WaitGroup
	for _, f := range fanouts {
		running.Go(func() { _ = release(f) })
	}
	running.Wait()
}
