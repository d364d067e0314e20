package cudart_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A call on a stream from a thread with another device current mostly works, and makes a
// context on that other device. No call may do that, however goroutines move between
// threads.
func TestEveryCallRunsOnItsDevice(t *testing.T) {
	t.Parallel()
	goroutines, rounds := 300, 12
	if testing.Short() {
		goroutines, rounds = 100, 4 // threads that change hands are slow under the race detector and an emulator
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4)})
	ctx := context.Background()

	var wg sync.WaitGroup
	for i := range goroutines {
		dev, err := rt.Device(1 + i%3) // never device 0, which fresh threads have
		require.NoError(t, err)
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			if random.IntN(3) == 0 {
				// The thread dies with this goroutine: later ones get fresh threads.
				runtime.LockOSThread()
			}
			for range rounds {
				assert.NoError(t, useDevice(ctx, dev), "goroutine %d", i)
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	assert.Empty(t, wrongDevice(sim))
	assert.Equal(t, []int{1, 2, 3}, sim.Contexts(), "devices with a context: not 0, which no call was for")
}

// useDevice makes a call of every kind that depends on the current device.
func useDevice(ctx context.Context, dev *cudart.Device) (err error) {
	check := func(e error) {
		if err == nil {
			err = e
		}
	}
	_, _, e := dev.MemInfo()
	check(e)
	s, e := dev.NewStream(cudart.StreamOptions{})
	check(e)
	marker, e := dev.NewEvent()
	check(e)
	mem, e := dev.Malloc(256)
	check(e)
	host, e := dev.HostAlloc(256, 0)
	check(e)
	if err != nil {
		return err
	}
	check(s.CopyToDevice(mem, host, 256))
	check(s.Memset(mem, 1, 128))
	check(s.Record(marker))
	check(raw.WaitEvent(s, marker))
	check(s.CopyToHost(host, mem, 256))
	_, e = s.Query()
	check(e)
	check(s.Synchronize(ctx))
	_, e = raw.QueryEvent(marker)
	check(e)
	_, e = marker.Since(marker)
	check(e)
	check(dev.CopyToDevice(mem, host, 256))
	check(dev.FreeHost(host))
	check(dev.Free(mem))
	check(marker.Close())
	check(s.Close())
	return err
}

func TestErrorsDoNotStayPending(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		rt := dev.Runtime()
		_, err := dev.Malloc(1 << 50)
		require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
		require.Equal(t, cudart.Code(0), rt.PendingError())
		require.Error(t, dev.HostRegister(nil, 0, 0))
		require.Equal(t, cudart.Code(0), rt.PendingError())

		s, e := stream(t, dev), event(t, dev)
		const n = 64 << 20
		mem, host := device(t, dev, n), pinned(t, dev, n)
		open, copies := func() {}, 50 // 60 ms at 55 GB/s
		if !testgpu.Real() {
			open, copies = gate(t, s), 1
		}
		for range copies {
			require.NoError(t, s.CopyToHost(pointer(host), mem, n))
		}
		require.NoError(t, s.Record(e))
		done, err := s.Query()
		require.NoError(t, err)
		require.False(t, done, "the copies take longer than this")
		require.Equal(t, cudart.Code(0), rt.PendingError(), "cudaErrorNotReady does not stay on the thread")
		open()
		require.NoError(t, s.Synchronize(context.Background()))
		require.Equal(t, cudart.Code(0), rt.PendingError())
	})
}

// Before 12.0 some calls fail on a thread to which no context is attached.
func TestThreadsWithoutContextGetOne(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Version: 11080})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	p, err := dev.MallocManaged(4096)
	require.NoError(t, err)
	mem := cudart.DevPtr(uintptr(p))
	sim.Fail("cudaMemAdvise", cudasim.Fault{Code: cudart.Code(201)})
	require.NoError(t, dev.MemAdvise(mem, 4096, cudart.AdviseReadMostly, dev.Location()))
	require.Equal(t, 2, sim.Calls("cudaMemAdvise"))
	sim.Fail("cudaMemAdvise", cudasim.Fault{Times: 2, Code: cudart.Code(201)})
	require.ErrorIs(t, dev.MemAdvise(mem, 4096, cudart.AdviseReadMostly, dev.Location()), cudart.Code(201), "tried twice, not for ever")
	require.NoError(t, dev.Free(mem))
}

// wrongDevice returns the misuses of that kind.
func wrongDevice(sim *cudasim.Sim) []cudasim.Misuse {
	return slices.DeleteFunc(sim.Misuses(), func(m cudasim.Misuse) bool { return m.Kind != "wrong device" })
}
