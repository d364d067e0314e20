package hostmem

import (
	"context"
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
	all  []streamUse
	uses uint64
}

// A streamUse is the latest use of a stream that add was not spared.
type streamUse struct {
	stream *cudart.Stream
	number uint64
}

// add remembers s. It is called after work was queued there: a wait that begins
// meanwhile either finds that work or leaves the stream in the set.
func (t *streamSet) add(s *cudart.Stream) {
	if t.last.Load() == s {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.all, func(u streamUse) bool { return u.stream == s })
	if i < 0 {
		i = len(t.all)
		t.all = append(t.all, streamUse{stream: s})
	}
	t.uses++
	t.all[i].number = t.uses
	t.last.Store(s)
}

// wait waits until all streams have done what was queued, and forgets those
// that have and were not used again. The set may be used meanwhile. An error
// says that work may still be under way.
func (t *streamSet) wait(ctx context.Context) error {
	for {
		u, ok := t.some()
		if !ok {
			return nil
		}
		if err := settle(ctx, u.stream); err != nil {
			return err
		}
		t.forget(u)
	}
}

// some returns one of the set, and sees to it that add tells of its next use.
func (t *streamSet) some() (u streamUse, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.all) == 0 {
		return u, false
	}
	t.last.Store(nil)
	return t.all[len(t.all)-1], true
}

func (t *streamSet) forget(u streamUse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = slices.DeleteFunc(t.all, func(x streamUse) bool { return x == u })
}

func (t *streamSet) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.all) == 0
}

// settle waits until what was queued on s is done. A stream that was closed
// meanwhile cannot be asked, and a call that fails tells nothing of the work:
// then the device is waited for.
func settle(ctx context.Context, s *cudart.Stream) error {
	if s.Synchronize(ctx) == nil {
		return nil
	}
	return s.Device().Synchronize(ctx)
}
