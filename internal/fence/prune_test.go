package fence

import (
	"context"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A device with streams that copy from the same host memory.
func newStreams(t *testing.T, n int) (*cudasim.Sim, []*cudart.Stream, func(*cudart.Stream)) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	host, err := dev.HostAlloc(64, 0)
	require.NoError(t, err)
	var streams []*cudart.Stream
	for range n {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		streams = append(streams, s)
	}
	t.Cleanup(func() {
		sim.Release()
		for _, s := range streams {
			assert.NoError(t, s.Synchronize(context.Background()))
			assert.NoError(t, s.Close())
		}
		assert.NoError(t, dev.Free(mem))
		assert.NoError(t, dev.FreeHost(host))
	})
	return sim, streams, func(s *cudart.Stream) { assert.NoError(t, s.CopyToHost(unsafe.Pointer(host), mem, 64)) }
}

// A stream on which work is queued and added while it is found idle is added again: its
// work counts.
func TestForgetKeepsWorkThatIsAddedMeanwhile(t *testing.T) {
	sim, streams, queue := newStreams(t, 1)
	s := streams[0]
	var f Fence
	queue(s)
	f.Add(s)
	require.NoError(t, s.Synchronize(t.Context()))
	sim.Hold()
	added := make(chan struct{})
	var returned atomic.Bool
	f.forget(func(use) bool {
		// It is idle; but while that is reported, another goroutine goes on.
		go func() {
			queue(s)
			f.Add(s)
			returned.Store(true)
			close(added)
		}()
		// Either Add waits for the lock, or it has returned, which it must not.
		for stack := make([]byte, 1<<20); !returned.Load(); runtime.Gosched() {
			if all := string(stack[:runtime.Stack(stack, true)]); strings.Contains(all, "sync.(*Mutex).Lock") && strings.Contains(all, "(*Fence).Add") {
				break
			}
		}
		return true
	})
	<-added
	assert.False(t, f.Empty())
	assert.False(t, f.Done(t.Context()), "a copy is under way")
	sim.Release()
	require.NoError(t, f.Wait(t.Context()))
}

// Of many streams prune forgets those that are idle, and no other.
func TestPruneKeepsStreamsWithWork(t *testing.T) {
	sim, streams, queue := newStreams(t, 2*minPrune)
	var f Fence
	idle, busy := streams[:minPrune], streams[minPrune:]
	for _, s := range streams {
		queue(s)
		f.Add(s)
	}
	f.Record()
	for _, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
	}
	sim.Hold()
	for _, s := range busy {
		queue(s) // not added yet: its owner is about to
	}
	f.prune()
	var left []Timeline
	for _, u := range f.uses {
		left = append(left, u.timeline)
	}
	for _, s := range idle {
		assert.NotContains(t, left, TimelineOf(s))
	}
	for _, s := range busy {
		assert.Contains(t, left, TimelineOf(s))
	}
}
