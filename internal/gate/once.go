package gate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrStuck is in the error of a Close that returns before its release does.
var ErrStuck = errors.New("a call into the CUDA library has not returned")

// patience is how long a release may go on when its context has ended, before its Close
// returns: most releases heed their context, and their own error says more.
const patience = 2 * time.Second

// A Once has something released once, by one goroutine at a time. The zero Once is ready.
type Once struct {
	mu      sync.Mutex
	running bool          // a release
	done    bool          // one has returned nil
	over    chan struct{} // closed when the running one returns; nil if nothing waits for that
}

// Do waits until no other release is in progress, and calls release, unless one has returned
// nil: then it returns nil. After an error, or a panic, the next Do calls its release.
//
// ctx bounds both. If it ends while another release is in progress, the error is its cause.
// Where it can end, release runs on a goroutine of its own, because calls into CUDA may never
// return: if release does not return soon after ctx's end, Do does, with an error that wraps
// the cause and [ErrStuck]. The release goes on then, others wait for it, and what it returns
// counts as if Do had returned it.
func (o *Once) Do(ctx context.Context, release func(context.Context) error) error {
	switch done, err := o.begin(ctx); {
	case err != nil:
		return fmt.Errorf("another Close is in progress: %w", err)
	case done:
		return nil
	case ctx.Done() == nil:
		return o.run(ctx, release)
	}
	returned := make(chan error, 1)
	go func() { returned <- o.run(ctx, release) }()
	select {
	case err := <-returned:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-returned:
		return err
	case <-timer.C:
		return fmt.Errorf("%w: %w", ErrStuck, context.Cause(ctx))
	}
}

// begin reserves the release for the caller, unless one has returned nil.
func (o *Once) begin(ctx context.Context) (done bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.running {
		if o.over == nil {
			o.over = make(chan struct{})
		}
		over := o.over
		o.mu.Unlock()
		err := await(ctx, over)
		o.mu.Lock()
		if err != nil {
			return false, err
		}
	}
	o.running = !o.done
	return o.done, nil
}

// run calls release, which begin has reserved.
func (o *Once) run(ctx context.Context, release func(context.Context) error) (err error) {
	returned := false
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running, o.done = false, returned && err == nil
		if o.over != nil {
			close(o.over)
			o.over = nil
		}
	}()
	err = release(ctx)
	returned = true
	return err
}
