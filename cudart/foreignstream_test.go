package cudart_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// foreign returns a Stream for a handle, as of other code.
func foreign(tb testing.TB, dev *cudart.Device, h cudart.StreamHandle) *cudart.Stream {
	tb.Helper()
	s, err := dev.StreamFromHandle(h)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		assert.NoError(tb, s.Close())
		assert.NoError(tb, dev.Synchronize(context.Background()), "the event that Close records")
	})
	return s
}

// careless opens a simulated library for tests that misuse it: the end of the test does
// not fail for that, nor for what is left open.
func careless(t *testing.T, cfg cudasim.Config) (*cudasim.Sim, *cudart.Runtime) {
	t.Helper()
	sim, err := cudasim.New(testgpu.Config(cfg))
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { _ = sim.Close() })
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	return sim, rt
}

// All methods work on a stream of other code, and in the order of its work.
func TestForeignStreamDoesEverything(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const n = 70_001
		ctx := context.Background()
		owner := stream(t, dev)
		for name, h := range map[string]cudart.StreamHandle{"created": owner.Handle(), "legacy, 0": 0, "legacy, 1": 1} {
			t.Run(name, func(t *testing.T) {
				s := foreign(t, dev, h)
				require.Equal(t, h, s.Handle())
				require.Equal(t, dev, s.Device())
				mem, back := device(t, dev, n), device(t, dev, n)
				src, dst := pinned(t, dev, n), pinned(t, dev, n)
				fill(src, 7)
				begun, ended := event(t, dev), event(t, dev)
				called := make(chan struct{})
				require.NoError(t, s.Record(begun))
				require.NoError(t, s.CopyToDevice(mem, pointer(src), n))
				require.NoError(t, s.CopyOnDevice(back, mem, n))
				require.NoError(t, s.Memset(back, 9, 1))
				require.NoError(t, s.LaunchHostFunc(func() { close(called) }))
				require.NoError(t, s.CopyToHost(pointer(dst), back, n))
				require.NoError(t, s.Record(ended))
				require.NoError(t, raw.WaitEvent(s, ended))
				async, err := s.Malloc(n)
				require.NoError(t, err)
				require.NoError(t, s.Free(async))
				p := s.Point()
				require.NoError(t, p.Wait(ctx))
				require.NoError(t, p.Err())
				require.NoError(t, s.Synchronize(ctx))
				<-called
				done, err := s.Query()
				require.NoError(t, err)
				require.True(t, done)
				src[0] = 9
				require.Equal(t, src, dst)
				_, err = ended.Since(begun)
				require.NoError(t, err)

				if dev.Runtime().Library().CopyBatch {
					var b cudart.CopyBatch
					fill(src, 8)
					b.ToDevice(mem, pointer(src), n/2)
					b.ToDevice(mem+n/2, pointer(src[n/2:]), n-n/2)
					require.NoError(t, s.CopyBatch(&b))
					b.Reset()
					b.ToHost(pointer(dst), mem, n)
					require.NoError(t, s.CopyBatch(&b))
					require.NoError(t, s.Synchronize(ctx))
					require.Equal(t, src, dst)
				}
			})
		}
	})
}

// Each Point of a stream of other code covers work that the other code has queued
// unseen, before and after the first Point.
func TestPointsOfForeignStreamsCoverUnseenWork(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := foreign(t, b.dev, b.s.Handle())
	for range 3 {
		open := gate(t, b.s)
		p := s.Point()
		require.False(t, p.Done(context.Background()))
		require.ErrorIs(t, p.Wait(soon(t)), context.DeadlineExceeded)
		open()
		require.NoError(t, p.Wait(t.Context()))
	}
	before := b.sim.Calls("cudaEventRecord")
	for range 3 {
		require.NoError(t, s.Point().Wait(t.Context()))
	}
	assert.Equal(t, 3, b.sim.Calls("cudaEventRecord")-before)
}

// Work of this package and work of the owner are in order, both ways.
func TestForeignStreamIsInOrderWithItsOwner(t *testing.T) {
	dev := testgpu.Device(t)
	owner := stream(t, dev)
	s := foreign(t, dev, owner.Handle())
	const n = 8 << 20
	mem, host := device(t, dev, n), pinned(t, dev, n)
	open := gate(t, owner)
	require.NoError(t, owner.Memset(mem, 1, n))
	require.NoError(t, s.CopyToHost(pointer(host[:n/2]), mem, n/2))
	require.NoError(t, owner.Memset(mem, 2, n))
	require.NoError(t, s.CopyToHost(pointer(host[n/2:]), mem, n/2))
	open()
	require.NoError(t, s.Synchronize(t.Context()))
	assert.Equal(t, byte(1), host[0])
	assert.Equal(t, byte(1), host[n/2-1])
	assert.Equal(t, byte(2), host[n/2])
	assert.Equal(t, byte(2), host[n-1])
}

