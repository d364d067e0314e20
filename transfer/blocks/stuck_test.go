package blocks

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Whichever call of New blocks until its caller has gone, what New has made is released when the call
// returns.
func TestNewIsAbandoned(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	var mu sync.Mutex
	calls := make(map[string]bool)
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn] = true
	})
	b, err := New(t.Context(), rt.Devices()[0], Options{})
	require.NoError(t, err)
	sim.OnCall(nil)
	require.NoError(t, b.Close())
	for _, fn := range slices.Sorted(maps.Keys(calls)) {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{}) // the end of the test checks that all is released
			unblock := sim.Block(fn, cudasim.Fault{})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			made := make(chan error, 1)
			var b *Copier
			go func() {
				var err error
				b, err = New(ctx, rt.Devices()[0], Options{})
				made <- err
			}()
			blocked := make(chan error, 1)
			go func() { blocked <- sim.AwaitBlocked(ctx, fn, 1) }()
			select {
			case err := <-blocked:
				require.NoError(t, err)
				cancel()
				require.ErrorIs(t, <-made, context.Canceled)
				unblock()
				// Events belong to the Runtime, which destroys them. If anything else stays, the test runs into its time limit.
				for left := sim.Outstanding(); left != (cudasim.Outstanding{Events: left.Events}); left = sim.Outstanding() {
					time.Sleep(time.Millisecond)
				}
			case err := <-made: // it polled the GPU by other calls this time
				require.NoError(t, err)
				unblock()
				require.NoError(t, b.Close())
			}
		})
	}
}

// stuckCalls has a call of each kind, and the function of CUDA in which it blocks.
var stuckCalls = []struct {
	name, fn string
	version  cudart.Version
	method   Method
	call     func(ctx context.Context, f *fixture, s *cudart.Stream, c Copy) error
}{
	{"kernel", "cuLaunchKernel", 13000, ByKernel, upload},
	{"batch", "cudaMemcpyBatchAsync", 13000, ByEngine, upload},
	{"one copy each", "cudaMemcpyAsync", 11080, ByEngine, upload},
	{"check of a list on the device", "cuLaunchKernel", 13000, ByKernel, func(ctx context.Context, f *fixture, s *cudart.Stream, c Copy) error {
		c.HostIndex, c.HostIndexOnDevice, c.CheckIndices = nil, f.p+cudart.DevPtr(f.n/2), true
		return upload(ctx, f, s, c)
	}},
	{"requests", "cuLaunchKernel", 13000, ByKernel, func(ctx context.Context, f *fixture, s *cudart.Stream, c Copy) error {
		other := c
		other.Device += cudart.DevPtr(f.n / 4)
		_, err := f.CopyToDevice(ctx, s, c, other)
		return err
	}},
	{"download", "cudaMemcpyBatchAsync", 13000, ByEngine, func(ctx context.Context, f *fixture, s *cudart.Stream, c Copy) error {
		_, err := f.CopyToHost(ctx, s, c)
		return err
	}},
}

func upload(ctx context.Context, f *fixture, s *cudart.Stream, c Copy) error {
	_, err := f.CopyToDevice(ctx, s, c)
	return err
}

// A call whose context ends while CUDA does not return does so, and uses the lists no more: of the copies that have yet
// to be queued then none is. Close waits for the call.
func TestCopiesReturnWhenTheirContextEnds(t *testing.T) {
	t.Parallel()
	for _, tc := range stuckCalls {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{Version: tc.version})
			f := newFixture(t, rt.Devices()[0], tc.method, hostmem.Options{})
			list := make([]uint32, 2*queue.MaxBatch+2)
			for i := range list {
				list[i] = uint32(i)
			}
			c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n / 4, HostIndex: list, Size: 16, Count: len(list)}
			before := sim.Calls(tc.fn)
			unblock := sim.Block(tc.fn, cudasim.Fault{})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			returned := make(chan error, 1)
			go func() { returned <- tc.call(ctx, f, f.s, c) }()
			require.NoError(t, sim.AwaitBlocked(t.Context(), tc.fn, 1))
			cancel()
			err := <-returned
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, stage.ErrUnderWay)
			for i := range list {
				list[i] = 1<<32 - 1
			}
			require.ErrorIs(t, f.CloseContext(ctx), context.Canceled, "it waits for the call")
			unblock()
			require.NoError(t, f.Close())
			assert.Equal(t, before+1, sim.Calls(tc.fn))
		})
	}
}

// A full stream blocks the copies on it as long as their contexts admit, a bounded number of them inside CUDA, and no
// copies on other streams.
func TestCopiesOnAFullStream(t *testing.T) {
	t.Parallel()
	for _, tc := range stuckCalls {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const depth = 300 // cudart takes a quarter of a real stream's for granted
			sim, rt := testgpu.Sim(t, cudasim.Config{Version: tc.version, QueueDepth: depth})
			f := newFixture(t, rt.Devices()[0], tc.method, hostmem.Options{})
			other, err := rt.Devices()[0].NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n / 4, HostIndex: []uint32{7, 9, 11}, Size: 16, Count: 3}
			sim.Hold()
			for range depth {
				require.NoError(t, f.s.Memset(f.p, 0, 16))
			}
			ctx, cancel := context.WithCancel(t.Context())
			const callers = 4 * bounded.MaxInside
			returned := make(chan error, callers)
			for range callers {
				go func() { returned <- tc.call(ctx, f, f.s, c) }()
			}
			require.NoError(t, sim.AwaitBlocked(t.Context(), tc.fn, bounded.MaxInside))
			require.NoError(t, upload(t.Context(), f, other, c), "another stream has room")
			time.Sleep(10 * time.Millisecond) // for more calls, if there were any: the test holds without
			assert.Equal(t, map[string]int{tc.fn: bounded.MaxInside}, sim.Blocked())
			cancel()
			for range callers {
				require.ErrorIs(t, <-returned, context.Canceled)
			}
			sim.Release()
			require.NoError(t, other.Synchronize(t.Context()))
			require.NoError(t, other.Close())
		})
	}
}

// Without a context that can end a call waits for CUDA.
func TestCopiesWaitForCUDA(t *testing.T) {
	t.Parallel()
	for _, tc := range stuckCalls {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{Version: tc.version})
			f := newFixture(t, rt.Devices()[0], tc.method, hostmem.Options{})
			unblock := sim.Block(tc.fn, cudasim.Fault{})
			defer unblock()
			returned := make(chan error, 1)
			require.NoError(t, f.s.Memset(f.p, 0, f.n))
			go func() {
				returned <- tc.call(context.Background(), f, f.s, Copy{Host: f.mem, Device: f.p, DeviceLen: f.n / 4, HostIndex: []uint32{7, 9, 11}, Size: 16, Count: 3})
			}()
			require.NoError(t, sim.AwaitBlocked(t.Context(), tc.fn, 1))
			unblock()
			require.NoError(t, <-returned)
		})
	}
}
