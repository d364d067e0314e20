package weights

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/raw"
)

const (
	// failedTimeout bounds the wait for copies that do not end, after a failure.
	failedTimeout = 2 * bounded.Grace
	// releaseTimeout bounds the same wait where all copies have ended: a busy host takes seconds to unmap memory.
	releaseTimeout = 30 * bounded.Grace
)

// A ring is what a load or save opens on a device: a Fanout or a Copier, a pool, streams, kernels.
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
	var again []func() error // first: those that fail are added again
	rings := unreleased.Of(rt)
	rings.Range(func(f, _ any) bool {
		if _, found := rings.LoadAndDelete(f); found {
			again = append(again, func() error { return release(caller, true, rt, *f.(*ring)) })
		}
		return true
	})
	_ = atOnce(again)
}

// atOnce makes calls at once, and joins their errors.
func atOnce(calls []func() error) error {
	errs := make([]error, len(calls))
	var running sync.WaitGroup
	for i, call := range calls {
		running.Go(func() { errs[i] = call() })
	}
	running.Wait()
	return errors.Join(errs...)
}

// An idle has, for each device, the ring that a load or save has kept open for the next one. The runtime's Close closes
// it.
type idle[T ring] struct {
	devices bounded.Each[cudart.Device, idleRing[T]]
}

type idleRing[T ring] struct {
	kept    atomic.Pointer[T] // nil while a load or save has it, and if none has kept one
	atClose sync.Once
	closing *T // whose Close has failed; the runtime calls close once at a time
}

// take returns the device's ring. It makes another one while a load or save has that: a file system that does not
// respond then delays no other.
func (i *idle[T]) take(dev *cudart.Device, open func() (T, error)) (T, error) {
	if f := i.devices.Of(dev).kept.Swap(nil); f != nil {
		return *f, nil
	}
	return open()
}

// keep keeps a ring that nothing uses, or releases it: if there is one already, failed is set, or the runtime was closed.
func (i *idle[T]) keep(caller context.Context, failed bool, dev *cudart.Device, f T) error {
	of, rt := i.devices.Of(dev), dev.Runtime()
	of.atClose.Do(func() { raw.AtClose(rt, of.close) })
	if !failed && of.kept.CompareAndSwap(nil, &f) && (!raw.Closed(rt) || !of.kept.CompareAndSwap(&f, nil)) {
		return nil
	}
	return release(caller, failed, rt, f)
}

// close takes the ring first: a load or save that has begun must not find one that is closed.
func (i *idleRing[T]) close() error {
	if i.closing == nil {
		i.closing = i.kept.Swap(nil)
	}
	if i.closing == nil {
		return nil
	}
	err := (*i.closing).CloseContext(context.Background())
	if err == nil {
		i.closing = nil
	}
	return err
}