// The legacy default stream and streams that are not non-blocking wait for each other.
func TestLegacyStreamIsInOrderWithBlockingStreams(t *testing.T) {
	dev := testgpu.Device(t)
	blocking, err := dev.NewStream(cudart.StreamOptions{Blocking: true})
	require.NoError(t, err)
	defer blocking.Close()
	legacy := foreign(t, dev, 0)
	open := gate(t, blocking)
	p := legacy.Point()
	require.ErrorIs(t, p.Wait(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, p.Wait(t.Context()))

	open = gate(t, legacy)
	require.NoError(t, blocking.Memset(device(t, dev, 64), 1, 64))
	p = blocking.Point()
	require.ErrorIs(t, p.Wait(soon(t)), context.DeadlineExceeded)
	open()
	require.NoError(t, p.Wait(t.Context()))
}

// Close leaves the stream to its owner, and so does the garbage collector.
func TestForeignStreamIsNotDestroyed(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"closed", "lost"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			lost := make(chan struct{})
			func() {
				s, err := b.dev.StreamFromHandle(b.s.Handle())
				require.NoError(t, err)
				b.queue(s)
				_ = s.Point()
				runtime.AddCleanup(s, func(c chan struct{}) { close(c) }, lost)
				if how == "closed" {
					require.NoError(t, s.Close())
					require.NoError(t, s.Close(), "a second Close does nothing")
					assert.ErrorIs(t, s.Memset(b.mem, 1, 1), cudart.ErrClosed)
				}
			}()
			require.Eventually(t, func() bool {
				runtime.GC()
				select {
				case <-lost:
					return true
				default:
					return false
				}
			}, 20*time.Second, time.Millisecond)
			b.queue(b.s)
			require.NoError(t, b.s.Synchronize(t.Context()))
			assert.Zero(t, b.sim.Calls("cudaStreamDestroy"))
			assert.Equal(t, 1, b.sim.Outstanding().Streams)
		})
	}
}

// After Close the owner may destroy the stream although work is queued: Points stand on
// the event that Close has recorded, and the handle is used no more.
func TestPointsOutliveAForeignStreamThatWasClosed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner, err := b.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	s, err := b.dev.StreamFromHandle(owner.Handle())
	require.NoError(t, err)
	open := gate(t, owner)
	b.queue(s)
	line := s.Timeline()
	early := line.End()
	require.NoError(t, s.Close())
	require.NoError(t, owner.Close())
	late := line.Point()
	for range 5 {
		require.False(t, early.Done(context.Background()))
		require.False(t, late.Done(context.Background()))
	}
	open()
	require.NoError(t, early.Wait(t.Context()))
	require.NoError(t, late.Wait(t.Context()))
	assert.Zero(t, b.sim.Calls("cudaDeviceSynchronize"))
}

// Close waits for calls that use the handle: when it returns, the owner may destroy the
// stream.
func TestCloseOfAForeignStreamWaitsForCalls(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, err := b.dev.StreamFromHandle(b.s.Handle())
	require.NoError(t, err)
	unblock := b.sim.Block("cudaMemsetAsync", cudasim.Fault{})
	queued := make(chan error, 1)
	go func() { queued <- s.Memset(b.mem, 1, 64) }()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaMemsetAsync", 1))
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	require.Eventually(t, func() bool { _, err := s.Query(); return errors.Is(err, cudart.ErrClosed) }, 20*time.Second, time.Millisecond)
	select {
	case <-closed:
		t.Error("Close has returned during a call")
	default:
	}
	unblock()
	require.NoError(t, <-queued)
	require.NoError(t, <-closed)
	require.NoError(t, b.s.Synchronize(t.Context()))
}

