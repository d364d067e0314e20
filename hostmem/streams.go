package hostmem

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
)

// A streamSet remembers on which streams memory was used, so that it is not
// given back before they have passed that use. Remembering costs one load for
// a stream that was the last one too, and no CUDA call.
type streamSet struct {
	last atomic.Pointer[cudart.Stream]
	mu   sync.Mutex
	all  []*cudart.Stream
}

func (t *streamSet) add(s *cudart.Stream) {
	if t.last.Load() == s {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.all, s) {
		t.all = append(t.all, s)
	}
	t.last.Store(s)
}

// wait waits until all streams have done what was queued so far, and forgets
// those that have. A stream that was closed meanwhile cannot be asked: its
// device can.
func (t *streamSet) wait(ctx context.Context, dev *cudart.Device) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for len(t.all) > 0 {
		s := t.all[len(t.all)-1]
		err := s.Synchronize(ctx)
		if errors.Is(err, cudart.ErrClosed) {
			err = s.Device().Synchronize(ctx)
		}
		if err != nil && ctx.Err() != nil {
			return err
		}
		if err != nil {
			errs = append(errs, err)
		}
		t.all = t.all[:len(t.all)-1]
	}
	t.last.Store(nil)
	return errors.Join(errs...)
}
