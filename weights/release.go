package weights

import (
	"context"
	"sync"
	"time"

	"github.com/gopinned/pinned/transfer"
)

// releaseTimeout bounds the wait for copies that CUDA does not end.
const releaseTimeout = 2 * time.Second

// unreleased are Fanouts of loads that have returned. Their rings could not be
// released, mostly because a call into CUDA had not returned. The next load tries again,
// as no caller can.
var unreleased struct {
	sync.Mutex
	fanouts []*transfer.Fanout
}

// release closes a Fanout, or leaves that to the next load.
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
		unreleased.fanouts = append(unreleased.fanouts, f)
	}
	return err
}

// releaseOthers tries to release what other loads have left. Those have reported it.
func releaseOthers() {
	unreleased.Lock()
	fanouts := unreleased.fanouts
	unreleased.fanouts = nil
	unreleased.Unlock()
	var running sync.WaitGroup
	for _, f := range fanouts {
		running.Go(func() { _ = release(f) })
	}
	running.Wait()
}