// An owner that destroys the stream first breaks the contract. Still no Point is reached
// before the work is done, nor missed when it is, whether or not CUDA gives the handle to
// another stream at once.
func TestPointsOfAForeignStreamThatItsOwnerDestroyed(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12040, 13000} {
		for _, reuse := range []bool{false, true} {
			if reuse && v < 12000 {
				continue // documented: cannot be detected
			}
			for _, when := range []string{"before the Point", "after End", "before Close"} {
				t.Run(fmt.Sprintf("%v, reuse %v, %s", v, reuse, when), func(t *testing.T) {
					t.Parallel()
					sim, rt := careless(t, cudasim.Config{Version: v, ReuseHandles: reuse})
					dev, err := rt.Device(0)
					require.NoError(t, err)
					owner, err := dev.NewStream(cudart.StreamOptions{})
					require.NoError(t, err)
					s, err := dev.StreamFromHandle(owner.Handle())
					require.NoError(t, err)
					mem, host := device(t, dev, 64), pinned(t, dev, 64)
					open := gate(t, owner)
					require.NoError(t, s.CopyToHost(pointer(host), mem, 64))
					line := s.Timeline()
					var p cudart.Point
					if when == "after End" {
						p = line.End()
					}
					require.NoError(t, owner.Close())
					other, err := dev.NewStream(cudart.StreamOptions{})
					require.NoError(t, err)
					require.Equal(t, reuse, other.Handle() == s.Handle())
					switch when {
					case "before the Point":
						p = line.Point()
					case "before Close":
						require.NoError(t, s.Close())
						p = line.Point()
					}
					for range 10 {
						require.False(t, p.Done(context.Background()), "the work is not done")
					}
					require.ErrorIs(t, p.Wait(soon(t)), context.DeadlineExceeded)
					if when != "before Close" {
						_, err = s.Query()
						require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
						require.ErrorIs(t, s.Synchronize(soon(t)), context.DeadlineExceeded, "the work is not done")
					}
					require.False(t, p.Completed())
					open()
					require.NoError(t, p.Wait(t.Context()))
					if when != "before Close" {
						require.ErrorIs(t, s.Synchronize(t.Context()), cudart.ErrInvalidResourceHandle)
						require.ErrorIs(t, p.Err(), cudart.ErrInvalidResourceHandle)
					}
					require.Zero(t, sim.Outstanding().PendingOps)
				})
			}
		}
	}
}

func TestHandlesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			_, rt := careless(t, cudasim.Config{Version: v, Devices: make([]cudasim.DeviceConfig, 2)})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			second, err := rt.Device(1)
			require.NoError(t, err)

			_, err = dev.StreamFromHandle(2)
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			assert.ErrorContains(t, err, "another stream on each OS thread")

			_, err = dev.StreamFromHandle(0x1234)
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
			assert.ErrorContains(t, err, "stream 0x1234 of device 0")

			_, err = dev.StreamFromHandle(stream(t, second).Handle())
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle, "of another device")
			assert.ErrorContains(t, err, "cudaEventRecord")

			require.NoError(t, rt.Close())
			_, err = dev.StreamFromHandle(0)
			require.ErrorIs(t, err, cudart.ErrClosed)
		})
	}
}

// A driver without cudaStreamGetId is no reason to refuse a stream.
func TestForeignStreamWithoutUniqueNumber(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sim.Fail("cudaStreamGetId", cudasim.Fault{Code: cudart.ErrCallRequiresNewerDriver, Times: -1})
	s := foreign(t, b.dev, b.s.Handle())
	require.NoError(t, s.Point().Wait(t.Context()))
	assert.Equal(t, 1, b.sim.Calls("cudaStreamGetId"))

	b.sim.ResetFaults()
	b.sim.Fail("cudaStreamGetId", cudasim.Fault{Code: cudart.Code(900), Times: 1})
	_, err := b.dev.StreamFromHandle(b.s.Handle())
	require.ErrorIs(t, err, cudart.Code(900), "a stream that is being captured")
	b.sim.Fail("cudaEventRecord", cudasim.Fault{Code: cudart.ErrUnknown, Times: 1})
	_, err = b.dev.StreamFromHandle(b.s.Handle())
	require.ErrorIs(t, err, cudart.ErrUnknown)
	b.sim.ResetFaults()
}

// On a default stream each copy of a batch is a call, which the error names.
func TestBatchOnTheLegacyStreamNamesTheCopyThatFails(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := foreign(t, b.dev, 0)
	var batch cudart.CopyBatch
	for i := range 4 {
		batch.ToHost(pointer(b.host[i:]), b.mem, 1)
	}
	b.sim.Fail("cudaMemcpyAsync", cudasim.Fault{Code: cudart.ErrInvalidValue, Nth: 3})
	err := s.CopyBatch(&batch)
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	assert.ErrorContains(t, err, "copy 2 of 4: 1 bytes")
	assert.Zero(t, b.sim.Calls("cudaMemcpyBatchAsync"), "CUDA refuses them there")
	require.NoError(t, s.Synchronize(t.Context()))
}

// Each device has a legacy default stream of its own.
func TestLegacyStreamOfEachDevice(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	var points []cudart.Point
	var opens []func()
	for _, dev := range rt.Devices() {
		s := foreign(t, dev, 0)
		opens = append(opens, gate(t, s))
		points = append(points, s.Point())
	}
	opens[1]()
	require.NoError(t, points[1].Wait(t.Context()))
	require.False(t, points[0].Done(context.Background()))
	opens[0]()
	require.NoError(t, points[0].Wait(t.Context()))
	assert.Empty(t, wrongDevice(sim))
}
