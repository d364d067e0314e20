package cudart_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	require.NoError(t, dev.Memset(mem, 3, 64))
	require.NoError(t, dev.Synchronize(context.Background()))
	sim.Hold()
	require.NoError(t, s.CopyToHost(pointer(host), mem, 64))
	for what, wait := range map[string]func(context.Context) error{
		"stream": s.Synchronize, "device": dev.Synchronize,
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
		err := wait(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded, what)
		require.ErrorContains(t, err, "goes on", what)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		require.ErrorIs(t, wait(ended), context.Canceled, what)
	}
	sim.Release()
	require.NoError(t, s.Synchronize(context.Background()))
	assert.Equal(t, byte(3), host[0], "the copy went on")
}

// Waits on one stream end in the order of the work, each when its own is done.
func TestWaitsOfOneStream(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	block, unblock := make(chan struct{}), make(chan struct{})
	require.NoError(t, s.LaunchHostFunc(func() { <-block }))
	var wg sync.WaitGroup
	first := make(chan struct{})
	for range 8 {
		wg.Go(func() { assert.NoError(t, s.Synchronize(context.Background())) })
	}
	go func() { wg.Wait(); close(first) }()
	require.Eventually(t, func() bool { return rt.Waiting() == 8 }, 10*time.Second, time.Millisecond)
	require.NoError(t, s.LaunchHostFunc(func() { <-unblock }))
	late := make(chan error, 1)
	go func() { late <- s.Synchronize(context.Background()) }()
	select {
	case <-first:
		t.Fatal("ended before the work did")
	default:
	}
	close(block)
	<-first
	select {
	case <-late:
		t.Fatal("ended before the work queued before it did")
	default:
	}
	close(unblock)
	require.NoError(t, <-late)
}

func TestCloseEndsWaits(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	sim.Hold()
	require.NoError(t, s.CopyToHost(pointer(host), mem, 64))
	ended := make(chan error, 1)
	go func() { ended <- s.Synchronize(context.Background()) }()
	require.Eventually(t, func() bool { return sim.Calls("cudaEventQuery") > 0 }, 10*time.Second, time.Millisecond)
	closed := make(chan error, 1)
	go func() { closed <- rt.Close() }()
	require.ErrorIs(t, <-ended, cudart.ErrClosed)
	require.NoError(t, <-closed)
	require.ErrorIs(t, s.Synchronize(context.Background()), cudart.ErrClosed)
	require.ErrorIs(t, dev.Synchronize(context.Background()), cudart.ErrClosed)
	sim.Release()
	require.Eventually(t, func() bool { done, err := s.Query(); return done && err == nil }, 10*time.Second, time.Millisecond, "queries work on")
}
