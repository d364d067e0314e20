//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A look at a point whose call blocks ends after a while, however long its context
// goes on. Other looks at the stream end at once, and other streams are not concerned.
func TestDoneReturnsWhileItsQueryBlocks(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	defer func() { assert.NoError(t, dev.Free(mem)) }()
	var streams []*cudart.Stream
	var points []cudart.Point
	for range 2 {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, s.Memset(mem, 0, 1))
		streams, points = append(streams, s), append(points, s.Point())
		require.NoError(t, s.Memset(mem, 0, 1)) // so that the point is not the end
	}
	defer func() {
		for _, s := range streams {
			assert.NoError(t, s.Synchronize(context.Background()))
			assert.NoError(t, s.Close())
		}
	}()
	require.Eventually(t, func() bool { return sim.Outstanding().PendingOps == 0 }, 20*time.Second, time.Millisecond)
	unblock := sim.Block("cudaEventQuery", cudasim.Fault{Stream: streams[0].Handle(), Times: -1})
	defer unblock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	looked := make(chan bool)
	go func() { looked <- points[0].Done(ctx) }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaEventQuery", 1))
	assert.False(t, points[0].Done(ctx), "another asks")
	assert.Eventually(t, func() bool { return points[1].Done(ctx) }, 20*time.Second, time.Millisecond, "another stream")
	select {
	case done := <-looked:
		assert.False(t, done)
	case <-time.After(20 * time.Second):
		require.FailNow(t, "the look does not end")
	}
	for range 100 {
		assert.False(t, points[0].Done(ctx))
	}
	assert.Equal(t, map[string]int{"cudaEventQuery": 1}, sim.Blocked(), "one thread for the stream")
	unblock()
	require.Eventually(t, func() bool { return points[0].Done(ctx) }, 20*time.Second, time.Millisecond)
}

// After Runtime.Close the events are gone, and the device as a whole answers for a
// stream's work, if it can at once.
func TestWaitingForAPointAfterTheRuntimeWasClosed(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		prepare func(t *testing.T, sim *cudasim.Sim)
		want    error
	}{
		"the work is done": {prepare: func(t *testing.T, sim *cudasim.Sim) {
			sim.Release()
			require.Eventually(t, func() bool { return sim.Outstanding().PendingOps == 0 }, 20*time.Second, time.Millisecond)
		}},
		"the work is not done": {prepare: func(*testing.T, *cudasim.Sim) {}, want: cudart.ErrClosed},
		"the device is lost": {prepare: func(t *testing.T, sim *cudasim.Sim) {
			require.NoError(t, sim.LoseDevice(0))
		}, want: cudart.ErrLaunchFailure},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
			require.NoError(t, err)
			defer sim.Close()
			rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
			require.NoError(t, err)
			dev, err := rt.Device(0)
			require.NoError(t, err)
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			mem, err := dev.Malloc(64)
			require.NoError(t, err)
			sim.Hold()
			require.NoError(t, s.Memset(mem, 0, 64))
			p := s.Point()
			tc.prepare(t, sim)
			assert.False(t, raw.Closed(rt))
			_ = rt.Close() // of a lost device it cannot destroy the events
			assert.True(t, raw.Closed(rt))
			err = p.Wait(t.Context())
			if tc.want == nil {
				require.NoError(t, err)
				assert.True(t, p.Completed())
			} else {
				require.ErrorIs(t, err, tc.want)
				assert.False(t, p.Completed())
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if tc.want != nil {
				require.ErrorIs(t, p.Wait(ended), context.Canceled)
			}
			sim.Release()
		})
	}
}
